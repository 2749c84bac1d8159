"""Gradients for the bit tests of examining and casting, and what the oracle makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

from dos.kernels import cast, reference
from dos.kernels.scalars import BLOCK_ELEMENTS, ROW_ELEMENTS, DType
from tests.cpu.adam_cases import GUARD, STORAGE, Array, aligned_copy, random_floats

if TYPE_CHECKING:
    from dos.kernels._native import ThreadPool

FORMATS = [DType.FP32, DType.BF16, DType.FP16]
SHORT = [DType.BF16, DType.FP16]


@dataclass(frozen=True)
class Source:
    """Words somewhere inside a larger buffer."""

    buffer: Array
    start: int
    numel: int
    dtype: DType

    @property
    def words(self) -> Array:
        """The words without their surroundings."""
        return self.buffer[self.start : self.start + self.numel]

    @property
    def address(self) -> int:
        """Of the first word."""
        return self.buffer.ctypes.data + self.start * self.buffer.itemsize


def source(seed: int, numel: int, dtype: DType, offset: int = 0) -> Source:
    """Random words, ``offset`` elements away from a cache line."""
    rng = np.random.default_rng(seed)
    length = GUARD + offset + numel
    values = random_floats(rng, length)
    if dtype.itemsize == 2:
        values = reference.round_to(values, dtype)
        if rng.integers(2):
            values = rng.integers(0, 1 << 16, length, dtype=np.uint16)
    buffer = aligned_copy(values.astype(STORAGE[dtype], copy=False))
    return Source(buffer, GUARD + offset, numel, dtype)


def subnormal(dtype: DType, numel: int = BLOCK_ELEMENTS) -> Source:
    """Subnormal throughout, so that even the largest magnitude is."""
    gradient = source(0, numel, dtype)
    mantissas = {DType.FP32: 0x7FFFFF, DType.BF16: 0x7F, DType.FP16: 0x3FF}
    gradient.words.view(np.uint32 if dtype.itemsize == 4 else np.uint16)[:] = (
        np.arange(1, numel + 1) * 97 % mantissas[dtype]
    )
    return gradient


def delicate(dtype: DType) -> Source:
    """A block that is subnormal throughout, and one whose sums are rounded again and again."""
    gradient = subnormal(dtype, 2 * BLOCK_ELEMENTS)
    rounded = gradient.words[BLOCK_ELEMENTS:]
    spread = np.exp2(np.arange(rounded.size) % 25 - 10.0) * 1.7
    rounded[:] = reference.round_to(spread.astype(np.float32), dtype)
    return gradient


def outcome(found: cast.Examined) -> tuple[bytes, str, int]:
    """The figures in a form that compares by bits, with one NaN standing for all."""
    squares = np.where(np.isnan(found.squares), np.nan, found.squares)
    return squares.tobytes(), repr(found.max_abs), found.fingerprint


def expected(gradient: Source) -> tuple[bytes, str, int]:
    """What the oracle finds."""
    values = reference.widen(gradient.words, gradient.dtype)
    return outcome(
        cast.Examined(
            reference.block_squares(values),
            reference.max_abs(values),
            reference.fingerprint(gradient.words),
        )
    )


def examined(gradient: Source, impl: str, pool: ThreadPool | None = None) -> object:
    """What an implementation finds."""
    found = cast.examine(gradient.address, gradient.numel, gradient.dtype, impl=impl, pool=pool)
    return outcome(found)


def canonical(buffer: Array, dtype: DType) -> bytes:
    """All bytes of a buffer, with one NaN standing for all."""
    words = buffer.copy()
    nan = np.isnan(reference.widen(buffer, dtype))
    words.view(np.uint32 if dtype.itemsize == 4 else np.uint16)[nan] = 0x7FFF
    return words.tobytes()


def target(numel: int, dtype: DType, offset: int) -> tuple[Array, int]:
    """A buffer for ``numel`` words with room on both sides, and where they begin."""
    buffer = aligned_copy(np.full(GUARD + offset + numel + GUARD, 7, STORAGE[dtype]))
    return buffer, GUARD + offset


def _around(edge: int) -> st.SearchStrategy[int]:
    return st.integers(max(0, edge - 17), edge + 17)


lengths = st.one_of(
    st.integers(0, 300),
    _around(ROW_ELEMENTS),
    _around(BLOCK_ELEMENTS),
    _around(2 * BLOCK_ELEMENTS),
    st.integers(0, 2 * BLOCK_ELEMENTS),
)
offsets = st.integers(0, 31)
gradients = st.builds(
    source,
    seed=st.integers(0, 2**32),
    numel=lengths,
    dtype=st.sampled_from(FORMATS),
    offset=offsets,
)
