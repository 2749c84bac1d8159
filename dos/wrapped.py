"""What the wrapped optimizer says: which parameters it has, and with which hyperparameters."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from dos.errors import ConfigError
from dos.kernels.scalars import AdamScalars
from dos.memory.flat import is_dense
from dos.shards import is_sharded, local_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_REFUSED_FLAGS = ("amsgrad", "capturable", "differentiable")
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter as it was when the optimizer took it in; shape and strides of what lies here."""

    tensor: torch.Tensor
    group: int
    position: int
    name: str
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    strides: tuple[int, ...]

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a parameter that was replaced in its group, re-typed, reshaped or moved."""
        members = groups[self.group]["params"] if self.group < len(groups) else []
        now = local_of(self.tensor)
        if len(members) <= self.position or members[self.position] is not self.tensor:
            raise ConfigError(
                "it was replaced in its param group",
                where=self.name,
                fix="make a new DOSOptimizer for the new parameters",
            )
        changes = [
            f"{what} was {was} and is {is_}"
            for what, was, is_ in (
                ("dtype", self.dtype, now.dtype),
                ("device", self.device, now.device),
                ("shape", tuple(self.shape), tuple(now.shape)),
                ("memory order", self.strides, now.stride()),
            )
            if was != is_
        ]
        if changes:
            raise ConfigError(
                f"it changed: {', '.join(changes)}",
                where=self.name,
                fix="move and convert the model before making the optimizer, or make a new one",
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
    parameters: Sequence[TrainedParameter],
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


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[TrainedParameter]:
    """All parameters that require a gradient, in the order of the groups, each once.

    Raises:
        ConfigError: nothing to train, or as `find_parameters`.
    """
    found = find_parameters(optimizer, lambda tensor: tensor.requires_grad)
    if not found:
        raise ConfigError(
            "no parameter requires a gradient",
            where="optimizer",
            fix="unfreeze something before making the optimizer",
        )
    return found


def find_parameters(
    optimizer: torch.optim.Optimizer,
    wanted: Callable[[torch.Tensor], bool],
    beside: Sequence[TrainedParameter] = (),
) -> list[TrainedParameter]:
    """The `wanted` parameters, in the order of the groups, each once.

    Args:
        optimizer: whose groups are read.
        wanted: which of their parameters.
        beside: those that are trained already.

    Raises:
        ConfigError: a parameter that cannot be updated in place (dtype, layout, tensor subclass,
            holes in memory), one that is listed twice, or two that share memory.
    """
    found: dict[int, TrainedParameter] = {}
    for index, group in enumerate(optimizer.param_groups):
        for position, tensor in enumerate(group["params"]):
            if not (id(tensor) in found or wanted(tensor)):
                continue
            names = group.get("param_names")
            name = f"param group {index}, parameter {position}"
            if names:
                name += f" {names[position]!r}"
            if id(tensor) in found:
                raise ConfigError("it is listed twice", where=name, fix="list every parameter once")
            local = local_of(tensor)
            _check_placement(tensor, name)
            _check_parameter(local, name)
            found[id(tensor)] = TrainedParameter(
                tensor=tensor,
                group=index,
                position=position,
                name=name,
                dtype=local.dtype,
                device=local.device,
                shape=local.shape,
                strides=local.stride(),
            )
    if found:
        _check_apart([*beside, *found.values()])
    return list(found.values())


def _check_apart(parameters: Iterable[TrainedParameter]) -> None:
    """Refuse two parameters that share memory: the order of their updates would matter."""
    spans = sorted(
        (str(p.device), local.data_ptr(), local.data_ptr() + local.nbytes, p.name)
        for p in parameters
        if (local := local_of(p.tensor)).numel()
    )
    for (device, _, end, first), (its_device, start, _, second) in pairwise(spans):
        if device == its_device and start < end:
            raise ConfigError(
                f"it shares memory with {first}",
                where=second,
                fix="tie weights by using one Parameter twice, or clone one of them",
            )


def _check_placement(tensor: torch.Tensor, name: str) -> None:
    if not is_sharded(tensor):
        return
    if tensor.device_mesh.get_coordinate() is None:
        raise ConfigError(
            "it is a DTensor on a mesh of other processes",
            where=name,
            fix="give each process the parameters of its own mesh",
        )
    if any(placement.is_partial() for placement in tensor.placements):
        raise ConfigError(
            f"it is a DTensor that is yet to be summed ({tensor.placements})",
            where=name,
            fix="redistribute it with Shard or Replicate placements",
        )


def _check_parameter(tensor: torch.Tensor, name: str) -> None:
    refusals = (
        (tensor.is_complex(), "complex", "train its real view (torch.view_as_real)"),
        (tensor.layout is not torch.strided, f"{tensor.layout}", "use a dense parameter"),
        (
            type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer),
            f"a {type(tensor).__name__}",
            "use plain parameters or DTensors of such",
        ),
        (tensor.is_meta, "on the meta device, without data", "materialize the model first"),
        (tensor.is_neg(), "a negated view", "use tensor.resolve_neg()"),
        (
            tensor.is_inference(),
            "an inference tensor",
            "make it outside torch.inference_mode(), or clone it",
        ),
        (tensor.dtype not in _DTYPES, f"{tensor.dtype}", "use float32, bfloat16 or float16"),
    )
    for refused, what, fix in refusals:
        if refused:
            raise ConfigError(f"it is {what}", where=name, fix=fix)
    if not is_dense(tensor):
        raise ConfigError(
            f"it has holes or overlaps in memory (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()})",
            where=name,
            fix="make it from tensor.contiguous()",
        )
