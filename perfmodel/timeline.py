"""When each op of a plan runs on a node: the plan as tasks, and what they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dos.trace import Span
from perfmodel.model import Task, run
from perfmodel.profile import NodeProfile

DEVICE_UPDATE_BYTES = 28
"""Device memory traffic per parameter: p, m, v read and written, gradient and weight of 2 bytes."""

_SLOWED = 0.95
"""An update that keeps less than this share of its rate beside copies is slowed by them."""


class _Named(Protocol):
    @property
    def value(self) -> str: ...


class _Kind(Protocol):
    @property
    def value(self) -> str: ...
    @property
    def lane(self) -> _Named: ...


class PlanOp(Protocol):
    """An op of a plan, as `dos.plan.Op` is."""

    @property
    def index(self) -> int:
        """Position in the plan."""
        ...

    @property
    def kind(self) -> _Kind:
        """What it does, and on which lane."""
        ...

    @property
    def subgroup(self) -> int:
        """On whose behalf."""
        ...

    @property
    def waits(self) -> tuple[int, ...]:
        """What must be over before it starts, beside its lane's earlier ops."""
        ...


class _Sized(Protocol):
    @property
    def numel(self) -> int: ...


class PlanBytes(Protocol):
    """Memory of a plan, as `dos.plan.PlanMemory` is."""

    @property
    def host_bytes(self) -> int:
        """All host memory."""
        ...

    @property
    def device_bytes(self) -> int:
        """All device memory."""
        ...


class Plan(Protocol):
    """A step as data, as `dos.plan.UpdatePlan` is."""

    @property
    def ops(self) -> Sequence[PlanOp]:
        """In the order of issue, which every lane keeps."""
        ...

    @property
    def sizes(self) -> Sequence[_Sized]:
        """Per subgroup."""
        ...

    def link_bytes(self, op: Any, /) -> int:
        """What an op moves over the link; 0 for an update."""
        ...


def capacities(profile: NodeProfile) -> dict[str, float]:
    """Bytes per second of each resource that ops share; what the profile lacks never limits."""
    known = {
        "host_memory": _host_memory_bytes_per_s(profile),
        "link": profile.link_bytes_per_s,
        "device_memory": profile.device_memory_bytes_per_s,
    }
    return {resource: rate for resource, rate in known.items() if rate is not None}


def _host_memory_bytes_per_s(profile: NodeProfile) -> float | None:
    """The host memory traffic at which an update beside copies was seen to slow down, if it was.

    It counts before a measured bandwidth, which holds for another mix of reads and writes; where
    copies slowed nothing, memory carries at least what was carried.
    """
    stated, beside = profile.host_memory_bytes_per_s, profile.host_params_per_s_beside_copies
    if beside is None or not profile.has_device:
        return stated
    both_ways = profile.rate("h2d_bytes_per_s") + profile.rate("d2h_bytes_per_s")
    carried = beside * profile.host_bytes_per_param + (profile.link_bytes_per_s or both_ways)
    if beside < _SLOWED * profile.host_params_per_s:
        return carried
    return None if stated is None else max(stated, carried)


def task_of(
    op: PlanOp, profile: NodeProfile, *, numel: int, link_bytes: int, waits: tuple[int, ...]
) -> Task:
    """An op as a task that comes behind the tasks `waits`.

    A copy takes its `link_bytes` of host memory, of the link's two ways together and of device
    memory; an update of `numel` parameters its traffic of host or device memory. Alone, an op
    takes `profile.op_s`.
    """
    lane = op.kind.lane.value
    if lane == "host":
        needs = {"host_memory": profile.host_bytes_per_param * numel}
    elif lane == "device":
        needs = {"device_memory": float(DEVICE_UPDATE_BYTES * numel)}
    else:
        needs = dict.fromkeys(("host_memory", "link", "device_memory"), float(link_bytes))
    return Task(
        name=f"{op.kind.value} {op.subgroup}",
        lane=lane,
        work_s=profile.op_s(lane, numel=numel, link_bytes=link_bytes) - profile.launch_s,
        needs=needs,
        launch_s=profile.launch_s,
        waits=waits,
        args={"op": op.index, "link_bytes": link_bytes},
    )


def tasks_of(plan: Plan, profile: NodeProfile) -> list[Task]:
    """The ops of a plan as tasks, one each and in its order."""
    return [
        task_of(
            op,
            profile,
            numel=plan.sizes[op.subgroup].numel,
            link_bytes=plan.link_bytes(op),
            waits=op.waits,
        )
        for op in plan.ops
    ]


def simulate(plan: Plan, profile: NodeProfile) -> list[Span]:
    """When each op runs, one span per op in the plan's order, as a real step records them."""
    return run(tasks_of(plan, profile), capacities(profile))


def step_s(spans: Sequence[Span]) -> float:
    """Seconds until the last span is over; 0 of none."""
    return max((span.end_s for span in spans), default=0.0)


def least_s(tasks: Sequence[Task], capacities: Mapping[str, float]) -> dict[str, float]:
    """Seconds that each lane and each shared resource is busy at the least.

    No order of the tasks is over before the largest of them.
    """
    total: dict[str, float] = {}
    for task in tasks:
        total[task.lane] = total.get(task.lane, 0.0) + task.launch_s + task.work_s
        for resource, n_bytes in task.needs.items():
            if resource in capacities:
                busy_s = n_bytes / capacities[resource]
                total[resource] = total.get(resource, 0.0) + busy_s
    return total
