"""What the wrapped optimizer says: its kind, its hooks, and its hyperparameters."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dos.errors import ConfigError
from dos.kernels.scalars import AdamScalars
from dos.trained import TrainedParameter

_REFUSED_FLAGS = ("amsgrad", "capturable", "differentiable")
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """What one param group asks for at one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool
    decoupled: bool

    def scalars(self, step: int, scale: float = 1.0) -> AdamScalars:
        """The kernels' scalars at step count `step`, 1 at the first, gradients times `scale`."""
        return AdamScalars.at_step(
            lr=self.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            step=step,
            decoupled=self.decoupled,
            maximize=self.maximize,
            scale=scale,
        )


def step_scalars(
    hyper: Sequence[Hyperparameters],
    parameters: Iterable[TrainedParameter],
    present: Sequence[bool],
    counts: Sequence[int],
    scale: float,
) -> list[AdamScalars | None]:
    """Per parameter that is `present` in a step, its scalars; made once per group and count.

    Args:
        hyper: per param group.
        parameters: the trained ones.
        present: per parameter, whether it has a gradient.
        counts: per parameter, how often it was updated before.
        scale: what gradients are multiplied by.
    """
    made: dict[tuple[int, int], AdamScalars] = {}
    scalars: list[AdamScalars | None] = []
    for parameter, there, count in zip(parameters, present, counts, strict=True):
        key = (parameter.group, count + 1)
        if there and key not in made:
            made[key] = hyper[parameter.group].scalars(count + 1, scale)
        scalars.append(made[key] if there else None)
    return scalars


def check_supported(optimizer: object) -> torch.optim.Optimizer:
    """`optimizer`, if it is an Adam or AdamW whose update this library computes.

    Raises:
        ConfigError: another optimizer, or a subclass with a step of its own.
    """
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        raise ConfigError(
            f"{type(optimizer).__name__} is not supported",
            where="optimizer",
            fix="wrap a torch.optim.Adam or torch.optim.AdamW",
        )
    # torch wraps `step` on each class for its hooks, so the functions below are compared.
    known = {inspect.unwrap(kind.step) for kind in (torch.optim.Adam, torch.optim.AdamW)}
    if inspect.unwrap(type(optimizer).step) not in known:
        raise ConfigError(
            f"{type(optimizer).__name__} has a step() of its own, which would not run",
            where="optimizer",
            fix="wrap a plain torch.optim.Adam or torch.optim.AdamW",
        )
    return optimizer


def share_hooks(optimizer: torch.optim.Optimizer, wrapped: torch.optim.Optimizer) -> None:
    """Give both one set of hooks: those registered before wrapping keep being called."""
    for hooks in _HOOKS:
        setattr(optimizer, hooks, getattr(wrapped, hooks))


def read_group(
    optimizer: torch.optim.Optimizer, index: int, group: Mapping[str, Any]
) -> Hyperparameters:
    """The hyperparameters of a param group as they are now; a tensor lr is read once.

    Raises:
        ConfigError: a flag that is not supported, or a value that is not finite or in range.
    """
    where = f"param group {index}"
    for flag in _REFUSED_FLAGS:
        if group.get(flag):
            raise ConfigError(f"{flag}=True is not supported", where=where, fix=f"leave {flag} off")
    try:
        beta1, beta2 = (float(beta) for beta in group["betas"])
        values = {"lr": float(group["lr"]), "beta1": beta1, "beta2": beta2}
        values |= {name: float(group[name]) for name in ("eps", "weight_decay")}
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"a hyperparameter cannot be read: {error!r}",
            where=where,
            fix="set lr, eps and weight_decay to numbers and betas to two numbers",
        ) from None
    for name, value in values.items():
        below = 1.0 if name.startswith("beta") else math.inf
        # Rounding takes some of torch's schedulers to an lr just below 0.
        if not (0.0 <= value < below or (name == "lr" and math.isfinite(value))):
            raise ConfigError(
                f"{name} is {value}",
                where=where,
                fix=f"set it to a finite number >= 0{' and < 1' if below == 1.0 else ''}",
            )
    decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    return Hyperparameters(
        **values, maximize=bool(group.get("maximize")), decoupled=bool(decoupled)
    )
