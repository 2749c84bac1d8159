"""What a backend offers an interpreter, and a device the ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from dos.kernels.cast import Examined
from dos.kernels.scalars import AdamScalars
from dos.plan import Lane, Op

WAIT_S = 600.0
"""Longest wait for one op, in seconds. A step that needs longer than that for one op hangs."""


@dataclass(frozen=True, slots=True)
class Interval:
    """When an op ran, in seconds of the backend's clock, and whether it missed its paced slot."""

    start_s: float
    end_s: float
    overran: bool = False


Reading: TypeAlias = Any
"""What `Device.examine` found, wherever that lies: for `Device.read` alone."""


class Event(Protocol):
    """The completion of one op."""

    def done(self) -> bool:
        """Whether the op has finished; never blocks."""
        ...

    def wait(self) -> Interval:
        """Block the calling thread until the op has finished; raises what the op raised."""
        ...


class HostEvent(Event, Protocol):
    """The completion of an op of the host lane, which a thread can be told of."""

    def then(self, call: Callable[[], None]) -> None:
        """Call `call`, on any thread, once the op has finished, however it did."""
        ...


class Stream(Protocol):
    """A FIFO lane: what is given to `run` runs in that order."""

    def wait(self, event: Event) -> None:
        """Let everything that `run` is given later start after `event`."""
        ...

    def run(self, op: Op, link_bytes: int, numel: int, work: Callable[[], None]) -> Event:
        """Enqueue `work`, which carries out `op`; returns at once."""
        ...


class Backend(Protocol):
    """Where a plan runs: what the interpreter needs of it."""

    label: str
    """Names the device in reports and traces; emulations and simulations say so."""

    time_scale: float
    """Measured times are divided by this before they are reported; 1 but for paced runs."""

    @property
    def streams(self) -> Mapping[Lane, Stream]:
        """One stream per lane that the backend has."""
        ...

    def begin(self) -> float:
        """Start a step: no lane runs ahead of the caller's work so far.

        Returns the time of the backend's clock that the step's spans count from.
        """
        ...

    def join(self, events: Sequence[Event]) -> None:
        """Let the caller's work from here on see what `events` stand for."""
        ...

    def close(self) -> None:
        """Stop every thread; idempotent."""
        ...


class Device(Backend, Protocol):
    """A backend with a device lane: what the ops' bodies need besides."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Device memory, 1-D and uninitialized."""
        ...

    def update(
        self,
        p: torch.Tensor,
        m: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        w: torch.Tensor,
        scalars: AdamScalars,
    ) -> None:
        """One Adam update in device memory of flat 1-D tensors, on the current lane."""
        ...

    def free_bytes(self) -> int | None:
        """Memory that is left beside the most that this process has needed at a time.

        Negative if so much is not to be had any more; None where the device does not tell.
        """
        ...

    def mark(self) -> Event:
        """What the caller's current stream has been given so far, as an event."""
        ...

    def examine(self, grad: torch.Tensor) -> Reading:
        """Look at a flat gradient on the caller's current stream, without waiting for it."""
        ...

    def read(self, readings: Sequence[Reading]) -> list[Examined]:
        """What was found, in their order; waits for the device once."""
        ...

    def release(self, slot: Sequence[torch.Tensor]) -> None:
        """A staging slot has no user any more."""
        ...
