"""The update on a device: Triton and torch operations give the reference's bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings

from dos.kernels import torch_adam
from dos.kernels.scalars import AdamScalars, DType
from tests.cpu import adam_cases as cases
from tests.cpu.adam_cases import Arrays

pytest.importorskip("triton")
from dos.kernels.gpu import adam

# The interpreter computes with numpy, which tells of every NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TORCH = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}
G_DTYPES = [DType.FP32, DType.BF16, DType.FP16]


def ordinary(**changes: float | bool) -> AdamScalars:
    values = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    return AdamScalars.at_step(**{**values, "step": 3, "decoupled": True, **changes})  # type: ignore[arg-type]


def updated(
    arrays: Arrays,
    scalars: AdamScalars,
    device: torch.device,
    update: Callable[..., None] = adam.update,
) -> bytes:
    """What a device's update makes of the arrays and of what lies around them."""
    result = arrays.copy()
    buffers = {name: torch.from_numpy(b).to(device) for name, b in result.buffers.items()}
    part = {
        name: buffers[name][start : start + result.numel] for name, start in result.offsets.items()
    }
    for name, dtype in (("g", result.g_dtype), ("w", result.w_dtype)):
        if name in part:
            part[name] = part[name].view(TORCH[dtype])
    update(*(part[name] for name in "pmvg"), part.get("w"), scalars)
    for name, buffer in buffers.items():
        result.buffers[name][:] = buffer.cpu().numpy()
    return result.canonical()


@settings(max_examples=150)
@given(arrays=cases.arrays, scalars=cases.scalars)
def test_same_bits_as_the_reference(
    device: torch.device, arrays: Arrays, scalars: AdamScalars
) -> None:
    assert updated(arrays, scalars, device) == cases.expected(arrays, scalars)


@pytest.mark.gpu
@settings(max_examples=150)
@given(arrays=cases.arrays, scalars=cases.scalars)
def test_torch_operations_give_the_same_bits_on_a_gpu(
    device: torch.device, arrays: Arrays, scalars: AdamScalars
) -> None:
    got = updated(arrays, scalars, device, torch_adam.update)
    assert got == cases.expected(arrays, scalars)


@pytest.mark.parametrize("w_dtype", list(DType))
@pytest.mark.parametrize("g_dtype", G_DTYPES)
def test_same_bits_with_every_pair_of_formats(
    device: torch.device, g_dtype: DType, w_dtype: DType
) -> None:
    scalars = [ordinary(decoupled=d, maximize=m) for d in (False, True) for m in (False, True)]
    inputs = [cases.random_arrays(seed, 3001, g_dtype, w_dtype) for seed in range(4)]
    got = [updated(a, s, device) for a in inputs for s in scalars]
    assert got == [cases.expected(a, s) for a in inputs for s in scalars]


@pytest.mark.parametrize("numel", [1, 2, 1023, 1024, 1025, 4096])
def test_same_bits_at_the_edges_of_a_program(device: torch.device, numel: int) -> None:
    arrays = cases.random_arrays(numel, numel, DType.BF16, DType.FP16)
    assert updated(arrays, ordinary(), device) == cases.expected(arrays, ordinary())


def test_same_bits_at_every_unaligned_start(device: torch.device) -> None:
    wrong = []
    for start in range(16):
        offsets = (start, (start + 1) % 16, 3 * start % 16, (start + 7) % 16, 15 - start)
        arrays = cases.random_arrays(start, 2000, DType.BF16, DType.BF16, offsets)
        if updated(arrays, ordinary(), device) != cases.expected(arrays, ordinary()):
            wrong.append(offsets)
    assert wrong == []


def test_same_bits_on_many_patterns(device: torch.device) -> None:
    # This seed draws any bit pattern for p, m and v (see random_floats).
    arrays = cases.random_arrays(0, 300_000, DType.FP32, DType.BF16)
    assert updated(arrays, ordinary(), device) == cases.expected(arrays, ordinary())


@pytest.mark.usefixtures("flushing")
@pytest.mark.parametrize("update", [adam.update, torch_adam.update], ids=["Triton", "torch"])
def test_a_thread_that_flushes_subnormals_hands_over_a_tiny_eps(
    device: torch.device, update: Callable[..., None]
) -> None:
    # Nothing but eps in the denominator: flushed, it makes the step infinite.
    arrays = cases.random_arrays(0, 1000, DType.FP32, DType.BF16)
    for name, buffer in arrays.buffers.items():
        buffer[:] = 1e-30 if name == "m" else 0
    got = updated(arrays, ordinary(eps=1e-40), device, update)
    torch.set_flush_denormal(False)
    assert got == cases.expected(arrays, ordinary(eps=1e-40))
