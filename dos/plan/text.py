"""Read a plan from its text form, one line for the plan, each subgroup and each op.

    plan stride=2 slots=2 stages=2 parameters=device
    subgroup 0  host      numel=8  grad_bytes=16  weight_bytes=16
    subgroup 1  streamed  numel=8  grad_bytes=16  weight_bytes=16
    op 0  h2d     fetch          1  @0  host.state[1]   -> slot[0]
    op 1  d2h     grad_to_host   0  -   grad[0]         -> host.grad[0]
    op 2  device  update_device  1  @0  slot[0],grad[1] -> slot[0],weight[1]  after 0

An op line holds index, lane, kind, subgroup, slot, buffers read and written, waits. `str` of
a plan writes this form.
"""

from __future__ import annotations

import re

from dos.errors import PlanError
from dos.plan.ops import Buffer, Lane, Op, OpKind, Placement, SubgroupSize, UpdatePlan

_INT = r"(-?\d{1,18})"
_HEADER = re.compile(
    rf"plan\s+stride=(\S+)\s+slots={_INT}\s+stages={_INT}\s+parameters=(host|device)"
)
_SUBGROUP = re.compile(
    rf"subgroup\s+{_INT}\s+({'|'.join(Placement)})"
    rf"\s+numel={_INT}\s+grad_bytes={_INT}\s+weight_bytes={_INT}(\s+absent)?"
)
_OP = re.compile(
    rf"op\s+{_INT}\s+({'|'.join(Lane)})\s+({'|'.join(OpKind)})\s+{_INT}\s+(?:@{_INT}|-)"
    r"\s+(\S+)\s+->\s+(\S+)(?:\s+after\s+(\d{1,18}(?:,\d{1,18})*))?"
)
_BUFFER = re.compile(rf"([a-z.]+)\[{_INT}\]")


def parse_plan(text: str) -> UpdatePlan:
    """Read back what `str` of a plan wrote. This checks the form only; see `verify`.

    Raises:
        PlanError: a line is not of its form; names the line.
    """
    numbered = [(n, line.strip()) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not numbered:
        raise _error(1, "no plan in an empty text")
    header = _match(_HEADER, *numbered[0])
    sizes: list[SubgroupSize] = []
    placement: list[Placement] = []
    absent: set[int] = set()
    ops: list[Op] = []
    for number, line in numbered[1:]:
        if line.startswith("subgroup") and not ops:
            found = _match(_SUBGROUP, number, line)
            if int(found[1]) != len(sizes):
                raise _error(number, f"subgroup {len(sizes)} is due, this is {found[1]}")
            if found[6]:
                absent.add(len(sizes))
            placement.append(Placement(found[2]))
            sizes.append(SubgroupSize(int(found[3]), int(found[4]), int(found[5])))
        else:
            ops.append(_parse_op(number, line))
    return UpdatePlan(
        ops=tuple(ops),
        sizes=tuple(sizes),
        placement=tuple(placement),
        stride=header[1],
        slots=int(header[2]),
        stages=int(header[3]),
        host_parameters=header[4] == "host",
        absent=frozenset(absent),
    )


def _parse_op(number: int, line: str) -> Op:
    found = _match(_OP, number, line)
    kind = OpKind(found[3])
    if found[2] != kind.lane.value:
        raise _error(number, f"{kind.value} runs on lane {kind.lane.value}, not {found[2]}")
    return Op(
        index=int(found[1]),
        kind=kind,
        subgroup=int(found[4]),
        slot=None if found[5] is None else int(found[5]),
        reads=_parse_buffers(number, found[6]),
        writes=_parse_buffers(number, found[7]),
        waits=tuple(map(int, found[8].split(","))) if found[8] else (),
    )


def _parse_buffers(number: int, text: str) -> tuple[Buffer, ...]:
    if text == "-":
        return ()
    matches = [_match(_BUFFER, number, item) for item in text.split(",")]
    return tuple(Buffer(found[1], int(found[2])) for found in matches)


def _match(form: re.Pattern[str], number: int, text: str) -> re.Match[str]:
    found = form.fullmatch(text)
    if found is None:
        expected = {_HEADER: "plan", _SUBGROUP: "subgroup", _OP: "op", _BUFFER: "buffer"}[form]
        raise _error(number, f"not of the form of a {expected}: {text!r}")
    return found


def _error(number: int, what: str) -> PlanError:
    return PlanError(what, where=f"line {number}", fix="write lines as str(plan) does")
