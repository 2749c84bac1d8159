"""fp32 masters against the weights that are their rounding: filled, compared, taken afresh."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from dos.memory import Gates
from dos.memory.flat import flat
from dos.shards import identity, local_of

SAMPLED = 64
"""Most elements of a parameter that are compared before each step."""

_CHUNK_NUMEL = 1 << 20
"""Elements compared at once where a whole parameter is: bounds the temporary memory."""


@dataclass(frozen=True, slots=True)
class MasterPart:
    """A piece of a parameter's fp32 master where it is at home, 1-D; `start` is its first element.

    A piece in memory order: element i of `master` is for element `start` + i of the weight. It
    lies in the memory of `subgroup`.
    """

    master: torch.Tensor
    start: int
    subgroup: int


@dataclass(frozen=True, slots=True)
class _Sample:
    """Sampled elements of many parameters whose masters can be gathered in one operation.

    `where`: per view its parameter, first element, number of elements and their distance.
    """

    where: list[tuple[int, int, int, int]] = field(default_factory=list)
    masters: list[torch.Tensor] = field(default_factory=list)


class Masters:
    """Which masters are to be taken from their weights before a step, and how.

    A master is written only while the `gates` of its subgroups are open.

    A weight that is its own master has no parts here and needs nothing. Of the others:

    - One that was never met, or was loaded without a master, gives its master all elements.
    - One whose master was loaded keeps it in every element where its rounding has the bits of
      the weight; in the others the weight wins, and a warning says so.
    - One that somebody changed since the last step is taken up likewise, without a warning.
      That shows in its version, its address or a fixed sample of at most `SAMPLED` elements,
      spread evenly from the first to the last.
    """

    def __init__(self, gates: Gates) -> None:
        self._gates = gates
        self._parameters: list[torch.Tensor] = []
        self._parts: list[Sequence[MasterPart]] = []
        self._seen: list[tuple[int, int, int]] = []
        self._new: set[int] = set()
        self._loaded: set[int] = set()
        self._samples: dict[tuple[torch.dtype, torch.device], _Sample] = {}

    def add(self, parameter: torch.Tensor, parts: Sequence[MasterPart]) -> None:
        """Have the next parameter, whose master consists of these parts."""
        index = len(self._parameters)
        self._parameters.append(parameter)
        self._parts.append(parts)
        self._seen.append(identity(parameter))
        if parts:
            self._new.add(index)
        for part in parts:
            key = parameter.dtype, part.master.device
            sample = self._samples.setdefault(key, _Sample())
            for first, count, step in _sampled(local_of(parameter).numel(), part):
                sample.where.append((index, first, count, step))
                start = first - part.start
                sample.masters.append(part.master[start : start + (count - 1) * step + 1 : step])

    def expect(self, index: int, *, loaded: bool) -> None:
        """Meet the weight afresh at the next step: with a master just loaded, or without one."""
        self._new.discard(index)
        self._loaded.discard(index)
        if self._parts[index]:
            (self._loaded if loaded else self._new).add(index)

    def fill(self) -> None:
        """Bring every master in line with its weight, before a step."""
        drifted = self._drifted() if len(self._new) < len(self._parameters) else set()
        overruled = 0
        for index, parameter in enumerate(self._parameters):
            if index in self._new:
                self._await_gates(index)
                for master, weight in self._pairs(index):
                    master.copy_(weight)
            elif index in self._loaded:
                overruled += self._take_up(index)
            elif index in drifted or self._seen[index] != identity(parameter):
                self._take_up(index)
        self._new.clear()
        self._loaded.clear()
        self.remember()
        if overruled:
            warnings.warn(
                f"{overruled} elements of the loaded fp32 masters do not round to the weights, "
                "which are others than those saved with them: the weights are used",
                stacklevel=2,
            )

    def refresh(self) -> None:
        """Compare every element of every weight now, and take up those that were changed."""
        for index, parameter in enumerate(self._parameters):
            if index not in self._new and index not in self._loaded:
                self._take_up(index)
                self._seen[index] = identity(parameter)

    def remember(self) -> None:
        """Note how a step left the weights, to tell later changes by others."""
        self._seen = [identity(parameter) for parameter in self._parameters]

    def _pairs(self, index: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        weights = flat(local_of(self._parameters[index]))
        for part in self._parts[index]:
            yield part.master, weights[part.start : part.start + part.master.numel()]

    def _await_gates(self, index: int) -> None:
        self._gates.wait("masters of changed weights", [p.subgroup for p in self._parts[index]])

    def _take_up(self, index: int) -> int:
        """Take the weights whose master does not round to them; returns how many these are.

        A master keeps what it knows beyond a weight that is its rounding.
        """
        changed = 0
        for whole_master, whole_weight in self._pairs(index):
            chunks = zip(
                whole_master.split(_CHUNK_NUMEL), whole_weight.split(_CHUNK_NUMEL), strict=True
            )
            for master, weight in chunks:
                weight = weight.to(master.device)
                same = _rounds_to(master, weight)
                others = same.numel() - int(same.sum())
                if others:
                    self._await_gates(index)
                    master.copy_(torch.where(same, master, weight.to(master.dtype)))
                    changed += others
        return changed

    def _drifted(self) -> set[int]:
        """Parameters of which a sampled element is not the rounding of its master."""
        found: set[int] = set()
        for sample in self._samples.values():
            # One gather and one transfer for all parameters together.
            masters = torch.cat(sample.masters)
            with torch.no_grad():
                views = [
                    p.as_strided((count,), (step,), p.storage_offset() + first)
                    for index, first, count, step in sample.where
                    for p in (local_of(self._parameters[index]),)
                ]
                weights = torch.cat(views).to(masters.device)
            same = _rounds_to(masters, weights)
            if not bool(same.all()):
                counts = [count for _, _, count, _ in sample.where]
                parts = zip(sample.where, same.cpu().split(counts), strict=True)
                found.update(index for (index, *_), part in parts if not bool(part.all()))
        return found


def _sampled(numel: int, part: MasterPart) -> Iterator[tuple[int, int, int]]:
    """The sampled elements that lie in a part, as runs of first element, count and distance."""
    step = -(-numel // (SAMPLED - 1))
    stop = part.start + part.master.numel()
    first = -(-part.start // step) * step
    if first < stop:
        yield first, -(-(stop - first) // step), step
    if stop == numel and (numel - 1) % step:
        yield numel - 1, 1, 1


def _rounds_to(master: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Per element, whether the rounded master has the weight's bits; any NaN equals another."""
    rounded = master.to(weight.dtype)
    return (_words(rounded) == _words(weight)) | (rounded.isnan() & weight.isnan())


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The raw bits, as integers."""
    return tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)
