"""What host memory subgroups take, and the pools that hold it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from dos.config import DOSConfig
from dos.errors import PoolError
from dos.execute.work import Piece
from dos.kernels import adam
from dos.kernels.thread_pool import ThreadPool
from dos.memory import Pool, Requirement, padded_bytes
from dos.memory.sizes import LINE_BYTES, bytes_text
from dos.plan import Placement, Subgroup, SubgroupSize, UpdatePlan

STATE_KINDS = ("master", "exp_avg", "exp_avg_sq")


def pieces_of(
    subgroup: Subgroup,
    parameters: Sequence[torch.Tensor],
    *,
    host_parameters: bool,
    widen: bool = False,
) -> tuple[Piece, ...]:
    """The segments of `subgroup` with their offsets in its memory.

    With `widen` gradients are sent in fp32, else in the dtype of their weights.
    """
    pieces, master, grad_bytes, weight_bytes = [], 0, 0, 0
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
            grad_dtype=torch.float32 if widen else parameter.dtype,
            grad_offset_bytes=grad_bytes,
            weight_offset_bytes=weight_bytes,
        )
        pieces.append(piece)
        master += 0 if own else piece.numel
        # Each on a cache line of its own, so that any dtype is aligned behind any other.
        grad_bytes += padded_bytes(piece.grad_bytes, LINE_BYTES)
        weight_bytes += padded_bytes(piece.numel * parameter.element_size(), LINE_BYTES)
    return tuple(pieces)


def size_of(pieces: Sequence[Piece], parameters: Sequence[torch.Tensor]) -> SubgroupSize:
    """What a subgroup of these pieces holds and moves."""
    last = pieces[-1]
    weight_bytes = last.numel * parameters[last.parameter].element_size()
    return SubgroupSize(
        numel=sum(piece.numel for piece in pieces),
        grad_bytes=last.grad_offset_bytes + last.grad_bytes,
        weight_bytes=last.weight_offset_bytes + weight_bytes,
    )


def master_numel(pieces: Sequence[Piece]) -> int:
    """Elements of fp32 master that a subgroup of these pieces keeps."""
    return sum(piece.numel for piece in pieces if piece.master_offset is not None)


def host_arrays(
    pieces: Sequence[tuple[Piece, ...]], plan: UpdatePlan, first: int
) -> list[tuple[str, int, int]]:
    """Kind, subgroup and elements of each state array in host memory, in the order of leases.

    Kind by kind, so that the pieces of a parameter that lies in several subgroups adjoin.
    `pieces` are those of the subgroups from `first` on.
    """
    return [
        (kind, index, master_numel(its) if kind == "master" else plan.sizes[index].numel)
        for kind in STATE_KINDS
        for index, its in enumerate(pieces, first)
        if plan.placement[index] is not Placement.RESIDENT
    ]


def requirement(
    pieces: Sequence[tuple[Piece, ...]],
    plan: UpdatePlan,
    *,
    ring_bytes: int | None,
    staged_bytes: int = 0,
    any_stride: bool = False,
) -> Requirement:
    """Host memory of a plan over subgroups of these pieces, all three kinds of lease.

    Args:
        pieces: of all subgroups, or of the last ones, for which memory is added.
        plan: of all subgroups.
        ring_bytes: size of the ring; None for what the plan needs.
        staged_bytes: size of each staging buffer that is there already.
        any_stride: the stride may change, so whatever is not resident may come to be updated
            on the host.

    Raises:
        PoolError: `ring_bytes` is too small for the plan's staging buffers.
    """
    first = len(plan.sizes) - len(pieces)
    state = [4 * numel for _, _, numel in host_arrays(pieces, plan, first)]
    sent = [index for index in range(len(plan.sizes)) if has_lease(plan, index, any_stride)]
    grad = [plan.sizes[index].grad_bytes for index in sent if index >= first]
    stage_bytes = max((plan.sizes[index].weight_bytes for index in sent), default=0)
    needed_bytes = plan.stages * padded_bytes(stage_bytes) if stage_bytes > staged_bytes else 0
    if ring_bytes is not None and ring_bytes < needed_bytes:
        raise PoolError(
            f"{bytes_text(ring_bytes)} cannot hold {plan.stages} staging buffers of "
            f"{bytes_text(padded_bytes(stage_bytes))}",
            where="ring_bytes",
            fix=f"raise ring_bytes to {needed_bytes}, or set a smaller subgroup_size",
        )
    if ring_bytes is None or first:
        ring_bytes = needed_bytes
    return Requirement.of_leases(state=state, gradient=grad, ring_bytes=ring_bytes)


def has_lease(plan: UpdatePlan, index: int, any_stride: bool) -> bool:
    """Whether the gradient of a subgroup is sent to the host, or may come to be."""
    at = plan.placement[index]
    may_be_sent = at is Placement.HOST or (any_stride and at is Placement.STREAMED)
    return may_be_sent and not plan.host_parameters


class Pools:
    """One pool for the first subgroups and one for each later addition, in one budget.

    Args:
        config: options.
        threads: what touches the memory first.
        any_stride: the stride may change: see `requirement`.
    """

    def __init__(self, config: DOSConfig, threads: ThreadPool, *, any_stride: bool) -> None:
        self._config, self._threads, self._any_stride = config, threads, any_stride
        self._pools: list[Pool] = []

    def __len__(self) -> int:
        """How many there are."""
        return len(self._pools)

    def __getitem__(self, index: int) -> Pool:
        """One of them, in the order of the additions."""
        return self._pools[index]

    @contextmanager
    def added(
        self,
        pieces: Sequence[tuple[Piece, ...]],
        plan: UpdatePlan,
        device: torch.device,
        staged_bytes: int,
    ) -> Iterator[Pool]:
        """A pool for the plan's last subgroups, of these pieces; kept if the body succeeds.

        Raises:
            PoolError: host memory is too small.
        """
        need = requirement(
            pieces,
            plan,
            ring_bytes=self._config.ring_bytes,
            staged_bytes=staged_bytes,
            any_stride=self._any_stride,
        )
        pool = Pool(
            state_bytes=need.state_bytes,
            gradient_bytes=need.gradient_bytes,
            ring_bytes=need.ring_bytes,
            budget_bytes=self._config.host_memory_bytes,
            held_bytes=sum(held.requirement.total_bytes for held in self._pools),
            device=device,
            touch=lambda address: adam.first_touch(need.blocks(address), self._threads),
        )
        try:
            yield pool
        except BaseException:
            pool.close()
            raise
        self._pools.append(pool)

    def check_process(self) -> None:
        """Raise PoolError in a forked child, which has neither the memory nor the threads."""
        self._pools[0].check_process()

    def close(self) -> None:
        """Give all memory back; idempotent."""
        for pool in reversed(self._pools):
            pool.close()
