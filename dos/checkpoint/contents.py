"""What a checkpoint has, compared with what is to be read into before anything is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dos.checkpoint.inspecting import inspect
from dos.checkpoint.paths import component, join, key_component
from dos.checkpoint.storage import Storage
from dos.errors import ConfigError
from dos.shards import is_sharded


class Contents:
    """Names, shapes and dtypes of all that was saved.

    Args:
        path: of the checkpoint.
        storage: the file system.

    Attributes:
        ranks: that saved something.

    Raises:
        FormatError, IntegrityError: as `dos.checkpoint.inspect`.
    """

    def __init__(self, path: str, storage: Storage) -> None:
        told = inspect(path, storage=storage)
        self._path = path
        self.ranks = {file["rank"] for file in told["files"]}
        self._tensors = {one["name"]: one for one in told["tensors"]}
        self._names = self._tensors.keys() | {one["name"] for one in told["objects"]}

    def has(self, at: str) -> bool:
        """Is there anything at a path, or below it?"""
        return at in self._names or any(name.startswith(f"{at}/") for name in self._names)

    def check_optimizer(self, at: str, *, holds: bool) -> None:
        """ConfigError where no state of such an optimizer was saved."""
        if not self.has(at):
            raise self._misfit("no state of an optimizer was saved", at, "restore without it")
        if self.has(f"{at}/steps") != holds:
            has, needs = ("torch's", "DOSOptimizer") if holds else ("DOSOptimizer's", "torch's")
            raise self._misfit(
                f"the state of {has} optimizer was saved, and this is {needs}",
                at,
                "restore into an optimizer of the same kind",
            )

    def check_groups(
        self, at: str, saved: Sequence[Mapping[str, Any]], here: Sequence[Mapping[str, Any]]
    ) -> None:
        """ConfigError where an optimizer of torch's would not take the param groups saved."""
        sizes = [[len(group["params"]) for group in groups] for groups in (saved, here)]
        if sizes[0] != sizes[1]:
            raise self._misfit(
                f"param groups of {sizes[0]} parameters were saved, and these are of {sizes[1]}",
                at,
                "restore into an optimizer of the same param groups",
            )

    def shards(self, at: str, parameters: Iterable[torch.Tensor]) -> dict[int, dict[str, Any]]:
        """DTensors to read an optimizer's state into, by its parameters' numbers and its keys."""
        found: dict[int, dict[str, Any]] = {}
        sharded = {
            join(join(at, "state"), key_component(str(number))): (number, parameter)
            for number, parameter in enumerate(parameters)
            if is_sharded(parameter)
        }
        for name, told in self._tensors.items() if sharded else ():
            parent, _, key = name.rpartition("/")
            number, parameter = sharded.get(parent, (0, None))
            if parameter is not None and told["shape"] == list(parameter.shape):
                made = torch.empty_like(parameter.detach(), dtype=getattr(torch, told["type"]))
                found.setdefault(number, {})[key] = made
        return found

    def check_model(self, at: str, state: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
        """Which tensors of a model's state dict are to be read; ConfigError where they differ."""
        names = {join(at, component(name)): name for name in state}
        begin = len(at) + 1
        saved = {
            join(at, name[begin:].partition("/")[0])
            for name in self._names
            if name.startswith(f"{at}/")
        }
        lacks = {"checkpoint": names.keys() - saved, "model": saved - names.keys()}
        for what, lacking in lacks.items():
            if lacking and strict:
                raise self._misfit(
                    f"the {what} lacks {min(lacking)!r} and {len(lacking) - 1} others",
                    at,
                    "restore into the model that was saved, or with strict=False",
                )
        into = {}
        for path in names.keys() & self._tensors.keys():
            tensor = state[names[path]]
            if isinstance(tensor, torch.Tensor):
                self._check_fits(path, tensor)
                into[names[path]] = tensor
        return into

    def check_extra(self, missing: list[str]) -> None:
        """ConfigError for objects of whom no state was saved."""
        if missing:
            raise self._misfit(
                f"no state of {missing[0]!r} was saved",
                "rank/extra",
                "leave it out of `extra`, or restore with strict=False",
            )

    def _check_fits(self, path: str, tensor: torch.Tensor) -> None:
        told = self._tensors[path]
        dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        if (dtype, shape) != (told["type"], told["shape"]):
            raise self._misfit(
                f"{told['type']} of shape {told['shape']} was saved, the model has {dtype} of "
                f"shape {shape}",
                path,
                "restore into the model that was saved",
            )

    def _misfit(self, what: str, where: str, fix: str) -> ConfigError:
        return ConfigError(what, where=f"{self._path}: {where}", fix=fix)
