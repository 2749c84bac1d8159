"""An accelerator made of threads, for machines without one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from dos.config import VirtualDevice
from dos.execute.backend import Event, Interval, Stream
from dos.execute.work import DTYPES
from dos.execute.worker import WorkerStream
from dos.kernels import adam, cast
from dos.kernels.cast import Examined
from dos.kernels.scalars import AdamScalars, Segment
from dos.plan import Lane, Op


class _Passed:
    """A point that a stream has passed."""

    def __init__(self) -> None:
        self._now_s = time.perf_counter()

    def done(self) -> bool:
        return True

    def wait(self) -> Interval:
        return Interval(self._now_s, self._now_s)


class VirtualBackend:
    """One FIFO thread per lane; "device" tensors are host tensors that no host op touches.

    The parameters and gradients of the caller, though CPU tensors, play device memory. The
    device lane runs the host's kernels on its own thread.
    """

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self.time_scale = device.time_scale
        self.label = device.label
        self._streams = {
            lane: WorkerStream(
                f"dos-virtual-{lane.value}",
                slot_s=self._slot_s if device.pace else None,
                jitter_seed=None
                if device.jitter_seed is None
                else f"{device.jitter_seed}/{lane.value}",
            )
            for lane in Lane
        }

    def _slot_s(self, op: Op, link_bytes: int, numel: int) -> float:
        assert self._device.pace is not None
        op_s = self._device.pace.op_s(op.kind.lane.value, numel=numel, link_bytes=link_bytes)
        return op_s * self.time_scale

    @property
    def streams(self) -> Mapping[Lane, Stream]:
        """All four lanes."""
        return self._streams

    def begin(self) -> float:
        """Start a step; returns `time.perf_counter()`, its clock."""
        return time.perf_counter()

    def join(self, events: Sequence[Event]) -> None:
        """Wait for `events`: the caller reads its CPU tensors without any stream."""
        for event in events:
            event.wait()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of its own, apart from the pool; poisoned where asked."""
        memory = torch.empty(numel, dtype=dtype, device="cpu")
        self.release([memory])
        return memory

    def update(
        self,
        p: torch.Tensor,
        m: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        w: torch.Tensor,
        scalars: AdamScalars,
    ) -> None:
        """One Adam update of flat 1-D tensors, on the calling thread alone."""
        segment = Segment(
            p=p.data_ptr(),
            m=m.data_ptr(),
            v=v.data_ptr(),
            g=g.data_ptr(),
            w=w.data_ptr(),
            numel=p.numel(),
            g_dtype=DTYPES[g.dtype],
            w_dtype=DTYPES[w.dtype],
            scalars=scalars,
        )
        adam.update([segment])

    def free_bytes(self) -> None:
        """Host memory plays the device's: nothing to tell."""

    def mark(self) -> Event:
        """An event that has passed: the caller's thread is the stream."""
        return _Passed()

    def examine(self, grad: torch.Tensor) -> Examined:
        """Look at a flat gradient, on the calling thread alone."""
        return cast.examine(grad.data_ptr(), grad.numel(), DTYPES[grad.dtype])

    def read(self, readings: Sequence[Examined]) -> list[Examined]:
        """What was found; nothing to wait for."""
        return list(readings)

    def release(self, slot: Sequence[torch.Tensor]) -> None:
        """Poison a slot, where asked, so that a read after its release shows in the bits."""
        if self._device.poison:
            for memory in slot:
                # All ones is NaN in fp32, bf16 and fp16 alike.
                memory.view(torch.uint8).fill_(0xFF)

    def close(self) -> None:
        """Stop the lanes' threads; idempotent."""
        for stream in self._streams.values():
            stream.close()
