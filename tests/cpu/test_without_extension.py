"""Training without the compiled extension: in Python threads, and to the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dos
from dos.kernels import adam

NUMEL = 300_000  # of a parameter: more than one thread's share


def trained() -> list[torch.Tensor]:
    """Weights and fp32 state after three steps on host and device, with two threads."""
    generator = torch.Generator().manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.randn(NUMEL, generator=generator).to(dtype))
        for dtype in (torch.bfloat16, torch.float32, torch.float16)
    ]
    optimizer = dos.DOSOptimizer(
        torch.optim.AdamW(parameters),
        device="virtual",
        stride=3,
        subgroup_size=2 * NUMEL // 3,
        threads=2,
    )
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(NUMEL, generator=generator).to(parameter.dtype)
        optimizer.step()
    state = [tensor for parameter in parameters for tensor in optimizer.state[parameter].values()]
    saved = [tensor.clone() for tensor in (*(p.detach() for p in parameters), *state)]
    optimizer.close()
    return saved


def trained_without(missing: list[str], path: Path) -> tuple[str, list[torch.Tensor]]:
    """The implementation that a process without these modules takes, and what it trains."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing}))\n"
        "import torch; from dos.kernels import adam; from tests.cpu import test_without_extension\n"
        f"torch.save(test_without_extension.trained(), {str(path)!r}); print(adam.available()[0])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), torch.load(path)


@pytest.mark.parametrize("stand_in", ["numba", "reference"])
def test_training_without_the_extension_gives_the_same_bits(stand_in: str, tmp_path: Path) -> None:
    if stand_in not in adam.available():
        pytest.skip("needs numba: pip install deep-optimizer-states[numba]")
    missing = ["dos.kernels._native", *(["numba"] if stand_in == "reference" else [])]
    implementation, got = trained_without(missing, tmp_path / "trained.pt")
    assert implementation == stand_in
    assert all(torch.equal(*pair) for pair in zip(got, trained(), strict=True))
