"""The part of `DOSOptimizer` that a checkpoint works with: state held, state restored in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dos.engine import UpdateEngine
from dos.errors import ConfigError
from dos.live_state import in_pieces, live
from dos.memory import HeldState
from dos.memory.flat import flat, flat_like
from dos.memory.pieces import Pieces
from dos.saved_state import take_counts
from dos.shards import is_sharded, local_of
from dos.state import OptimizerState
from dos.state_dict import SavedOptimizer, read_state_dict
from dos.trained import TrainedParameters

_MOMENTS = ("exp_avg", "exp_avg_sq")
Names = Mapping[torch.Tensor, str]


class Checkpointed(torch.optim.Optimizer):
    """A torch optimizer whose state an engine keeps, held for a capture and restored in place."""

    _engine: UpdateEngine
    _trained: TrainedParameters
    _wrapped: torch.optim.Optimizer | None
    _restoring: _Restoring | None = None

    def hold_state(self, names: Names | None = None, what: str = "a checkpoint") -> HeldState:
        """All state as the last step leaves it, where it lies; it stays so until it is released.

        `tree` of what is returned has "master" (of 16-bit weights), "exp_avg" and "exp_avg_sq",
        each by the names of the parameters that were stepped: a tensor, or `Pieces` where it lies
        in several places; "steps" by the same names; and "param_groups", parameters as names.
        `holds` has the trained weights too, by address. The next steps run up to what is not
        released yet and wait there. With `overlap_forward` the last step is not waited for:
        `HeldState.ready` does.

        Args:
            names: of the parameters; None: as the param groups have them, else "<group>.<index>".
            what: names the capture in messages.

        Raises:
            ConfigError: a parameter has no name, or another one's, or was replaced; the optimizer
                was closed, or a step or a load failed half-way.
            PoolError: called in a forked child.
        """
        self._check_here("hold_state")
        self._engine.whole.check("hold_state")
        self._trained.check(self.param_groups)
        named = names_of(self.param_groups, names)
        state = self._engine.state
        leaves = {kind: self._leaves(kind) for kind in ("master", *_MOMENTS)}
        if any(leaf is None for its in leaves.values() for leaf in its.values()):
            self._engine.synchronize()  # what cannot be told in pieces is copied now
        held, steps = self._engine.hold(what)
        found = {index: named[tensor] for index, tensor in enumerate(self._trained.tensors)}
        held.tree = {
            kind: {
                found[index]: _copied(state, index, kind) if leaf is None else leaf
                for index, leaf in its.items()
                if steps[index]
            }
            for kind, its in leaves.items()
        }
        held.tree["steps"] = {found[index]: n for index, n in enumerate(steps) if n}
        held.tree["param_groups"] = [
            {**group, "params": [named[tensor] for tensor in group["params"]]}
            for group in self.param_groups
        ]
        return held

    def restore_target(
        self, saved: Mapping[str, Any], names: Names | None = None
    ) -> dict[str, dict[str, torch.Tensor | Pieces]]:
        """Where to read saved state into: a tree like `hold_state`'s, of what `saved` has.

        Waits for captures. When all of it has been read call `restored`; when none of it has been
        touched, `restore_abandoned`. Until then the optimizer refuses to step, to be saved or held.

        Args:
            saved: "steps" and "param_groups" as `hold_state` gave them; with "master", whose
                masters are there.
            names: as for `hold_state`.

        Raises:
            ConfigError: it does not fit, or the optimizer was closed. Nothing has been changed.
            PoolError: called in a forked child; a capture does not end; or it has state of frozen
                parameters, for which host memory is too small. Nothing has been changed.
        """
        self._check_writable("restore_target")
        assert self._wrapped is not None
        self._trained.check(self.param_groups)
        named = names_of(self.param_groups, names)
        groups = read_state_dict(self._wrapped, _by_order(saved, self.param_groups, named))
        steps = _read_steps(saved, named.values())
        with torch.no_grad():
            self._admit(lambda tensor: named[tensor] in steps)
        found = {index: named[tensor] for index, tensor in enumerate(self._trained.tensors)}
        masters = set(saved.get("master", found.values()))
        restoring = _Restoring(groups, {i: steps.get(name, 0) for i, name in found.items()})
        target: dict[str, dict[str, torch.Tensor | Pieces]] = {}
        for kind in ("master", *_MOMENTS):
            target[kind] = {}
            for index, leaf in self._leaves(kind).items():
                name = found[index]
                if name in steps and (kind != "master" or name in masters):
                    if leaf is None:
                        leaf = restoring.stage(self._engine.state, index, kind)
                    if kind == "master":
                        restoring.masters.add(index)
                    target[kind][name] = leaf
        self._restoring = restoring
        self._engine.whole.load_begins()
        return target

    def restored(self) -> None:
        """What `restore_target` gave has been filled: it is the state from here on.

        Weights are met at the next step, as after `load_state_dict`.

        Raises:
            ConfigError: no load is under way.
        """
        restoring = self._end_restoring("restored")
        assert self._wrapped is not None
        with torch.no_grad():
            restoring.take_home(self._engine.state)
        restoring.groups.set_groups(self._wrapped)
        self._engine.whole.load_ended()

    def restore_abandoned(self) -> None:
        """Nothing of what `restore_target` gave has been written to: all is as before.

        Raises:
            ConfigError: no load is under way.
        """
        self._end_restoring("restore_abandoned")
        self._engine.whole.load_abandoned()

    def _end_restoring(self, where: str) -> _Restoring:
        self._check_here(where)
        restoring, self._restoring = self._restoring, None
        if restoring is None:
            raise ConfigError(
                "no load is under way", where=where, fix="call restore_target first, once for each"
            )
        return restoring

    def _leaves(self, kind: str) -> dict[int, torch.Tensor | Pieces | None]:
        """By parameter that has such state, what `live` says; an fp32 weight is its own master."""
        return {
            index: live(self._engine.state, index, kind)
            for index, tensor in enumerate(self._trained.tensors)
            if kind != "master" or tensor.dtype is not torch.float32
        }

    def _admit(self, wanted: Callable[[torch.Tensor], bool]) -> None:
        """Take in those of the `wanted` parameters in the groups that have no state yet."""
        assert self._wrapped is not None
        found = self._trained.missing(self._wrapped, wanted)
        if found:
            tensors = [parameter.tensor for parameter in found]
            self._engine.extend(tensors, [parameter.group for parameter in found])
            self._trained.add(found)

    def _check_here(self, where: str) -> None:
        """Refuse a call that cannot be answered in this process any more."""
        if self._engine.closed:
            raise ConfigError("the optimizer was closed", where=where, fix="make a new one")
        self._engine.check_process()

    def _check_usable(self, where: str) -> None:
        """As `_check_here`, with the last step over."""
        self._check_here(where)
        self._engine.synchronize()

    def _check_writable(self, where: str) -> None:
        """As `_check_usable`, with nothing being captured."""
        self._check_usable(where)
        self._engine.state.gates.wait(where)


def names_of(groups: list[dict[str, Any]], names: Names | None) -> dict[torch.Tensor, str]:
    """The name of every parameter: by `names`, by its group's own, else "<group>.<index>".

    Raises:
        ConfigError: one has no name, or another one's.
    """
    found: dict[torch.Tensor, str] = {}
    taken: set[str] = set()
    for number, group in enumerate(groups):
        own = group.get("param_names")
        for index, tensor in enumerate(group["params"]):
            place = f"{number}.{index}"
            default = own[index] if own else place
            name = default if names is None else names.get(tensor)
            if name is None or name in taken:
                raise ConfigError(
                    "it has no name" if name is None else f"its name {name!r} is another one's",
                    where=f"parameter {place}",
                    fix="give the names of all parameters in the param groups, each once",
                )
            found[tensor] = name
            taken.add(name)
    return found


@dataclass
class _Restoring:
    """A load under way: what it will change when its tensors have been read."""

    groups: SavedOptimizer
    steps: dict[int, int]
    masters: set[int] = field(default_factory=set)
    staged: list[tuple[int, str, torch.Tensor]] = field(default_factory=list)

    def stage(self, state: OptimizerState, index: int, kind: str) -> torch.Tensor | Pieces:
        """What to read into where `live` has nothing: in row-major order, copied home later."""
        parameter = state.parameters[index]
        read = torch.empty(local_of(parameter).shape, dtype=torch.float32, device="cpu")
        self.staged.append((index, kind, read))
        return in_pieces(parameter, [(flat(read), 0)]) if is_sharded(parameter) else read

    def take_home(self, state: OptimizerState) -> None:
        """All has been read."""
        for index, kind, read in self.staged:
            source = flat_like(read, local_of(state.parameters[index]))
            for home, start in state.parts(index, kind):
                home.copy_(source[start : start + home.numel()])
        state.forget_zeros()
        take_counts(state, self.steps, self.masters)


def _copied(state: OptimizerState, index: int, kind: str) -> torch.Tensor | Pieces:
    """A copy of what is in pieces and in another memory order than row-major."""
    parameter, whole = state.parameters[index], state.whole(index, kind)
    if not is_sharded(parameter):
        return whole
    return in_pieces(parameter, [(whole.reshape(-1), 0)])


def _by_order(
    saved: Mapping[str, Any], groups: list[dict[str, Any]], named: Names
) -> dict[str, Any]:
    """The param groups that were saved, their parameters in the order of those that are here."""
    try:
        found = [dict(group) for group in saved["param_groups"]]
        names = [set(group["params"]) for group in found]
    except (KeyError, TypeError, ValueError) as error:
        raise _misfit(f"it has no param groups: {error!r}") from None
    for number, (its, group) in enumerate(zip(names, groups, strict=False)):
        if other := its ^ {named[tensor] for tensor in group["params"]}:
            owner = "the saved" if min(other, key=str) in its else "this"
            raise _misfit(f"only {owner} param group {number} has {min(other, key=str)!r}")
    for saved_group, group in zip(found, groups, strict=False):
        saved_group["params"] = [named[tensor] for tensor in group["params"]]
        saved_group.pop("param_names", None)
    return {"param_groups": found, "state": {}}


def _read_steps(saved: Mapping[str, Any], names: Collection[str]) -> dict[str, int]:
    """The step counts that were saved, by name, of what was stepped."""
    steps = saved.get("steps")
    if not isinstance(steps, Mapping):
        raise _misfit("it has no steps")
    for name, count in steps.items():
        if name not in names:
            raise _misfit(f"it has state of {name!r}, which is no parameter here")
        if type(count) is not int or count < 0:
            raise _misfit(f"the step of {name!r} is {count!r}, not a whole number >= 0")
    return {name: count for name, count in steps.items() if count}


def _misfit(what: str) -> ConfigError:
    return ConfigError(
        f"the state does not fit the optimizer: {what}",
        where="restore_target",
        fix="restore what hold_state() gave of an optimizer of this model, with the same names",
    )
