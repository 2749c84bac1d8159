"""Prove a plan right, whoever made it, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from dos.errors import PlanError
from dos.plan.ops import Buffer, Lane, Op, OpKind, Placement, UpdatePlan, operands


class _Fault(NamedTuple):
    what: str
    op: int | None = None
    subgroup: int | None = None
    fix: str = ""


_LIFE = {
    Placement.HOST: (OpKind.GRAD_TO_HOST, OpKind.UPDATE_HOST, OpKind.PUBLISH),
    Placement.STREAMED: (OpKind.FETCH, OpKind.UPDATE_DEVICE, OpKind.FLUSH),
    Placement.RESIDENT: (OpKind.UPDATE_DEVICE,),
}
_TAKES_STAGING = (OpKind.FETCH, OpKind.UPDATE_HOST)
_RETURNS_STAGING = (OpKind.FLUSH, OpKind.PUBLISH)


def verify(
    plan: UpdatePlan,
    *,
    host_budget_bytes: int | None = None,
    device_budget_bytes: int | None = None,
) -> None:
    """Check that any execution that keeps lane order and waits does the step right.

    In time linear in the plan: every op is well formed and waits for earlier ops only (no
    cycle); every subgroup with a gradient runs its ops once each and in order, so that it is
    updated once and its state is back home at the end; a staging slot has one user at a
    time; any two ops in conflict over a buffer are ordered; memory stays within the budgets.

    Raises:
        PlanError: with the broken rule and the printed plan, the spot marked with ``>>``.
    """
    # Lazy: each check may rely on what those before it have found to hold.
    faults = chain(
        _malformed(plan),
        _wrong_lives(plan),
        _shared_staging(plan),
        _unordered(plan),
        _over_budget(plan, host_budget_bytes, device_budget_bytes),
    )
    for fault in faults:
        raise _error(plan, fault)


def _error(plan: UpdatePlan, fault: _Fault) -> PlanError:
    where, marked = "plan", 0
    if fault.op is not None:
        op = plan.ops[fault.op]
        where = f"op {fault.op} ({op.kind.value} of subgroup {op.subgroup})"
        marked = 1 + len(plan.sizes) + fault.op
    elif fault.subgroup is not None:
        where, marked = f"subgroup {fault.subgroup}", 1 + fault.subgroup
    lines = str(plan).splitlines()
    printed = "\n".join(f"{'>>' if n == marked else '  '} {line}" for n, line in enumerate(lines))
    return PlanError(f"{fault.what}\n{printed}", where=where, fix=fault.fix)


def _life(plan: UpdatePlan, subgroup: int) -> tuple[OpKind, ...]:
    """The ops that a subgroup must have, in this order."""
    if subgroup in plan.absent:
        return ()
    if plan.host_parameters:
        return (OpKind.UPDATE_HOST,)
    life = _LIFE[plan.placement[subgroup]]
    sent = plan.placement[subgroup] is Placement.HOST and not plan.sizes[subgroup].grad_bytes
    return life[1:] if sent else life


def _staging(plan: UpdatePlan, op: Op) -> tuple[str, int]:
    """Name and number of the staging buffers of which `op` uses one; number 0 if it uses none."""
    placement = plan.placement[op.subgroup]
    if plan.host_parameters or placement is Placement.RESIDENT or op.kind is OpKind.GRAD_TO_HOST:
        return "", 0
    return ("slot", plan.slots) if placement is Placement.STREAMED else ("stage", plan.stages)


def _malformed(plan: UpdatePlan) -> Iterator[_Fault]:
    if plan.host_parameters and set(plan.placement) - {Placement.HOST}:
        yield _Fault("parameters in host memory, but a subgroup is placed on the device")
    for position, op in enumerate(plan.ops):
        if op.index != position:
            yield _Fault(f"its index is {op.index}, its position {position}", position)
        if not 0 <= op.subgroup < len(plan.sizes):
            yield _Fault("no such subgroup", position)
        for other in op.waits:
            if not 0 <= other < position:
                yield _Fault(f"waits for op {other}, which is not before it: a cycle", position)
        if op.kind not in _life(plan, op.subgroup):
            state = "absent" if op.subgroup in plan.absent else plan.placement[op.subgroup].value
            yield _Fault(f"subgroup {op.subgroup} is {state} and has no such op", position)
        name, number = _staging(plan, op)
        if number == 0 and op.slot is not None:
            yield _Fault(f"uses staging buffer {op.slot}, but needs none", position)
        if number and (op.slot is None or not 0 <= op.slot < number):
            yield _Fault(f"uses {name}[{op.slot}], but there are {number}", position)
        if (op.reads, op.writes) != operands(op.kind, op.subgroup, op.slot):
            yield _Fault("its buffers are not those of its kind, subgroup and slot", position)


def _wrong_lives(plan: UpdatePlan) -> Iterator[_Fault]:
    done = [0] * len(plan.sizes)
    for op in plan.ops:
        life = _life(plan, op.subgroup)
        due = life[done[op.subgroup]] if done[op.subgroup] < len(life) else None
        if op.kind is not due:
            expected = f"{due.value} is due" if due else "it was complete"
            yield _Fault(f"out of turn or twice: {expected}", op.index)
        done[op.subgroup] += 1
    for subgroup, count in enumerate(done):
        missing = _life(plan, subgroup)[count:]
        if missing:
            names = ", ".join(kind.value for kind in missing)
            yield _Fault(f"the step ends without its {names}", subgroup=subgroup)


def _shared_staging(plan: UpdatePlan) -> Iterator[_Fault]:
    # A slot belongs to one subgroup from the op that fills it to the op that empties it. As
    # every subgroup's ops come in order, what is in the slot is then always that subgroup's
    # state or weight, old before its update and new after it.
    user: dict[tuple[str, int], int] = {}
    for op in plan.ops:
        if op.slot is None:
            continue
        name, _ = _staging(plan, op)
        key = (name, op.slot)
        holder = user.get(key)
        if op.kind in _TAKES_STAGING:
            if holder is not None:
                yield _Fault(f"{name}[{op.slot}] is still in use by subgroup {holder}", op.index)
            user[key] = op.subgroup
        elif holder != op.subgroup:
            held = "nothing" if holder is None else f"subgroup {holder}"
            yield _Fault(f"{name}[{op.slot}] holds {held}", op.index)
        if op.kind in _RETURNS_STAGING:
            del user[key]


def _unordered(plan: UpdatePlan) -> Iterator[_Fault]:
    # over[n][lane]: the last op of the lane that is surely over once op n is.
    over: list[dict[Lane, int]] = []
    tail: dict[Lane, int] = {}
    writer: dict[Buffer, int] = {}
    readers: dict[Buffer, list[int]] = {}
    for op in plan.ops:
        lane = op.kind.lane
        known: dict[Lane, int] = {}
        for before in (*op.waits, *([tail[lane]] if lane in tail else [])):
            for other_lane, last in over[before].items():
                known[other_lane] = max(last, known.get(other_lane, -1))
        for other, conflict in _conflicts(op, writer, readers):
            if known.get(plan.ops[other].kind.lane, -1) < other:
                yield _Fault(f"{conflict} op {other}, but nothing makes it wait", op.index)
        over.append({**known, lane: op.index})
        tail[lane] = op.index
        for buffer in op.reads:
            readers.setdefault(buffer, []).append(op.index)
        for buffer in op.writes:
            writer[buffer], readers[buffer] = op.index, []


def _conflicts(
    op: Op, writer: dict[Buffer, int], readers: dict[Buffer, list[int]]
) -> Iterator[tuple[int, str]]:
    """The earlier ops that must be over before `op`, each with the reason in words."""
    for buffer in op.reads:
        if buffer in writer:
            yield writer[buffer], f"reads {buffer} written by"
    for buffer in op.writes:
        if buffer in writer:
            yield writer[buffer], f"overwrites {buffer} written by"
        for reader in readers.get(buffer, ()):
            yield reader, f"overwrites {buffer} read by"


def _over_budget(plan: UpdatePlan, host: int | None, device: int | None) -> Iterator[_Fault]:
    memory = plan.memory()
    if host is not None and memory.host_bytes > host:
        fix = "raise the host memory budget or keep more state on the device"
        what = f"needs {memory.host_bytes} bytes of host memory, the budget is {host}"
        yield _Fault(f"{what}: {memory}", fix=fix)
    if device is not None and memory.device_bytes > device:
        fix = "raise the device memory budget, or use fewer residents, fewer or smaller slots"
        what = f"needs {memory.device_bytes} bytes of device memory, the budget is {device}"
        yield _Fault(f"{what}: {memory}", fix=fix)
