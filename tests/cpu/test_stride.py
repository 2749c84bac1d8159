"""When `stride="auto"` thinks again: the watch as a state machine, and what it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dos.plan import SubgroupSize, UpdatePlan, build
from dos.stride import (
    SLOT_MARGIN,
    DeviceMemory,
    StrideWatch,
    fastest_stride,
    slot_bytes,
    slowed,
    stride_of,
)
from perfmodel.profile import H100_NODE, NodeProfile
from perfmodel.timeline import simulate, step_s

PATIENCE, LIMIT = 3, 4
RATIOS = st.sampled_from([0.2, 0.84, 0.86, 1.0, 1.14, 1.16, 5.0])
ONE_LANE = {"host": 1.0}


def watch() -> StrideWatch:
    return StrideWatch(tolerance=0.15, patience=PATIENCE, limit=LIMIT)


def asked_at(ratios: list[float]) -> list[int]:
    """The steps after which another stride was asked for."""
    watching = watch()
    answers = [watching.step(ONE_LANE, {"host": ratio}) for ratio in ratios]
    return [step for step, answer in enumerate(answers) if answer is not None]


@given(st.lists(RATIOS, max_size=60))
def test_another_stride_is_asked_for_after_steps_in_a_row_on_one_side(
    ratios: list[float],
) -> None:
    expected, run, side = [], 0, 0
    for step, ratio in enumerate(ratios):
        now = (ratio > 1.15) - (ratio < 0.85)
        run = run + 1 if now == side else 1
        side = now
        if side and run == PATIENCE:
            expected.append(step)
            run = side = 0
    assert asked_at(ratios) == expected[:LIMIT]


@given(st.lists(st.floats(0.86, 1.14)))
def test_within_the_tolerance_nothing_happens(ratios: list[float]) -> None:
    assert asked_at(ratios) == []


@given(st.lists(RATIOS, max_size=60), st.lists(st.booleans(), max_size=60))
def test_changes_are_bounded_whatever_happens(ratios: list[float], fits: list[bool]) -> None:
    watching = watch()
    asked = sum(watching.step(ONE_LANE, {"host": ratio}) is not None for ratio in ratios)
    acted_on = True
    for each in fits:
        if watching.memory(each, acted_on=acted_on):
            asked, acted_on = asked + 1, each
    assert asked <= LIMIT
    assert watching.spent == (asked == LIMIT)


@given(st.lists(st.booleans(), max_size=60))
def test_memory_counts_after_steps_in_a_row(fits: list[bool]) -> None:
    watching, acted_on, run, changes = watch(), True, 0, 0
    for each in fits:
        run = run + 1 if each != acted_on else 0
        asked = watching.memory(each, acted_on=acted_on)
        assert asked == (run >= PATIENCE and changes < LIMIT)
        if asked:
            acted_on, run, changes = each, 0, changes + 1


def test_a_lane_that_has_little_to_do_is_not_judged() -> None:
    watching = watch()
    answers = [watching.step({"host": 1.0, "device": 0.05}, {"host": 1.0}) for _ in range(9)]
    assert answers == [None] * 9


def test_every_judged_lane_is_told_by_its_median() -> None:
    watching = watch()
    predicted_s = {"host": 1.0, "h2d": 0.5}
    for host_s in (2.0, 4.0):
        assert watching.step(predicted_s, {"host": host_s, "h2d": 0.5}) is None
    assert watching.step(predicted_s, {"host": 3.0, "h2d": 0.5}) == {"host": 3.0, "h2d": 1.0}


# ---------------------------------------------------------------- memory of the device


@given(st.integers(1, 1 << 40), st.integers(-(1 << 40), 1 << 41))
def test_slots_are_had_if_they_fit_with_a_margin(needed: int, free: int) -> None:
    assert DeviceMemory(needed, 0, free).fits == (free >= (1 + SLOT_MARGIN) * needed)


@pytest.mark.parametrize(("free", "fits"), [(-1, False), (0, True), (1 << 40, True)])
def test_slots_that_are_held_fit_while_memory_suffices(free: int, fits: bool) -> None:
    assert DeviceMemory(1 << 30, 1 << 30, free).fits == fits


def test_where_the_device_does_not_tell_slots_fit() -> None:
    assert DeviceMemory(1 << 60, 0, None).fits


@pytest.mark.parametrize("stride", ["host", 1, 2.5])
def test_slots_of_any_stride_are_as_large_as_the_largest_that_may_be_streamed(
    stride: float | str,
) -> None:
    sizes = [SubgroupSize(numel, 2 * numel, 2 * numel) for numel in (10, 30, 20)]
    assert slot_bytes(build(sizes, stride=stride, slots=2)) == 2 * 12 * 30


# ---------------------------------------------------------------- what is solved


def planner(
    count: int, residents: float = 0.0, numel: int = 10**8
) -> Callable[[float | str], UpdatePlan]:
    sizes = [SubgroupSize(numel, 0, 2 * numel)] * count
    return lambda stride: build(sizes, stride=stride, resident_ratio=residents)


PROFILES = st.builds(
    lambda host, link, both: replace(
        H100_NODE,
        host_params_per_s=host,
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=link,
        link_bytes_per_s=both * link,
    ),
    host=st.floats(1e8, 4e9),
    link=st.floats(2e9, 1e11),
    both=st.floats(1.0, 2.0),
)


@settings(max_examples=30)
@given(PROFILES, st.integers(1, 12), st.sampled_from([0.0, 0.3, 1.0]))
def test_the_chosen_stride_is_no_slower_than_the_host_or_the_device_alone(
    profile: NodeProfile, count: int, residents: float
) -> None:
    plans = planner(count, residents)
    chosen = fastest_stride(profile, plans)
    chosen_s, host_s, device_s = (
        step_s(simulate(plans(stride), profile)) for stride in (chosen, "host", 1)
    )
    assert chosen_s <= min(host_s, device_s)


def test_published_h100_rates_call_for_a_stride_below_two() -> None:
    assert 1.3 < float(fastest_stride(H100_NODE, planner(60))) < 1.6


def test_a_link_that_is_too_slow_leaves_all_to_the_host() -> None:
    assert fastest_stride(replace(H100_NODE, h2d_bytes_per_s=1e7), planner(60)) == "host"


def test_where_there_is_nothing_the_host_updates_it() -> None:
    assert fastest_stride(H100_NODE, planner(0)) == "host"


def test_the_stride_is_kept_as_an_option_is() -> None:
    assert [repr(stride_of(text)) for text in ("2.0", "1.39", "host")] == ["2", "1.39", "'host'"]


def test_slower_ways_of_a_link_share_less() -> None:
    slow = slowed(replace(H100_NODE, link_bytes_per_s=90e9), {"h2d": 2.0, "d2h": 2.0})
    assert (slow.h2d_bytes_per_s, slow.link_bytes_per_s) == (27.6e9, 45e9)


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_a_link_that_carries_both_ways_stays_possible(h2d: float, d2h: float) -> None:
    profile = replace(H100_NODE, link_bytes_per_s=2 * 55.2e9)
    slowed(profile, {"h2d": h2d, "d2h": d2h})  # or a profile that cannot be is refused


def test_a_slower_host_is_slower_beside_copies_too() -> None:
    slow = slowed(replace(H100_NODE, host_params_per_s_beside_copies=1e9), {"host": 4.0})
    assert (slow.host_params_per_s, slow.host_params_per_s_beside_copies) == (1.69e9 / 4, 0.25e9)
