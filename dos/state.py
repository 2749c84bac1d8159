"""The fp32 state of every subgroup: where it is at home, and views of it per parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from dos.errors import ConfigError, PoolError
from dos.execute.backend import Device
from dos.execute.work import Piece, Staging, SubgroupMemory
from dos.memory import Lease, Pool, Requirement, padded_bytes
from dos.memory.flat import flat, flat_like, unflatten
from dos.memory.sizes import LINE_BYTES, bytes_text
from dos.plan import Placement, Subgroup, SubgroupSize, UpdatePlan


def pieces_of(
    subgroup: Subgroup, parameters: Sequence[torch.Tensor], *, host_parameters: bool
) -> tuple[Piece, ...]:
    """The segments of `subgroup` with their offsets in its memory."""
    pieces, master, wire_bytes = [], 0, 0
    for segment, offset in zip(subgroup.segments, subgroup.offsets, strict=True):
        parameter = parameters[segment.parameter]
        # An fp32 weight in host memory is its own master where it lies.
        own = host_parameters and parameter.dtype is torch.float32
        piece = Piece(
            parameter=segment.parameter,
            start=segment.start,
            stop=segment.stop,
            offset=offset,
            master_offset=None if own else master,
            wire_offset_bytes=wire_bytes,
        )
        pieces.append(piece)
        master += 0 if own else piece.numel
        # Each on a cache line of its own, so that any dtype is aligned behind any other.
        wire_bytes += padded_bytes(piece.numel * parameter.element_size(), LINE_BYTES)
    return tuple(pieces)


def size_of(pieces: Sequence[Piece], parameters: Sequence[torch.Tensor]) -> SubgroupSize:
    """What a subgroup of these pieces holds and moves; gradients have the weights' dtype."""
    last = pieces[-1]
    wire_bytes = last.wire_offset_bytes + last.numel * parameters[last.parameter].element_size()
    return SubgroupSize(
        numel=sum(piece.numel for piece in pieces), grad_bytes=wire_bytes, weight_bytes=wire_bytes
    )


def master_numel(pieces: Sequence[Piece]) -> int:
    """Elements of fp32 master that a subgroup of these pieces keeps."""
    return sum(piece.numel for piece in pieces if piece.master_offset is not None)


def requirement(
    pieces: Sequence[tuple[Piece, ...]], plan: UpdatePlan, *, ring_bytes: int | None
) -> Requirement:
    """Host memory of a plan over subgroups of these pieces, all three kinds of lease.

    Raises:
        PoolError: `ring_bytes` is too small for the plan's staging buffers.
    """
    state: list[int] = []
    grad: list[int] = []
    stage_bytes = 0
    for its, placement, size in zip(pieces, plan.placement, plan.sizes, strict=True):
        if placement is not Placement.RESIDENT:
            state += [4 * master_numel(its), 4 * size.numel, 4 * size.numel]
        if placement is Placement.HOST and not plan.host_parameters:
            grad.append(size.grad_bytes)
            stage_bytes = max(stage_bytes, size.weight_bytes)
    needed_bytes = plan.stages * padded_bytes(stage_bytes)
    if ring_bytes is not None and ring_bytes < needed_bytes:
        raise PoolError(
            f"{bytes_text(ring_bytes)} cannot hold {plan.stages} staging buffers of "
            f"{bytes_text(padded_bytes(stage_bytes))}",
            where="ring_bytes",
            fix=f"raise ring_bytes to {needed_bytes}, or set a smaller subgroup_size",
        )
    return Requirement.of_leases(
        state=state, gradient=grad, ring_bytes=needed_bytes if ring_bytes is None else ring_bytes
    )


