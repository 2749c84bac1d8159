"""What a calibration has at hand: memory, threads and a device, real or virtual."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from dos.config import VirtualDevice
from dos.errors import PoolError
from dos.kernels import adam
from dos.kernels.device import device_kernels
from dos.kernels.scalars import AdamScalars, DType, Segment
from dos.kernels.thread_pool import ThreadPool
from dos.memory import Slab, available_host_bytes, padded_bytes
from dos.memory.sizes import LINE_BYTES, bytes_text
from perfmodel.timing import Work

UPDATE_BYTES = 16
"""Host memory of a parameter with 16-bit gradient and weight."""

SCALARS = AdamScalars.at_step(
    lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=10, decoupled=True
)

_FEWEST_PARAMS = 2_000_000  # fewer stay in the caches of a server's processor


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a calibration may take.

    Attributes:
        window_s: seconds for which each measurement runs at least.
        params: parameters of a host update.
        copy_bytes: of each copy over the link; as many bytes of it are updated on the device.
        disk_bytes: written to the disk, and read again.
    """

    window_s: float
    params: int
    copy_bytes: int
    disk_bytes: int

    @property
    def host_bytes(self) -> int:
        """Host memory that it takes: for the update, and for two pinned and two other copies."""
        return UPDATE_BYTES * self.params + 4 * self.copy_bytes

    def within(self, available_bytes: int | None) -> Effort:
        """As much of it as a quarter of the available host memory holds.

        Where the system does not say what is available, 1 GiB is taken for granted.

        Raises:
            PoolError: that would be too little to get past the processor's caches.
        """
        room_bytes = (1 << 30 if available_bytes is None else available_bytes) // 4
        share = min(1.0, room_bytes / self.host_bytes)
        fitting = replace(
            self, params=int(share * self.params), copy_bytes=int(share * self.copy_bytes)
        )
        if share < 1 and fitting.params < _FEWEST_PARAMS:
            needed_bytes = 4 * self.host_bytes * _FEWEST_PARAMS // self.params
            raise PoolError(
                f"a calibration within {bytes_text(room_bytes)}, a quarter of what is available, "
                "would measure the processor's caches",
                where="host memory",
                fix=f"free host memory: {bytes_text(needed_bytes)} must be available",
            )
        return fitting


class MeasuredDevice(Protocol):
    """A device with a link."""

    device: torch.device
    """Where its tensors are made, and for which host memory is pinned."""

    emulated: bool
    """Whether times are made up, so that only what its pace speaks of can be measured."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Its memory, 1-D."""
        ...

    def update(self, arrays: DeviceArrays) -> None:
        """One Adam update."""
        ...

    def work(
        self, lane: str, units: float, body: Callable[[], object], *, repeats: int = 1, numel: int
    ) -> Work:
        """`repeats` times `body` on a lane of its own, each of so many `units`.

        A body of lane "h2d" or "d2h" copies `numel` fp32 elements, one of another lane updates
        as many parameters.
        """
        ...


