"""What gradients are multiplied by in the update: the clip factor, and the loss scale undone."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from dos.errors import ConfigError, NonFiniteError
from dos.kernels import norm
from dos.kernels.cast import Examined
from dos.shards import gather, is_counted_here, is_sharded


class ClipFactor:
    """What gradients are to be multiplied by, of which the norm was taken.

    It goes with them: where they all are others by now, or none (`model.zero_grad()`), it is 1.
    """

    def __init__(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Forget it: used, or not wanted."""
        self._value = 1.0
        self._clipped: list[weakref.ref[torch.Tensor]] = []

    def of(self, grads: Sequence[torch.Tensor | None]) -> float:
        """The factor for these `p.grad`, 1 by default."""
        there = set(map(id, grads))
        alive = (clipped() for clipped in self._clipped)
        if not any(grad is not None and id(grad) in there for grad in alive):
            self.drop()
        return self._value

    def multiply(self, factor: float, grads: Sequence[torch.Tensor | None]) -> None:
        """Clip these `p.grad` once more."""
        self._value *= factor
        self._clipped = [weakref.ref(grad) for grad in grads if grad is not None]


def loss_unscaling(optimizer: object) -> float | None:
    """What undoes the loss scale in this step, 1 without one; None if it is to be skipped.

    torch.amp.GradScaler sets two attributes around the `step` of an optimizer with
    `_step_supports_amp_scaling`: `found_inf`, and `grad_scale` where nobody has unscaled.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None and float(found_inf):
        return None
    grad_scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if grad_scale is None else 1.0 / float(grad_scale)


def total_norm(
    parameters: Sequence[torch.Tensor], examined: Sequence[Examined | None], norm_type: float
) -> float:
    """The 2- or infinity norm over the gradients of all parameters, None for no gradient.

    Of DTensors over all processes of their mesh, each of which comes to the same bits: shards
    are added in the order of the parameters, then processes in the order of the mesh, then
    meshes. Every process of a mesh has to call it.

    Raises:
        ConfigError: another norm.
    """
    kind = float(norm_type)
    if kind not in (2.0, math.inf):
        raise ConfigError(
            f"a norm of type {norm_type} is not supported",
            where="clip_grad_norm_",
            fix="use 2 or math.inf, or torch.nn.utils.clip_grad_norm_",
        )
    combine = norm.square_sum if kind == 2.0 else norm.infinity_norm
    here: dict[Any, list[float]] = {}
    for parameter, its in zip(parameters, examined, strict=True):
        mesh = parameter.device_mesh if is_sharded(parameter) else None
        parts = here.setdefault(mesh, [])
        if its is not None and is_counted_here(parameter):
            parts.append(its.square_sum if kind == 2.0 else its.max_abs)
    totals = [
        combine(parts) if mesh is None else combine(gather(combine(parts), mesh))
        for mesh, parts in here.items()
    ]
    return norm.norm(totals) if kind == 2.0 else norm.infinity_norm(totals)


def check_finite(total: float) -> None:
    """Raise NonFiniteError for a norm that is infinite or NaN."""
    if not math.isfinite(total):
        raise NonFiniteError(
            f"the norm of the gradients is {total}",
            where="clip_grad_norm_",
            fix="lower the learning rate or the loss scale, or leave error_if_nonfinite off",
        )
