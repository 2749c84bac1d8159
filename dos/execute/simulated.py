"""A virtual clock: ops take the time that the performance model gives them, and touch no memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dos.execute.backend import Event, Interval, Stream
from dos.plan import Lane, Op
from dos.trace import Span
from perfmodel.model import Task, run
from perfmodel.profile import NodeProfile
from perfmodel.timeline import capacities, task_of


class _Step:
    """The ops of one step as the model's tasks, in the order of issue.

    What runs beside an op, and so when it ends, is known once all are issued.
    """

    def __init__(self, profile: NodeProfile) -> None:
        self.profile, self.tasks = profile, list[Task]()
        self._spans: list[Span] = []

    def interval(self, index: int) -> Interval:
        if len(self._spans) < len(self.tasks):
            self._spans = run(self.tasks, capacities(self.profile))
        return Interval(self._spans[index].start_s, self._spans[index].end_s)


class SimulatedEvent:
    """An op of a simulated step, over as soon as it is issued."""

    def __init__(self, step: _Step) -> None:
        self.index, self._step = len(step.tasks), step

    def done(self) -> bool:
        """Always true."""
        return True

    def wait(self) -> Interval:
        """When the op runs on the virtual clock, beside what was issued so far; never blocks."""
        return self._step.interval(self.index)


class SimulatedStream:
    """A lane that only notes what it is given."""

    def __init__(self, step: _Step) -> None:
        self._step, self._waits = step, set[int]()

    def wait(self, event: Event) -> None:
        """Let everything that `run` is given later start after `event`, of the same step."""
        assert isinstance(event, SimulatedEvent), "no other clock has this one's times"
        self._waits.add(event.index)

    def run(self, op: Op, link_bytes: int, numel: int, work: Callable[[], None]) -> SimulatedEvent:
        """Note `op`; `work` is not run."""
        waits, self._waits = tuple(sorted(self._waits)), set()
        event = SimulatedEvent(self._step)
        self._step.tasks.append(
            task_of(op, self._step.profile, numel=numel, link_bytes=link_bytes, waits=waits)
        )
        return event


class SimulatedBackend:
    """All lanes on one virtual clock that starts at zero with each step."""

    time_scale = 1.0

    def __init__(self, profile: NodeProfile) -> None:
        self.label = f"simulation of {profile.name}"
        self._profile = profile
        self._streams: dict[Lane, Stream] = {}

    @property
    def streams(self) -> Mapping[Lane, Stream]:
        """All four lanes."""
        return self._streams

    def begin(self) -> float:
        """Set the clock to zero."""
        step = _Step(self._profile)
        self._streams = {lane: SimulatedStream(step) for lane in Lane}
        return 0.0

    def join(self, events: Sequence[Event]) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to stop."""
