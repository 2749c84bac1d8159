"""The oracle: one Adam update, and what a gradient is known by, in plain numpy.

Slow and obvious on purpose. Every other kernel must give these bits.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dos.kernels.scalars import (
    BLOCK_ELEMENTS,
    FINGERPRINT_STEP,
    LANES,
    ROW_ELEMENTS,
    AdamScalars,
    DType,
)

Array: TypeAlias = npt.NDArray[Any]
Float32s: TypeAlias = npt.NDArray[np.float32]


def update(
    p: Float32s,
    m: Float32s,
    v: Float32s,
    g: Array,
    w: Array | None,
    scalars: AdamScalars,
    *,
    g_dtype: DType = DType.FP32,
    w_dtype: DType = DType.NONE,
) -> None:
    """Update flat arrays of equal length in place: p, m, v, and w if there is one.

    Args:
        p, m, v: parameter, momentum, variance; float32.
        g: gradient in ``g_dtype``: float32, or 16-bit words (uint16, or float16 for FP16).
        w: receives p rounded to ``w_dtype`` (same storage as ``g``); None with NONE.
        scalars: hyperparameters, see `AdamScalars`.
    """
    f32 = np.float32
    with np.errstate(all="ignore"):
        grad = widen(g, g_dtype)
        if scalars.maximize:
            grad = -grad
        grad = grad * f32(scalars.scale)
        if scalars.decoupled:
            p[:] = p * f32(scalars.decay)
        else:
            grad = grad + f32(scalars.weight_decay) * p
        m[:] = m * f32(scalars.c1) + grad * f32(scalars.d1)
        v[:] = v * f32(scalars.c2) + (grad * grad) * f32(scalars.d2)
        denominator = np.sqrt(v) * f32(scalars.inv_sqrt_bc2) + f32(scalars.eps)
        p[:] = p - f32(scalars.step_size) * (m / denominator)
        if w is not None:
            w[:] = round_to(p, w_dtype).view(w.dtype)


def widen(words: Array, dtype: DType) -> Float32s:
    """The float32 values of ``words``; exact for every format.

    Args:
        words: float32 for FP32; uint16 (or float16 for FP16) words of the 16-bit formats.
    """
    if dtype is DType.FP32:
        return words.view(np.float32)
    if dtype is DType.BF16:
        return (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        return words.view(np.float16).astype(np.float32)


def round_to(values: Float32s, dtype: DType) -> Array:
    """``values`` in ``dtype``, nearest even; overflow to infinity, NaN stays NaN.

    Returns:
        float32 for FP32, else uint16 words.
    """
    if dtype is DType.FP32:
        return values
    if dtype is DType.FP16:
        with np.errstate(all="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    # Adding just under half a unit, plus one when the kept part is odd, carries into the
    # kept part exactly when nearest-even rounds up, and from the largest value to infinity.
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    # The carry could turn a NaN into an infinity or a zero: keep its top and make it quiet.
    words = np.where(np.isnan(values), (bits >> 16) | 0x40, rounded)
    return words.astype(np.uint16)


def block_squares(values: Float32s) -> npt.NDArray[np.float64]:
    """Sums of squares of every `BLOCK_ELEMENTS` elements, in float64, the last block padded with 0.

    The order is part of the contract. A block is cut into rows of `ROW_ELEMENTS`, a row into
    steps of `LANES`. Lane j of a row adds the squares of its elements step after step; then
    the upper half of the lanes is added to the lower half until one is left; and so are the
    upper half of a block's rows to the lower. Squares of fp32 values are exact in float64, so
    only additions round, and padding changes nothing. NaN and infinity pass through.
    """
    n_blocks = -(-values.size // BLOCK_ELEMENTS)
    shape = (n_blocks, BLOCK_ELEMENTS // ROW_ELEMENTS, ROW_ELEMENTS // LANES, LANES)
    padded = np.zeros(n_blocks * BLOCK_ELEMENTS, np.float64)
    with np.errstate(all="ignore"):
        padded[: values.size] = values
        squares = (padded * padded).reshape(shape)
        lanes = squares[:, :, 0]
        for step in range(1, squares.shape[2]):
            lanes = lanes + squares[:, :, step]
        return _folded(_folded(lanes))


def _folded(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The last axis, a power of two long, added up by halves."""
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


def sum_in_order(sums: npt.NDArray[np.float64]) -> float:
    """Blocks of a parameter, parameters, or ranks: added one after the other, from the first."""
    with np.errstate(all="ignore"):
        return float(np.add.accumulate(sums)[-1]) if sums.size else 0.0


def max_abs(values: Float32s) -> float:
    """The largest magnitude; NaN if there is one, 0 without elements."""
    return float(np.max(np.abs(values), initial=0.0))


def fingerprint(words: Array, first: int = 0) -> int:
    """64 bits that tell whether a gradient is still the same, from its raw words.

    Each word is mixed with a key made of its index; the results are added modulo 2^64, so that
    any order gives the same, and the fingerprints of parts add up to that of the whole.

    Args:
        words: float32, or 16-bit words.
        first: index of the first one, where ``words`` is part of something longer.
    """
    raw = words.view(np.uint32 if words.itemsize == 4 else np.uint16).astype(np.uint64)
    index = np.arange(first + 1, first + 1 + raw.size, dtype=np.uint64)
    key = index * np.uint64(FINGERPRINT_STEP)
    low, high = key & np.uint64(0xFFFFFFFF), key >> np.uint64(32)
    # 32 by 32 bits: the product is exact. Its upper half goes into the lower, or equal changes
    # in many places would add up linearly.
    mixed = (raw ^ low) * (high | np.uint64(1))
    mixed ^= mixed >> np.uint64(32)
    return int(np.sum(mixed, dtype=np.uint64))
