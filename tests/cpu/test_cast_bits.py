"""Examining and casting give the oracle's bits, on any thread and in any company."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dos.errors import ConfigError
from dos.kernels import adam, cast, reference, torch_cast
from dos.kernels.scalars import BLOCK_ELEMENTS, DType
from tests.cpu import cast_cases as cases
from tests.cpu.cast_cases import FORMATS, SHORT, Source
from tests.cpu.float_modes import MODES, float_mode, mode_now

TORCH = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}
NATIVE = [name for name in cast.available() if name != "reference"]

every_implementation = pytest.mark.parametrize("impl", cast.available())
every_isa = pytest.mark.parametrize("impl", NATIVE)
every_format = pytest.mark.parametrize("dtype", FORMATS)
every_mode = pytest.mark.parametrize("mode", MODES)


def tensor(gradient: Source) -> torch.Tensor:
    return torch.from_numpy(gradient.words).view(TORCH[gradient.dtype])


@every_implementation
@settings(max_examples=60)
@given(gradient=cases.gradients)
def test_a_gradient_is_known_by_the_oracles_bits(impl: str, gradient: Source) -> None:
    assert cases.examined(gradient, impl) == cases.expected(gradient)


@every_implementation
@settings(max_examples=40)
@given(gradient=cases.gradients, offset=cases.offsets)
def test_examining_widens_into_out_and_nowhere_else(
    impl: str, gradient: Source, offset: int
) -> None:
    buffer, start = cases.target(gradient.numel, DType.FP32, offset)
    wanted = buffer.copy()
    wanted[start : start + gradient.numel] = reference.widen(gradient.words, gradient.dtype)
    out = buffer.ctypes.data + start * 4
    found = cast.examine(gradient.address, gradient.numel, gradient.dtype, out=out, impl=impl)
    assert cases.outcome(found) == cases.expected(gradient)
    assert cases.canonical(buffer, DType.FP32) == cases.canonical(wanted, DType.FP32)


@every_implementation
@settings(max_examples=40)
@given(
    numel=cases.lengths,
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(SHORT),
    offsets=st.tuples(cases.offsets, cases.offsets),
)
def test_downscaling_rounds_as_the_oracle_and_nowhere_else(
    impl: str, numel: int, seed: int, dtype: DType, offsets: tuple[int, int]
) -> None:
    values = cases.source(seed, numel, DType.FP32, offsets[0])
    buffer, start = cases.target(numel, dtype, offsets[1])
    wanted = buffer.copy()
    wanted[start : start + numel] = reference.round_to(values.words, dtype)
    cast.downscale(values.address, buffer.ctypes.data + start * 2, numel, dtype, impl=impl)
    assert cases.canonical(buffer, dtype) == cases.canonical(wanted, dtype)


@every_isa
@every_format
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_a_pool_does_not_change_the_figures(impl: str, dtype: DType, threads: int) -> None:
    gradient = cases.source(1, 9 * BLOCK_ELEMENTS + 777, dtype, 3)
    pool = adam.make_pool(threads)
    assert cases.examined(gradient, impl, pool) == cases.expected(gradient)


@every_isa
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_a_pool_does_not_change_what_is_rounded(impl: str, threads: int) -> None:
    values = cases.source(1, 9 * BLOCK_ELEMENTS + 777, DType.FP32, 3)
    words = np.zeros(values.numel, np.uint16)
    pool = adam.make_pool(threads)
    cast.downscale(
        values.address, words.ctypes.data, values.numel, DType.BF16, impl=impl, pool=pool
    )
    wanted = reference.round_to(values.words, DType.BF16)
    assert cases.canonical(words, DType.BF16) == cases.canonical(wanted, DType.BF16)


@settings(max_examples=60)
@given(gradient=cases.gradients, chunk_blocks=st.integers(1, 3))
def test_torch_operations_find_the_same_figures(gradient: Source, chunk_blocks: int) -> None:
    out = torch.zeros(gradient.numel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_cast, "_CHUNK_ELEMENTS", chunk_blocks * BLOCK_ELEMENTS)
        found = torch_cast.examine(tensor(gradient), out=out)
    assert cases.outcome(torch_cast.on_host([found])[0]) == cases.expected(gradient)
    wanted = reference.widen(gradient.words, gradient.dtype)
    assert cases.canonical(out.numpy(), DType.FP32) == cases.canonical(wanted, DType.FP32)


def test_torch_operations_do_not_wait_for_the_device() -> None:
    # A tensor on "meta" has no values that could be waited for.
    gradient = torch.empty(3 * BLOCK_ELEMENTS + 5, dtype=torch.bfloat16, device="meta")
    found = torch_cast.examine(gradient, out=torch.empty(gradient.shape, device="meta"))
    assert found.squares.shape == found.max_abs.shape == (4,)


@every_implementation
@every_format
@every_mode
@pytest.mark.parametrize("pool_first", [True, False])
@pytest.mark.parametrize("make", [cases.delicate, cases.subnormal])
def test_a_threads_mode_does_not_change_the_figures(
    impl: str, dtype: DType, mode: str, pool_first: bool, make: Callable[[DType], Source]
) -> None:
    gradient = make(dtype)
    pool = adam.make_pool(3) if pool_first else None
    with float_mode(mode):
        pool = pool or adam.make_pool(3)  # its workers start in the mode
        found = cast.examine(gradient.address, gradient.numel, dtype, impl=impl, pool=pool)
        total = found.square_sum
    assert cases.outcome(found) == cases.expected(gradient)
    values = reference.widen(gradient.words, dtype)
    assert total == reference.sum_in_order(reference.block_squares(values))


@every_implementation
@every_mode
@pytest.mark.parametrize("dtype", SHORT)
def test_a_threads_mode_does_not_change_what_is_rounded(impl: str, mode: str, dtype: DType) -> None:
    values = np.concatenate(
        [
            np.random.default_rng(0).standard_normal(1000).astype(np.float32),
            np.arange(1, 1001, dtype=np.uint32).view(np.float32) * np.float32(2.0**16),
            np.random.default_rng(1).standard_normal(1000).astype(np.float32) * np.float32(1e-7),
        ]
    )
    words = np.zeros(values.size, np.uint16)
    with float_mode(mode):
        cast.downscale(values.ctypes.data, words.ctypes.data, values.size, dtype, impl=impl)
    assert words.tobytes() == reference.round_to(values, dtype).tobytes()


@every_implementation
@every_mode
def test_the_threads_own_mode_is_back_after_examining(impl: str, mode: str) -> None:
    gradient = cases.delicate(DType.BF16)
    with float_mode(mode):
        before = mode_now()
        cases.examined(gradient, impl)
        after = mode_now()
    assert before == after


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@every_implementation
@every_format
def test_one_element_that_is_not_finite_is_seen(impl: str, dtype: DType, bad: float) -> None:
    values = np.ones(BLOCK_ELEMENTS + 5000, np.float32)
    values[BLOCK_ELEMENTS + 1500] = bad
    words = reference.round_to(values, dtype)
    assert not cast.examine(words.ctypes.data, words.size, dtype, impl=impl).finite


@every_implementation
def test_the_largest_finite_gradient_is_finite(impl: str) -> None:
    values = np.full(BLOCK_ELEMENTS, np.finfo(np.float32).max)
    found = cast.examine(values.ctypes.data, values.size, DType.FP32, impl=impl)
    assert found.finite
    assert np.isfinite(found.square_sum)


@given(
    dtype=st.sampled_from(FORMATS),
    numel=st.integers(1, 5000),
    where=st.integers(0, 4999),
    bit=st.integers(0, 31),
)
def test_any_one_bit_changes_the_fingerprint(
    dtype: DType, numel: int, where: int, bit: int
) -> None:
    gradient = cases.source(numel, numel, dtype)
    before = cast.examine(gradient.address, numel, dtype).fingerprint
    words = gradient.words.view(np.uint32 if dtype.itemsize == 4 else np.uint16)
    words[where % numel] ^= 1 << bit % (8 * dtype.itemsize)
    assert cast.examine(gradient.address, numel, dtype).fingerprint != before


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"g": 0}, "g"),
        ({"g": 66}, "g"),
        ({"out": 66}, "out"),
        ({"numel": -1}, "numel"),
        ({"dtype": DType.NONE}, "dtype"),
        ({"impl": "mmx"}, "impl"),
    ],
)
def test_a_gradient_that_cannot_be_right_is_refused(change: dict[str, object], where: str) -> None:
    values = np.ones(8, np.float32)
    arguments = {"g": values.ctypes.data, "numel": 8, "dtype": DType.FP32, **change}
    with pytest.raises(ConfigError, match=f"^{where}:"):
        cast.examine(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"source": 0}, "source"),
        ({"target": 0}, "target"),
        ({"target": 65}, "target"),
        ({"numel": -1}, "numel"),
        ({"dtype": DType.FP32}, "dtype"),
        ({"impl": "mmx"}, "impl"),
    ],
)
def test_a_rounding_that_cannot_be_right_is_refused(change: dict[str, object], where: str) -> None:
    memory = np.ones(16, np.float32)
    start = memory.ctypes.data
    arguments = {"source": start, "target": start + 32, "numel": 8, "dtype": DType.BF16, **change}
    with pytest.raises(ConfigError, match=f"^{where}:"):
        cast.downscale(**arguments)  # type: ignore[arg-type]
