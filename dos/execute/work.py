"""The bodies of the ops: what FETCH, UPDATE_HOST and the others do to which memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    itself is the master; `grad_offset_bytes` in its gradient lease, where gradients have
    `grad_dtype`; `weight_offset_bytes` in a staging buffer.
    """

    parameter: int
    start: int
    stop: int
    offset: int
    master_offset: int | None
    grad_dtype: torch.dtype
    grad_offset_bytes: int
    weight_offset_bytes: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def grad_bytes(self) -> int:
        """Bytes of its gradient as sent to the host."""
        return self.numel * self.grad_dtype.itemsize

    def grad_in(self, buffer: torch.Tensor) -> torch.Tensor:
        """Its gradient inside a gradient lease, or a buffer laid out like one."""
        start = self.grad_offset_bytes
        return buffer[start : start + self.grad_bytes].view(self.grad_dtype)

    def weight_in(self, buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Its weight inside a staging buffer."""
        start = self.weight_offset_bytes
        return buffer[start : start + self.numel * dtype.itemsize].view(dtype)


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

    @property
    def slot_bytes(self) -> int:
        """Device memory of all slots."""
        return sum(part.nbytes for slot in self.slots for part in slot)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one step works on, indexed by parameter.

    `weights` and `grads` are 1-D and in the memory order of the parameter; scalars are None
    where the parameter is not updated this step. The gradients of `arrived` parameters lie in
    the gradient leases already, as far as the host needs them; a grad may be None where the
    device does not need it either. A piece in `placed` takes its gradient from there.
    """

    weights: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor | None]
    scalars: Sequence[AdamScalars | None]
    arrived: Collection[int] = ()
    placed: Mapping[Piece, torch.Tensor] = field(default_factory=dict)


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

    def _present(self, op: Op) -> Iterator[tuple[Piece, torch.Tensor, AdamScalars]]:
        """The pieces that this step updates, each with its weight and scalars."""
        for piece in self._subgroups[op.subgroup].pieces:
            scalars = self._inputs.scalars[piece.parameter]
            if scalars is not None:
                weight = self._inputs.weights[piece.parameter]
                yield piece, weight[piece.start : piece.stop], scalars

    def _grad(self, piece: Piece) -> torch.Tensor:
        if piece in self._inputs.placed:
            return self._inputs.placed[piece]
        grad = self._inputs.grads[piece.parameter]
        assert grad is not None, f"parameter {piece.parameter} has no gradient here"
        return grad[piece.start : piece.stop]

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
        for piece, weight, scalars in self._present(op):
            part = slice(piece.offset, piece.offset + piece.numel)
            self._device.update(p[part], m[part], v[part], self._grad(piece), weight, scalars)

    def _grad_to_host(self, op: Op) -> None:
        home = self._subgroups[op.subgroup]
        arrived = self._inputs.arrived
        present = [piece for piece, *_ in self._present(op)]
        missing = [(p, self._grad(p)) for p in present if p.parameter not in arrived]
        # One transfer, unless it would write over what has arrived between them.
        batches = [missing] if len(missing) == len(present) else [[one] for one in missing]
        for batch in batches:
            send(home, batch, self._staging)

    def _publish(self, op: Op) -> None:
        assert op.slot is not None
        stage = self._staging.stages[op.slot]
        present = list(self._present(op))
        arrived = stage
        if len(present) > 1:
            # One transfer and a scatter on the device, instead of many small transfers.
            assert self._staging.device_weight is not None
            arrived = self._staging.device_weight
            last, weight, _ = present[-1]
            n_bytes = last.weight_offset_bytes + weight.nbytes
            arrived[:n_bytes].copy_(stage[:n_bytes], non_blocking=True)
        for piece, weight, _ in present:
            weight.copy_(piece.weight_in(arrived, weight.dtype), non_blocking=True)
        self._device.release([stage])

    def _update_host(self, op: Op) -> None:
        home = self._subgroups[op.subgroup]
        stage = None if op.slot is None else self._staging.stages[op.slot]
        segments = []
        for piece, weight, scalars in self._present(op):
            grad = self._grad(piece) if home.grad is None else piece.grad_in(home.grad)
            if stage is not None:
                weight = piece.weight_in(stage, weight.dtype)
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


def send(
    home: SubgroupMemory, grads: Sequence[tuple[Piece, torch.Tensor]], staging: Staging
) -> None:
    """Copy gradients of pieces into their subgroup's lease, widened to the wire's dtype.

    On the d2h lane: that all such copies use one device buffer is safe in its order only.
    """
    assert home.grad is not None, "nothing is sent for a subgroup of the device"
    if len(grads) == 1 and grads[0][0].grad_dtype is grads[0][1].dtype:
        piece, grad = grads[0]
        piece.grad_in(home.grad).copy_(grad, non_blocking=True)
        return
    # Gathered and widened on the device, then one transfer.
    assert staging.device_grad is not None
    for piece, grad in grads:
        piece.grad_in(staging.device_grad).copy_(grad, non_blocking=True)
    first, last = grads[0][0], grads[-1][0]
    part = slice(first.grad_offset_bytes, last.grad_offset_bytes + last.grad_bytes)
    home.grad[part].copy_(staging.device_grad[part], non_blocking=True)
