"""Gates: what is being captured is not updated, everything else goes on."""

from __future__ import annotations

import random
import threading
import time
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dos
from dos import VirtualDevice
from dos.execute.backend import Backend
from dos.execute.interpreter import Interpreter
from dos.execute.record import StepRecord
from dos.execute.virtual import VirtualBackend
from dos.execute.worker import HostBackend
from dos.memory import Gates, HeldState, Hold
from dos.plan import Op, OpKind, SubgroupSize, UpdatePlan, build, verify
from tests.cpu.forked import in_child

UPDATES = (OpKind.UPDATE_HOST, OpKind.UPDATE_DEVICE)
COUNT = 7


def plan_of(stride: float | str, resident_ratio: float = 0.0) -> UpdatePlan:
    sizes = [SubgroupSize(100, 200, 200)] * COUNT
    plan = build(sizes, stride=stride, resident_ratio=resident_ratio)
    verify(plan)
    return plan


HOST_PLAN = build([SubgroupSize(100, 200, 200)] * COUNT, stride="host", host_parameters=True)


class Log:
    """Bodies that note what ran, and whether a closed gate's subgroup was among it."""

    def __init__(self, gates: Gates) -> None:
        self.gates, self.updated, self.too_early = gates, list[int](), list[int]()

    def __call__(self, op: Op) -> Any:
        def body() -> None:
            if op.kind in UPDATES:
                if not self.gates.is_open(op.subgroup):
                    self.too_early.append(op.subgroup)
                self.updated.append(op.subgroup)

        return body


def run(backend: Backend, plan: UpdatePlan, gates: Gates, log: Log) -> StepRecord:
    with closing(backend), closing(Interpreter(backend)) as interpreter:
        return interpreter.run(plan, log, gates=gates)


def opening(gates: Gates, ticket: int, order: list[int], pause_s: float = 0.0) -> threading.Thread:
    """A capture that opens the gates in this order."""

    def capture() -> None:
        for index in order:
            time.sleep(pause_s)
            gates.open(ticket, index)

    thread = threading.Thread(target=capture)
    thread.start()
    return thread


# --- the gates themselves ------------------------------------------------------------------------


def test_a_gate_is_closed_until_all_who_hold_it_open_it() -> None:
    gates = Gates()
    first, second = gates.close([0, 1], "one"), gates.close([1], "two")
    gates.open(first)
    assert gates.is_open(0)
    assert not gates.is_open(1)
    gates.open(second, 1)
    assert gates.is_open(1)


def test_opening_twice_takes_back_nobody_elses_closing() -> None:
    gates = Gates()
    first = gates.close([0], "one")
    gates.close([0], "two")
    gates.open(first, 0)
    gates.open(first, 0)
    assert not gates.is_open(0)


def test_who_began_before_a_closing_does_not_heed_it() -> None:
    gates = Gates()
    gates.close([0], "one")
    until = gates.closings
    gates.close([1], "two")
    assert not gates.is_open(0, until)
    assert gates.is_open(1, until)


def test_a_waiter_for_one_subgroup_does_not_wait_for_others() -> None:
    gates = Gates(timeout_s=0.0)
    gates.close([0], "one")
    gates.wait("a test", [1, 2])


def test_a_waiter_goes_on_when_the_last_gate_opens() -> None:
    gates = Gates()
    thread = opening(gates, gates.close(range(3), "one"), [2, 0, 1], 0.005)
    gates.wait("a test")
    thread.join()
    assert gates.waited_s > 0


def test_a_gate_that_never_opens_is_named_with_whom_it_is_closed_for() -> None:
    gates = Gates(timeout_s=0.01)
    gates.close([4], "checkpoint 12")
    with pytest.raises(dos.PoolError, match=r"^load: .*subgroup 4.* captured for checkpoint 12"):
        gates.wait("load")


def test_held_state_that_is_dropped_opens_its_gates() -> None:
    gates = Gates()
    held = HeldState(gates, [Hold("cpu", 0, 8, 3)], "one")
    assert not gates.is_open(3)
    del held
    assert gates.is_open(3)


def test_abandoned_state_opens_all_its_gates_and_no_others() -> None:
    gates = Gates()
    held = HeldState(gates, [Hold("cpu", 0, 8, 3), Hold("cpu", 8, 16, 4)], "one")
    other = HeldState(gates, [Hold("cpu", 0, 8, 3)], "two")
    held.abandon()
    assert gates.is_open(4)
    assert not gates.is_open(3)
    other.release(3)
    assert gates.is_open(3)


def test_a_forked_child_waits_for_nothing() -> None:
    gates = Gates(timeout_s=0.0)
    gates.close([0], "one")
    assert in_child(lambda: gates.wait("a test")) == "None"


# --- a step between them -------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.sampled_from([(1, 0.0), (1.5, 0.0), (2, 0.0), ("host", 0.0), (1, 0.5), (2, 1.0)]),
    st.permutations(range(COUNT)),
    st.sets(st.integers(0, COUNT - 1), min_size=1),
    st.integers(0, 1000),
)
def test_gates_that_open_in_any_order_hold_up_their_subgroups_alone(
    place: tuple[float | str, float], order: list[int], held: set[int], seed: int
) -> None:
    gates = Gates()
    ticket, log = gates.close(held, "one"), Log(gates)
    pause_s = random.Random(seed).random() * 1e-3
    thread = opening(gates, ticket, [index for index in order if index in held], pause_s)
    run(VirtualBackend(VirtualDevice(jitter_seed=seed)), plan_of(*place), gates, log)
    thread.join()
    assert sorted(log.updated) == list(range(COUNT))
    assert not log.too_early


