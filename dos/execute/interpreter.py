"""Walks a plan over a backend."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from dos.execute.backend import WAIT_S, Backend, Event
from dos.plan import Lane, Op, OpKind, UpdatePlan
from dos.trace import Span, busy_s

Work = Callable[[Op], Callable[[], None]]
"""Gives the body of an op."""

SETTLED_ON_RETURN = (OpKind.UPDATE_HOST, OpKind.FLUSH)
"""Ops that bring state home: over, not only issued, when a step returns."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as it ran.

    Attributes:
        plan: what ran.
        label: the device, with its label where it is an emulation.
        wall_s: seconds from when the lanes could start to the return, divided by the time
            scale.
        events: per op, its completion.
        begin_s: when the lanes could start, on the backend's clock.
        time_scale: what paced times were stretched by.
    """

    plan: UpdatePlan
    label: str
    wall_s: float
    events: tuple[Event, ...]
    begin_s: float
    time_scale: float

    @property
    def stride(self) -> str:
        """The stride that ran, as text."""
        return self.plan.stride

    @property
    def h2d_bytes(self) -> int:
        """Bytes sent to the device."""
        return self._link_bytes(Lane.H2D)

    @property
    def d2h_bytes(self) -> int:
        """Bytes sent to the host."""
        return self._link_bytes(Lane.D2H)

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds of work per lane, divided by the time scale; waits for device ops."""
        return busy_s(self.spans())

    @property
    def overran(self) -> int:
        """Number of paced ops that missed their slot: if any, the times say nothing."""
        return sum(event.wait().overran for event in self.events)

    def spans(self) -> list[Span]:
        """One span per op, in plan order; waits for device ops still under way."""
        spans = []
        for op, event in zip(self.plan.ops, self.events, strict=True):
            ran = event.wait()
            spans.append(
                Span(
                    f"{op.kind.value} {op.subgroup}",
                    op.kind.lane.value,
                    (ran.start_s - self.begin_s) / self.time_scale,
                    (ran.end_s - self.begin_s) / self.time_scale,
                    {"op": op.index, "link_bytes": self.plan.link_bytes(op)},
                )
            )
        return spans

    def _link_bytes(self, lane: Lane) -> int:
        return sum(self.plan.link_bytes(op) for op in self.plan.ops if op.kind.lane is lane)


class Interpreter:
    """Runs plans, one at a time, from a coordinator thread of its own.

    The coordinator issues each lane's ops in the plan's order. Lanes of the device wait for
    one another by events, without the host; but a device cannot wait for a thread, so an op
    that waits for the host lane is issued only once that host op is over.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._coordinator = ThreadPoolExecutor(1, thread_name_prefix="dos-coordinator")

    def run(self, plan: UpdatePlan, work: Work) -> StepRecord:
        """Run every op of `plan`; `work(op)` gives its body.

        Returns when all state is home and the caller's stream waits for the rest. If a body
        raises, no other starts, those under way finish, and the error is raised here.
        """
        begin_s = self._backend.begin()
        # From here, not from the call: a device first finishes the backward pass.
        entered_s = time.perf_counter()
        walk = self._coordinator.submit(_walk, plan, self._backend, work)
        try:
            events = walk.result(WAIT_S * (1 + len(plan.ops)))
        except BaseException:
            # Also after Ctrl-C in here: the coordinator may still be issuing.
            wait([walk], WAIT_S)
            raise
        rest = [
            e for op, e in zip(plan.ops, events, strict=True) if op.kind not in SETTLED_ON_RETURN
        ]
        try:
            self._backend.join(rest)
        except BaseException:
            _settle(events)  # as in _walk: nothing may still be running
            raise
        scale = self._backend.time_scale
        return StepRecord(
            plan=plan,
            label=self._backend.label,
            wall_s=(time.perf_counter() - entered_s) / scale,
            events=tuple(events),
            begin_s=begin_s,
            time_scale=scale,
        )

    def close(self) -> None:
        """Stop the coordinator; idempotent."""
        self._coordinator.shutdown(wait=True)


def _walk(plan: UpdatePlan, backend: Backend, work: Work) -> list[Event]:
    """Issue every op, then settle; returns the events in plan order."""
    lanes = {lane: deque(ops) for lane, ops in plan.lanes().items() if ops}
    events: dict[int, Event] = {}
    failure: BaseException | None = None
    work = _until_one_fails(work)
    try:
        while lanes:
            if not _issue(plan, lanes, events, backend, work):
                _await_host(plan, lanes, events)
        settling = [i for i in events if plan.ops[i].kind in SETTLED_ON_RETURN]
        failure = _settle([events[i] for i in sorted(settling)])
    except BaseException as error:
        failure = error
    if failure is not None:
        # Nothing may still be running when the error surfaces: its memory is the caller's.
        _settle([events[i] for i in sorted(events)])
        raise failure
    return [events[op.index] for op in plan.ops]


def _until_one_fails(work: Work) -> Work:
    """The same bodies, but once one has raised, all later ones raise that and do nothing.

    Waits alone do not keep a dependent from running: a plan leaves out those that the order
    of the lanes implies, and a device knows nothing of a failed host op.
    """
    failures: list[BaseException] = []

    def guarded(op: Op) -> Callable[[], None]:
        body = work(op)

        def run() -> None:
            if failures:
                raise failures[0]
            try:
                body()
            except BaseException as error:
                failures.append(error)
                raise

        return run

    return guarded


def _issue(
    plan: UpdatePlan,
    lanes: dict[Lane, deque[Op]],
    events: dict[int, Event],
    backend: Backend,
    work: Work,
) -> bool:
    """Issue all that can be issued now; whether that was anything."""
    issued = False
    for lane, ops in list(lanes.items()):
        stream = backend.streams[lane]
        while ops and _may_issue(plan, ops[0], events):
            op = ops.popleft()
            body = work(op)  # may raise: before the lane is told to wait for its sake
            for waited in op.waits:
                stream.wait(events[waited])
            events[op.index] = stream.run(
                op, plan.link_bytes(op), plan.sizes[op.subgroup].numel, body
            )
            issued = True
        if not ops:
            del lanes[lane]
    return issued


def _may_issue(plan: UpdatePlan, op: Op, events: dict[int, Event]) -> bool:
    """Whether what `op` waits for is issued, and over where a stream could not wait for it."""
    for waited in op.waits:
        if waited not in events:
            return False
        on_host = plan.ops[waited].kind.lane is Lane.HOST
        if on_host and op.kind.lane is not Lane.HOST and not events[waited].done():
            return False
    return True


def _await_host(plan: UpdatePlan, lanes: dict[Lane, deque[Op]], events: dict[int, Event]) -> None:
    """Block until the host lane's next op that holds some lane back is over."""
    held = [
        waited
        for ops in lanes.values()
        for waited in ops[0].waits
        if plan.ops[waited].kind.lane is Lane.HOST and waited in events
    ]
    # The host lane is FIFO: the first of them is over first.
    events[min(held)].wait()


def _settle(events: Sequence[Event]) -> BaseException | None:
    """Wait for all of `events`; the first error among them, the one the others follow from."""
    failure: BaseException | None = None
    for event in events:
        try:
            event.wait()
        except BaseException as error:
            failure = failure or error
    return failure