class OptimizerState:
    """fp32 master, exp_avg and exp_avg_sq of all subgroups, and the staging memory.

    Args:
        parameters: the trainable parameters, dense.
        pieces: of every subgroup.
        plan: placement, sizes, slots and stages.
        pool: host memory, as `requirement` computed it.
        device: the backend, where it has device memory.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        pieces: Sequence[tuple[Piece, ...]],
        plan: UpdatePlan,
        pool: Pool,
        device: Device | None,
    ) -> None:
        self.steps = [0] * len(parameters)
        self._parameters = list(parameters)
        self._leases: list[tuple[Lease, Lease, Lease] | None] = []
        self._where: list[list[tuple[int, Piece]]] = [[] for _ in parameters]
        self.subgroups = [
            self._home(index, its, plan, pool, device) for index, its in enumerate(pieces)
        ]
        self.staging = _staging(plan, pool, device)
        self._seen: list[tuple[int, int]] | None = None  # until the first step is over

    def _home(
        self,
        index: int,
        pieces: tuple[Piece, ...],
        plan: UpdatePlan,
        pool: Pool,
        device: Device | None,
    ) -> SubgroupMemory:
        numels = (master_numel(pieces), plan.sizes[index].numel, plan.sizes[index].numel)
        for piece in pieces:
            self._where[piece.parameter].append((index, piece))
        grad = None
        if plan.placement[index] is Placement.RESIDENT:
            assert device is not None, "residents need a device"
            self._leases.append(None)
            state = [device.empty(numel, torch.float32).zero_() for numel in numels]
        else:
            names = (f"{name} of subgroup {index}" for name in ("master", "exp_avg", "exp_avg_sq"))
            master, exp_avg, exp_avg_sq = (
                pool.state(4 * numel, name) for numel, name in zip(numels, names, strict=True)
            )
            self._leases.append((master, exp_avg, exp_avg_sq))
            state = [lease.tensor(torch.float32) for lease in (master, exp_avg, exp_avg_sq)]
            if plan.placement[index] is Placement.HOST and not plan.host_parameters:
                lease = pool.gradient(plan.sizes[index].grad_bytes, f"gradient of subgroup {index}")
                grad = lease.tensor(torch.uint8)
        return SubgroupMemory(pieces, state[0], state[1], state[2], grad)

    def fill_masters(self) -> None:
        """Take the fp32 masters from the weights, before a step.

        At the first one, since weights are often loaded after the optimizer was made; later
        only where somebody else changed a weight, which shows in its version or address.
        """
        for index, parameter in enumerate(self._parameters):
            if self._seen is None:
                for master, weight in self._masters_of(index):
                    master.copy_(weight)
            elif self._seen[index] != _identity(parameter):
                for master, weight in self._masters_of(index):
                    # By bits: a master keeps what it knows beyond a weight that is its rounding.
                    same = _words(master.to(weight.dtype)) == _words(weight.to(master.device))
                    master.copy_(torch.where(same, master, weight.to(master)))

    def remember_weights(self) -> None:
        """Note how a step left the weights, to tell later changes by others."""
        self._seen = [_identity(parameter) for parameter in self._parameters]

    def _masters_of(self, index: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The masters of a parameter, piece by piece, each with the weights that it is for."""
        for subgroup, piece in self._where[index]:
            if piece.master_offset is not None:
                part = slice(piece.master_offset, piece.master_offset + piece.numel)
                weight = flat(self._parameters[index])[piece.start : piece.stop]
                yield self.subgroups[subgroup].master[part], weight

    def adopt(self, index: int, state: Mapping[str, Any]) -> None:
        """Take over what a torch optimizer keeps for parameter `index`.

        Raises:
            ConfigError: it does not fit the parameter; nothing has been taken over then.
        """
        parameter = self._parameters[index]
        step = float(state.get("step", math.nan))
        fits = step >= 0 and step.is_integer()
        for name in ("exp_avg", "exp_avg_sq"):
            fits = fits and name in state and state[name].shape == parameter.shape
        if not fits:
            raise ConfigError(
                "its state does not fit it: a step count and exp_avg and exp_avg_sq of its shape "
                "are needed",
                where=f"state of parameter {index}",
                fix="load a matching state before wrapping, or clear the optimizer's state",
            )
        self.steps[index] = int(step)
        averages = [flat_like(state[name], parameter) for name in ("exp_avg", "exp_avg_sq")]
        for subgroup, piece in self._where[index]:
            memory = self.subgroups[subgroup]
            part = slice(piece.offset, piece.offset + piece.numel)
            for target, source in zip((memory.exp_avg, memory.exp_avg_sq), averages, strict=True):
                target[part].copy_(source[piece.start : piece.stop])

    def of_parameter(self, index: int) -> dict[str, torch.Tensor]:
        """step, exp_avg, exp_avg_sq of a parameter, and the fp32 master of a 16-bit one.

        Each with a storage of exactly its bytes: views where the parameter lies in one piece
        on the host, else copies.
        """
        state = {"step": torch.tensor(float(self.steps[index]))}
        names = ["exp_avg", "exp_avg_sq"]
        if self._parameters[index].dtype is not torch.float32:
            names.append("master")
        for name in names:
            parts = [self._part(subgroup, piece, name) for subgroup, piece in self._where[index]]
            if len(parts) == 1:
                whole = parts[0]
            else:  # an empty parameter has none
                nothing = torch.empty(0, dtype=torch.float32, device="cpu")
                whole = torch.cat([nothing, *(part.cpu() for part in parts)])
            state[name] = unflatten(whole, self._parameters[index])
        return state

    def drop(self) -> None:
        """Let go of all memory; nothing of any parameter is left."""
        self.subgroups, self._leases, self.staging = [], [], Staging()
        self.steps = [0] * len(self.steps)

    def _part(self, subgroup: int, piece: Piece, name: str) -> torch.Tensor:
        leases = self._leases[subgroup]
        start = piece.offset if name != "master" else piece.master_offset
        assert start is not None
        if leases is None:
            resident: torch.Tensor = getattr(self.subgroups[subgroup], name)
            return resident[start : start + piece.numel].clone()
        lease = leases[("master", "exp_avg", "exp_avg_sq").index(name)]
        return lease.tensor(torch.float32, piece.numel, offset_bytes=4 * start)


