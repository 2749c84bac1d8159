"""The fluid model: what runs at once shares what there is, and no more."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.model import Task, fair_speeds, run

RESOURCES = ("host_memory", "link")
amounts = st.floats(1.0, 1e3)


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    needs = draw(st.dictionaries(st.sampled_from(RESOURCES), amounts, max_size=2))
    return Task("t", draw(st.sampled_from("abcd")), draw(st.floats(1e-3, 10)), needs)


capacities = st.dictionaries(st.sampled_from(RESOURCES), st.floats(1.0, 1e4), max_size=2)


def used(running: list[Task], speeds: list[float], resource: str) -> float:
    pairs = zip(running, speeds, strict=True)
    return sum(speed * task.needs.get(resource, 0.0) for task, speed in pairs)


@given(st.lists(tasks(), max_size=6), capacities)
def test_no_resource_gives_more_than_it_has(
    running: list[Task], capacities: dict[str, float]
) -> None:
    speeds = fair_speeds(running, capacities)
    for resource, rate in capacities.items():
        assert used(running, speeds, resource) <= rate * (1 + 1e-9)


@given(st.lists(tasks(), max_size=6), capacities)
def test_nobody_is_slowed_for_nothing(running: list[Task], capacities: dict[str, float]) -> None:
    speeds = fair_speeds(running, capacities)
    full = {r for r, rate in capacities.items() if used(running, speeds, r) >= rate * (1 - 1e-9)}
    for task, speed in zip(running, speeds, strict=True):
        alone = math.isclose(speed * task.work_s, 1.0)
        assert alone or full & set(task.needs)


@given(st.lists(tasks(), max_size=6), capacities)
def test_sharing_makes_no_task_faster_than_alone(
    running: list[Task], capacities: dict[str, float]
) -> None:
    speeds = fair_speeds(running, capacities)
    assert all(speed * task.work_s <= 1 + 1e-9 for task, speed in zip(running, speeds, strict=True))


@given(st.lists(tasks(), max_size=8), capacities)
def test_a_run_moves_no_more_than_its_time_allows(
    given_tasks: list[Task], capacities: dict[str, float]
) -> None:
    end_s = max((span.end_s for span in run(given_tasks, capacities)), default=0.0)
    for resource, rate in capacities.items():
        moved = sum(task.needs.get(resource, 0.0) for task in given_tasks)
        assert moved <= rate * end_s * (1 + 1e-6)


def test_two_that_want_all_of_a_resource_get_half_each() -> None:
    pair = [Task("t", lane, 1.0, {"link": 8.0}) for lane in "ab"]
    assert [span.end_s for span in run(pair, {"link": 8.0})] == pytest.approx([2.0, 2.0])


def test_what_one_does_not_want_is_the_others() -> None:
    small, large = Task("t", "a", 1.0, {"link": 2.0}), Task("t", "b", 1.0, {"link": 8.0})
    assert fair_speeds([small, large], {"link": 8.0}) == pytest.approx([1.0, 0.75])


def test_a_launch_needs_nothing_of_what_is_shared() -> None:
    launching = Task("t", "a", 1.0, {"link": 8.0}, launch_s=1.0)
    working = Task("t", "b", 1.0, {"link": 8.0})
    spans = run([launching, working], {"link": 8.0})
    assert [span.end_s for span in spans] == pytest.approx([2.0, 1.0])


def test_a_lane_keeps_its_order() -> None:
    spans = run([Task("first", "a", 1.0), Task("second", "a", 1.0)], {})
    assert spans[1].start_s == spans[0].end_s == 1.0


def test_a_wait_holds_over_lanes() -> None:
    spans = run([Task("first", "a", 1.0), Task("second", "b", 1.0, waits=(0,))], {})
    assert spans[1].start_s == 1.0


def test_a_task_without_work_is_over_when_it_starts() -> None:
    spans = run([Task("nothing", "a", 0.0), Task("t", "a", 1.0)], {})
    assert (spans[0].end_s, spans[1].end_s) == (0.0, 1.0)


def test_a_wait_for_a_later_task_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="later"):
        run([Task("first", "a", 1.0, waits=(1,)), Task("second", "b", 1.0)], {})


def test_nothing_to_do_takes_no_time() -> None:
    assert run([], {"link": 1.0}) == []
