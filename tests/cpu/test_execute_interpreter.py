"""One interpreter: every backend runs the plan's ops in order, and the step's record says how."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from dos import VirtualDevice
from dos.execute.backend import Backend, Event, Interval, Stream
from dos.execute.interpreter import Interpreter
from dos.execute.record import StepRecord
from dos.execute.simulated import SimulatedBackend
from dos.execute.virtual import VirtualBackend
from dos.plan import Lane, Op, OpKind, SubgroupSize, UpdatePlan, build, verify
from dos.trace import write_trace
from perfmodel.profile import H100_NODE

Bodies = Callable[[Op], Callable[[], None]]
Issued = dict[Lane, list[tuple[int, frozenset[int]]]]  # per lane, op index and what it waits for


def plan_of(
    stride: float | str = 2, *, resident_ratio: float = 0.25, slots: int = 2, count: int = 12
) -> UpdatePlan:
    sizes = [SubgroupSize(100 + i, 200 + 2 * i, 300 + 2 * i) for i in range(count)]
    plan = build(sizes, stride=stride, resident_ratio=resident_ratio, slots=slots, absent={3})
    verify(plan)
    return plan


PLANS = {
    "host": plan_of("host", resident_ratio=0.0),
    "streamed": plan_of(1, resident_ratio=0.0),
    "one slot": plan_of(1.5, slots=1),
    "three slots": plan_of(1.25, slots=3),
    "mixed": plan_of(2),
    "residents": plan_of(2, resident_ratio=1.0),
}
MIXED = PLANS["mixed"]
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


class InlineStream:
    """Runs each op at once, on the thread that issues it."""

    def wait(self, event: Event) -> None:
        assert event.done()

    def run(self, op: Op, link_bytes: int, numel: int, work: Callable[[], None]) -> Event:
        start_s = time.perf_counter()
        work()
        return InlineEvent(Interval(start_s, time.perf_counter()))


@dataclass
class InlineEvent:
    interval: Interval

    def done(self) -> bool:
        return True

    def wait(self) -> Interval:
        return self.interval


class InlineBackend:
    """The smallest backend there can be."""

    label, time_scale = "inline", 1.0

    def __init__(self) -> None:
        self.streams: Mapping[Lane, Stream] = {lane: InlineStream() for lane in Lane}

    def begin(self) -> float:
        return time.perf_counter()

    def join(self, events: Sequence[Event]) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class RecordingStream:
    """Passes everything on, and writes down what it was asked."""

    inner: Stream
    issued: list[tuple[int, frozenset[int]]]
    index_of: dict[int, int]
    waits: list[int] = field(default_factory=list)

    def wait(self, event: Event) -> None:
        self.waits.append(self.index_of[id(event)])
        self.inner.wait(event)

    def run(self, op: Op, link_bytes: int, numel: int, work: Callable[[], None]) -> Event:
        self.issued.append((op.index, frozenset(self.waits)))
        self.waits.clear()
        event = self.inner.run(op, link_bytes, numel, work)
        self.index_of[id(event)] = op.index
        return event


class RecordingBackend:
    """Any backend, with its lanes' orders written down in `issued`."""

    def __init__(self, inner: Backend) -> None:
        self.inner, self.label, self.time_scale = inner, inner.label, inner.time_scale
        self.issued: Issued = {lane: [] for lane in Lane}
        self.streams: Mapping[Lane, Stream] = {}

    def begin(self) -> float:
        begin_s = self.inner.begin()
        index_of: dict[int, int] = {}
        self.streams = {
            lane: RecordingStream(stream, self.issued[lane], index_of)
            for lane, stream in self.inner.streams.items()
        }
        return begin_s

    def join(self, events: Sequence[Event]) -> None:
        self.inner.join(events)

    def close(self) -> None:
        self.inner.close()


BACKENDS: dict[str, Callable[[], Backend]] = {
    "virtual": lambda: VirtualBackend(VirtualDevice(jitter_seed=1)),
    "simulated": lambda: SimulatedBackend(H100_NODE),
    "inline": InlineBackend,
}


def nothing(op: Op) -> Callable[[], None]:
    return lambda: None


@contextmanager
def interpreting(backend: Backend) -> Iterator[Interpreter]:
    with closing(backend), closing(Interpreter(backend)) as interpreter:
        yield interpreter


def run(plan: UpdatePlan, backend: Backend, work: Bodies = nothing) -> StepRecord:
    with interpreting(backend) as interpreter:
        return interpreter.run(plan, work)


def virtual(**options: object) -> VirtualBackend:
    return VirtualBackend(VirtualDevice(**options))


# The same ops with the same dependencies on every backend.


@every_plan
@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_given_each_lane_of_the_plan(name: str, plan: UpdatePlan) -> None:
    backend = RecordingBackend(BACKENDS[name]())
    run(plan, backend)
    expected = {
        lane: [(op.index, frozenset(op.waits)) for op in ops] for lane, ops in plan.lanes().items()
    }
    assert backend.issued == expected


