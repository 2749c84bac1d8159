"""One Adam: every implementation gives the reference's bits, on any thread and in any company."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dos.kernels import adam, torch_adam
from dos.kernels.scalars import AdamScalars, DType
from dos.kernels.thread_pool import PythonPool, ThreadPool
from tests.cpu import adam_cases as cases
from tests.cpu.adam_cases import Arrays
from tests.cpu.float_modes import FLUSHING, MODES, ROUNDING, float_mode, mode_now

Case = Callable[[], tuple[Arrays, AdamScalars]]
MakePool = Callable[[int], ThreadPool]
NATIVE = [name for name in adam.available() if name not in {"numba", "reference"}]
OTHERS = [name for name in adam.available() if name != "reference"]
G_DTYPES = [DType.FP32, DType.BF16, DType.FP16]
TORCH = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}

every_implementation_and_the_reference = pytest.mark.parametrize("impl", adam.available())
every_implementation = pytest.mark.parametrize("impl", OTHERS)
POOLS = {name: adam.make_pool if name in NATIVE else PythonPool for name in adam.available()}
every_implementation_with_its_pool = pytest.mark.parametrize(("impl", "make_pool"), POOLS.items())


def ordinary(**changes: float | bool) -> AdamScalars:
    values = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    return AdamScalars.at_step(**{**values, "step": 3, "decoupled": True, **changes})  # type: ignore[arg-type]


@pytest.fixture
def flushing() -> Iterator[None]:
    """This thread flushes subnormals to zero, as any library may have told it."""
    with float_mode(FLUSHING):
        yield


@every_implementation
@settings(max_examples=150)
@given(arrays=cases.arrays, scalars=cases.scalars)
def test_same_bits_as_the_reference(impl: str, arrays: Arrays, scalars: AdamScalars) -> None:
    assert cases.updated(arrays, scalars, impl) == cases.expected(arrays, scalars)


@every_implementation
def test_same_bits_at_every_length(impl: str) -> None:
    wrong = []
    for numel in range(301):
        g_dtype, w_dtype = G_DTYPES[numel % 3], DType(numel // 3 % 4)
        arrays = cases.random_arrays(numel, numel, g_dtype, w_dtype)
        scalars = ordinary(decoupled=numel % 2 == 0)
        if cases.updated(arrays, scalars, impl) != cases.expected(arrays, scalars):
            wrong.append(numel)
    assert wrong == []


@every_implementation
@pytest.mark.parametrize("w_dtype", list(DType))
@pytest.mark.parametrize("g_dtype", G_DTYPES)
def test_same_bits_with_every_pair_of_formats(impl: str, g_dtype: DType, w_dtype: DType) -> None:
    scalars = [ordinary(decoupled=d, maximize=m) for d in (False, True) for m in (False, True)]
    inputs = [cases.random_arrays(seed, 1000, g_dtype, w_dtype) for seed in range(8)]
    got = [cases.updated(a, s, impl) for a in inputs for s in scalars]
    assert got == [cases.expected(a, s) for a in inputs for s in scalars]


@every_implementation
def test_same_bits_at_every_unaligned_start(impl: str) -> None:
    wrong = []
    for start in range(16):
        offsets = (start, (start + 1) % 16, 3 * start % 16, (start + 7) % 16, 15 - start)
        arrays = cases.random_arrays(start, 200, DType.BF16, DType.BF16, offsets)
        if cases.updated(arrays, ordinary(), impl) != cases.expected(arrays, ordinary()):
            wrong.append(offsets)
    assert wrong == []


@every_implementation
def test_same_bits_on_a_million_patterns(impl: str) -> None:
    # This seed draws any bit pattern for p, m and v (see random_floats).
    arrays = million_patterns()
    assert cases.updated(arrays, ordinary(), impl) == cases.expected(arrays, ordinary())


def million_patterns() -> Arrays:
    arrays = cases.random_arrays(0, 10**6, DType.FP32, DType.BF16)
    generator = torch.Generator().manual_seed(5)
    for name in "pmvg":
        words = torch.from_numpy(arrays.array(name)).view(torch.int32)
        words.random_(-(2**31), 2**31, generator=generator)
    return arrays


@settings(max_examples=200)
@given(arrays=cases.arrays, scalars=cases.scalars)
def test_torch_operations_give_the_same_bits(arrays: Arrays, scalars: AdamScalars) -> None:
    result = arrays.copy()
    tensors = {name: torch.from_numpy(result.array(name)) for name in result.buffers}
    for name, dtype in (("g", arrays.g_dtype), ("w", arrays.w_dtype)):
        if name in tensors:
            tensors[name] = tensors[name].view(TORCH[dtype])
    p, m, v, g = (tensors[name] for name in "pmvg")
    torch_adam.update(p, m, v, g, tensors.get("w"), scalars)
    assert result.canonical() == cases.expected(arrays, scalars)


@every_implementation_with_its_pool
@settings(max_examples=40)
@given(parts=st.lists(cases.arrays, max_size=40), scalars=st.lists(cases.scalars, min_size=1))
def test_many_segments_at_once_give_the_bits_of_one_by_one(
    impl: str, make_pool: MakePool, parts: list[Arrays], scalars: list[AdamScalars]
) -> None:
    results = [part.copy() for part in parts]
    each = [scalars[i % len(scalars)] for i in range(len(parts))]
    segments = [part.segment(s) for part, s in zip(results, each, strict=True)]
    with closing(make_pool(3)) as pool:
        adam.update(segments, impl=impl, pool=pool)
    assert [r.canonical() for r in results] == [
        cases.expected(part, s) for part, s in zip(parts, each, strict=True)
    ]


@every_implementation_with_its_pool
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_a_pool_does_not_change_the_bits(impl: str, make_pool: MakePool, threads: int) -> None:
    # Odd lengths and starts, and enough elements for many chunks with cuts inside segments.
    shape = [(100_003, (1, 2, 3, 4, 5)), (0, (0, 0, 0, 0, 0)), (7, (9, 0, 0, 1, 3))] * 3
    parts = [
        cases.random_arrays(i, numel, DType.BF16, DType.FP16, offsets)
        for i, (numel, offsets) in enumerate(shape)
    ]
    results = [part.copy() for part in parts]
    segments = [part.segment(ordinary()) for part in results]
    with closing(make_pool(threads)) as pool:
        adam.update(segments, impl=impl, pool=pool)
    assert [r.canonical() for r in results] == [cases.expected(p, ordinary()) for p in parts]


@every_implementation_with_its_pool
@pytest.mark.parametrize("threads", [1, 2])
def test_without_segments_nothing_happens(impl: str, make_pool: MakePool, threads: int) -> None:
    with closing(make_pool(threads)) as pool:
        adam.update([], impl=impl, pool=pool)


def subnormal_arrays() -> tuple[Arrays, AdamScalars]:
    """Every input and every result is subnormal; 1 as eps keeps the step itself as small."""
    arrays = cases.random_arrays(0, 1000, DType.BF16, DType.BF16)
    for buffer in arrays.buffers.values():
        words = buffer.view(np.uint32 if buffer.itemsize == 4 else np.uint16)
        words[:] = np.arange(1, words.size + 1) % 0x7F
    return arrays, ordinary(eps=1.0)


def subnormal_eps() -> tuple[Arrays, AdamScalars]:
    """Nothing but eps in the denominator: flushed, it makes the step infinite."""
    arrays = cases.random_arrays(0, 1000, DType.FP32, DType.BF16)
    for name, buffer in arrays.buffers.items():
        buffer[:] = 1e-30 if name == "m" else 0
    return arrays, ordinary(eps=1e-40)


every_subnormal = pytest.mark.parametrize("case", [subnormal_arrays, subnormal_eps])


@every_implementation_and_the_reference
@every_subnormal
@pytest.mark.usefixtures("flushing")
def test_a_thread_that_flushes_subnormals_gets_the_same_bits(impl: str, case: Case) -> None:
    arrays, scalars = case()
    got = cases.updated(arrays, scalars, impl)
    torch.set_flush_denormal(False)
    assert got == cases.expected(arrays, scalars)


@every_implementation_with_its_pool
@every_subnormal
@pytest.mark.usefixtures("flushing")
def test_workers_made_by_a_thread_that_flushes_give_the_same_bits(
    impl: str, make_pool: MakePool, case: Case
) -> None:
    arrays, scalars = case()
    results = [arrays.copy() for _ in range(200)]
    with closing(make_pool(4)) as pool:
        adam.update([r.segment(scalars) for r in results], impl=impl, pool=pool)
    torch.set_flush_denormal(False)
    assert {r.canonical() for r in results} == {cases.expected(arrays, scalars)}


@every_implementation_and_the_reference
@pytest.mark.parametrize("mode", ROUNDING)
@pytest.mark.parametrize("pool_first", [True, False])
def test_a_thread_that_rounds_otherwise_gets_the_same_bits(
    impl: str, mode: str, pool_first: bool
) -> None:
    # Enough elements for several chunks; ordinary values, whose every operation rounds.
    arrays = cases.random_arrays(1, 100_003, DType.FP16, DType.BF16)
    scalars = ordinary()
    result = arrays.copy()
    pool = adam.make_pool(3) if pool_first else None
    with float_mode(mode):
        pool = pool or adam.make_pool(3)  # its workers start in the mode
        adam.update([result.segment(scalars)], impl=impl, pool=pool)
    assert result.canonical() == cases.expected(arrays, scalars)


@every_implementation_and_the_reference
@pytest.mark.parametrize("mode", MODES)
def test_the_threads_own_mode_is_back_afterwards(impl: str, mode: str) -> None:
    arrays, scalars = subnormal_arrays()
    with float_mode(mode):
        before = mode_now()
        cases.updated(arrays, scalars, impl)
        after = mode_now()
    assert before == after
