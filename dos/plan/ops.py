"""The words that a plan is written in: lanes, op kinds, placements, buffers, ops, the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

STATE_BYTES_PER_ELEMENT = 12
"""Bytes of fp32 master weight, momentum and variance of one element."""


class Lane(str, Enum):
    """A queue that runs its ops one after another, in the order of the plan."""

    H2D = "h2d"
    D2H = "d2h"
    DEVICE = "device"
    HOST = "host"


class OpKind(str, Enum):
    """What an op does; `operands` says to which buffers."""

    GRAD_TO_HOST = "grad_to_host"
    FETCH = "fetch"
    UPDATE_DEVICE = "update_device"
    FLUSH = "flush"
    UPDATE_HOST = "update_host"
    PUBLISH = "publish"

    @property
    def lane(self) -> Lane:
        """The lane on which ops of this kind run."""
        return _LANE_OF[self]


_LANE_OF = {
    OpKind.GRAD_TO_HOST: Lane.D2H,
    OpKind.FETCH: Lane.H2D,
    OpKind.UPDATE_DEVICE: Lane.DEVICE,
    OpKind.FLUSH: Lane.D2H,
    OpKind.UPDATE_HOST: Lane.HOST,
    OpKind.PUBLISH: Lane.H2D,
}


class Placement(str, Enum):
    """Where a subgroup is updated, and with that where its state is at home.

    HOST: updated on the host, at home there. STREAMED: at home on the host, sent to the
    device for its update. RESIDENT: updated and at home on the device.
    """

    HOST = "host"
    STREAMED = "streamed"
    RESIDENT = "resident"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A piece of memory that ops read and write whole.

    Of subgroup i: ``grad[i]`` and ``weight[i]`` (gradient and parameter where the parameter
    lives), ``host.grad[i]`` (the gradient sent to the host), ``host.state[i]`` and
    ``device.state[i]`` (p, m, v at home). Shared: ``slot[s]`` (device staging of p, m, v) and
    ``stage[s]`` (pinned host staging of the weight to publish).
    """

    name: str
    index: int

    def __str__(self) -> str:
        return f"{self.name}[{self.index}]"


Operands = tuple[tuple[Buffer, ...], tuple[Buffer, ...]]


def operands(kind: OpKind, subgroup: int, slot: int | None) -> Operands:
    """The buffers that an op reads and those that it writes.

    A device update without a slot works on resident state; a host update without a staging
    buffer takes the gradient and writes the parameter where they lie, in host memory.
    """
    grad, weight = Buffer("grad", subgroup), Buffer("weight", subgroup)
    lease, state = Buffer("host.grad", subgroup), Buffer("host.state", subgroup)
    if kind is OpKind.GRAD_TO_HOST:
        return (grad,), (lease,)
    if slot is None:
        home = Buffer("device.state", subgroup) if kind is OpKind.UPDATE_DEVICE else state
        return (home, grad), (home, weight)
    device_slot, stage = Buffer("slot", slot), Buffer("stage", slot)
    return {
        OpKind.FETCH: ((state,), (device_slot,)),
        OpKind.UPDATE_DEVICE: ((device_slot, grad), (device_slot, weight)),
        OpKind.FLUSH: ((device_slot,), (state,)),
        OpKind.UPDATE_HOST: ((state, lease), (state, stage)),
        OpKind.PUBLISH: ((stage,), (weight,)),
    }[kind]


