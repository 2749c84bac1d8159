"""A virtual clock: ops take the time that a profile gives them, and touch no memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dos.config import Pace
from dos.execute.backend import Event, Interval, Stream
from dos.plan import Lane, Op


class SimulatedEvent:
    """An op of a simulated step, over as soon as it is issued."""

    def __init__(self, interval: Interval) -> None:
        self._interval = interval

    def done(self) -> bool:
        """Always true."""
        return True

    def wait(self) -> Interval:
        """When the op runs on the virtual clock; never blocks."""
        return self._interval


class SimulatedStream:
    """A lane that only keeps time."""

    def __init__(self, pace: Pace) -> None:
        self._pace, self._free_s = pace, 0.0

    def wait(self, event: Event) -> None:
        """Let everything that `run` is given later start after `event`."""
        self._free_s = max(self._free_s, event.wait().end_s)

    def run(self, op: Op, link_bytes: int, numel: int, work: Callable[[], None]) -> SimulatedEvent:
        """Give `op` its time on this lane; `work` is not run."""
        start_s = self._free_s
        op_s = self._pace.op_s(op.kind.lane.value, numel=numel, link_bytes=link_bytes)
        self._free_s = start_s + op_s
        return SimulatedEvent(Interval(start_s, self._free_s))


class SimulatedBackend:
    """All lanes on one virtual clock that starts at zero with each step."""

    time_scale = 1.0

    def __init__(self, pace: Pace) -> None:
        self.label = f"simulation of {getattr(pace, 'name', 'a node')}"
        self._pace = pace
        self._streams: dict[Lane, Stream] = {}

    @property
    def streams(self) -> Mapping[Lane, Stream]:
        """All four lanes."""
        return self._streams

    def begin(self) -> float:
        """Set the clock to zero."""
        self._streams = {lane: SimulatedStream(self._pace) for lane in Lane}
        return 0.0

    def join(self, events: Sequence[Event]) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to stop."""
