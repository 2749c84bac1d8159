"""Make a plan: where each subgroup is updated, in which order, and what waits for what."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction
from math import floor

from dos.plan.ops import (
    Buffer,
    Lane,
    Op,
    OpKind,
    Placement,
    SubgroupSize,
    UpdatePlan,
    operands,
)

_Step = tuple[OpKind, int, int | None]  # kind, subgroup, slot
_ORDINAL = {lane: n for n, lane in enumerate(Lane)}


def place(
    count: int, stride: float | str, resident_ratio: float | str = 0.0
) -> tuple[Placement, ...]:
    """Spread `count` subgroups over host and device.

    Residents are picked first, evenly; `stride` counts the others only. Subgroup i of those
    counted is streamed iff floor((i+1)/k) > floor(i/k), so that exactly floor(n/k) of the
    first n are, for every n.

    Args:
        count: number of subgroups.
        stride: k >= 1, one of k subgroups is updated on the device; "host" for none. The
            decimal text of a number counts: 1.1 is eleven tenths exactly.
        resident_ratio: share of the subgroups, 0 to 1, whose state stays on the device.
    """
    resident = _picks(count, Fraction(str(resident_ratio)))
    streamed = iter(_picks(count, Fraction(0) if stride == "host" else 1 / Fraction(str(stride))))
    return tuple(
        Placement.RESIDENT if stays else Placement.STREAMED if next(streamed) else Placement.HOST
        for stays in resident
    )


def _picks(count: int, share: Fraction) -> list[bool]:
    """Which of `count` items a share of them takes when spread evenly."""
    assert 0 <= share <= 1, share
    return [floor((i + 1) * share) > floor(i * share) for i in range(count)]


def build(
    sizes: Sequence[SubgroupSize],
    *,
    stride: float | str,
    resident_ratio: float | str = 0.0,
    slots: int = 2,
    stages: int = 2,
    host_parameters: bool = False,
    absent: Collection[int] = frozenset(),
    order: Sequence[int] | None = None,
) -> UpdatePlan:
    """Make the plan of one step. `verify` accepts every plan made here.

    Args:
        sizes: per subgroup, what it holds and moves.
        stride, resident_ratio: see `place`.
        slots: device staging slots, at least 1; with 2 a flush and a fetch overlap.
        stages: host staging buffers for weights, at least 1. The host runs on during a
            fetch for as many updates as there are buffers.
        host_parameters: the parameters lie in host memory: everything is updated there, in
            place, and stride and residents have no effect.
        absent: subgroups that have no gradient this step: no ops, and nobody's placement
            changes by it.
        order: all subgroups in the order in which they are updated; by index without one.
    """
    assert min(slots, stages) >= 1, (slots, stages)
    absent = frozenset(absent)
    present = [i for i in (range(len(sizes)) if order is None else order) if i not in absent]
    if host_parameters:
        placement = (Placement.HOST,) * len(sizes)
        steps: list[_Step] = [(OpKind.UPDATE_HOST, i, None) for i in present]
    else:
        placement = place(len(sizes), stride, resident_ratio)
        steps = _issue_order(placement, present, sizes, slots, stages)
    return UpdatePlan(
        ops=_with_waits(steps),
        sizes=tuple(sizes),
        placement=placement,
        stride=str(stride),
        slots=slots,
        stages=stages,
        host_parameters=host_parameters,
        absent=absent,
    )


def _issue_order(
    placement: Sequence[Placement],
    present: Sequence[int],
    sizes: Sequence[SubgroupSize],
    slots: int,
    stages: int,
) -> list[_Step]:
    """The order of issue, which each lane keeps.

    An op that has to wait holds up all that is behind it in its lane. Hence, period by
    period, a period being the subgroups up to and with one streamed subgroup:

    1. Ops that wait for nothing (gradients to the host, updates of residents) go a period
       ahead, or they would queue behind a FLUSH or an update that waits for its FETCH.
    2. The update and the FLUSH of a period's streamed subgroup open the period. They depend
       on nothing of the host, and whoever walks the list stops at the period's first
       PUBLISH until the host gets there.
    3. The FETCH into the slot so freed closes the period: earlier, it would keep the link
       from the period's PUBLISHes, and the host from the staging buffers that they empty.
    4. A PUBLISH comes behind the next UPDATE_HOST (if there is a second staging buffer), so
       that the host always has work queued while its last result is waited for.
    """
    streamed = [i for i in present if placement[i] is Placement.STREAMED]
    waitless = deque(i for i in present if placement[i] is not Placement.STREAMED)
    turn = {i: n for n, i in enumerate(present)}
    unpublished: deque[_Step] = deque()
    steps: list[_Step] = []

    def fetch(nth: int) -> None:
        if nth < len(streamed):
            steps.append((OpKind.FETCH, streamed[nth], nth % slots))

    def open_period(nth: int) -> None:
        ahead = turn[streamed[nth + 1]] if nth + 1 < len(streamed) else len(present)
        while waitless and turn[waitless[0]] < ahead:
            i = waitless.popleft()
            if placement[i] is Placement.RESIDENT:
                steps.append((OpKind.UPDATE_DEVICE, i, None))
            elif sizes[i].grad_bytes:
                steps.append((OpKind.GRAD_TO_HOST, i, None))
        if nth < len(streamed):
            steps.append((OpKind.UPDATE_DEVICE, streamed[nth], nth % slots))
            steps.append((OpKind.FLUSH, streamed[nth], nth % slots))

    for nth in range(slots):
        fetch(nth)
    open_period(0)
    on_device = on_host = 0
    for i in present:
        if placement[i] is Placement.STREAMED:
            fetch(on_device + slots)
            on_device += 1
            open_period(on_device)
        elif placement[i] is Placement.HOST:
            steps.append((OpKind.UPDATE_HOST, i, on_host % stages))
            unpublished.append((OpKind.PUBLISH, i, on_host % stages))
            on_host += 1
            if len(unpublished) == min(stages, 2):
                steps.append(unpublished.popleft())
    return [*steps, *unpublished]


def _with_waits(steps: Iterable[_Step]) -> tuple[Op, ...]:
    """Ops with the fewest waits that order every two ops in conflict over a buffer.

    ``over[n][lane]`` is the last op of the lane known to be over once op n is (a vector
    clock): lanes being FIFO, so is every op before it there. A wait that the clock already
    implies is left out.
    """
    writer: dict[Buffer, int] = {}
    readers: dict[Buffer, list[int]] = {}  # since the last write
    over: list[list[int]] = []
    tail = {lane: [-1] * len(Lane) for lane in Lane}
    ops: list[Op] = []
    for index, (kind, subgroup, slot) in enumerate(steps):
        reads, writes = operands(kind, subgroup, slot)
        conflicts = {writer[b] for b in (*reads, *writes) if b in writer}
        conflicts.update(reader for b in writes for reader in readers.get(b, ()))
        known, waits = tail[kind.lane], []
        # The latest first: it may imply the earlier ones, never the other way round.
        for other in sorted(conflicts, reverse=True):
            if known[_ORDINAL[ops[other].kind.lane]] < other:
                waits.append(other)
                known = [max(pair) for pair in zip(known, over[other], strict=True)]
        over.append([index if lane is kind.lane else known[_ORDINAL[lane]] for lane in Lane])
        tail[kind.lane] = over[index]
        ops.append(Op(index, kind, subgroup, slot, reads, writes, tuple(sorted(waits))))
        for b in reads:
            readers.setdefault(b, []).append(index)
        for b in writes:
            writer[b], readers[b] = index, []
    return tuple(ops)
