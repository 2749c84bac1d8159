"""What a training consists of, taken as a tree to be saved.

    step        how often it was stepped
    model       a module's state dict
    optimizer   of one that holds its state what `hold_state` gives; of any other its state dict
    rank        what each rank has of its own: rng, extra

Of several models or optimizers, given by name, each stands under its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

from dos.checkpoint.names import ModelNames
from dos.checkpoint.replicas import outline_of, part_of
from dos.checkpoint.rng import rng_states
from dos.memory import HeldState
from dos.memory.pieces import Pieces

T = TypeVar("T")
Models = torch.nn.Module | Mapping[str, torch.nn.Module] | None
Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None


@runtime_checkable
class Stateful(Protocol):
    """A scheduler, a scaler, a loader: what gives its state, and takes it."""

    def state_dict(self) -> Any:
        """What it needs to go on from here."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Go on from there."""


@runtime_checkable
class Holding(Protocol):
    """An optimizer that leaves its state as it is until it is captured: `DOSOptimizer`."""

    def hold_state(self, names: Mapping[torch.Tensor, str] | None, what: str) -> HeldState:
        """Its state, live, under the names of its parameters."""

    def restore_target(
        self, saved: Mapping[str, Any], names: Mapping[torch.Tensor, str] | None
    ) -> dict[str, Any]:
        """Where to read saved state into; it refuses to step from here on."""

    def restored(self) -> None:
        """It was read."""

    def restore_abandoned(self) -> None:
        """Nothing was read."""


class Training(NamedTuple):
    """What is saved and restored together.

    Attributes:
        models, optimizers: by where they stand in the tree: ("model",), or ("model", its name).
        extra: by key, objects that give and take their state, and values.
    """

    models: Mapping[tuple[str, ...], torch.nn.Module]
    optimizers: Mapping[tuple[str, ...], torch.optim.Optimizer]
    extra: Mapping[str, Any]

    @classmethod
    def of(cls, model: Models, optimizer: Optimizers, extra: Mapping[str, Any] | None) -> Training:
        """As a user gives them."""
        return cls(_placed("model", model), _placed("optimizer", optimizer), extra or {})

    def names(self) -> dict[torch.Tensor, str] | None:
        """Of all parameters, where there is a model to name them; of several, with its name."""
        if not self.models:
            return None
        return {
            tensor: ".".join((*where[1:], name))
            for where, model in self.models.items()
            for tensor, name in ModelNames(model).parameters().items()
        }

    def part(
        self, step: int, rank: int, world: int, check_room: Callable[[int], None]
    ) -> tuple[dict[str, Any], list[HeldState], dict[str, str]]:
        """What one rank saves, live; what is held until it is captured or abandoned; the outline.

        The generators come first, since what follows may draw from them. Optimizers are held before
        models are looked at, so that a step that runs on is not waited for.

        Args:
            step: how many were done.
            rank: of this process.
            world: how many ranks save.
            check_room: called with the bytes of the whole tree; it may raise.
        """
        own: dict[str, Any] = {"rng": rng_states()}
        tree: dict[str, Any] = {"step": step, "rank": own}
        own["extra"] = {
            key: value.state_dict() if isinstance(value, Stateful) else value
            for key, value in self.extra.items()
        }
        # Each rank has its own: DistributedDataParallel takes those of rank 0 at the next forward.
        buffers: set[int] = set()
        held: list[HeldState] = []
        try:
            states = {
                where: self._hold(optimizer, f"the save of step {step}", held)
                for where, optimizer in self.optimizers.items()
            }
            for where, model in self.models.items():
                names = ModelNames(model)
                put(tree, where, state := _state_dict(names, held))
                buffers |= names.buffers(state)
            for where, state in states.items():
                put(tree, where, state)
            check_room(n_bytes_of(tree))
            outline = outline_of(tree) if world > 1 else {}
            return part_of(tree, rank, world, buffers), held, outline
        except BaseException:
            for one in held:
                one.abandon()
            raise

    def _hold(self, optimizer: torch.optim.Optimizer, what: str, held: list[HeldState]) -> Any:
        """The state of an optimizer; what of it is held is added to `held`."""
        if not isinstance(optimizer, Holding):
            return optimizer.state_dict()
        held.append(optimizer.hold_state(self.names(), what))
        return held[-1].tree


def put(tree: dict[str, Any], where: tuple[str, ...], value: Any) -> None:
    """Give a tree of dicts a value at a place."""
    for key in where[:-1]:
        tree = tree.setdefault(key, {})
    tree[where[-1]] = value


def n_bytes_of(tree: Any) -> int:
    """The bytes of all tensors in a tree of dicts, lists and tuples; of tied ones once."""
    return sum({_memory(tensor): tensor.nbytes for tensor in _tensors(tree)}.values())


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Pieces):
        yield from tree.parts.values()
    elif isinstance(tree, Mapping | list | tuple):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _tensors(value)


def _memory(tensor: torch.Tensor) -> Any:
    """What is equal for tensors of the same bytes; of a kind that has no address, the tensor."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.nbytes


def _state_dict(names: ModelNames, held: list[HeldState]) -> dict[str, Any]:
    """A model's state dict; what of it is held is not waited for, unless somebody may read it."""
    with ExitStack() as unread:
        for one in held if names.reads_no_values else ():
            unread.enter_context(one.unread())
        state = names.state_dict()
    return state


def _placed(part: str, given: T | Mapping[str, T] | None) -> dict[tuple[str, ...], T]:
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {(part, name): one for name, one in given.items()}
    return {(part,): given}
