"""The oracle: the arithmetic of one Adam update in plain numpy, one rounding per operation.

Slow and obvious on purpose. Every other kernel must give these bits.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dos.kernels.scalars import AdamScalars, DType

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
