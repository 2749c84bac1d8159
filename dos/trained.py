"""The parameters that an optimizer updates: found in the groups, checked, numbered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from dos.errors import ConfigError
from dos.memory.flat import is_dense
from dos.shards import is_sharded, local_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


class TrainedParameters:
    """All that an optimizer updates: what required a gradient when it was made, and was added.

    Args:
        optimizer: whose groups are read.

    Attributes:
        tensors: in the order of the groups, then of the additions.
        names: of each, for messages.
        index_of: its place among them.

    Raises:
        ConfigError: nothing to train, or as `missing`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._parameters: list[TrainedParameter] = []
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self.index_of: dict[torch.Tensor, int] = {}
        self.add(self.missing(optimizer, lambda tensor: tensor.requires_grad))
        if not self.tensors:
            raise ConfigError(
                "no parameter requires a gradient",
                where="optimizer",
                fix="unfreeze something before making the optimizer",
            )

    def __iter__(self) -> Iterator[TrainedParameter]:
        """Them, in their order."""
        return iter(self._parameters)

    @property
    def groups(self) -> list[int]:
        """The param group of each."""
        return [parameter.group for parameter in self._parameters]

    @property
    def grads(self) -> list[torch.Tensor | None]:
        """The `.grad` of each."""
        return [tensor.grad for tensor in self.tensors]

    def check(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Refuse what was replaced in its group, re-typed, reshaped or moved.

        Raises:
            ConfigError: says which.
        """
        for parameter in self._parameters:
            parameter.check(groups)

    def missing(
        self, optimizer: torch.optim.Optimizer, wanted: Callable[[torch.Tensor], bool]
    ) -> list[TrainedParameter]:
        """Those of the `wanted` parameters in the groups of `optimizer` that are not here yet.

        Raises:
            ConfigError: a parameter that cannot be updated in place (dtype, layout, tensor
                subclass, holes in memory), one that is listed twice, or two that share memory.
        """
        found = _find(optimizer, lambda tensor: tensor not in self.index_of and wanted(tensor))
        if found:
            _check_apart([*self._parameters, *found])
        return found

    def add(self, found: Sequence[TrainedParameter]) -> None:
        """Take in what was `missing`."""
        first = len(self._parameters)
        self._parameters += found
        self.tensors += [parameter.tensor for parameter in found]
        self.names += [parameter.name for parameter in found]
        self.index_of.update({p.tensor: index for index, p in enumerate(found, first)})


def _find(
    optimizer: torch.optim.Optimizer, wanted: Callable[[torch.Tensor], bool]
) -> list[TrainedParameter]:
    """The `wanted` parameters, in the order of the groups, each once."""
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
