"""Cut the parameters into subgroups, the unit in which state is placed, moved and updated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

PAGE_ELEMENTS = 1024
"""fp32 elements in a page of 4 KiB, the alignment of state in host memory."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements `start` to `stop` (exclusive) of one flattened parameter.

    Attributes:
        parameter: index of the parameter.
        group: index of its param group.
        start, stop: element range within the parameter.
    """

    parameter: int
    group: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Subgroup:
    """Segments that lie one behind the other in the buffers of one subgroup."""

    index: int
    segments: tuple[Segment, ...]

    @property
    def numel(self) -> int:
        """Number of elements of all segments."""
        return sum(segment.numel for segment in self.segments)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Per segment, the element of the subgroup at which it starts."""
        return tuple(accumulate((s.numel for s in self.segments[:-1]), initial=0))


def partition(
    numels: Sequence[int],
    groups: Sequence[int],
    subgroup_size: int,
    *,
    first_parameter: int = 0,
    first_subgroup: int = 0,
    apart: bool = False,
) -> tuple[Subgroup, ...]:
    """Cut parameters, in their order, into subgroups of `subgroup_size` elements.

    Every subgroup is full except the last: a parameter may fill the rest of one and go on in
    the next, so that all subgroups take the same time and any of them fits a staging slot.
    From 1,024 elements on the size is rounded down to a multiple of that, so that the state of
    a full subgroup ends on a page and that of the next follows without a gap: a parameter cut
    over both then still has its state in one piece.

    Args:
        numels: elements of each parameter; one without elements gets no segment.
        groups: param group of each parameter.
        subgroup_size: elements per subgroup, at least 1.
        first_parameter, first_subgroup: where to begin counting.
        apart: no subgroup holds parts of two parameters.
    """
    assert subgroup_size >= 1, subgroup_size
    if subgroup_size >= PAGE_ELEMENTS:
        subgroup_size -= subgroup_size % PAGE_ELEMENTS
    done: list[Subgroup] = []
    filling: list[Segment] = []
    room = subgroup_size
    pairs = zip(numels, groups, strict=True)
    for parameter, (numel, group) in enumerate(pairs, first_parameter):
        start = 0
        while start < numel:
            segment = Segment(parameter, group, start, min(numel, start + room))
            filling.append(segment)
            start, room = segment.stop, room - segment.numel
            if room == 0 or (apart and start == numel):
                done.append(Subgroup(first_subgroup + len(done), tuple(filling)))
                filling, room = [], subgroup_size
    if filling:
        done.append(Subgroup(first_subgroup + len(done), tuple(filling)))
    return tuple(done)
