"""What a state dict says of one parameter: checked, then copied home piece by piece."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dos.errors import ConfigError
from dos.memory.flat import flat_like
from dos.shards import cut_like, is_sharded, local_of, same_placement
from dos.state import OptimizerState

_CHUNK_NUMEL = 1 << 20
"""Elements copied at once: bounds what a conversion of dtype takes on the source's device."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """The step count of a parameter and, by kind, tensors of its shape here, from anywhere."""

    step: int
    arrays: Mapping[str, torch.Tensor]


def read_saved(entry: object, parameter: torch.Tensor, where: str) -> SavedState | None:
    """What `entry` of a state dict keeps for `parameter`; None for nothing: it was never stepped.

    Any floating-point dtype, device and memory order will do; other keys are ignored. Of a DTensor
    the state is placed as it is, or given whole to every process.

    Raises:
        ConfigError: it does not fit the parameter.
    """
    if not entry:
        return None
    if not isinstance(entry, Mapping):
        raise _misfit(f"it is a {type(entry).__name__}, not a mapping", where)
    try:
        step = float(entry["step"])
    except (KeyError, TypeError, ValueError, RuntimeError):
        step = math.nan
    if not (step >= 0 and step.is_integer()):
        raise _misfit(f"its step is {entry.get('step')}, not a whole number >= 0", where)
    kinds = ["exp_avg", "exp_avg_sq"]
    # A weight in fp32 is its master.
    if parameter.dtype is not torch.float32 and "master" in entry:
        kinds.append("master")
    arrays = {kind: _array(kind, entry.get(kind), parameter, where) for kind in kinds}
    if step == 0:
        if any(bool(arrays[kind].any()) for kind in ("exp_avg", "exp_avg_sq")):
            raise _misfit("its step is 0, but its averages are not", where)
        return None
    return SavedState(int(step), arrays)


def load_saved(state: OptimizerState, saved: Mapping[int, SavedState | None]) -> None:
    """Copy into the state, by parameter, what `saved` has; zeros and no step where it has None.

    A source in another memory order than its parameter's takes a copy of that one tensor where
    it is; nothing else is kept. Masters are met with their weights at the next step, since a
    model may be loaded after its optimizer.
    """
    for index, its in saved.items():
        if its is not None:
            for kind, array in its.arrays.items():
                source = flat_like(array.detach(), local_of(state.parameters[index]))
                for home, start in state.parts(index, kind):
                    _copy(home, source[start : start + home.numel()])
    # Zeros last: the source may be views of this very state.
    counts = {index: 0 if its is None else its.step for index, its in saved.items()}
    with_master = [i for i, its in saved.items() if its is not None and "master" in its.arrays]
    take_counts(state, counts, with_master)


def take_counts(state: OptimizerState, counts: Mapping[int, int], masters: Collection[int]) -> None:
    """After a load, set step counts by parameter; those of `masters` were loaded with a master.

    What was never stepped gets zeros; where it was not before it has them, and its pages,
    perhaps, are not there yet.
    """
    for index, count in counts.items():
        if not count and state.steps[index]:
            for kind in ("exp_avg", "exp_avg_sq"):
                for home, _ in state.parts(index, kind):
                    home.zero_()
        state.steps[index] = count
        state.masters.expect(index, loaded=index in masters)


def _copy(home: torch.Tensor, source: torch.Tensor) -> None:
    for target, part in zip(home.split(_CHUNK_NUMEL), source.split(_CHUNK_NUMEL), strict=True):
        target.copy_(part)


def _array(kind: str, array: Any, parameter: torch.Tensor, where: str) -> torch.Tensor:
    """What `array` holds of the elements that lie here."""
    if not isinstance(array, torch.Tensor):
        raise _misfit(f"its {kind} is {'missing' if array is None else 'no tensor'}", where)
    plain = type(array) in (torch.Tensor, torch.nn.Parameter)
    if not plain and not (is_sharded(array) and is_sharded(parameter)):
        raise _misfit(f"its {kind} is a {type(array).__name__}, not a plain tensor", where)
    if array.shape != parameter.shape:
        shapes = f"{tuple(array.shape)}, the parameter {tuple(parameter.shape)}"
        raise _misfit(f"its {kind} has the shape {shapes}", where)
    if array.layout is not torch.strided or array.is_meta or not array.is_floating_point():
        kind_of = f"{array.dtype}, {array.layout} on {array.device}"
        raise _misfit(f"its {kind} is {kind_of}, not dense floating-point data", where)
    if not is_sharded(parameter):
        return array
    if plain:
        part = cut_like(array, parameter)
    else:
        part = local_of(array) if same_placement(array, parameter) else None
    if part is None:
        raise ConfigError(
            f"its {kind} cannot be placed as the parameter is, {parameter.placements}",
            where=where,
            fix="load it with torch.distributed.checkpoint, which moves it where it belongs",
        )
    return part


def _misfit(what: str, where: str) -> ConfigError:
    return ConfigError(
        f"the state does not fit the parameter: {what}",
        where=where,
        fix="load the state of the same model: step, and exp_avg and exp_avg_sq of its shape",
    )
