"""Every plan that is built is accepted and reads back from its text; every broken one is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dos.errors import PlanError
from dos.plan import (
    Op,
    OpKind,
    Placement,
    SubgroupSize,
    UpdatePlan,
    build,
    operands,
    parse_plan,
    verify,
)

SIZE = SubgroupSize(numel=10, grad_bytes=20, weight_bytes=20)
STRIDES = st.sampled_from(["host", "1", "1.25", "1.5", "1.87", "2", "2.4", "3", "5", "9"])


@st.composite
def plans(draw: st.DrawFn, *, min_count: int = 0) -> UpdatePlan:
    numbers = st.integers(0, 50)
    sizes = st.builds(SubgroupSize, numbers, numbers, numbers)
    drawn = draw(st.lists(sizes, min_size=min_count, max_size=24))
    return build(
        drawn,
        stride=draw(STRIDES),
        resident_ratio=draw(st.sampled_from([0.0, 0.0, 0.1, 0.4, 1.0])),
        slots=draw(st.integers(1, 4)),
        stages=draw(st.integers(1, 3)),
        host_parameters=draw(st.sampled_from([False] * 7 + [True])),
        absent=draw(st.sets(st.sampled_from(range(len(drawn))), max_size=3)) if drawn else (),
    )


@st.composite
def interleaved_plans(draw: st.DrawFn, *, min_slots: int = 1) -> UpdatePlan:
    """Plans with host subgroups, and more streamed ones than slots: slots are used again."""
    return build(
        [SIZE] * draw(st.integers(10, 24)),
        stride=draw(st.decimals(min_value=1.25, max_value=2, places=2).map(str)),
        slots=draw(st.integers(min_slots, 4)),
        stages=draw(st.integers(1, 3)),
    )


def reissued(plan: UpdatePlan, order: Sequence[Op]) -> UpdatePlan:
    """The plan with its ops in another order, indices and waits following."""
    position = {op.index: n for n, op in enumerate(order)}
    ops = (
        replace(op, index=n, waits=tuple(sorted(position[w] for w in op.waits if w in position)))
        for n, op in enumerate(order)
    )
    return replace(plan, ops=tuple(ops))


def with_op(plan: UpdatePlan, op: Op) -> UpdatePlan:
    return replace(plan, ops=(*plan.ops[: op.index], op, *plan.ops[op.index + 1 :]))


def without(plan: UpdatePlan, op: Op) -> UpdatePlan:
    return reissued(plan, [other for other in plan.ops if other is not op])


def on_slot(op: Op, slot: int) -> Op:
    reads, writes = operands(op.kind, op.subgroup, slot)
    return replace(op, slot=slot, reads=reads, writes=writes)


def pick(data: st.DataObject, plan: UpdatePlan, wanted: Callable[[Op], object]) -> Op:
    candidates = [op for op in plan.ops if wanted(op)]
    assume(candidates)
    return data.draw(st.sampled_from(candidates))


def rejected(plan: UpdatePlan) -> str:
    with pytest.raises(PlanError) as caught:
        verify(plan)
    return str(caught.value)


@settings(max_examples=400)
@given(plans())
def test_every_built_plan_is_accepted(plan: UpdatePlan) -> None:
    verify(plan)


@given(plans())
def test_every_built_plan_reads_back_from_its_text(plan: UpdatePlan) -> None:
    assert parse_plan(str(plan)) == plan


@given(plans(min_count=1), st.data())
def test_a_dropped_wait_is_caught(plan: UpdatePlan, data: st.DataObject) -> None:
    op = pick(data, plan, lambda op: op.waits)
    dropped = data.draw(st.sampled_from(op.waits))
    fewer = tuple(wait for wait in op.waits if wait != dropped)
    assert "nothing makes it wait" in rejected(with_op(plan, replace(op, waits=fewer)))


@pytest.mark.parametrize("stride", ["host", "1", "1.25", "2", "3"])
def test_every_single_wait_is_needed(stride: str) -> None:
    plan = build([SIZE] * 12, stride=stride, resident_ratio=0.1)
    for op in plan.ops:
        for dropped in op.waits:
            fewer = tuple(wait for wait in op.waits if wait != dropped)
            rejected(with_op(plan, replace(op, waits=fewer)))


@given(plans(min_count=2), st.data())
def test_an_op_before_one_that_it_waits_for_is_caught(
    plan: UpdatePlan, data: st.DataObject
) -> None:
    later = pick(data, plan, lambda op: op.waits)
    order = list(plan.ops)
    n, m = later.index, data.draw(st.sampled_from(later.waits))
    order[n], order[m] = order[m], order[n]
    assert "a cycle" in rejected(reissued(plan, order))


@given(plans(min_count=1), st.data())
def test_a_wait_for_a_later_op_is_caught(plan: UpdatePlan, data: st.DataObject) -> None:
    op = pick(data, plan, lambda _: True)
    forward = data.draw(st.integers(op.index, len(plan.ops)))
    assert "a cycle" in rejected(with_op(plan, replace(op, waits=(*op.waits, forward))))


@given(plans(min_count=1), st.data())
def test_a_missing_op_is_caught(plan: UpdatePlan, data: st.DataObject) -> None:
    rejected(without(plan, pick(data, plan, lambda _: True)))


@pytest.mark.parametrize("kind", [OpKind.FLUSH, OpKind.PUBLISH])
@given(interleaved_plans(), st.data())
def test_a_forgotten_return_is_caught(kind: OpKind, plan: UpdatePlan, data: st.DataObject) -> None:
    op = pick(data, plan, lambda op: op.kind is kind)
    message = rejected(without(plan, op))
    assert f"without its {kind.value}" in message


@given(plans(min_count=1), st.data())
def test_an_update_that_runs_twice_is_caught(plan: UpdatePlan, data: st.DataObject) -> None:
    op = pick(data, plan, lambda op: op.kind in (OpKind.UPDATE_HOST, OpKind.UPDATE_DEVICE))
    order = [*plan.ops[: op.index], op, *plan.ops[op.index :]]
    again = replace(plan, ops=tuple(replace(o, index=n, waits=()) for n, o in enumerate(order)))
    assert "out of turn or twice" in rejected(again)


@given(plans(min_count=1), st.data())
def test_another_placement_than_the_ops_have_is_caught(
    plan: UpdatePlan, data: st.DataObject
) -> None:
    i = pick(data, plan, lambda _: True).subgroup
    other = data.draw(st.sampled_from([at for at in Placement if at is not plan.placement[i]]))
    changed = (*plan.placement[:i], other, *plan.placement[i + 1 :])
    rejected(replace(plan, placement=changed))


@given(plans(min_count=1), st.data())
def test_an_op_of_an_absent_subgroup_is_caught(plan: UpdatePlan, data: st.DataObject) -> None:
    i = pick(data, plan, lambda _: True).subgroup
    assert "is absent" in rejected(replace(plan, absent=plan.absent | {i}))


@given(interleaved_plans(min_slots=2), st.data())
def test_a_slot_taken_before_it_is_free_is_caught(plan: UpdatePlan, data: st.DataObject) -> None:
    fetches = [op for op in plan.ops if op.kind is OpKind.FETCH]
    n = data.draw(st.integers(1, len(fetches) - 1))
    taken = fetches[n - 1].slot
    assert taken is not None
    ops = (on_slot(op, taken) if op.subgroup == fetches[n].subgroup else op for op in plan.ops)
    assert "in use by" in rejected(replace(plan, ops=tuple(ops)))


@given(interleaved_plans(), st.data())
def test_a_fetch_ahead_of_the_flush_that_frees_its_slot_is_caught(
    plan: UpdatePlan, data: st.DataObject
) -> None:
    fetch = pick(data, plan, lambda op: op.kind is OpKind.FETCH and op.waits)
    rest = [op for op in plan.ops if op is not fetch]
    at = fetch.waits[0]
    early = [*rest[:at], replace(fetch, waits=()), *rest[at:]]
    assert "in use by" in rejected(reissued(plan, early))


@given(plans(min_count=1), st.data())
def test_one_op_on_another_slot_is_caught(plan: UpdatePlan, data: st.DataObject) -> None:
    op = pick(data, plan, lambda op: op.slot is not None)
    other = data.draw(st.integers(0, 4).filter(lambda slot: slot != op.slot))
    rejected(with_op(plan, on_slot(op, other)))


@given(plans(min_count=1), st.data(), st.sampled_from([-1, 0, 3]))
def test_a_slot_out_of_range_is_caught(plan: UpdatePlan, data: st.DataObject, by: int) -> None:
    op = pick(data, plan, lambda op: op.slot is not None)
    staged = op.kind in (OpKind.UPDATE_HOST, OpKind.PUBLISH)
    slot = by if by < 0 else by + (plan.stages if staged else plan.slots)
    assert "but there are" in rejected(with_op(plan, on_slot(op, slot)))


@given(plans(min_count=1), st.data())
def test_other_buffers_than_those_of_the_op_are_caught(
    plan: UpdatePlan, data: st.DataObject
) -> None:
    op = pick(data, plan, lambda _: True)
    changed = replace(op, reads=op.writes, writes=op.reads)
    assert "its buffers are not" in rejected(with_op(plan, changed))


@given(plans(min_count=1), st.data())
def test_an_unknown_subgroup_is_caught(plan: UpdatePlan, data: st.DataObject) -> None:
    op = pick(data, plan, lambda _: True)
    assert "no such subgroup" in rejected(with_op(plan, replace(op, subgroup=len(plan.sizes))))


@given(plans(min_count=1), st.data())
def test_a_wrong_index_is_caught(plan: UpdatePlan, data: st.DataObject) -> None:
    op = pick(data, plan, lambda _: True)
    changed = replace(op, index=op.index + 1)
    ops = (*plan.ops[: op.index], changed, *plan.ops[op.index + 1 :])
    assert "its index is" in rejected(replace(plan, ops=ops))


def test_parameters_in_host_memory_exclude_the_device() -> None:
    plan = build([SIZE] * 2, stride="host", host_parameters=True)
    moved = replace(plan, placement=(Placement.HOST, Placement.RESIDENT))
    assert "placed on the device" in rejected(moved)


def test_a_slot_where_none_is_needed_is_caught() -> None:
    plan = build([SIZE], stride="host")
    assert "but needs none" in rejected(with_op(plan, replace(plan.ops[0], slot=0)))


def test_the_spot_of_an_op_is_marked_in_the_printed_plan() -> None:
    plan = build([SIZE] * 4, stride=2)
    message = rejected(with_op(plan, replace(plan.ops[3], waits=(5,))))
    marked = [line for line in message.splitlines() if line.startswith(">>")]
    assert [line.split()[:3] for line in marked] == [[">>", "op", "3"]]


def test_the_spot_of_a_subgroup_is_marked_in_the_printed_plan() -> None:
    plan = build([SIZE] * 3, stride="host")
    message = rejected(without(plan, plan.ops[-1]))
    marked = [line for line in message.splitlines() if line.startswith(">>")]
    assert [line.split()[:3] for line in marked] == [[">>", "subgroup", "2"]]


def test_the_error_names_the_op_in_words() -> None:
    plan = build([SIZE], stride="host")
    assert rejected(with_op(plan, replace(plan.ops[1], waits=()))).startswith(
        "op 1 (update_host of subgroup 0): reads host.grad[0] written by op 0"
    )


def test_a_plan_within_its_budgets_is_accepted() -> None:
    plan = build([SIZE] * 5, stride=2, resident_ratio=0.2)
    memory = plan.memory()
    verify(plan, host_budget_bytes=memory.host_bytes, device_budget_bytes=memory.device_bytes)


def test_a_host_budget_one_byte_short_is_caught() -> None:
    plan = build([SIZE] * 5, stride=2)
    with pytest.raises(PlanError, match="bytes of host memory"):
        verify(plan, host_budget_bytes=plan.memory().host_bytes - 1)


def test_a_device_budget_one_byte_short_is_caught() -> None:
    plan = build([SIZE] * 5, stride=2)
    with pytest.raises(PlanError, match="bytes of device memory"):
        verify(plan, device_budget_bytes=plan.memory().device_bytes - 1)
