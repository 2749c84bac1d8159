"""Placement, order and memory of built plans, by hand and by rule."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dos.plan import (
    Lane,
    Op,
    OpKind,
    Placement,
    SubgroupSize,
    UpdatePlan,
    build,
    operands,
    place,
    verify,
)

SIZE = SubgroupSize(numel=10, grad_bytes=20, weight_bytes=21)
LETTERS = {Placement.HOST: "h", Placement.STREAMED: "d", Placement.RESIDENT: "r"}
STRIDES = st.decimals(min_value=1, max_value=9, places=3).map(str)
RATIOS = st.decimals(min_value=0, max_value=1, places=2).map(str)


def letters(count: int, stride: float | str, resident_ratio: float = 0.0) -> str:
    return "".join(LETTERS[at] for at in place(count, stride, resident_ratio))


def of_kind(plan: UpdatePlan, kind: OpKind) -> list[Op]:
    return [op for op in plan.ops if op.kind is kind]


def names(plan: UpdatePlan, lane: Lane) -> list[str]:
    return [f"{op.kind.value} {op.subgroup}" for op in plan.lanes()[lane]]


@pytest.mark.parametrize(
    ("stride", "expected"),
    [
        (1, "ddddddd"),
        (2, "hdhdhdh"),
        (3, "hhdhhdh"),
        (3.0, "hhdhhdh"),
        (1.5, "hddhddh"),
        (1.25, "hddddhd"),
        ("1.25", "hddddhd"),
        (7, "hhhhhhd"),
        (8, "hhhhhhh"),
        ("host", "hhhhhhh"),
    ],
)
def test_stride_spreads_the_device_share(stride: float | str, expected: str) -> None:
    assert letters(7, stride) == expected


@pytest.mark.parametrize(
    ("stride", "ratio", "expected"),
    [
        (2, 0.4, "hdrhrdhrdr"),
        ("host", 0.4, "hhrhrhhrhr"),
        (1, 0.5, "drdrdrdrdr"),
        (3, 1.0, "rrrrrrrrrr"),
        (3, 0.0, "hhdhhdhhdh"),
    ],
)
def test_residents_are_picked_first(stride: float | str, ratio: float, expected: str) -> None:
    assert letters(10, stride, ratio) == expected


@given(st.integers(0, 300), STRIDES)
def test_the_device_gets_exactly_the_floor_of_n_over_k(count: int, stride: str) -> None:
    assert letters(count, stride).count("d") == floor(count / Fraction(stride))


@given(st.integers(0, 300), RATIOS, st.sampled_from(["host", "1", "2.5"]))
def test_residents_are_exactly_the_floor_of_their_share(n: int, ratio: str, stride: str) -> None:
    assert place(n, stride, ratio).count(Placement.RESIDENT) == floor(n * Fraction(ratio))


def test_a_decimal_stride_is_exact_where_binary_fractions_are_not() -> None:
    # Adding 1 / 1.1 in floating point drifts off eleven tenths; the text does not.
    assert letters(11_000, 1.1).count("d") == 10_000


def test_absence_moves_nobody() -> None:
    sizes = [SIZE] * 9
    whole = build(sizes, stride=3, resident_ratio=0.3)
    assert build(sizes, stride=3, resident_ratio=0.3, absent={2, 5}).placement == whole.placement


def test_an_absent_subgroup_has_no_ops() -> None:
    assert {op.subgroup for op in build([SIZE] * 6, stride=2, absent={1, 4}).ops} == {0, 2, 3, 5}


def test_no_subgroups_make_an_empty_plan() -> None:
    assert build([], stride=3).ops == ()


@pytest.mark.parametrize(
    ("stride", "ratio", "kinds"),
    [
        ("host", 0.0, [OpKind.GRAD_TO_HOST, OpKind.UPDATE_HOST, OpKind.PUBLISH]),
        (1, 0.0, [OpKind.FETCH, OpKind.UPDATE_DEVICE, OpKind.FLUSH]),
        (1, 1.0, [OpKind.UPDATE_DEVICE]),
    ],
)
def test_one_subgroup(stride: float | str, ratio: float, kinds: list[OpKind]) -> None:
    assert [op.kind for op in build([SIZE], stride=stride, resident_ratio=ratio).ops] == kinds


def test_parameters_in_host_memory_are_updated_there_and_nothing_is_sent() -> None:
    plan = build([SIZE] * 4, stride=2, resident_ratio=0.5, host_parameters=True)
    assert [(op.kind, op.slot) for op in plan.ops] == [(OpKind.UPDATE_HOST, None)] * 4


def test_the_tail_after_the_last_streamed_subgroup_runs_on_the_host() -> None:
    updates = of_kind(build([SIZE] * 8, stride=3), OpKind.UPDATE_HOST)
    assert [op.subgroup for op in updates] == [0, 1, 3, 4, 6, 7]


def test_the_link_to_the_device_fetches_ahead_and_publishes_one_behind() -> None:
    assert names(build([SIZE] * 9, stride=3), Lane.H2D) == [
        *("fetch 2", "fetch 5", "publish 0", "fetch 8", "publish 1", "publish 3"),
        *("publish 4", "publish 6", "publish 7"),
    ]


def test_gradients_go_to_the_host_a_period_ahead_of_the_flush() -> None:
    assert names(build([SIZE] * 7, stride=3), Lane.D2H) == [
        *("grad_to_host 0", "grad_to_host 1", "grad_to_host 3", "grad_to_host 4"),
        *("flush 2", "grad_to_host 6", "flush 5"),
    ]


def test_residents_are_not_held_up_by_a_fetch() -> None:
    plan = build([SIZE] * 4, stride=1, resident_ratio=0.5)
    assert names(plan, Lane.DEVICE)[0] == "update_device 1"


def test_with_a_second_staging_buffer_the_host_has_work_queued_before_each_publish() -> None:
    plan = build([SIZE] * 6, stride="host")
    publishes = of_kind(plan, OpKind.PUBLISH)
    updates = of_kind(plan, OpKind.UPDATE_HOST)
    queued = zip(publishes, updates[1:], strict=False)
    assert all(update.index < publish.index for publish, update in queued)


def test_a_fetch_into_a_used_slot_waits_for_its_flush() -> None:
    plan = build([SIZE] * 5, stride=1, slots=2)
    fetches, flushes = of_kind(plan, OpKind.FETCH), of_kind(plan, OpKind.FLUSH)
    assert [op.waits for op in fetches[2:]] == [(op.index,) for op in flushes[:3]]


def test_a_flush_and_the_next_fetch_overlap_with_two_slots() -> None:
    plan = build([SIZE] * 5, stride=1, slots=2)
    second_fetch, first_flush = of_kind(plan, OpKind.FETCH)[1], of_kind(plan, OpKind.FLUSH)[0]
    assert first_flush.index not in second_fetch.waits


def test_a_plan_is_the_same_every_time() -> None:
    first, second = (build([SIZE] * 20, stride=1.7, resident_ratio=0.2) for _ in range(2))
    assert first == second


def test_link_bytes_are_those_of_what_is_moved() -> None:
    plan = build([SIZE] * 2, stride=2)
    moved = {op.kind: plan.link_bytes(op) for op in plan.ops}
    assert moved == {
        OpKind.GRAD_TO_HOST: 20,
        OpKind.PUBLISH: 21,
        OpKind.FETCH: 120,
        OpKind.FLUSH: 120,
        OpKind.UPDATE_HOST: 0,
        OpKind.UPDATE_DEVICE: 0,
    }


def test_host_memory_holds_state_gradients_and_staging() -> None:
    memory = build([SIZE] * 10, stride=2, resident_ratio=0.4, stages=3).memory()
    sent, at_home_on_host = 3, 6
    assert memory.host_bytes == at_home_on_host * 120 + sent * 20 + 3 * 21


def test_device_memory_holds_slots_and_residents() -> None:
    memory = build([SIZE] * 10, stride=2, resident_ratio=0.4, slots=3).memory()
    assert memory.device_bytes == 3 * 120 + 4 * 120


def test_absent_subgroups_keep_their_memory() -> None:
    sizes = [SIZE] * 6
    assert build(sizes, stride=3, absent={0, 2}).memory() == build(sizes, stride=3).memory()


def test_parameters_in_host_memory_need_no_gradient_memory_and_no_staging() -> None:
    memory = build([SIZE] * 6, stride=3, host_parameters=True).memory()
    assert memory.host_bytes == memory.host_state_bytes


@pytest.mark.parametrize("kind", OpKind)
def test_every_op_kind_names_what_it_reads_and_writes(kind: OpKind) -> None:
    reads, writes = operands(kind, 3, 0)
    assert reads
    assert writes


def test_importing_the_plan_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, dos.plan; print(*sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_gradient_that_was_sent_before_is_not_sent_again() -> None:
    sent = SubgroupSize(numel=10, grad_bytes=0, weight_bytes=20)
    plan = build([sent, SIZE], stride="host")
    verify(plan)
    assert [op.subgroup for op in of_kind(plan, OpKind.GRAD_TO_HOST)] == [1]


@given(st.integers(0, 60), st.integers(0, 60), STRIDES, RATIOS)
def test_more_subgroups_leave_the_placement_of_the_first_alone(
    count: int, more: int, stride: str, ratio: str
) -> None:
    assert place(count + more, stride, ratio)[:count] == place(count, stride, ratio)
