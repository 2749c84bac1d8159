"""On a real accelerator, plain torch operations find the figures that the host finds."""

from __future__ import annotations

import pytest
import torch

from dos.kernels import cast, torch_cast
from dos.kernels.scalars import DType

pytestmark = pytest.mark.gpu

FORMATS = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16, torch.float16: DType.FP16}


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("numel", [0, 1, 1025, 200_003, 2_500_000])
def test_the_figures_are_those_of_the_host(dtype: torch.dtype, numel: int) -> None:
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    found = torch_cast.on_host(
        [torch_cast.examine(gradient.to(torch.accelerator.current_accelerator()))]
    )[0]
    wanted = cast.examine(gradient.data_ptr(), numel, FORMATS[dtype])
    assert found.squares.tobytes() == wanted.squares.tobytes()
    assert (found.max_abs, found.fingerprint) == (wanted.max_abs, wanted.fingerprint)


def test_the_host_waits_for_nothing() -> None:
    if not torch.cuda.is_available():
        pytest.skip("only CUDA tells of waits")
    gradient = torch.ones(200_003, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch_cast.examine(gradient)
    finally:
        torch.cuda.set_sync_debug_mode("default")