def _identity(parameter: torch.Tensor) -> tuple[int, int]:
    """What an in-place change or an exchange of the memory changes, but for writes by `.data`."""
    return parameter._version, parameter.data_ptr()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The raw bits, as integers."""
    return tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


def _staging(plan: UpdatePlan, pool: Pool, device: Device | None) -> Staging:
    """Slots, stages and the two device buffers, as large as the largest subgroup that uses them."""
    if device is None:
        return Staging()
    sizes = list(zip(plan.sizes, plan.placement, strict=True))
    streamed = max((s.numel for s, at in sizes if at is Placement.STREAMED), default=0)
    wire_bytes = max((s.weight_bytes for s, at in sizes if at is Placement.HOST), default=0)
    slots = range(plan.slots if streamed else 0)
    stages = range(plan.stages if wire_bytes else 0)
    f32 = torch.float32
    return Staging(
        slots=tuple(
            (device.empty(streamed, f32), device.empty(streamed, f32), device.empty(streamed, f32))
            for _ in slots
        ),
        # Held as long as the optimizer lives: a step never waits for a staging buffer.
        stages=tuple(
            pool.ring.acquire(wire_bytes, f"weight staging buffer {i}").tensor(torch.uint8)
            for i in stages
        ),
        device_grad=device.empty(wire_bytes, torch.uint8),
        device_weight=device.empty(wire_bytes, torch.uint8),
    )


class StateView(Mapping[torch.Tensor, dict[str, torch.Tensor]]):
    """`optimizer.state`: what torch's optimizers keep per parameter, made on access.

    Holds the parameters that have been updated at least once.
    """

    def __init__(self, state: OptimizerState, index_of: Mapping[torch.Tensor, int]) -> None:
        self._state, self._index_of = state, index_of

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        index = self._index_of[parameter]
        if self._state.steps[index] == 0:
            raise KeyError(parameter)
        return self._state.of_parameter(index)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (p for p, index in self._index_of.items() if self._state.steps[index])

    def __len__(self) -> int:
        return sum(1 for _ in self)
