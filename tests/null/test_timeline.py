"""A plan as tasks, and what the model says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dos.plan import SubgroupSize, UpdatePlan, build
from perfmodel.closed_form import closed_form_s
from perfmodel.profile import H100_NODE, NodeProfile
from perfmodel.timeline import capacities, least_s, simulate, step_s, tasks_of

NUMEL = 10_000_000
SHARED = replace(H100_NODE, host_memory_bytes_per_s=80e9, link_bytes_per_s=90e9)


def plan(count: int, stride: float | str, *, slots: int = 2, residents: float = 0.0) -> UpdatePlan:
    sizes = [SubgroupSize(NUMEL, 0, 2 * NUMEL)] * count
    return build(sizes, stride=stride, slots=slots, resident_ratio=residents)


plans = st.builds(
    plan,
    st.integers(0, 12),
    st.sampled_from(["host", 1, 1.5, 1.39, 2, 3]),
    slots=st.integers(1, 3),
    residents=st.sampled_from([0.0, 0.25, 1.0]),
)
nodes = st.sampled_from([H100_NODE, SHARED])


@given(plans, nodes)
def test_every_op_keeps_its_lane_and_waits_for_what_the_plan_says(
    made: UpdatePlan, node: NodeProfile
) -> None:
    spans = simulate(made, node)
    last: dict[str, float] = {}
    for op, span in zip(made.ops, spans, strict=True):
        assert all(spans[other].end_s <= span.start_s for other in op.waits)
        assert last.get(span.lane, 0.0) <= span.start_s
        last[span.lane] = span.end_s


@given(plans, nodes)
def test_no_step_is_faster_than_its_busiest_lane_or_resource(
    made: UpdatePlan, node: NodeProfile
) -> None:
    least = max(least_s(tasks_of(made, node), capacities(node)).values(), default=0.0)
    assert step_s(simulate(made, node)) >= least * (1 - 1e-9)


@given(plans)
def test_sharing_never_speeds_a_step_up(made: UpdatePlan) -> None:
    assert step_s(simulate(made, SHARED)) >= step_s(simulate(made, H100_NODE)) * (1 - 1e-9)


def test_a_host_only_step_is_the_host_rate() -> None:
    expected = 4 * (NUMEL / H100_NODE.host_params_per_s + H100_NODE.launch_s)
    spans = simulate(plan(4, "host"), H100_NODE)
    assert max(s.end_s for s in spans if s.lane == "host") == pytest.approx(expected)


def test_host_memory_slows_an_update_beside_copies() -> None:
    def host_s(node: NodeProfile) -> float:
        spans = [s for s in simulate(plan(12, 2), node) if s.lane == "host"]
        return sum(s.end_s - s.start_s for s in spans)

    assert host_s(SHARED) > 1.2 * host_s(H100_NODE)


GOLDEN_S = {"host": 0.072349, "1.5": 0.0390705, "2": 0.0455678, "3": 0.053768}


@pytest.mark.parametrize("stride", GOLDEN_S)
def test_golden_predictions(stride: str) -> None:
    assert step_s(simulate(plan(12, stride), SHARED)) == pytest.approx(GOLDEN_S[stride], rel=1e-4)


@pytest.mark.parametrize("stride", ["host", 1.0, 1.39, 2.0, 3.0])
def test_the_closed_form_is_near_where_subgroups_are_many(stride: float | str) -> None:
    seconds = step_s(simulate(plan(60, stride), SHARED))
    closed_s = closed_form_s(SHARED, 60 * NUMEL, stride)  # type: ignore[arg-type]
    assert 0.99 <= seconds / closed_s <= 1.2


def test_the_closed_form_without_a_device_updates_all_on_the_host() -> None:
    lacking = ("h2d_bytes_per_s", "d2h_bytes_per_s", "device_params_per_s")
    node = replace(H100_NODE, **dict.fromkeys(lacking))
    assert closed_form_s(node, NUMEL, 2) == closed_form_s(node, NUMEL, "host")


def test_the_closed_form_knows_what_both_ways_of_the_link_carry_together() -> None:
    narrow = replace(H100_NODE, link_bytes_per_s=56e9)
    assert closed_form_s(narrow, NUMEL, 1) == pytest.approx(24 * NUMEL / 56e9)


def test_an_update_that_copies_slowed_tells_how_much_memory_carries() -> None:
    slowed = replace(SHARED, host_params_per_s_beside_copies=1e9)
    assert capacities(slowed)["host_memory"] == pytest.approx(28e9 + 90e9)


def test_where_copies_slowed_nothing_memory_carries_at_least_that() -> None:
    even = replace(SHARED, host_params_per_s_beside_copies=SHARED.host_params_per_s)
    assert capacities(even)["host_memory"] == pytest.approx(28 * 1.69e9 + 90e9)


def test_what_nobody_measured_never_limits() -> None:
    assert capacities(H100_NODE) == {}
