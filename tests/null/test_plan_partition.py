"""Cutting parameters into subgroups."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dos.plan import Segment, Subgroup, partition

NUMELS = st.lists(st.integers(0, 40), max_size=12)
SIZES = st.integers(1, 25)


def cut(numels: list[int], size: int) -> tuple[Subgroup, ...]:
    return partition(numels, [i % 3 for i in range(len(numels))], size)


def test_a_large_parameter_is_cut_and_its_rest_shares_a_subgroup() -> None:
    first, second = partition([5, 2], [0, 1], 4)
    assert first.segments == (Segment(0, 0, 0, 4),)
    assert second.segments == (Segment(0, 0, 4, 5), Segment(1, 1, 0, 2))


def test_no_parameters_make_no_subgroups() -> None:
    assert partition([], [], 4) == ()


def test_an_empty_parameter_has_no_segment() -> None:
    (only,) = partition([2, 0, 1], [0, 0, 0], 4)
    assert [segment.parameter for segment in only.segments] == [0, 2]


@given(NUMELS, SIZES)
def test_every_element_lies_in_exactly_one_segment_in_order(numels: list[int], size: int) -> None:
    covered = [
        (segment.parameter, element)
        for subgroup in cut(numels, size)
        for segment in subgroup.segments
        for element in range(segment.start, segment.stop)
    ]
    assert covered == [(p, element) for p, numel in enumerate(numels) for element in range(numel)]


@given(NUMELS, SIZES)
def test_every_subgroup_but_the_last_is_full(numels: list[int], size: int) -> None:
    counts = [subgroup.numel for subgroup in cut(numels, size)]
    total = sum(numels)
    assert counts == [size] * (total // size) + ([total % size] if total % size else [])


@given(NUMELS, SIZES)
def test_no_segment_is_empty(numels: list[int], size: int) -> None:
    assert all(s.numel > 0 for subgroup in cut(numels, size) for s in subgroup.segments)


@given(NUMELS, SIZES)
def test_segments_carry_the_group_of_their_parameter(numels: list[int], size: int) -> None:
    assert all(s.group == s.parameter % 3 for sub in cut(numels, size) for s in sub.segments)


@given(NUMELS, SIZES)
def test_offsets_put_segments_end_to_end(numels: list[int], size: int) -> None:
    for subgroup in cut(numels, size):
        ends = [o + s.numel for o, s in zip(subgroup.offsets, subgroup.segments, strict=True)]
        assert [*subgroup.offsets, subgroup.numel] == [0, *ends]


@given(NUMELS, SIZES)
def test_subgroups_are_numbered_in_order(numels: list[int], size: int) -> None:
    subgroups = cut(numels, size)
    assert [subgroup.index for subgroup in subgroups] == list(range(len(subgroups)))


@given(NUMELS, SIZES, st.integers(0, 9), st.integers(0, 9))
def test_counting_may_begin_anywhere(numels: list[int], size: int, first: int, at: int) -> None:
    groups = [0] * len(numels)
    moved = partition(numels, groups, size, first_parameter=first, first_subgroup=at)
    cut_from_zero = partition(numels, groups, size)
    assert [s.index - at for s in moved] == [s.index for s in cut_from_zero]
    assert [[g.parameter - first for g in s.segments] for s in moved] == [
        [g.parameter for g in s.segments] for s in cut_from_zero
    ]


@given(st.integers(1, 9000))
def test_a_subgroup_of_a_page_or_more_ends_on_a_page(size: int) -> None:
    full = partition([10_000], [0], size)[0].numel
    assert full == (size if size < 1024 else size - size % 1024)
