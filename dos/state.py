"""The fp32 state of every subgroup: where it is at home, and which part is whose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from dos.execute.backend import Device
from dos.execute.work import Piece, Staging, StepInputs, SubgroupMemory
from dos.host_memory import STATE_KINDS, has_lease, host_arrays, master_numel
from dos.masters import MasterPart, Masters
from dos.memory import Gates, Lease, Pool, tensor_across
from dos.memory.flat import unflatten
from dos.memory.pieces import Pieces
from dos.plan import Placement, SubgroupSize, UpdatePlan
from dos.shards import local_of


class OptimizerState:
    """fp32 master, exp_avg and exp_avg_sq of all subgroups, and the staging memory.

    Args:
        device: the backend, where it has device memory.
        any_stride: the stride may change: see `restage`.

    Attributes:
        parameters: the trained ones, dense; of a DTensor the local shard is.
        steps: per parameter, how often it was updated.
        gates: closed for subgroups that are being captured.
        masters: what brings masters in line with the weights.
        subgroups: per subgroup, its state where it is at home.
        staging: slots and staging buffers.
        leaves: by parameter and kind of state, how it is shown to captures, once it was.
    """

    def __init__(self, device: Device | None, *, any_stride: bool = False) -> None:
        self.parameters: list[torch.Tensor] = []
        self.steps: list[int] = []
        self.gates = Gates()
        self.masters = Masters(self.gates)
        self.subgroups: list[SubgroupMemory] = []
        self.staging = Staging()
        self.leaves: dict[tuple[int, str], torch.Tensor | Pieces | None] = {}
        self._device, self._any_stride = device, any_stride
        self._leases: dict[tuple[str, int], Lease] = {}
        self._where: list[list[tuple[int, Piece]]] = []

    def extend(
        self,
        parameters: Sequence[torch.Tensor],
        pieces: Sequence[tuple[Piece, ...]],
        plan: UpdatePlan,
        pool: Pool,
    ) -> None:
        """Take in parameters behind those that are here, never stepped.

        Args:
            parameters: the new ones.
            pieces: of the new subgroups, which hold these parameters.
            plan: of all subgroups, the old ones placed as before.
            pool: host memory, as `requirement` computed it.
        """
        first, first_parameter = len(self.subgroups), len(self.parameters)
        leases = {
            (kind, index): pool.state(4 * numel, f"{kind} of subgroup {index}")
            for kind, index, numel in host_arrays(pieces, plan, first)
        }
        homes = [
            _home(index, its, plan, pool, leases, self._device, self._any_stride)
            for index, its in enumerate(pieces, first)
        ]
        staging = _staging(plan, pool, self._device, self.staging, self._any_stride)
        # From here on nothing fails.
        self.subgroups += homes
        self.staging = staging
        self._leases.update(leases)
        self.parameters += parameters
        self.steps += [0] * len(parameters)
        self._where += [[] for _ in parameters]
        for index, its in enumerate(pieces, first):
            for piece in its:
                self._where[piece.parameter].append((index, piece))
        for index, parameter in enumerate(parameters, first_parameter):
            homes_of = zip(self._where[index], self.parts(index, "master"), strict=False)
            parts = [MasterPart(*home, subgroup) for (subgroup, _), home in homes_of]
            self.masters.add(parameter, parts)

    def restage(self, plan: UpdatePlan) -> None:
        """Between steps: have slots while `plan`, one of another stride, streams anything.

        Nothing else moves by it: every state that is not resident is at home in host memory,
        where each has a gradient lease, and staging buffers hold the largest of all.
        """
        assert self._any_stride, "memory for this stride alone"
        assert self._device is not None, "host parameters have no stride"
        slots = _slots(plan, self._device, self.staging, self._any_stride)
        self.staging = replace(self.staging, slots=slots)

    def still_to_send(
        self, sizes: tuple[SubgroupSize, ...], inputs: StepInputs
    ) -> tuple[SubgroupSize, ...]:
        """The sizes of the subgroups, their gradients as far as they have not arrived."""
        if not inputs.arrived:
            return sizes
        found = list(sizes)
        for index, memory in enumerate(self.subgroups):
            present = [p for p in memory.pieces if inputs.scalars[p.parameter] is not None]
            missing = [p for p in present if p.parameter not in inputs.arrived]
            if len(missing) < len(present):
                n_bytes = sum(piece.grad_bytes for piece in missing)
                found[index] = replace(found[index], grad_bytes=n_bytes)
        return tuple(found)

    def parts(self, index: int, kind: str) -> Iterator[tuple[torch.Tensor, int]]:
        """The homes of a parameter's "master", "exp_avg" or "exp_avg_sq", piece by piece.

        Each 1-D, with the first element in memory order that it holds; of a parameter that is
        its own master there is none.
        """
        for subgroup, piece in self._where[index]:
            offset = piece.master_offset if kind == "master" else piece.offset
            if offset is not None:
                home: torch.Tensor = getattr(self.subgroups[subgroup], kind)
                yield home[offset : offset + piece.numel], piece.start

    def view(self, index: int, kind: str) -> torch.Tensor | None:
        """All of it here in the parameter's shape and order, if its pieces adjoin in host memory.

        Its storage is exactly its bytes.
        """
        like = local_of(self.parameters[index])
        spans = []
        for subgroup, piece in self._where[index]:
            offset = piece.master_offset if kind == "master" else piece.offset
            lease = self._leases.get((kind, subgroup))  # a resident has none
            if lease is None or offset is None:
                return None
            spans.append((lease, 4 * offset, 4 * piece.numel))
        return tensor_across(spans, torch.float32, like.shape, like.stride()) if spans else None

    def whole(self, index: int, kind: str) -> torch.Tensor:
        """As `view`, but put together in host memory where there is none."""
        view = self.view(index, kind)
        if view is not None:
            return view
        like = local_of(self.parameters[index])
        assembled = torch.empty(like.numel(), dtype=torch.float32, device="cpu")
        for home, start in self.parts(index, kind):
            assembled[start : start + home.numel()].copy_(home)
        return unflatten(assembled, like)

    def fill_masters(self) -> None:
        """Bring the fp32 masters in line with the weights, before a step."""
        self.masters.fill()

    def remember_weights(self) -> None:
        """Note how a step left the weights, to tell later changes by others."""
        self.masters.remember()

    def forget_zeros(self) -> None:
        """What was never stepped may not be zero: something was written there, and failed."""
        self.steps = [max(1, count) for count in self.steps]

    def drop(self) -> None:
        """Let go of all memory; nothing of any parameter is left."""
        self.subgroups, self._leases, self.staging = [], {}, Staging()
        self.masters, self.leaves = Masters(self.gates), {}
        self._where = [[] for _ in self._where]
        self.steps = [0] * len(self.steps)


def _home(
    index: int,
    pieces: tuple[Piece, ...],
    plan: UpdatePlan,
    pool: Pool,
    leases: Mapping[tuple[str, int], Lease],
    device: Device | None,
    any_stride: bool,
) -> SubgroupMemory:
    grad = None
    if plan.placement[index] is Placement.RESIDENT:
        assert device is not None, "residents need a device"
        numels = (master_numel(pieces), plan.sizes[index].numel, plan.sizes[index].numel)
        state = [device.empty(numel, torch.float32).zero_() for numel in numels]
    else:
        state = [leases[kind, index].tensor(torch.float32) for kind in STATE_KINDS]
        if has_lease(plan, index, any_stride) and plan.sizes[index].grad_bytes:
            lease = pool.gradient(plan.sizes[index].grad_bytes, f"gradient of subgroup {index}")
            grad = lease.tensor(torch.uint8)
    return SubgroupMemory(pieces, state[0], state[1], state[2], grad)


def _staging(
    plan: UpdatePlan, pool: Pool, device: Device | None, held: Staging, any_stride: bool
) -> Staging:
    """Slots, stages and the two device buffers, as large as the largest subgroup that uses them.

    What `held` has in sufficient size is kept.
    """
    if device is None:
        return held
    sent = [s for index, s in enumerate(plan.sizes) if has_lease(plan, index, any_stride)]
    grad_bytes = max((size.grad_bytes for size in sent), default=0)
    weight_bytes = max((size.weight_bytes for size in sent), default=0)
    stages, device_grad, device_weight = held.stages, held.device_grad, held.device_weight
    slots = _slots(plan, device, held, any_stride)
    if weight_bytes > held.stage_bytes:
        # Held as long as the optimizer lives: a step never waits for a staging buffer.
        stages = tuple(
            pool.ring.acquire(weight_bytes, f"weight staging buffer {i}").tensor(torch.uint8)
            for i in range(plan.stages)
        )
        device_weight = device.empty(weight_bytes, torch.uint8)
    if grad_bytes > (0 if device_grad is None else device_grad.numel()):
        device_grad = device.empty(grad_bytes, torch.uint8)
    return Staging(slots, stages, device_grad, device_weight)


def _slots(
    plan: UpdatePlan, device: Device, held: Staging, any_stride: bool
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]:
    """Slots for what the plan streams; none where it streams nothing, kept where they suffice."""
    if Placement.STREAMED not in plan.placement:
        return ()
    uses = (Placement.STREAMED, Placement.HOST) if any_stride else (Placement.STREAMED,)
    placed = zip(plan.sizes, plan.placement, strict=True)
    numel = max(size.numel for size, at in placed if at in uses)
    if held.slots and held.slots[0][0].numel() >= numel:
        return held.slots

    def empty() -> torch.Tensor:
        return device.empty(numel, torch.float32)

    return tuple((empty(), empty(), empty()) for _ in range(plan.slots))
