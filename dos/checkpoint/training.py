"""What a training consists of: taken as a tree to be saved, and read back into what is alive.

    model       a module's state dict
    optimizer   of one that holds its state: what `hold_state` gives; of any other its state dict
    rank        what each rank has of its own: rng, extra
    step        how often it was stepped

Of several models or optimizers, given by name, each stands under its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

from dos.checkpoint.inspecting import inspect
from dos.checkpoint.names import ModelNames
from dos.checkpoint.paths import component, join
from dos.checkpoint.reader import load
from dos.checkpoint.rng import rng_states, set_rng_states
from dos.checkpoint.storage import Storage
from dos.errors import ConfigError
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


class Training(NamedTuple):
    """What is saved together.

    Attributes:
        models, optimizers: by name, "" where there is one only.
        extra: by key, objects that give and take their state, and values.
    """

    models: Mapping[str, torch.nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer]
    extra: Mapping[str, Any]

    @classmethod
    def of(cls, model: Models, optimizer: Optimizers, extra: Mapping[str, Any] | None) -> Training:
        """As a user gives them."""
        return cls(_by_name(model), _by_name(optimizer), extra or {})

    def tree(self, step: int) -> dict[str, Any]:
        """All of it, live: the generators first, since what follows may draw from them."""
        rank: dict[str, Any] = {"rng": rng_states()}
        tree: dict[str, Any] = {"step": step, "rank": rank}
        if self.models:
            models = {name: ModelNames(one).state_dict() for name, one in self.models.items()}
            tree["model"] = models.get("", models)
        if self.optimizers:
            states = {name: one.state_dict() for name, one in self.optimizers.items()}
            tree["optimizer"] = states.get("", states)
        rank["extra"] = {
            key: value.state_dict() if isinstance(value, Stateful) else value
            for key, value in self.extra.items()
        }
        return tree

    def restore(
        self,
        path: str,
        *,
        strict: bool,
        allow: Iterable[type],
        trusted: bool,
        storage: Storage,
    ) -> Mapping[str, Any]:
        """Read a checkpoint into all of it; what was saved as `extra`, with values only.

        Whether it fits is checked before anything is changed.

        Raises:
            ConfigError: it does not fit.
            FormatError, IntegrityError: as `dos.checkpoint.load`.
        """
        held = _Contents(path, storage)
        how: dict[str, Any] = {"storage": storage, "allow": tuple(allow), "trusted": trusted}
        own = load(path, only="rank", **how)["rank"]
        held.check_extra(self.extra, own["extra"], strict=strict)
        wanted = [part for part, given in self._parts() if given]
        into: dict[str, Any] = {}
        for name, model in self.models.items():
            state = ModelNames(model).state_dict()
            into[name] = held.check_model(_at("model", name), state, strict=strict)
        for name in self.optimizers:
            held.check_optimizer(_at("optimizer", name))
        read: Any = {}
        if wanted:
            targets = {"model": into.get("", into)} if into else None
            read = load(path, into=targets, only=wanted, **how)
        for name, model in self.models.items():
            state = read["model"][name] if name else read["model"]
            ModelNames(model).load_state_dict(state, strict=strict)
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(read["optimizer"][name] if name else read["optimizer"])
        for key, value in self.extra.items():
            if isinstance(value, Stateful) and key in own["extra"]:
                value.load_state_dict(own["extra"][key])
        set_rng_states(own["rng"])
        saved: Mapping[str, Any] = own["extra"]
        return saved

    def _parts(self) -> list[tuple[str, bool]]:
        return [("model", bool(self.models)), ("optimizer", bool(self.optimizers))]


class _Contents:
    """What a checkpoint has, to be compared with what is to be read into."""

    def __init__(self, path: str, storage: Storage) -> None:
        told = inspect(path, storage=storage)
        self._path = path
        self._tensors = {one["name"]: one for one in told["tensors"]}
        self._names = self._tensors.keys() | {one["name"] for one in told["objects"]}

    def check_extra(
        self, given: Mapping[str, Any], saved: Mapping[str, Any], *, strict: bool
    ) -> None:
        """ConfigError where an object would get no state."""
        missing = [k for k, v in given.items() if isinstance(v, Stateful) and k not in saved]
        if missing and strict:
            raise self._misfit(
                f"no state of {missing[0]!r} was saved", "rank/extra", "leave it out of `extra`"
            )

    def check_optimizer(self, at: str) -> None:
        """ConfigError where no state of an optimizer was saved."""
        if not any(name == at or name.startswith(f"{at}/") for name in self._names):
            raise self._misfit("no state of an optimizer was saved", at, "restore without it")

    def check_model(self, at: str, state: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
        """Which tensors of a model's state dict are to be read; ConfigError where they differ."""
        names = {join(at, component(name)): name for name in state}
        begin = len(at) + 1
        saved = {
            join(at, name[begin:].partition("/")[0])
            for name in self._names
            if name.startswith(f"{at}/")
        }
        for what, lacking in (
            ("checkpoint", names.keys() - saved),
            ("model", saved - names.keys()),
        ):
            if lacking and strict:
                raise self._misfit(
                    f"the {what} lacks {min(lacking)!r} and {len(lacking) - 1} others",
                    at,
                    "restore into the model that was saved, or with strict=False",
                )
        into = {}
        for path in names.keys() & self._tensors.keys():
            tensor, told = state[names[path]], self._tensors[path]
            if not isinstance(tensor, torch.Tensor):
                continue
            has = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
            if has != (told["type"], told["shape"]):
                raise self._misfit(
                    f"{told['type']} of shape {told['shape']} was saved, the model has "
                    f"{has[0]} of shape {has[1]}",
                    path,
                    "restore into the model that was saved",
                )
            into[names[path]] = tensor
        return into

    def _misfit(self, what: str, where: str, fix: str) -> ConfigError:
        return ConfigError(what, where=f"{self._path}: {where}", fix=fix)


def n_bytes_of(tree: Any) -> int:
    """The bytes of all tensors in a tree of dicts, lists and tuples."""
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    if isinstance(tree, Pieces):
        return n_bytes_of(tree.parts)
    if isinstance(tree, Mapping):
        return sum(map(n_bytes_of, tree.values()))
    return sum(map(n_bytes_of, tree)) if isinstance(tree, list | tuple) else 0


def _at(part: str, name: str) -> str:
    return join(part, component(name)) if name else part


def _by_name(given: T | Mapping[str, T] | None) -> Mapping[str, T]:
    if given is None:
        return {}
    return given if isinstance(given, Mapping) else {"": given}