class Accelerator:
    """A real device: each work has a stream of its own."""

    emulated = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._update = device_kernels(device).update

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros, so that they are there before any stream reads them."""
        made = torch.zeros(numel, dtype=dtype, device=self.device)
        torch.accelerator.synchronize(self.device)
        return made

    def update(self, arrays: DeviceArrays) -> None:
        """One Adam update on the current stream."""
        self._update(*arrays.pmv, arrays.g, arrays.w, SCALARS)

    def work(
        self, lane: str, units: float, body: Callable[[], object], *, repeats: int = 1, numel: int
    ) -> Work:
        """See `MeasuredDevice.work`."""
        stream = None if lane == "host" else torch.Stream(device=self.device)

        def run() -> None:
            if stream is not None:
                torch.accelerator.set_stream(stream)  # of this thread
            for _ in range(repeats):
                body()
            if stream is not None:
                stream.synchronize()

        return Work(units * repeats, run)


class VirtualAccelerator:
    """`dos.VirtualDevice`: host memory plays the device's, and ops last as its pace has it."""

    device = torch.device("cpu")

    def __init__(self, virtual: VirtualDevice) -> None:
        self._pace, self._time_scale = virtual.pace, virtual.time_scale
        self.emulated = virtual.pace is not None

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory."""
        return torch.zeros(numel, dtype=dtype, device="cpu")

    def update(self, arrays: DeviceArrays) -> None:
        """One Adam update on the calling thread alone."""
        p, m, v = (each.data_ptr() for each in arrays.pmv)
        numel, g, w = arrays.w.numel(), arrays.g.data_ptr(), arrays.w.data_ptr()
        adam.update([Segment(p, m, v, g, w, numel, DType.BF16, DType.BF16, SCALARS)])

    def work(
        self, lane: str, units: float, body: Callable[[], object], *, repeats: int = 1, numel: int
    ) -> Work:
        """See `MeasuredDevice.work`."""
        slot_s = 0.0
        if self._pace is not None:
            op_s = self._pace.op_s(lane, numel=numel, link_bytes=4 * numel)
            slot_s = op_s * self._time_scale

        def run() -> None:
            for _ in range(repeats):
                end_s = time.perf_counter() + slot_s
                body()
                while (rest_s := end_s - time.perf_counter()) > 0:
                    time.sleep(rest_s)

        return Work(units * repeats * self._time_scale, run)


class DeviceArrays:
    """p, m, v in fp32, g and w in bf16, in device memory."""

    def __init__(self, device: MeasuredDevice, numel: int) -> None:
        self.pmv = [device.empty(numel, torch.float32) for _ in range(3)]
        self.g, self.w = (device.empty(numel, torch.bfloat16) for _ in range(2))


class HostArrays:
    """p, m, v in fp32, g and w in bf16, in a slab from its start on."""

    def __init__(self, slab: Slab, numel: int) -> None:
        self.numel, self.at = numel, {}
        offset_bytes = 0
        for name, itemsize in (("p", 4), ("m", 4), ("v", 4), ("g", 2), ("w", 2)):
            self.at[name] = slab.address + offset_bytes
            if name in "pg":  # a processor may write whole lines of zeros without moving them
                dtype = torch.float32 if itemsize == 4 else torch.bfloat16
                slab.tensor(offset_bytes, numel, dtype).fill_(0.75)
            offset_bytes += padded_bytes(numel * itemsize, LINE_BYTES)
        self.end_bytes = offset_bytes

    def segment(self, numel: int | None = None) -> Segment:
        """The first `numel` of the parameters, or all, for `adam.update`."""
        numel = self.numel if numel is None else numel
        return Segment(
            **self.at, numel=numel, g_dtype=DType.BF16, w_dtype=DType.BF16, scalars=SCALARS
        )


class Bench:
    """Host memory, threads and device of one calibration.

    Args:
        device: None where there is none.
        pool: threads of the host update.
        effort: what to take.

    Attributes:
        arrays: of the host update.
        here: two 1-D fp32 tensors in host memory, pinned if it can be, to copy from and to.

    Raises:
        PoolError: host memory is too small.
    """

    def __init__(self, device: MeasuredDevice | None, pool: ThreadPool, effort: Effort) -> None:
        self.device, self.pool = device, pool
        self.effort = effort.within(available_host_bytes())
        self.copy_numel = self.effort.copy_bytes // 4
        n_bytes = UPDATE_BYTES * self.effort.params + 8 * self.copy_numel + 7 * LINE_BYTES
        with ExitStack() as cleanup:
            self._slab = Slab(
                n_bytes,
                device=device.device if device else None,
                touch=lambda address: adam.first_touch([(address, n_bytes)], pool),
            )
            cleanup.callback(self._slab.close)
            self.arrays = HostArrays(self._slab, self.effort.params)
            starts = [padded_bytes(self.arrays.end_bytes, LINE_BYTES)]
            starts.append(padded_bytes(starts[0] + 4 * self.copy_numel, LINE_BYTES))
            self.here = [
                self._slab.tensor(start, self.copy_numel, torch.float32) for start in starts
            ]
            self._cleanup = cleanup.pop_all()

    def copies(
        self, here: list[torch.Tensor], *, numel: int | None = None, repeats: int = 1
    ) -> list[Work]:
        """Copies to the device and from it, in bytes; of the first `numel` elements."""
        assert self.device is not None, "no device to copy to"
        numel = self.copy_numel if numel is None else numel
        there = [self.device.empty(numel, torch.float32) for _ in range(2)]
        near = [tensor[:numel] for tensor in here]
        bodies = {
            "h2d": lambda: there[0].copy_(near[0], non_blocking=True),
            "d2h": lambda: near[1].copy_(there[1], non_blocking=True),
        }
        return [
            self.device.work(lane, 4 * numel, body, numel=numel, repeats=repeats)
            for lane, body in bodies.items()
        ]

    def host_update(
        self, pool: ThreadPool | None = None, *, numel: int | None = None, repeats: int = 1
    ) -> Work:
        """The host update of the first `numel` parameters, or of all, in parameters."""
        segment = self.arrays.segment(numel)
        body = partial(adam.update, [segment], pool=pool or self.pool)
        timed_by = self.device or VirtualAccelerator(VirtualDevice())
        return timed_by.work("host", segment.numel, body, numel=segment.numel, repeats=repeats)

    def close(self) -> None:
        """Give the memory back; idempotent."""
        self.here = []
        self._cleanup.close()