@pytest.mark.parametrize("order", [range(COUNT), reversed(range(COUNT))])
def test_host_updates_wait_for_their_gates(order: Any) -> None:
    gates = Gates()
    log = Log(gates)
    thread = opening(gates, gates.close(range(COUNT), "one"), list(order), 0.002)
    run(HostBackend(), HOST_PLAN, gates, log)
    thread.join()
    assert log.updated == list(range(COUNT))
    assert not log.too_early


def test_what_stands_before_a_closed_gate_in_the_plan_goes_on() -> None:
    gates = Gates()
    log, ticket = Log(gates), gates.close([3], "one")
    with closing(HostBackend()) as backend, closing(Interpreter(backend)) as interpreter:
        step = interpreter.start(HOST_PLAN, log, gates=gates)
        step.join([2])
        while not log.updated or log.updated[-1] != 2:
            time.sleep(1e-3)
        before = list(log.updated)
        gates.open(ticket)
        step.finish()
    assert before == [0, 1, 2]


def test_a_closed_gate_of_the_host_does_not_hold_up_the_device() -> None:
    plan = plan_of(2)
    on_host, on_device = (
        [op for op in plan.ops if op.kind is kind]
        for kind in (OpKind.UPDATE_HOST, OpKind.UPDATE_DEVICE)
    )
    gates = Gates()
    log, ticket = Log(gates), gates.close([op.subgroup for op in on_host], "one")
    with (
        closing(VirtualBackend(VirtualDevice())) as backend,
        closing(Interpreter(backend)) as interpreter,
    ):
        step = interpreter.start(plan, log, gates=gates)
        step.join([on_device[0].index])
        before = list(log.updated)
        gates.open(ticket)
        step.finish()
    assert before[0] == on_device[0].subgroup


def test_a_step_under_way_does_not_heed_a_later_closing() -> None:
    gates = Gates(timeout_s=0.0)
    log, started = Log(Gates()), threading.Event()

    def work(op: Op) -> Any:
        body = log(op)

        def held_up() -> None:
            started.wait()
            body()

        return held_up

    with closing(HostBackend()) as backend, closing(Interpreter(backend)) as interpreter:
        step = interpreter.start(HOST_PLAN, work, gates=gates)
        gates.close(range(COUNT), "one")
        started.set()
        step.finish()
    assert log.updated == list(range(COUNT))


def test_a_step_that_waits_for_ever_says_for_whom() -> None:
    gates = Gates(timeout_s=0.01)
    gates.close([5], "checkpoint 12")
    with pytest.raises(dos.PoolError, match=r"^step: .*subgroup 5.* captured for checkpoint 12"):
        run(HostBackend(), HOST_PLAN, gates, Log(gates))


@pytest.mark.parametrize(("held", "begun"), [(0, False), (1, True)])
def test_a_step_knows_whether_an_update_had_begun(held: int, begun: bool) -> None:
    gates = Gates(timeout_s=0.01)
    gates.close([held], "one")
    with closing(HostBackend()) as backend, closing(Interpreter(backend)) as interpreter:
        step = interpreter.start(HOST_PLAN, Log(gates), gates=gates)
        with pytest.raises(dos.PoolError):
            step.finish()
    assert (step.failed, step.begun) == (True, begun)


def test_a_step_between_open_gates_has_waited_for_nothing() -> None:
    gates = Gates()
    assert run(HostBackend(), HOST_PLAN, gates, Log(gates)).waited_s == 0


def test_the_time_that_a_step_waited_is_in_its_record_and_in_the_trace() -> None:
    gates = Gates()
    thread = opening(gates, gates.close([0], "one"), [0], 0.02)
    record = run(HostBackend(), HOST_PLAN, gates, Log(gates))
    thread.join()
    assert record.metrics()["waited_s"] == record.waited_s > 0
    (span,) = record.gate_spans()
    assert (span.name, span.lane) == ("capture of 0", "host gate")
    assert span.end_s - span.start_s == pytest.approx(record.waited_s)
    assert gates.waited_s == pytest.approx(record.waited_s)


def test_the_time_that_a_step_waits_is_told_while_it_runs() -> None:
    gates = Gates()
    first, second = gates.close([0], "one"), gates.close([1], "two")
    with closing(HostBackend()) as backend, closing(Interpreter(backend)) as interpreter:
        step = interpreter.start(HOST_PLAN, Log(gates), gates=gates)
        while not step._walk._gated_since_s:
            time.sleep(1e-3)
        gates.open(first)
        while not step._walk.has([0]):
            time.sleep(1e-3)
        assert gates.waited_s > 0
        gates.open(second)
        record = step.finish()
    assert gates.waited_s == pytest.approx(record.waited_s)


def test_a_gate_behind_a_busy_lane_holds_up_nothing() -> None:
    gates = Gates()
    ticket, running = gates.close([1], "one"), threading.Event()

    def work(op: Op) -> Any:
        def body() -> None:
            if op.subgroup == 0:
                running.wait()

        return body

    with closing(HostBackend()) as backend, closing(Interpreter(backend)) as interpreter:
        step = interpreter.start(HOST_PLAN, work, gates=gates)
        while not step._walk._gated_since_s:
            time.sleep(1e-3)
        gates.open(ticket)
        while not step._walk.has([1]):
            time.sleep(1e-3)
        running.set()
        record = step.finish()
    assert record.waited_s == 0
