"""What one Adam update is told: number formats, hyperparameters, and where the arrays lie.

Plain data without torch, so that a plan can be made, checked and printed anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from dos.errors import ConfigError

BLOCK_ELEMENTS = 65_536
"""Elements under one partial sum of squares, counted from the start of a parameter."""
ROW_ELEMENTS = 1024
"""A block's rows are summed apart from each other; see `reference.block_squares`."""
LANES = 64
"""Running sums of a row."""
FINGERPRINT_STEP = 0x9E3779B97F4A7C15
"""Between the keys of neighbouring words: 2^64 divided by the golden ratio, made odd."""


class DType(IntEnum):
    """Number format of a gradient or a weight; the values are those of the C++ enum."""

    NONE = 0
    FP32 = 1
    BF16 = 2
    FP16 = 3

    @property
    def itemsize(self) -> int:
        """Bytes per element; 0 for NONE."""
        return (0, 4, 2, 2)[self]


@dataclass(frozen=True, slots=True)
class AdamScalars:
    """Hyperparameters of one update, each a Python float that is exactly an fp32 value.

    Every kernel takes these and computes none of them again: two implementations that
    round ``1 - beta`` differently could not give the same bits.

    Attributes:
        c1: beta1. d1: 1 - beta1. c2: beta2. d2: 1 - beta2.
        step_size: lr / (1 - beta1^t).
        inv_sqrt_bc2: 1 / sqrt(1 - beta2^t).
        decay: 1 - lr * weight_decay; multiplies the parameter when ``decoupled``.
        weight_decay: times the parameter, added to the gradient when not ``decoupled``.
        eps: added to the root of the bias-corrected variance.
        scale: multiplies the gradient first (loss unscaling and clipping).
        decoupled: AdamW if true, Adam with L2 regularisation if false.
        maximize: negate the gradient.
    """

    c1: float
    d1: float
    c2: float
    d2: float
    step_size: float
    inv_sqrt_bc2: float
    decay: float
    weight_decay: float
    eps: float
    scale: float
    decoupled: bool
    maximize: bool

    @classmethod
    def at_step(
        cls,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: int,
        decoupled: bool,
        maximize: bool = False,
        scale: float = 1.0,
    ) -> AdamScalars:
        """Scalars of step ``step`` (the first is 1): float64 throughout, rounded to fp32 once.

        Formulas: Kingma & Ba, "Adam" (2015), algorithm 1, with both bias corrections moved
        into scalars; Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (2019).

        Raises:
            ConfigError: a step below 1 or a beta outside [0, 1).
        """
        if step < 1:
            raise ConfigError(
                f"step {step} has no bias correction", where="step", fix="count steps from 1"
            )
        for name, beta in (("beta1", beta1), ("beta2", beta2)):
            if not 0.0 <= beta < 1.0:
                raise ConfigError(f"{beta} is not in [0, 1)", where=name, fix="e.g. 0.9 or 0.999")
        return cls(
            c1=to_fp32(beta1),
            d1=to_fp32(1.0 - beta1),
            c2=to_fp32(beta2),
            d2=to_fp32(1.0 - beta2),
            step_size=to_fp32(lr / (1.0 - beta1**step)),
            inv_sqrt_bc2=to_fp32(1.0 / math.sqrt(1.0 - beta2**step)),
            decay=to_fp32(1.0 - lr * weight_decay),
            weight_decay=to_fp32(weight_decay),
            eps=to_fp32(eps),
            scale=to_fp32(scale),
            decoupled=decoupled,
            maximize=maximize,
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """One contiguous range to update, by the addresses of its arrays in host memory.

    The arrays are aligned to their elements, do not overlap, and live until the update
    returns. ``w`` receives the rounded parameter; it is ignored when ``w_dtype`` is NONE.

    Attributes:
        p, m, v: addresses of parameter, momentum and variance; fp32, updated in place.
        g: address of the gradient in ``g_dtype`` (FP32, BF16 or FP16); only read.
        w: address of the weight to write in ``w_dtype``.
        numel: elements in each array.
    """

    p: int
    m: int
    v: int
    g: int
    w: int
    numel: int
    g_dtype: DType
    w_dtype: DType
    scalars: AdamScalars


def to_fp32(value: float) -> float:
    """The fp32 value nearest to ``value`` (ties to even, overflow to infinity).

    By exact float64 arithmetic instead of a hardware conversion, which would flush a tiny
    ``eps`` to zero on a thread where subnormals are switched off.
    """
    # Halfway from the largest fp32 value to 2^128, where nearest-even goes up.
    if not abs(value) < 2.0**128 - 2.0**103:
        return value if math.isnan(value) else math.copysign(math.inf, value)
    quantum_log2 = max(math.frexp(value)[1] - 24, -149)
    rounded = math.ldexp(round(math.ldexp(value, -quantum_log2)), quantum_log2)
    return math.copysign(rounded, value)
