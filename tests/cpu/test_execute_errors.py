"""An op that raises: its error surfaces, what depends on it is left out, the next step works."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from dos.execute.backend import Event, Interval
from dos.plan import Lane, Op, OpKind, SubgroupSize, UpdatePlan, build
from tests.cpu.test_execute_interpreter import (
    MIXED,
    InlineBackend,
    InlineStream,
    interpreting,
    nothing,
    run,
    virtual,
)


class Broken(Exception):
    pass


@dataclass
class Failing:
    """Bodies that take a while; that of op `index` raises. Says what ran and what still runs."""

    index: int
    ran: list[int] = field(default_factory=list)
    running: set[int] = field(default_factory=set)

    def __call__(self, op: Op) -> Callable[[], None]:
        def body() -> None:
            self.running.add(op.index)
            if op.index != self.index:
                time.sleep(2e-3)
                self.ran.append(op.index)
            self.running.discard(op.index)
            if op.index == self.index:
                raise Broken(op.index)

        return body


def dependents(plan: UpdatePlan, failed: int) -> set[int]:
    """The ops that need what op `failed` should have written, directly or through others."""
    tainted = {failed}
    for op in plan.ops[failed + 1 :]:
        for buffer in op.reads:
            writers = [o.index for o in plan.ops[: op.index] if buffer in o.writes]
            if writers and writers[-1] in tainted:
                tainted.add(op.index)
    return tainted - {failed}


every_op = pytest.mark.parametrize(
    "failed", range(len(MIXED.ops)), ids=[f"{op.index}-{op.kind.value}" for op in MIXED.ops]
)


@every_op
def test_an_error_surfaces_from_run(failed: int) -> None:
    with pytest.raises(Broken, match=f"^{failed}$"):
        run(MIXED, virtual(), Failing(failed))


@every_op
def test_what_depends_on_a_failed_op_is_left_out(failed: int) -> None:
    work = Failing(failed)
    with interpreting(virtual()) as interpreter, pytest.raises(Broken):
        interpreter.run(MIXED, work)
    assert dependents(MIXED, failed).isdisjoint(work.ran)


def test_a_dependency_that_lane_order_implies_counts_when_an_op_fails() -> None:
    """An update whose wait for its gradient the plan leaves out, as other waits imply it."""
    plan = build([SubgroupSize(4, 8, 8)] * 12, stride=3, slots=1)
    of_gradient = {op.subgroup: op for op in plan.ops if op.kind is OpKind.GRAD_TO_HOST}
    update = next(
        op
        for op in plan.ops
        if op.kind is OpKind.UPDATE_HOST and of_gradient[op.subgroup].index not in op.waits
    )
    work = Failing(of_gradient[update.subgroup].index)
    with interpreting(virtual()) as interpreter, pytest.raises(Broken):
        interpreter.run(plan, work)
    assert update.index not in work.ran


@every_op
def test_nothing_runs_any_more_when_an_error_surfaces(failed: int) -> None:
    work = Failing(failed)
    with interpreting(virtual()) as interpreter:
        with pytest.raises(Broken):
            interpreter.run(MIXED, work)
        ran = len(work.ran)
        time.sleep(10e-3)
        assert (len(work.ran), work.running) == (ran, set())


@every_op
def test_the_run_after_an_error_is_complete(failed: int) -> None:
    ran: list[int] = []
    with interpreting(virtual()) as interpreter:
        with pytest.raises(Broken):
            interpreter.run(MIXED, Failing(failed))
        interpreter.run(MIXED, lambda op: lambda: ran.append(op.index))
    assert sorted(ran) == list(range(len(MIXED.ops)))


def test_the_first_of_two_errors_surfaces() -> None:
    """The second op fails only because the first did."""
    plan = build([SubgroupSize(1, 2, 2)], stride=1)

    def work(op: Op) -> Callable[[], None]:
        def body() -> None:
            raise Broken(op.kind.value)

        return body

    with pytest.raises(Broken, match="fetch"):
        run(plan, virtual(), work)


def test_an_error_in_giving_a_body_leaves_nothing_to_the_next_run() -> None:
    """A lane that was told to wait for a failed op, then given none, forgets it."""
    plan = build([SubgroupSize(1, 2, 2)], stride=1)
    failing = Failing(0)

    def work(op: Op) -> Callable[[], None]:
        if op.kind is OpKind.UPDATE_DEVICE:
            raise Broken("no body")
        return failing(op)

    with interpreting(virtual()) as interpreter:
        with pytest.raises(Broken):
            interpreter.run(plan, work)
        assert len(interpreter.run(plan, nothing).spans()) == len(plan.ops)


@dataclass
class FailedEvent:
    """An op that is over and has raised."""

    error: Exception

    def done(self) -> bool:
        return True

    def wait(self) -> Interval:
        raise self.error


class FailingLane(InlineStream):
    """A host lane whose errors show in its events only, as those of a thread."""

    def run(self, op: Op, link_bytes: int, numel: int, work: Callable[[], None]) -> Event:
        try:
            return super().run(op, link_bytes, numel, work)
        except Broken as error:
            return FailedEvent(error)


def test_a_device_that_cannot_see_a_failed_host_op_runs_no_dependent() -> None:
    """A device's streams do not look at events of the host, which are over before."""
    plan = build([SubgroupSize(1, 2, 2)], stride="host")
    work = Failing(next(op.index for op in plan.ops if op.kind is OpKind.UPDATE_HOST))
    backend = InlineBackend()
    backend.streams = {**backend.streams, Lane.HOST: FailingLane()}
    with interpreting(backend) as interpreter, pytest.raises(Broken):
        interpreter.run(plan, work)
    assert [op.kind for op in plan.ops if op.index in work.ran] == [OpKind.GRAD_TO_HOST]
