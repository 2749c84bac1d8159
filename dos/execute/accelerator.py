"""Streams and events of whatever accelerator torch has, by its device-neutral API."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from dos.execute.backend import Event, Interval, Stream
from dos.execute.worker import WorkerStream
from dos.kernels import torch_cast
from dos.kernels.cast import Examined
from dos.kernels.device import device_kernels
from dos.kernels.scalars import AdamScalars
from dos.kernels.torch_cast import DeviceExamined
from dos.plan import Lane, Op


@dataclass(frozen=True, slots=True)
class DeviceClock:
    """Ties a device's events to `time.perf_counter()`: `base` was recorded at `base_s`."""

    base: torch.Event
    base_s: float

    def at_s(self, event: torch.Event) -> float:
        """When a finished event was recorded."""
        return self.base_s + float(self.base.elapsed_time(event)) / 1e3


class DeviceEvent:
    """The completion of one op on the accelerator."""

    def __init__(self, clock: DeviceClock, start: torch.Event, end: torch.Event) -> None:
        self._clock, self._start, self.end = clock, start, end

    def done(self) -> bool:
        """Whether the op has finished; never blocks."""
        return bool(self.end.query())

    def wait(self) -> Interval:
        """Block until the op has finished."""
        self.end.synchronize()
        return Interval(self._clock.at_s(self._start), self._clock.at_s(self.end))


class DeviceStream:
    """A lane that is a stream of the accelerator. Host events are over before `run`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.Stream(device=device)
        self.clock: DeviceClock | None = None

    def wait(self, event: Event) -> None:
        """Let everything that `run` is given later start after `event`."""
        if isinstance(event, DeviceEvent):
            self.stream.wait_event(event.end)

    def run(self, op: Op, link_bytes: int, numel: int, work: Callable[[], None]) -> DeviceEvent:
        """Enqueue `work`, which carries out `op`, without waiting for it."""
        start = torch.Event(device=self._device, enable_timing=True)
        end = torch.Event(device=self._device, enable_timing=True)
        start.record(self.stream)
        # Hooks of autograd run on a thread whose current stream is that of backward.
        before = torch.accelerator.current_stream(self._device)
        outside = torch.accelerator.current_stream()
        torch.accelerator.set_stream(self.stream)
        try:
            work()
        except BaseException:
            # No event will cover the copies that it has already enqueued.
            self.stream.synchronize()
            raise
        finally:
            torch.accelerator.set_stream(before)
            torch.accelerator.set_stream(outside)  # whose device becomes the current one again
        end.record(self.stream)
        assert self.clock is not None, "run before begin"
        return DeviceEvent(self.clock, start, end)


class AcceleratorBackend:
    """A real device: one stream per lane that it has, a thread for the host lane."""

    time_scale = 1.0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.label = str(device)
        self._kernels = device_kernels(device)
        self._host = WorkerStream("dos-host")
        self._device_streams = {
            lane: DeviceStream(device) for lane in (Lane.H2D, Lane.D2H, Lane.DEVICE)
        }

    @property
    def streams(self) -> Mapping[Lane, Stream]:
        """All four lanes."""
        return {**self._device_streams, Lane.HOST: self._host}

    def begin(self) -> float:
        """Start a step after what the caller's current stream holds; returns its time.

        Blocks until that point has passed, which nothing of the step could overtake anyway:
        so the device's clock is tied to the host's.
        """
        # The last step's PUBLISHes still read the staging buffers; the stream that waits for
        # them may have been another than the current one. Gradients may still be on their way.
        self._device_streams[Lane.H2D].stream.synchronize()
        base = torch.Event(device=self._device, enable_timing=True)
        base.record(torch.accelerator.current_stream(self._device))
        for lane in self._device_streams.values():
            lane.stream.wait_event(base)
        base.synchronize()
        clock = DeviceClock(base, time.perf_counter())
        for lane in self._device_streams.values():
            lane.clock = clock
        return clock.base_s

    def join(self, events: Sequence[Event]) -> None:
        """Let the caller's current stream wait for `events`; does not block."""
        stream = torch.accelerator.current_stream(self._device)
        for event in events:
            if isinstance(event, DeviceEvent):
                stream.wait_event(event.end)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Device memory, 1-D and uninitialized."""
        return torch.empty(numel, dtype=dtype, device=self._device)

    def update(
        self,
        p: torch.Tensor,
        m: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        w: torch.Tensor,
        scalars: AdamScalars,
    ) -> None:
        """One Adam update of flat 1-D device tensors, on the current stream."""
        self._kernels.update(p, m, v, g, w, scalars)

    def free_bytes(self) -> int | None:
        """By CUDA's count of free memory and by torch's of what it holds and held at most."""
        if self._device.type != "cuda":
            return None
        free_bytes: int = torch.cuda.mem_get_info(self._device)[0]
        held_bytes = torch.cuda.memory_reserved(self._device)
        return free_bytes + held_bytes - torch.cuda.max_memory_allocated(self._device)

    def mark(self) -> DeviceEvent:
        """What the caller's current stream has been given so far, as an event."""
        event = torch.Event(device=self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        # Before the first step there is no clock; nobody asks then when it was.
        clock = self._device_streams[Lane.D2H].clock or DeviceClock(event, time.perf_counter())
        return DeviceEvent(clock, event, event)

    def examine(self, grad: torch.Tensor) -> DeviceExamined:
        """Look at a flat gradient on the caller's current stream, without waiting for it."""
        return self._kernels.examine(grad)

    def read(self, readings: Sequence[DeviceExamined]) -> list[Examined]:
        """What was found, in their order; waits for the device once."""
        return torch_cast.on_host(readings)

    def release(self, slot: Sequence[torch.Tensor]) -> None:
        """Reuse is ordered by the plan; nothing to do."""

    def close(self) -> None:
        """Finish what is under way and stop the host lane's thread; idempotent."""
        self._drain()
        self._host.close()

    def _drain(self) -> None:
        for lane in self._device_streams.values():
            lane.stream.synchronize()