@every_plan
@pytest.mark.parametrize("name", ["virtual", "inline"])
def test_every_body_runs_once(name: str, plan: UpdatePlan) -> None:
    ran: list[int] = []
    run(plan, BACKENDS[name](), lambda op: lambda: ran.append(op.index))
    assert sorted(ran) == list(range(len(plan.ops)))


@every_plan
def test_an_op_starts_after_all_it_waits_for(plan: UpdatePlan) -> None:
    spans = run(plan, virtual(jitter_seed=2)).spans()
    early = [
        (op.index, waited)
        for op in plan.ops
        for waited in op.waits
        if spans[op.index].start_s < spans[waited].end_s
    ]
    assert early == []


@every_plan
def test_conflicting_ops_do_not_overlap(plan: UpdatePlan) -> None:
    spans = run(plan, virtual(jitter_seed=3)).spans()
    overlapping = [
        (first.index, second.index)
        for second in plan.ops
        for first in plan.ops[: second.index]
        if set(second.writes) & {*first.reads, *first.writes}
        or set(second.reads) & set(first.writes)
        if spans[second.index].start_s < spans[first.index].end_s
    ]
    assert overlapping == []


@every_plan
def test_spans_of_a_lane_do_not_overlap(plan: UpdatePlan) -> None:
    spans = run(plan, virtual(jitter_seed=4)).spans()
    overlapping = [
        (before.index, after.index)
        for ops in plan.lanes().values()
        for before, after in pairwise(ops)
        if spans[after.index].start_s < spans[before.index].end_s
    ]
    assert overlapping == []


def test_lanes_run_at_the_same_time() -> None:
    """Two bodies on different lanes that wait for one another can meet."""
    both = threading.Barrier(2, timeout=30.0)
    plan = build([SubgroupSize(1, 2, 2)] * 2, stride=2, slots=1)

    def work(op: Op) -> Callable[[], None]:
        meets = op.kind in (OpKind.FETCH, OpKind.GRAD_TO_HOST)
        return both.wait if meets else lambda: None

    run(plan, virtual(), work)
    assert not both.broken


@pytest.mark.parametrize("name", BACKENDS)
def test_a_plan_without_ops_runs(name: str) -> None:
    plan = build([SubgroupSize(1, 2, 2)], stride=2, absent={0})
    assert run(plan, BACKENDS[name]()).spans() == []


# The record.


@every_plan
@pytest.mark.parametrize(("lane", "name"), [(Lane.H2D, "h2d_bytes"), (Lane.D2H, "d2h_bytes")])
def test_bytes_are_those_of_the_plan(lane: Lane, name: str, plan: UpdatePlan) -> None:
    record = run(plan, InlineBackend())
    sizes = {
        OpKind.GRAD_TO_HOST: lambda size: size.grad_bytes,
        OpKind.FETCH: lambda size: 12 * size.numel,
        OpKind.FLUSH: lambda size: 12 * size.numel,
        OpKind.PUBLISH: lambda size: size.weight_bytes,
    }
    ops = plan.lanes()[lane]
    assert getattr(record, name) == sum(sizes[op.kind](plan.sizes[op.subgroup]) for op in ops)


@pytest.mark.parametrize("lane", Lane)
def test_busy_time_is_the_sum_of_the_lanes_spans(lane: Lane) -> None:
    record = run(MIXED, virtual())
    lasted_s = [s.end_s - s.start_s for s in record.spans() if s.lane == lane.value]
    assert record.busy_s[lane.value] == pytest.approx(sum(lasted_s))


def test_spans_name_the_ops_in_plan_order() -> None:
    spans = run(MIXED, virtual()).spans()
    assert [s.args["op"] for s in spans] == list(range(len(MIXED.ops)))


def test_no_span_starts_before_the_step() -> None:
    assert min(span.start_s for span in run(MIXED, virtual()).spans()) >= 0.0


def test_the_step_lasts_from_its_first_span_to_its_last() -> None:
    record = run(MIXED, virtual())
    spans = record.spans()
    assert record.wall_s >= max(s.end_s for s in spans) - min(s.start_s for s in spans)


def test_an_emulation_says_so() -> None:
    assert "virtual" in run(MIXED, virtual()).label


def test_a_trace_has_one_event_per_op(tmp_path: Path) -> None:
    record = run(MIXED, virtual())
    write_trace(record.spans(), tmp_path / "trace.json", process=record.label)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    timed = [event["args"]["op"] for event in events if event["ph"] == "X"]
    assert timed == list(range(len(MIXED.ops)))


def test_a_trace_names_the_device(tmp_path: Path) -> None:
    write_trace([], tmp_path / "trace.json", process="virtual device")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["virtual device"]
