"""Clipping by Hugging Face's Trainer and accelerate, handed to the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import wraps
from importlib.util import find_spec
from typing import Any

import torch

from dos.errors import ConfigError
from dos.optimizer import DOSOptimizer


def register_transformers() -> None:
    """Have `transformers.Trainer` and `accelerate.Accelerator` clip by `DOSOptimizer`; idempotent.

    From here on `Accelerator.clip_grad_norm_`, which Trainer calls with its `max_grad_norm`, is
    `DOSOptimizer.clip_grad_norm_` where the gradients given are those of one prepared
    `DOSOptimizer`: they stay as they were sent during backward, and none is sent twice. In every
    other case accelerate does what it always does.

    Without this the training is as right: gradients that were clipped behind the optimizer's back
    are noticed and sent again, and early sending pauses.

    Raises:
        ConfigError: accelerate is not installed.
    """
    if find_spec("accelerate") is None:
        raise ConfigError(
            "accelerate is not installed, so there is nothing to register with",
            where="register_transformers",
            fix="pip install 'deep-optimizer-states[transformers]'",
        )
    from accelerate import Accelerator

    original = Accelerator.clip_grad_norm_
    if hasattr(original, "__wrapped__") and original.__module__ == __name__:
        return

    @wraps(original, assigned=("__name__", "__qualname__", "__doc__"))
    def clip_grad_norm_(
        self: Any,
        parameters: Iterable[torch.Tensor] | torch.Tensor,
        max_norm: float,
        norm_type: float = 2,
    ) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        optimizer = _owner(self, given)
        if optimizer is None or float(norm_type) not in (2.0, float("inf")):
            return original(self, given, max_norm, norm_type)
        self.unscale_gradients()
        return optimizer.clip_grad_norm_(max_norm, norm_type)

    Accelerator.clip_grad_norm_ = clip_grad_norm_


def _owner(accelerator: Any, parameters: Iterable[torch.Tensor]) -> DOSOptimizer | None:
    """The prepared optimizer that has exactly these parameters' gradients, if there is one."""
    wanted = {id(parameter) for parameter in parameters if parameter.grad is not None}
    for optimizer in _prepared(accelerator):
        members = (p for group in optimizer.param_groups for p in group["params"])
        if wanted == {id(p) for p in members if p.grad is not None}:
            return optimizer
    return None


def _prepared(accelerator: Any) -> Iterator[DOSOptimizer]:
    for optimizer in accelerator._optimizers:
        inner = getattr(optimizer, "optimizer", optimizer)  # an AcceleratedOptimizer's own
        if isinstance(inner, DOSOptimizer):
            yield inner
