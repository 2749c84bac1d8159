"""Portable fallback for machines without the compiled extension: one loop, jitted by numba.

Importing this module imports numba and compiles for about a second, so `adam` does so when it
is first needed. The machine code is not kept in files: they would lie beside the package, or
in a folder of the user's where that is read-only, for a second per process.
"""

from __future__ import annotations

from typing import Any

import numba  # type: ignore[import-untyped, unused-ignore]
import numpy as np
from numba import types
from numba.extending import intrinsic

from dos.kernels.scalars import AdamScalars, DType

_FP32, _BF16, _FP16 = int(DType.FP32), int(DType.BF16), int(DType.FP16)
_U32, _U64 = np.uint32, np.uint64
# Elements widened, updated and rounded in turn: few enough to find them in the L1 cache, and
# for the processor to begin with the next ones meanwhile. 1024 take a fifth longer.
_BLOCK = _U64(512)
_TWO_TO_112, _HALF = np.float32(2.0**112), np.float32(0.5)
_HALF_BITS = _HALF.view(_U32)

# The numpy error model divides by zero as IEEE says; the default raises. Without fastmath
# LLVM neither fuses nor reorders.
_JIT = {"nogil": True, "fastmath": False, "error_model": "numpy"}
_SIGNATURE = types.void(
    *[types.uintp] * 6, *[types.intp] * 2, types.boolean, types.UniTuple(types.float32, 10)
)


def update(
    p: int,
    m: int,
    v: int,
    g: int,
    w: int,
    numel: int,
    g_dtype: DType,
    w_dtype: DType,
    scalars: AdamScalars,
) -> None:
    """Update the fields of a `Segment`, without the GIL; same bits as `reference.update`."""
    s = scalars
    # Rounding is symmetric: (-g) * scale and g * (-scale) are the same bits.
    scale = -s.scale if s.maximize else s.scale
    decay = s.decay if s.decoupled else 1.0
    numbers = (s.c1, s.d1, s.c2, s.d2, s.step_size, s.inv_sqrt_bc2, decay, s.weight_decay)
    floats = tuple(map(np.float32, (*numbers, s.eps, scale)))
    _update(p, m, v, g, w, numel, int(g_dtype), int(w_dtype), s.decoupled, floats)


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    """The address as a pointer, of which numba.carray makes an array."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), codegen


# numba counts in 64 bits wherever it may: every result of 32 is told so, for twice the lanes.


@numba.njit(**_JIT)
def _widen_fp16(word: Any) -> Any:
    # Read as fp32 the exponent is 112 too small; the product is exact, also for subnormals.
    bits = _U32((word & _U32(0x7FFF)) << _U32(13))
    scaled = np.float32(bits.view(np.float32) * _TWO_TO_112).view(_U32)
    special = _U32(0x7F800000) if word & _U32(0x7C00) == _U32(0x7C00) else _U32(0)
    return _U32(scaled | special | _U32(word & _U32(0x8000)) << _U32(16)).view(np.float32)


@numba.njit(**_JIT)
def _round_bf16(bits: Any) -> Any:
    top = _U32(bits >> _U32(16))
    # Half a unit less one, and one more when the kept part is odd: carries into the kept
    # part exactly when nearest-even rounds up. It could carry a NaN to infinity or zero.
    rounded = _U32(_U32(bits + _U32(0x7FFF)) + _U32(top & _U32(1))) >> _U32(16)
    is_nan = _U32(bits & _U32(0x7FFFFFFF)) > _U32(0x7F800000)
    return np.uint16(top | _U32(0x40) if is_nan else rounded)


@numba.njit(**_JIT)
def _round_fp16(bits: Any) -> Any:
    magnitude = _U32(bits & _U32(0x7FFFFFFF))
    odd = _U32(magnitude >> _U32(13)) & _U32(1)
    half = _U32(_U32(magnitude + odd) - _U32((112 << 23) - 0xFFF)) >> _U32(13)
    if magnitude < _U32(0x38800000):
        # Below 2^-14: adding 0.5, whose unit is that of fp16's subnormals, rounds for us.
        half = np.float32(magnitude.view(np.float32) + _HALF).view(_U32) - _HALF_BITS
    if magnitude >= _U32(0x47800000):  # 2^16 and up; from 65520 the carry does it
        half = _U32(0x7C00)
    if magnitude > _U32(0x7F800000):
        half = _U32(0x7E00)
    return np.uint16(_U32(half) | _U32(bits >> _U32(16)) & _U32(0x8000))


@numba.njit(_SIGNATURE, **_JIT)
def _update(
    p_at: Any,
    m_at: Any,
    v_at: Any,
    g_at: Any,
    w_at: Any,
    size: Any,
    g_format: Any,
    w_format: Any,
    decoupled: Any,
    numbers: Any,
) -> None:
    p = numba.carray(_pointer(p_at), size, np.float32)
    m = numba.carray(_pointer(m_at), size, np.float32)
    v = numba.carray(_pointer(v_at), size, np.float32)
    g = numba.carray(_pointer(g_at), size, np.float32)
    w = numba.carray(_pointer(w_at), size, np.float32)
    g_words = numba.carray(_pointer(g_at), size, np.uint16)
    w_words = numba.carray(_pointer(w_at), size, np.uint16)
    # Every operand is float32: a Python literal here would widen its expression to float64.
    c1, d1, c2, d2, step_size, inv_sqrt_bc2, decay, weight_decay, eps, scale = numbers
    grads = np.empty(_BLOCK, np.float32)
    p_bits, grad_bits = p.view(_U32), grads.view(_U32)
    # Unsigned: a signed index may count from the end, and that question cannot be vectorized.
    for start in range(_U64(0), size, _BLOCK):
        numel = min(_BLOCK, size - start)
        if g_format == _BF16:
            for i in range(numel):
                grad_bits[i] = _U32(g_words[start + i]) << _U32(16)
        elif g_format == _FP16:
            for i in range(numel):
                grads[i] = _widen_fp16(_U32(g_words[start + i]))
        else:
            for i in range(numel):
                grads[i] = g[start + i]
        for i in range(numel):
            param = p[start + i]
            grad = grads[i] * scale
            if not decoupled:
                grad = grad + weight_decay * param
            momentum = m[start + i] * c1 + grad * d1
            variance = v[start + i] * c2 + (grad * grad) * d2
            denominator = np.sqrt(variance) * inv_sqrt_bc2 + eps
            m[start + i] = momentum
            v[start + i] = variance
            p[start + i] = param * decay - step_size * (momentum / denominator)
        if w_format == _BF16:
            for i in range(numel):
                w_words[start + i] = _round_bf16(p_bits[start + i])
        elif w_format == _FP16:
            for i in range(numel):
                w_words[start + i] = _round_fp16(p_bits[start + i])
        elif w_format == _FP32:
            for i in range(numel):
                w[start + i] = p[start + i]
