"""Portable fallback for machines without the compiled extension: one loop, jitted by numba.

numba is imported by the first update, not by importing this module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from dos.kernels.reference import Array, Float32s, round_to, widen
from dos.kernels.scalars import AdamScalars, DType


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
    """Same arguments and same bits as `reference.update`; the loop runs without the GIL.

    The 16-bit formats are converted by the reference before and after the loop, so pass
    arrays that fit the cache.

    Raises:
        ImportError: numba is not installed.
    """
    f32 = np.float32
    _loop()(
        p,
        m,
        v,
        widen(g, g_dtype),
        f32(scalars.c1),
        f32(scalars.d1),
        f32(scalars.c2),
        f32(scalars.d2),
        f32(scalars.step_size),
        f32(scalars.inv_sqrt_bc2),
        f32(scalars.decay),
        f32(scalars.weight_decay),
        f32(scalars.eps),
        # Rounding is symmetric: (-g) * scale and g * (-scale) are the same bits.
        f32(-scalars.scale if scalars.maximize else scalars.scale),
        scalars.decoupled,
    )
    if w is not None:
        w[:] = round_to(p, w_dtype).view(w.dtype)


@cache
def _loop() -> Callable[..., None]:
    import numba  # type: ignore[import-untyped, unused-ignore]

    # The numpy error model divides by zero as IEEE says; the default raises. Without
    # fastmath LLVM neither fuses nor reorders.
    jit = numba.njit(nogil=True, cache=False, fastmath=False, error_model="numpy")
    loop: Callable[..., None] = jit(_update_loop)
    return loop


def _update_loop(
    p: Float32s,
    m: Float32s,
    v: Float32s,
    g: Float32s,
    c1: Any,
    d1: Any,
    c2: Any,
    d2: Any,
    step_size: Any,
    inv_sqrt_bc2: Any,
    decay: Any,
    weight_decay: Any,
    eps: Any,
    scale: Any,
    decoupled: bool,
) -> None:
    # Every operand is float32: a Python literal here would widen its expression to float64.
    for i in range(p.size):
        param = p[i]
        grad = g[i] * scale
        if decoupled:
            param = param * decay
        else:
            grad = grad + weight_decay * param
        momentum = m[i] * c1 + grad * d1
        variance = v[i] * c2 + (grad * grad) * d2
        denominator = np.sqrt(variance) * inv_sqrt_bc2 + eps
        m[i] = momentum
        v[i] = variance
        p[i] = param - step_size * (momentum / denominator)
