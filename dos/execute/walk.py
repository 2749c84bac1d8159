"""One walk through a plan: each op issued as soon as what it waits for allows it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import cast as as_type

from dos.execute.backend import WAIT_S, Backend, Event, HostEvent, Interval
from dos.execute.record import Gated, Transfer, covered_s
from dos.memory import Gates
from dos.plan import Lane, Op, OpKind, UpdatePlan

Work = Callable[[Op], Callable[[], None]]
"""Gives the body of an op."""

SETTLED_ON_RETURN = (OpKind.UPDATE_HOST, OpKind.FLUSH)
"""Ops that bring state home: over, not only issued, when a step returns."""

GATED = (OpKind.UPDATE_HOST, OpKind.UPDATE_DEVICE)
"""Ops that pass the gate of their subgroup; all else that writes state or weights follows them."""


class Walk:
    """Issues the ops of one step, on the coordinator's thread; others see how far it is.

    Args:
        plan: what to do.
        backend: where.
        work: gives the body of each op.
        transfers: what a subgroup's host update waits for besides.
        gates: an update waits for those that are closed now.

    Attributes:
        work: kept as long as a device may still read gradients.
        events: per op that is issued, by index, its completion.
        issued: notified when some are.
        gated: when ops were held back by nothing but their gates.
        begun: whether an update was issued.
    """

    def __init__(
        self,
        plan: UpdatePlan,
        backend: Backend,
        work: Work,
        transfers: Sequence[Transfer],
        gates: Gates,
    ) -> None:
        self.plan, self.backend, self.gates = plan, backend, gates
        self.work: Work | None = work
        self.events: dict[int, Event] = {}
        self.issued = threading.Condition()
        self.gated: list[Gated] = []
        self.begun = False
        self._until = gates.closings
        self._lanes = {lane: deque(ops) for lane, ops in plan.lanes().items() if ops}
        self._last: dict[Lane, Event] = {}
        self._arrivals: dict[int, list[Event]] = {}
        for transfer in transfers:
            self._arrivals.setdefault(transfer.subgroup, []).append(transfer.event)
        self._gated_since_s: dict[int, float] = {}
        self._told_s, self._told_until_s = 0.0, float("-inf")  # of `gated`, to `gates`
        # Told when a host op is over, or a gate opens: then something may be issued. Unlike an
        # event it may be told by a finalizer, in the middle of anything.
        self._changed: SimpleQueue[None] = SimpleQueue()

    def has(self, ops: Sequence[int]) -> bool:
        """Whether all of these are issued."""
        return all(op in self.events for op in ops)

    def run(self) -> list[Event]:
        """Issue every op, then wait until all state is home; returns the events in plan order."""
        failure: BaseException | None = None
        assert self.work is not None
        work = _until_one_fails(self.work)
        try:
            with self.gates.heard(self._tell):
                while self._lanes:
                    if self._issue(work):
                        with self.issued:
                            self.issued.notify_all()
                    else:
                        self._await_change()
            settling = [i for i in self.events if self.plan.ops[i].kind in SETTLED_ON_RETURN]
            failure = settle([self.events[i] for i in sorted(settling)])
        except BaseException as error:
            failure = error
        finally:
            # What ops of several lanes waited at once, where the later one began to wait first.
            waited_s = covered_s(its.interval for its in self.gated)
            self.gates.add_waited(waited_s - self._told_s)
        if failure is not None:
            # Nothing may still be running when the error surfaces: its memory is the caller's.
            settle([self.events[i] for i in sorted(self.events)])
            raise failure
        return [self.events[op.index] for op in self.plan.ops]

    def _tell(self) -> None:
        self._changed.put(None)

    def _issue(self, work: Work) -> bool:
        """Issue all that can be issued now; whether that was anything."""
        issued = False
        for lane, ops in list(self._lanes.items()):
            while ops and self._may_issue(ops[0]):
                self._give(ops.popleft(), lane, work)
                issued = True
            if not ops:
                del self._lanes[lane]
        return issued

    def _give(self, op: Op, lane: Lane, work: Work) -> None:
        """Give an op to its lane."""
        stream = self.backend.streams[lane]
        body = work(op)  # may raise: before the lane is told to wait for its sake
        waits = [self.events[waited] for waited in op.waits]
        if op.kind is OpKind.UPDATE_HOST:
            waits += self._arrivals.get(op.subgroup, ())
        if op.index in self._gated_since_s:
            self._note(op, [*waits, self._last[lane]] if lane in self._last else waits)
        for waited in waits:
            stream.wait(waited)
        self.begun = self.begun or op.kind in GATED
        event = stream.run(op, self.plan.link_bytes(op), self.plan.sizes[op.subgroup].numel, body)
        self.events[op.index] = self._last[lane] = event
        if lane is Lane.HOST and not event.done():
            as_type(HostEvent, event).then(self._tell)

    def _may_issue(self, op: Op) -> bool:
        """Whether what `op` waits for is issued, and over where a stream could not wait for it."""
        for waited in op.waits:
            if waited not in self.events:
                return False
            on_host = self.plan.ops[waited].kind.lane is Lane.HOST
            if on_host and op.kind.lane is not Lane.HOST and not self.events[waited].done():
                return False
        if op.kind not in GATED or self.gates.is_open(op.subgroup, self._until):
            return True
        self._gated_since_s.setdefault(op.index, time.perf_counter())
        return False

    def _note(self, op: Op, others: Sequence[Event]) -> None:
        """A gate has opened: how long it alone held `op` back, and not `others` that it follows."""
        now_s = time.perf_counter()
        since_s = self._gated_since_s.pop(op.index)
        if all(event.done() for event in others):
            since_s = max([since_s, *(event.wait().end_s for event in others)])
            # Told now, since the save that it waited for may be durable before the step is over.
            waited_s = max(0.0, now_s - max(since_s, self._told_until_s))
            self.gates.add_waited(waited_s)
            self._told_s, self._told_until_s = self._told_s + waited_s, now_s
            self.gated.append(Gated(op.kind.lane, op.subgroup, Interval(since_s, now_s)))

    def _await_change(self) -> None:
        """Block until a host op is over or a gate opens.

        Raises:
            PoolError: no gate opens.
            TimeoutError: no host op ends.
        """
        last = self._last.get(Lane.HOST)
        busy = last is not None and not last.done()
        with suppress(Empty):
            self._changed.get(timeout=WAIT_S if busy else self.gates.timeout_s)
            return
        if busy:
            raise TimeoutError(f"no op of the host lane finished within {WAIT_S:.0f} s")
        assert self._gated_since_s, "nothing is under way, and nothing can be issued"
        raise self.gates.stuck("step", self.plan.ops[min(self._gated_since_s)].subgroup)


def settle(events: Sequence[Event]) -> BaseException | None:
    """Wait for all of `events`; the first error among them, the one the others follow from."""
    failure: BaseException | None = None
    for event in events:
        try:
            event.wait()
        except BaseException as error:
            failure = failure or error
    return failure


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