@dataclass(frozen=True, slots=True)
class Op:
    """One piece of work of a step.

    Attributes:
        index: its position in the plan.
        kind: what it does; fixes its lane.
        subgroup: on whose behalf.
        slot: the device slot (FETCH, UPDATE_DEVICE, FLUSH) or host staging buffer
            (UPDATE_HOST, PUBLISH) that it uses; None if it needs none.
        reads, writes: its buffers, as `operands` gives them.
        waits: indices of the ops that must be over before it starts, beside those that
            its lane has started earlier.
    """

    index: int
    kind: OpKind
    subgroup: int
    slot: int | None
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    waits: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SubgroupSize:
    """What one subgroup holds and moves.

    Attributes:
        numel: elements.
        grad_bytes: bytes of its gradient still to be sent to the host; with 0, all of it having
            been sent during backward, there is no GRAD_TO_HOST.
        weight_bytes: bytes of its weight as published to the device.
    """

    numel: int
    grad_bytes: int
    weight_bytes: int

    @property
    def state_bytes(self) -> int:
        """Bytes of p, m, v together: what a FETCH or a FLUSH moves."""
        return STATE_BYTES_PER_ELEMENT * self.numel


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """Bytes that a plan needs; sizes are those of the data, without alignment."""

    host_state_bytes: int
    host_grad_bytes: int
    stage_bytes: int
    device_slot_bytes: int
    device_resident_bytes: int

    @property
    def host_bytes(self) -> int:
        """All host memory: state, gradients sent, staging."""
        return self.host_state_bytes + self.host_grad_bytes + self.stage_bytes

    @property
    def device_bytes(self) -> int:
        """All device memory: slots and resident state."""
        return self.device_slot_bytes + self.device_resident_bytes


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """What one step does, as data: built, verified, printed, simulated and executed.

    Attributes:
        ops: in the order in which they are issued; each lane runs its own in this order.
        sizes: per subgroup, what it holds and moves.
        placement: per subgroup, where it is updated; also of the absent ones, whose state
            keeps its home.
        stride: the stride as text, a decimal or "host".
        slots: number of device staging slots.
        stages: number of host staging buffers.
        host_parameters: the parameters lie in host memory and nothing is sent.
        absent: subgroups without a gradient this step; they have no ops.
    """

    ops: tuple[Op, ...]
    sizes: tuple[SubgroupSize, ...]
    placement: tuple[Placement, ...]
    stride: str
    slots: int
    stages: int
    host_parameters: bool = False
    absent: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        assert len(self.sizes) == len(self.placement), "one size and one placement per subgroup"
        assert all(0 <= i < len(self.sizes) for i in self.absent), "absent: unknown subgroup"

    def __str__(self) -> str:
        """The whole plan as text, columns aligned; `parse_plan` reads it back."""
        header = (
            f"plan stride={self.stride} slots={self.slots} stages={self.stages} "
            f"parameters={'host' if self.host_parameters else 'device'}"
        )
        subgroups = [
            (
                f"subgroup {i}",
                placement.value,
                f"numel={size.numel}",
                f"grad_bytes={size.grad_bytes}",
                f"weight_bytes={size.weight_bytes}",
                "absent" if i in self.absent else "",
            )
            for i, (size, placement) in enumerate(zip(self.sizes, self.placement, strict=True))
        ]
        ops = [
            (
                f"op {op.index}",
                op.kind.lane.value,
                op.kind.value,
                str(op.subgroup),
                "-" if op.slot is None else f"@{op.slot}",
                _join(op.reads),
                f"-> {_join(op.writes)}",
                f"after {','.join(map(str, op.waits))}" if op.waits else "",
            )
            for op in self.ops
        ]
        return "\n".join((header, *_aligned(subgroups), *_aligned(ops)))

    def lanes(self) -> Mapping[Lane, tuple[Op, ...]]:
        """The ops of every lane, in the order in which it runs them."""
        return {lane: tuple(op for op in self.ops if op.kind.lane is lane) for lane in Lane}

    def link_bytes(self, op: Op) -> int:
        """Bytes that `op` moves over the link; 0 for an update."""
        size = self.sizes[op.subgroup]
        if op.kind is OpKind.GRAD_TO_HOST:
            return size.grad_bytes
        if op.kind is OpKind.PUBLISH:
            return size.weight_bytes
        return size.state_bytes if op.kind in (OpKind.FETCH, OpKind.FLUSH) else 0

    def memory(self) -> PlanMemory:
        """Bytes needed by all subgroups, also the absent ones: memory outlives the step.

        With `host_parameters` the state counts in full, although a parameter that is its own
        fp32 master needs 4 bytes per element less.
        """

        def of(placement: Placement) -> list[SubgroupSize]:
            return [s for s, at in zip(self.sizes, self.placement, strict=True) if at is placement]

        host, streamed = of(Placement.HOST), of(Placement.STREAMED)
        sent = [] if self.host_parameters else host
        return PlanMemory(
            host_state_bytes=sum(s.state_bytes for s in (*host, *streamed)),
            host_grad_bytes=sum(s.grad_bytes for s in sent),
            stage_bytes=self.stages * max((s.weight_bytes for s in sent), default=0),
            device_slot_bytes=self.slots * max((s.state_bytes for s in streamed), default=0),
            device_resident_bytes=sum(s.state_bytes for s in of(Placement.RESIDENT)),
        )


def _join(buffers: Sequence[Buffer]) -> str:
    return ",".join(map(str, buffers)) or "-"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
