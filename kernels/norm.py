"""One norm from many sums: gradients into a rank's, ranks into the total, and what it clips to.

Plain float64 numbers, added in an order that all agree on, in the default floating-point mode
whatever the calling thread was told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dos.errors import ConfigError
from dos.kernels import reference
from dos.kernels.float_mode import exact_float_mode


def square_sum(parts: Sequence[float] | npt.NDArray[np.float64]) -> float:
    """Sums of squares added one after the other: a gradient's blocks, gradients, or ranks.

    Gradients are given in the order of their parameters and ranks in rank order, so that
    every process comes to the same bits. 0 without parts.
    """
    with exact_float_mode():
        return reference.sum_in_order(np.asarray(parts, np.float64))


def norm(parts: Sequence[float]) -> float:
    """The 2-norm over parts that are given as in `square_sum`."""
    total = square_sum(parts)
    with exact_float_mode():
        return math.sqrt(total)


def infinity_norm(maxima: Sequence[float]) -> float:
    """The largest of the parts' largest magnitudes; NaN if there is one, 0 without parts."""
    return float(np.max(np.asarray(maxima, np.float64), initial=0.0))


def clip_scale(norm: float, max_norm: float) -> float:
    """What gradients of that norm are multiplied by, so that it becomes ``max_norm`` at most.

    max_norm / (norm + 1e-6), at most 1, as `torch.nn.utils.clip_grad_norm_` has it, though in
    float64; `AdamScalars.at_step` rounds it once, into ``scale``. 0 for an infinite norm and
    NaN for a NaN, as there.

    Raises:
        ConfigError: ``max_norm`` is negative or NaN.
    """
    if not max_norm >= 0.0:
        raise ConfigError(
            f"a norm cannot be clipped to {max_norm}",
            where="max_norm",
            fix="give 0 or more; math.inf clips nothing",
        )
    with exact_float_mode():
        coefficient = max_norm / (norm + 1e-6)
    return 1.0 if coefficient > 1.0 else coefficient
