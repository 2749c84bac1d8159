"""A checkpoint read into a training, in place."""

from __future__ import annotations

import glob
import logging
from collections.abc import Mapping
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

from dos.checkpoint.contents import Contents
from dos.checkpoint.names import ModelNames
from dos.checkpoint.paths import component, join
from dos.checkpoint.reader import load
from dos.checkpoint.rng import set_rng_states
from dos.checkpoint.storage import Storage
from dos.checkpoint.training import Holding, Stateful, Training, put
from dos.errors import ConfigError, FormatError, PoolError

_log = logging.getLogger(__name__)

_Place = tuple[str, ...]


class Restored(NamedTuple):
    """Where a training goes on.

    Attributes:
        step: of the checkpoint.
        extra: what was saved as `extra`; of an object that gives its state, that state.
        path: the checkpoint's directory.
    """

    step: int
    extra: Mapping[str, Any]
    path: str


class Restoration:
    """Reads a checkpoint into all of a training, having checked that it fits.

    Tensors of models, and the state of optimizers that hold theirs, are read where they are.

    Args:
        training: what is overwritten.
        path: of the checkpoint.
        rank: whose generators and `extra` are taken; of a rank that saved none, the first one's
            `extra`, and its generators stay as they are.
        strict: models must have the tensors that were saved, and no other; of every object in
            `extra` the state must have been saved.
        storage: the file system.
        **how: `allow` and `trusted` of `dos.checkpoint.load`.

    Raises:
        ConfigError: it does not fit; nothing was changed.
        FormatError, IntegrityError: as `dos.checkpoint.load`.
    """

    def __init__(
        self,
        training: Training,
        path: str,
        *,
        rank: int,
        strict: bool,
        storage: Storage,
        **how: Any,
    ) -> None:
        self._training, self._path, self._strict = training, path, strict
        self._how = {**how, "storage": storage}
        optimizers = training.optimizers.items()
        self._holding = {where: one for where, one in optimizers if isinstance(one, Holding)}
        self._contents = Contents(path, storage)
        for where, _ in optimizers:
            self._contents.check_optimizer(_text(where), holds=where in self._holding)
        self._into: dict[str, Any] = {}
        for where, model in training.models.items():
            state = ModelNames(model).state_dict()
            put(self._into, where, self._contents.check_model(_text(where), state, strict=strict))
        told = [f"{_glob(where)}/steps" for where in self._holding]
        told += [
            f"{_glob(where)}/param_groups"
            for where, _ in optimizers
            if self._contents.has(f"{_text(where)}/param_groups")
        ]
        own = rank if rank in self._contents.ranks else None
        self._objects = load(path, only=["rank", *told], rank=own, **self._how)
        for where, optimizer in optimizers:
            if where not in self._holding and f"{_glob(where)}/param_groups" in told:
                groups = _get(self._objects, where)["param_groups"]
                self._contents.check_groups(_text(where), groups, optimizer.param_groups)
        self._rng = None if own is None else self._objects["rank"]["rng"]
        self.extra: Mapping[str, Any] = self._objects["rank"]["extra"]
        extra = training.extra.items()
        self._taking = {key: value for key, value in extra if isinstance(value, Stateful)}
        if strict:
            self._contents.check_extra([key for key in self._taking if key not in self.extra])

    def run(self) -> None:
        """Overwrite it; the generators last.

        Raises:
            ConfigError, FormatError: it does not fit; nothing was changed.
            IntegrityError: damaged bytes, found after some were overwritten: optimizers that hold
                their state refuse to step until they are restored.
        """
        read = self._read()
        for where, model in self._training.models.items():
            ModelNames(model).load_state_dict(_get(read, where), strict=self._strict)
        for where, optimizer in self._training.optimizers.items():
            if where in self._holding:
                self._holding[where].restored()
            else:
                optimizer.load_state_dict(_get(read, where))
        for key, value in self._taking.items():
            if key in self.extra:
                value.load_state_dict(self.extra[key])
        if self._rng is None:
            _log.warning(
                "this rank saved no generators, as there were fewer: they stay as they are"
            )
        else:
            set_rng_states(self._rng)

    def _read(self) -> Any:
        """All tensors, into their places; what has none is made anew."""
        training, begun = self._training, list[Holding]()
        only = [_glob(where) for where in training.models]
        try:
            for where, other in training.optimizers.items():
                if where not in self._holding:
                    only.append(_glob(where))
                    parameters = [one for group in other.param_groups for one in group["params"]]
                    if shards := self._contents.shards(_text(where), parameters):
                        put(self._into, (*where, "state"), shards)
                    continue
                saved = self._saved(where)
                optimizer = self._holding[where]
                target = optimizer.restore_target(saved, training.names())
                begun.append(optimizer)
                for kind, leaves in target.items():
                    if leaves:
                        only.append(f"{_glob(where)}/{kind}")
                        put(self._into, (*where, kind), leaves)
            return load(self._path, into=self._into, only=only, **self._how) if only else {}
        except (ConfigError, FormatError, PoolError):  # of what comes before all reading
            for one in begun:
                one.restore_abandoned()
            raise

    def _saved(self, where: _Place) -> dict[str, Any]:
        """What `restore_target` has to know: counts, groups, and whose masters there are."""
        told = _get(self._objects, where)
        masters = f"{_text(where)}/master"
        have = [n for n in told["steps"] if self._contents.has(join(masters, component(n)))]
        return {**told, "master": have}


def _text(where: _Place) -> str:
    return "/".join(map(component, where))


def _glob(where: _Place) -> str:
    return glob.escape(_text(where))


def _get(tree: Any, where: _Place) -> Any:
    return reduce(getitem, where, tree)
