"""The bodies of the ops: what FETCH, UPDATE_HOST and the others do to which memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dos.execute.backend import Device
from dos.kernels import adam
from dos.kernels.scalars import AdamScalars, DType, Segment
from dos.kernels.thread_pool import ThreadPool
from dos.plan import Op, OpKind

DTYPES = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16, torch.float16: DType.FP16}
"""The dtypes of weights and gradients, as the kernels name them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One segment of a subgroup: elements [start, stop) of a parameter, and where they lie.

    Offsets count from the start of the subgroup's memory: `offset` in elements of exp_avg and
    exp_avg_sq; `master_offset` in elements of the fp32 master, None where the parameter
    itself is the master; `wire_offset_bytes` in its gradient lease and staging buffers.
    """

    parameter: int
    start: int
    stop: int
    offset: int
    master_offset: int | None
    wire_offset_bytes: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class SubgroupMemory:
    """The state of one subgroup where it is at home: 1-D fp32 tensors, and its gradient lease."""

    pieces: tuple[Piece, ...]
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor | None

    @property
    def state(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """p, m, v in the kernels' order."""
        return self.master, self.exp_avg, self.exp_avg_sq


@dataclass(frozen=True, slots=True)
class Staging:
    """Memory between home and device.

    `slots`: per device slot, fp32 p, m, v. `stages`: pinned host buffers of published weights,
    uint8. `device_grad`, `device_weight`: device buffers, uint8, from which a gradient is sent
    and into which a weight is published in one transfer. One of each is enough: only one
    lane uses it, in order.
    """

    slots: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...] = ()
    stages: tuple[torch.Tensor, ...] = ()
    device_grad: torch.Tensor | None = None
    device_weight: torch.Tensor | None = None

    @property
    def stage_bytes(self) -> int:
        """Size of each staging buffer of weights; 0 without one."""
        return self.stages[0].numel() if self.stages else 0


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one step works on, indexed by parameter.

    `weights` and `grads` are 1-D and in the memory order of the parameter; a grad is None
    where the parameter is not updated this step, and so are its scalars.
    """

    weights: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor | None]
    scalars: Sequence[AdamScalars | None]


class StepWork:
    """Gives the interpreter the body of each op of one step.

    Args:
        subgroups: where each subgroup's state lives.
        staging: slots and staging buffers.
        inputs: weights, gradients and scalars of this step.
        device: the backend, where it has a device lane; None where parameters lie in host
            memory.
        pool: threads of the host update.
    """

    def __init__(
        self,
        subgroups: Sequence[SubgroupMemory],
        staging: Staging,
        inputs: StepInputs,
        *,
        device: Device | None,
        pool: ThreadPool | None,
    ) -> None:
        self._subgroups, self._staging, self._inputs = subgroups, staging, inputs
        self._on_device, self._pool = device, pool

    def __call__(self, op: Op) -> Callable[[], None]:
        """The body of `op`."""
        # Made here: kept on self, it would be a cycle that holds the step's gradients.
        bodies: dict[OpKind, Callable[[Op], None]] = {
            OpKind.GRAD_TO_HOST: self._grad_to_host,
            OpKind.FETCH: self._fetch,
            OpKind.UPDATE_DEVICE: self._update_device,
            OpKind.FLUSH: self._flush,
            OpKind.UPDATE_HOST: self._update_host,
            OpKind.PUBLISH: self._publish,
        }
        return partial(bodies[op.kind], op)

    def _present(self, op: Op) -> Iterator[tuple[Piece, torch.Tensor, torch.Tensor, AdamScalars]]:
        """The pieces that this step updates, each with its weight, gradient and scalars."""
        for piece in self._subgroups[op.subgroup].pieces:
            grad = self._inputs.grads[piece.parameter]
            scalars = self._inputs.scalars[piece.parameter]
            if grad is not None and scalars is not None:
                part = slice(piece.start, piece.stop)
                yield piece, self._inputs.weights[piece.parameter][part], grad[part], scalars

    @property
    def _device(self) -> Device:
        assert self._on_device is not None, "an op of the device lanes without a device"
        return self._on_device

    def _slot(self, op: Op) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert op.slot is not None
        return self._staging.slots[op.slot]

    def _fetch(self, op: Op) -> None:
        for staged, home in zip(self._slot(op), self._subgroups[op.subgroup].state, strict=True):
            staged[: home.numel()].copy_(home, non_blocking=True)

    def _flush(self, op: Op) -> None:
        for staged, home in zip(self._slot(op), self._subgroups[op.subgroup].state, strict=True):
            home.copy_(staged[: home.numel()], non_blocking=True)
        self._device.release(self._slot(op))

    def _update_device(self, op: Op) -> None:
        # A resident has no slot: it is updated where it is at home.
        p, m, v = self._subgroups[op.subgroup].state if op.slot is None else self._slot(op)
        for piece, weight, grad, scalars in self._present(op):
            part = slice(piece.offset, piece.offset + piece.numel)
            self._device.update(p[part], m[part], v[part], grad, weight, scalars)

    def _grad_to_host(self, op: Op) -> None:
        lease = self._subgroups[op.subgroup].grad
        assert lease is not None
        present = list(self._present(op))
        gathered = lease
        if len(present) > 1:
            # Gathered on the device, then one transfer.
            assert self._staging.device_grad is not None
            gathered = self._staging.device_grad[: lease.numel()]
        for piece, _, grad, _ in present:
            _wire(gathered, piece, grad.dtype).copy_(grad, non_blocking=True)
        if gathered is not lease:
            lease.copy_(gathered, non_blocking=True)

    def _publish(self, op: Op) -> None:
        assert op.slot is not None
        stage = self._staging.stages[op.slot]
        present = list(self._present(op))
        arrived = stage
        if len(present) > 1:
            # One transfer and a scatter on the device, instead of many small transfers.
            assert self._staging.device_weight is not None
            arrived = self._staging.device_weight
            last, weight, _, _ = present[-1]
            n_bytes = last.wire_offset_bytes + last.numel * weight.element_size()
            arrived[:n_bytes].copy_(stage[:n_bytes], non_blocking=True)
        for piece, weight, _, _ in present:
            weight.copy_(_wire(arrived, piece, weight.dtype), non_blocking=True)
        self._device.release([stage])

    def _update_host(self, op: Op) -> None:
        home = self._subgroups[op.subgroup]
        stage = None if op.slot is None else self._staging.stages[op.slot]
        segments = []
        for piece, weight, grad, scalars in self._present(op):
            if home.grad is not None:
                grad = _wire(home.grad, piece, grad.dtype)
            if stage is not None:
                weight = _wire(stage, piece, weight.dtype)
            own_master = piece.master_offset is None
            segments.append(
                Segment(
                    p=weight.data_ptr()
                    if piece.master_offset is None
                    else home.master.data_ptr() + 4 * piece.master_offset,
                    m=home.exp_avg.data_ptr() + 4 * piece.offset,
                    v=home.exp_avg_sq.data_ptr() + 4 * piece.offset,
                    g=grad.data_ptr(),
                    w=0 if own_master else weight.data_ptr(),
                    numel=piece.numel,
                    g_dtype=DTYPES[grad.dtype],
                    w_dtype=DType.NONE if own_master else DTYPES[weight.dtype],
                    scalars=scalars,
                )
            )
        adam.update(segments, pool=self._pool)


def _wire(buffer: torch.Tensor, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
    """A piece's elements inside a gradient lease or staging buffer."""
    start = piece.wire_offset_bytes
    return buffer[start : start + piece.numel * dtype.itemsize].view(dtype)
