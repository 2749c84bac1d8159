"""Walks a plan over a backend."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from dos.execute.backend import WAIT_S, Backend, Event
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
        """Run every op of `plan`; `work(op)` gives its body.

        A subgroup's host update waits for what `backward` has sent it too, on the d2h lane.

        Returns when all state is home and the caller's stream waits for the rest. If a body
        raises, no other starts, those under way finish, and the error is raised here.
        """
        begin_s = self._backend.begin()
        # From here, not from the call: a device first finishes the backward pass.
        entered_s = time.perf_counter()
        arrivals = _by_subgroup(backward.transfers)
        walk = self._coordinator.submit(_walk, plan, self._backend, work, arrivals)
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
            backward=backward,
        )

    def close(self) -> None:
        """Stop the coordinator; idempotent."""
        self._coordinator.shutdown(wait=True)


def _by_subgroup(transfers: Sequence[Transfer]) -> Mapping[int, list[Event]]:
    arrivals: dict[int, list[Event]] = {}
    for transfer in transfers:
        arrivals.setdefault(transfer.subgroup, []).append(transfer.event)
    return arrivals


def _walk(
    plan: UpdatePlan, backend: Backend, work: Work, arrivals: Mapping[int, list[Event]]
) -> list[Event]:
    """Issue every op, then settle; returns the events in plan order."""
    lanes = {lane: deque(ops) for lane, ops in plan.lanes().items() if ops}
    events: dict[int, Event] = {}
    failure: BaseException | None = None
    work = _until_one_fails(work)
    try:
        while lanes:
            if not _issue(plan, lanes, events, backend, work, arrivals):
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
