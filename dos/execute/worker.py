"""A lane that is a thread: the host lane of every backend, all lanes of the virtual device."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

from dos.execute.backend import WAIT_S, Event, Interval, Stream
from dos.plan import Lane, Op

JITTER_S = 500e-6
"""Longest random delay before an op, in seconds: several times what a small op takes."""


class WorkerEvent:
    """The completion of one op on a `WorkerStream`."""

    def __init__(self, future: Future[Interval], name: str) -> None:
        self._future, self._name = future, name

    def done(self) -> bool:
        """Whether the op has finished; never blocks."""
        return self._future.done()

    def wait(self) -> Interval:
        """Block until the op has finished; raises what the op raised, or TimeoutError."""
        try:
            return self._future.result(WAIT_S)
        except FutureTimeout:
            if self._future.done():
                raise
            raise TimeoutError(f"{self._name} did not finish within {WAIT_S:.0f} s") from None

    def then(self, call: Callable[[], None]) -> None:
        """Call `call`, on any thread, once the op has finished, however it did."""
        self._future.add_done_callback(lambda _: call())


class WorkerStream:
    """A FIFO of work on one thread of its own.

    Args:
        name: the thread's name.
        slot_s: for pacing, `slot_s(op, link_bytes, numel)` gives the seconds that an op lasts
            at least; None runs flat out.
        jitter_seed: delay each op by a random time up to `JITTER_S`; None for no delay.
    """

    def __init__(
        self,
        name: str,
        *,
        slot_s: Callable[[Op, int, int], float] | None = None,
        jitter_seed: int | str | None = None,
    ) -> None:
        # One worker makes an executor a FIFO lane; it starts on first use and ends with us.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._slot_s = slot_s
        self._jitter = None if jitter_seed is None else random.Random(jitter_seed)
        self._waits: list[Event] = []

    def wait(self, event: Event) -> None:
        """Let everything that `run` is given later start after `event`."""
        self._waits.append(event)

    def run(self, op: Op, link_bytes: int, numel: int, work: Callable[[], None]) -> WorkerEvent:
        """Enqueue `work`, which carries out `op`; returns at once."""
        waits, self._waits = self._waits, []
        slot_s = self._slot_s(op, link_bytes, numel) if self._slot_s else None
        delay_s = self._jitter.random() * JITTER_S if self._jitter else 0.0
        future = self._thread.submit(_carry_out, waits, work, slot_s, delay_s)
        return WorkerEvent(future, f"{op.kind.name} of subgroup {op.subgroup}")

    def close(self) -> None:
        """Finish what is enqueued and stop the thread; idempotent."""
        self._thread.shutdown(wait=True)


def _carry_out(
    waits: Sequence[Event], work: Callable[[], None], slot_s: float | None, delay_s: float
) -> Interval:
    # An event of a failed op raises here: whatever depends on it fails with the same error
    # and touches nothing.
    for event in waits:
        event.wait()
    if delay_s:
        time.sleep(delay_s)
    start_s = time.perf_counter()
    work()
    end_s = time.perf_counter()
    if slot_s is None:
        return Interval(start_s, end_s)
    overran = end_s - start_s > slot_s
    while (rest_s := start_s + slot_s - time.perf_counter()) > 0:
        time.sleep(rest_s)
    return Interval(start_s, time.perf_counter(), overran)


class HostBackend:
    """Parameters in host memory: a host lane and nothing else."""

    label = "cpu"
    time_scale = 1.0

    def __init__(self) -> None:
        self._host = WorkerStream("dos-host")

    @property
    def streams(self) -> Mapping[Lane, Stream]:
        """The host lane."""
        return {Lane.HOST: self._host}

    def begin(self) -> float:
        """Start a step; returns `time.perf_counter()`, its clock."""
        return time.perf_counter()

    def join(self, events: Sequence[Event]) -> None:
        """Wait for `events`: the caller reads host memory without any stream."""
        for event in events:
            event.wait()

    def close(self) -> None:
        """Stop the lane's thread; idempotent."""
        self._host.close()
