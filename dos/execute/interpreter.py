"""Walks a plan over a backend."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from dos.execute.backend import WAIT_S, Backend, Event, Interval
from dos.execute.record import NO_BACKWARD, Backward, StepRecord, Transfer
from dos.plan import Lane, Op, OpKind, UpdatePlan

Work = Callable[[Op], Callable[[], None]]
"""Gives the body of an op."""

SETTLED_ON_RETURN = (OpKind.UPDATE_HOST, OpKind.FLUSH)
"""Ops that bring state home: over, not only issued, when a step returns."""


class Interpreter:
    """Runs plans, one at a time, from a coordinator thread of its own.

    The coordinator issues each lane's ops in the plan's order. Lanes of the device wait for
    one another by events, without the host; but a device cannot wait for a thread, so an op
    that waits for the host lane is issued only once that host op is over.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._coordinator = ThreadPoolExecutor(1, thread_name_prefix="dos-coordinator")

    def run(self, plan: UpdatePlan, work: Work, backward: Backward = NO_BACKWARD) -> StepRecord:
        """`start` a step and `finish` it: for its arguments, result and errors see there."""
        return self.start(plan, work, backward).finish()

    def start(self, plan: UpdatePlan, work: Work, backward: Backward = NO_BACKWARD) -> RunningStep:
        """Begin to run every op of `plan`; `work(op)` gives its body.

        A subgroup's host update waits for what `backward` has sent it too, on the d2h lane.
        Finish it before the next is started.
        """
        begin_s = self._backend.begin()
        return RunningStep(plan, self._backend, work, backward, begin_s, self._coordinator)

    def close(self) -> None:
        """Stop the coordinator; idempotent."""
        self._coordinator.shutdown(wait=True)


class RunningStep:
    """A step under way: anybody may wait for some of its ops, and somebody finishes it.

    Attributes:
        failed: an op had raised when `finish` raised, so that the step is over and torn.
    """

    def __init__(
        self,
        plan: UpdatePlan,
        backend: Backend,
        work: Work,
        backward: Backward,
        begin_s: float,
        coordinator: ThreadPoolExecutor,
    ) -> None:
        self._plan, self._backend, self._backward = plan, backend, backward
        # From here, not from the call: a device first finishes the backward pass.
        self._begin_s, self._entered_s = begin_s, time.perf_counter()
        self._settled_s: float | None = None
        self._held: list[Interval] = []
        self._events: dict[int, Event] = {}
        self._issued = threading.Condition()
        self.failed = False
        self._timeout_s = WAIT_S * (1 + len(plan.ops))
        self._work: Work | None = work  # gradients that the device may still read are kept by it
        arrivals = _by_subgroup(backward.transfers)
        self._walk = coordinator.submit(
            _walk, plan, backend, work, arrivals, self._events, self._announce
        )
        self._walk.add_done_callback(self._settle)
        self._hold(self._entered_s)

    def join(self, ops: Sequence[int]) -> bool:
        """Let the caller's work from here on see these ops, given by index; whether they are over.

        Blocks until they are issued. Raises what failed, while others may still be running.
        """
        since_s = time.perf_counter()
        with self._issued:
            self._issued.wait_for(lambda: self._walk.done() or self._has(ops), self._timeout_s)
        if not self._has(ops):
            self._walk.result(0)  # raises: it ended before they were issued, or takes too long
        events = [self._events[op] for op in ops]
        self._backend.join(events)
        self._hold(since_s)
        return all(event.done() for event in events)

    def finish(self) -> StepRecord:
        """Wait until all state is home, and let the caller's stream wait for the rest.

        If a body raises, no other starts, those under way finish, and the error is raised here.
        """
        since_s = time.perf_counter()
        try:
            events = self._walk.result(self._timeout_s)
            settled = zip(self._plan.ops, events, strict=True)
            self._backend.join([e for op, e in settled if op.kind not in SETTLED_ON_RETURN])
        except BaseException:
            # Nothing may still be running then, also after Ctrl-C in here.
            wait([self._walk], WAIT_S)
            failure = _settle(list(self._events.values()))
            self.failed = failure is not None or self._walk.exception() is not None
            raise
        self._hold(since_s)
        self._work = None
        scale = self._backend.time_scale
        return StepRecord(
            plan=self._plan,
            label=self._backend.label,
            wall_s=(self._ended_s(events) - self._entered_s) / scale,
            events=tuple(events),
            begin_s=self._begin_s,
            time_scale=scale,
            backward=self._backward,
            held=tuple(self._held),
        )

    def _has(self, ops: Sequence[int]) -> bool:
        return all(op in self._events for op in ops)

    def _ended_s(self, events: Sequence[Event]) -> float:
        """When the last op was over; what is still under way on a device is not waited for."""
        last = {op.kind.lane: event for op, event in zip(self._plan.ops, events, strict=True)}
        ends_s = [event.wait().end_s for event in last.values() if event.done()]
        if self._settled_s is None or len(ends_s) < len(last):
            return time.perf_counter()
        return max([self._settled_s, *ends_s])

    def _hold(self, since_s: float) -> None:
        """Somebody was held by this step from then to now."""
        now_s = time.perf_counter()
        self._held.append(Interval(since_s - self._entered_s, now_s - self._entered_s))

    def _announce(self) -> None:
        with self._issued:
            self._issued.notify_all()

    def _settle(self, walk: Future[list[Event]]) -> None:
        self._settled_s = time.perf_counter()
        self._announce()


def _by_subgroup(transfers: Sequence[Transfer]) -> Mapping[int, list[Event]]:
    arrivals: dict[int, list[Event]] = {}
    for transfer in transfers:
        arrivals.setdefault(transfer.subgroup, []).append(transfer.event)
    return arrivals


def _walk(
    plan: UpdatePlan,
    backend: Backend,
    work: Work,
    arrivals: Mapping[int, list[Event]],
    events: dict[int, Event],
    announce: Callable[[], None],
) -> list[Event]:
    """Issue every op into `events`, telling so, then settle; returns these in plan order."""
    lanes = {lane: deque(ops) for lane, ops in plan.lanes().items() if ops}
    failure: BaseException | None = None
    work = _until_one_fails(work)
    try:
        while lanes:
            if _issue(plan, lanes, events, backend, work, arrivals):
                announce()
            else:
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
    arrivals: Mapping[int, list[Event]],
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
            if op.kind is OpKind.UPDATE_HOST:
                for arrival in arrivals.get(op.subgroup, ()):
                    stream.wait(arrival)
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
