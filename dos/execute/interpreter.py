"""Walks a plan over a backend."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property

from dos.execute.backend import WAIT_S, Backend, Event, Interval
from dos.execute.record import NO_BACKWARD, Backward, StepRecord
from dos.execute.walk import SETTLED_ON_RETURN, Walk, Work, settle
from dos.memory import Gates
from dos.plan import UpdatePlan


class Interpreter:
    """Runs plans, one at a time, from a coordinator thread of its own.

    The coordinator issues each lane's ops in the plan's order. Lanes of the device wait for
    one another by events, without the host; but a device cannot wait for a thread, so an op
    that waits for the host lane is issued only once that host op is over; nor for a capture,
    so that an update is issued only once the gate of its subgroup is open.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._coordinator = ThreadPoolExecutor(1, thread_name_prefix="dos-coordinator")

    def run(
        self,
        plan: UpdatePlan,
        work: Work,
        backward: Backward = NO_BACKWARD,
        gates: Gates | None = None,
    ) -> StepRecord:
        """`start` a step and `finish` it: for its arguments, result and errors see there."""
        return self.start(plan, work, backward, gates).finish()

    def start(
        self,
        plan: UpdatePlan,
        work: Work,
        backward: Backward = NO_BACKWARD,
        gates: Gates | None = None,
    ) -> RunningStep:
        """Begin to run every op of `plan`; `work(op)` gives its body.

        A subgroup's host update waits for what `backward` has sent it too, on the d2h lane; any
        update for those of `gates` that are closed now. Finish it before the next is started.
        """
        walk = Walk(plan, self._backend, work, backward.transfers, gates or Gates())
        begin_s = self._backend.begin()
        return RunningStep(walk, backward, begin_s, self._coordinator)

    def close(self) -> None:
        """Stop the coordinator; idempotent."""
        self._coordinator.shutdown(wait=True)


class RunningStep:
    """A step under way: anybody may wait for some of its ops, and somebody finishes it.

    Attributes:
        failed: an op had raised when `finish` raised, so that the step is over, and torn if it
            had `begun`.
    """

    def __init__(
        self,
        walk: Walk,
        backward: Backward,
        begin_s: float,
        coordinator: ThreadPoolExecutor,
    ) -> None:
        self._walk, self._backward = walk, backward
        self._plan, self._backend = walk.plan, walk.backend
        # From here, not from the call: a device first finishes the backward pass.
        self._begin_s, self._entered_s = begin_s, time.perf_counter()
        self._settled_s: float | None = None
        self._held: list[Interval] = []
        self.failed = False
        self._timeout_s = (WAIT_S + walk.gates.timeout_s) * (1 + len(self._plan.ops))
        self._events = coordinator.submit(walk.run)
        self._events.add_done_callback(self._settle)
        self._hold(self._entered_s)

    @property
    def begun(self) -> bool:
        """Whether an update was issued: some weights or state may have changed."""
        return self._walk.begun

    def join(self, ops: Sequence[int]) -> bool:
        """Let the caller's work from here on see these ops, given by index; whether they are over.

        Blocks until they are issued. Raises what failed, while others may still be running.
        """
        since_s = time.perf_counter()
        events = self._issued(ops)
        self._backend.join(events)
        self._hold(since_s)
        return all(event.done() for event in events)

    def _issued(self, ops: Sequence[int]) -> list[Event]:
        """The events of these ops, once they are issued."""
        with self._walk.issued:
            self._walk.issued.wait_for(
                lambda: self._events.done() or self._walk.has(ops), self._timeout_s
            )
        if not self._walk.has(ops):
            self._events.result(0)  # raises: it ended before they were issued, or takes too long
        return [self._walk.events[op] for op in ops]

    @cached_property
    def _ops_of(self) -> dict[int, list[int]]:
        """By subgroup, its ops."""
        found: dict[int, list[int]] = {}
        for op in self._plan.ops:
            found.setdefault(op.subgroup, []).append(op.index)
        return found

    def await_end(self, subgroup: int | None = None) -> None:
        """Block until all ops, or a subgroup's, are over, on a device too. Ends nothing.

        Raises what failed.
        """
        if subgroup is None:
            events = self._events.result(self._timeout_s)
        else:
            events = self._issued(self._ops_of.get(subgroup, []))
        for event in events:
            event.wait()

    def finish(self) -> StepRecord:
        """Wait until all state is home, and let the caller's stream wait for the rest.

        If a body raises, no other starts, those under way finish, and the error is raised here.
        """
        since_s = time.perf_counter()
        try:
            events = self._events.result(self._timeout_s)
            settled = zip(self._plan.ops, events, strict=True)
            self._backend.join([e for op, e in settled if op.kind not in SETTLED_ON_RETURN])
        except BaseException:
            # Nothing may still be running then, also after Ctrl-C in here.
            wait([self._events], WAIT_S)
            failure = settle(list(self._walk.events.values()))
            self.failed = failure is not None or self._events.exception() is not None
            if self.failed:
                self._walk.work = None
            raise
        self._hold(since_s)
        self._walk.work = None
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
            gated=tuple(self._walk.gated),
        )

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

    def _settle(self, events: Future[list[Event]]) -> None:
        self._settled_s = time.perf_counter()
        with self._walk.issued:
            self._walk.issued.notify_all()
