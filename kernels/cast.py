"""Front door of what a host gradient is known by, and of the casts between fp32 and 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dos.errors import ConfigError
from dos.kernels import adam, norm, reference
from dos.kernels.float_mode import exact_float_mode
from dos.kernels.host_array import host_array
from dos.kernels.scalars import BLOCK_ELEMENTS, DType
from dos.kernels.thread_pool import ThreadPool


@dataclass(frozen=True, eq=False)
class Examined:
    """What one gradient is known by.

    Attributes:
        squares: float64 sum of squares of each block of `BLOCK_ELEMENTS` elements.
        max_abs: the largest magnitude; NaN if there is one, 0 without elements.
        fingerprint: 64 bits of its raw words; see `reference.fingerprint`.
    """

    squares: npt.NDArray[np.float64]
    max_abs: float
    fingerprint: int

    @cached_property
    def square_sum(self) -> float:
        """The blocks' sums, added in their order; not finite where the gradient is not."""
        return norm.square_sum(self.squares)

    @property
    def finite(self) -> bool:
        """Whether every element is neither infinite nor NaN."""
        return self.max_abs < float("inf")


def available() -> list[str]:
    """Implementations that this machine can run, best first; "reference" is always there."""
    return [name for name in adam.available() if name != "numba"]


def examine(
    g: int,
    numel: int,
    dtype: DType,
    *,
    out: int = 0,
    impl: str = "auto",
    pool: ThreadPool | None = None,
) -> Examined:
    """Read a gradient in host memory once; the same bits with any implementation and pool.

    The GIL is released meanwhile ("reference": seldom).

    Args:
        g: address of the gradient; aligned to its elements, which lie one after the other.
        numel: its elements.
        dtype: its format: FP32, BF16 or FP16.
        out: address of ``numel`` fp32 elements that receive the gradient, past the cache; they
            do not overlap it. 0: it is not wanted.
        impl: a name out of `available()`, or "auto" for the best one.
        pool: threads to share the work; None: the calling thread alone. "reference" always
            runs on the calling thread.

    Raises:
        ConfigError: unknown implementation, or arguments that cannot be right; nothing has
            been written then.
    """
    chosen = _chosen(impl)
    if dtype is DType.NONE:
        raise _wrong("a gradient without a number format", "dtype", "give FP32, BF16 or FP16")
    _check_arrays(numel, g=(g, dtype))
    if out:
        _check_arrays(numel, out=(out, DType.FP32))
    if chosen != "reference":
        import dos.kernels._native as native

        assert pool is None or isinstance(pool, native.ThreadPool), "a pool of Python threads"
        squares = np.empty(-(-numel // BLOCK_ELEMENTS))
        figures = native.examine(g, numel, dtype, out, squares.ctypes.data, chosen, pool)
        return Examined(squares, *figures)
    blocks = [np.empty(0)]
    largest, fingerprint = [], 0
    with exact_float_mode():
        for first, words, target in _blocks((g, dtype), (out, DType.FP32), numel):
            values = reference.widen(words, dtype)
            blocks.append(reference.block_squares(values))
            largest.append(reference.max_abs(values))
            fingerprint += reference.fingerprint(words, first)
            if out:
                target[:] = values
    max_abs = norm.infinity_norm(largest)
    return Examined(np.concatenate(blocks), max_abs, fingerprint % 2**64)


def downscale(
    source: int,
    target: int,
    numel: int,
    dtype: DType,
    *,
    impl: str = "auto",
    pool: ThreadPool | None = None,
) -> None:
    """Round fp32 values to BF16 or FP16 as an update rounds its weight, past the cache.

    Args:
        source: address of ``numel`` fp32 elements.
        target: address of as many 16-bit words; they do not overlap the source.
        dtype: their format.
        impl, pool: as for `examine`.

    Raises:
        ConfigError: as `examine` does.
    """
    chosen = _chosen(impl)
    if dtype not in (DType.BF16, DType.FP16):
        raise _wrong(f"{dtype.name} is no 16-bit format", "dtype", "give BF16 or FP16")
    _check_arrays(numel, source=(source, DType.FP32), target=(target, dtype))
    if chosen != "reference":
        import dos.kernels._native as native

        assert pool is None or isinstance(pool, native.ThreadPool), "a pool of Python threads"
        native.downscale(source, target, numel, dtype, chosen, pool)
        return
    with exact_float_mode():
        for _, values, words in _blocks((source, DType.FP32), (target, dtype), numel):
            words[:] = reference.round_to(values, dtype)


def _chosen(impl: str) -> str:
    names = available()
    if impl == "auto":
        return names[0]
    if impl not in names:
        fix = f"use 'auto' or one of {', '.join(names)}"
        raise _wrong(f"no implementation {impl!r} on this machine", "impl", fix)
    return impl


def _check_arrays(numel: int, **arrays: tuple[int, DType]) -> None:
    if numel < 0:
        raise _wrong(f"numel is {numel}", "numel", "give the number of elements")
    for name, (address, dtype) in arrays.items():
        if numel and (not address or address % dtype.itemsize):
            fix = f"give the address of its first element, a multiple of {dtype.itemsize}"
            raise _wrong(f"no array can lie at {address:#x}", name, fix)


def _wrong(what: str, where: str, fix: str) -> ConfigError:
    return ConfigError(what, where=where, fix=fix)


def _blocks(
    source: tuple[int, DType], target: tuple[int, DType], numel: int
) -> Iterator[tuple[int, reference.Array, reference.Array]]:
    """Block by block the index of the first element, and both arrays; a target of 0 is empty."""
    read = host_array(source[0], numel, source[1])
    written = host_array(target[0], numel if target[0] else 0, target[1])
    for first in range(0, numel, BLOCK_ELEMENTS):
        block = slice(first, first + BLOCK_ELEMENTS)
        yield first, read[block], written[block]
