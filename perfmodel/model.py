"""A step as fluid: tasks in FIFO lanes that share a node's resources max-min fairly."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dos.trace import Span

_SETTLED = 1e-12
"""Share of a task's work below which what is left is rounding."""


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work on one lane.

    Attributes:
        name, lane: as in a `dos.trace.Span`.
        work_s: seconds of work when nothing else runs; no sharing makes it faster.
        needs: bytes that the whole task takes of each shared resource.
        launch_s: fixed cost before the work, during which it needs nothing.
        waits: indices of earlier tasks that must be over before it starts, beside the one
            before it in its lane.
        args: kept for its span.
    """

    name: str
    lane: str
    work_s: float
    needs: Mapping[str, float] = field(default_factory=dict)
    launch_s: float = 0.0
    waits: tuple[int, ...] = ()
    args: Mapping[str, int | str] = field(default_factory=dict)


def fair_speeds(running: Sequence[Task], capacities: Mapping[str, float]) -> list[float]:
    """Speed of each of the tasks that run at once, in shares of its work per second.

    Max-min fair in bytes per second, by progressive filling (Bertsekas and Gallager, Data
    Networks, section 6.5.2): all tasks speed up alike until one reaches the speed that it has
    alone or a resource is full; those are settled, and the others go on. A resource without a
    capacity never limits.
    """
    # A task's bytes per second are its speed times the most that it needs of any one resource.
    bytes_ = [max(task.needs.values(), default=0.0) for task in running]
    speeds = [1 / task.work_s for task in running]
    free = dict(capacities)
    filling = {i for i, n_bytes in enumerate(bytes_) if n_bytes > 0}
    while filling:
        level = min(speeds[i] * bytes_[i] for i in filling)
        settled = [i for i in filling if speeds[i] * bytes_[i] <= level]
        for resource, rate in free.items():
            users = [i for i in filling if running[i].needs.get(resource)]
            weight = sum(running[i].needs[resource] / bytes_[i] for i in users)
            if users and rate / weight < level:
                level, settled = rate / weight, users
        for i in settled:
            speeds[i] = level / bytes_[i]
            filling.remove(i)
            for resource, n_bytes in running[i].needs.items():
                if resource in free:
                    free[resource] = max(free[resource] - n_bytes * speeds[i], 0.0)
    return speeds


def _waits(tasks: Sequence[Task]) -> tuple[list[list[int]], list[int]]:
    """Per task, those that come behind it, and the number of those that it comes behind."""
    behind: list[list[int]] = [[] for _ in tasks]
    missing = [0] * len(tasks)
    tail: dict[str, int] = {}
    for i, task in enumerate(tasks):
        before = {*task.waits, *([tail[task.lane]] if task.lane in tail else [])}
        assert all(0 <= other < i for other in before), f"{task.name} waits for a later task"
        missing[i] = len(before)
        for other in before:
            behind[other].append(i)
        tail[task.lane] = i
    return behind, missing


def run(tasks: Sequence[Task], capacities: Mapping[str, float]) -> list[Span]:
    """When each task runs, in the order given. Every lane keeps that order.

    Between two events (a launch or a task ends) every running task goes at the constant speed
    that `fair_speeds` gives it.
    """
    behind, missing = _waits(tasks)
    kinds: dict[tuple[object, ...], int] = {}
    kind = [kinds.setdefault((t.work_s, *t.needs.items()), len(kinds)) for t in tasks]
    known: dict[tuple[int, ...], list[float]] = {}  # speeds by what runs: most of it recurs
    started_s, ended_s = [math.nan] * len(tasks), [math.nan] * len(tasks)
    launching: list[tuple[float, int]] = []  # a heap: when the work begins, task
    left: dict[int, float] = {}  # share of its work that is left
    now_s = 0.0
    ready = [i for i, count in enumerate(missing) if not count]
    while True:
        while ready:
            i = ready.pop()
            started_s[i] = now_s
            heapq.heappush(launching, (now_s + tasks[i].launch_s, i))
        over = [i for i, share in left.items() if share <= _SETTLED]
        while launching and launching[0][0] <= now_s:
            i = heapq.heappop(launching)[1]
            if tasks[i].work_s > 0:
                left[i] = 1.0
            else:
                over.append(i)
        for i in over:
            left.pop(i, None)
            ended_s[i] = now_s
            for other in behind[i]:
                missing[other] -= 1
                if not missing[other]:
                    ready.append(other)
        if ready:
            continue
        if not launching and not left:
            break
        mix = tuple([kind[i] for i in left])
        if mix not in known:
            known[mix] = fair_speeds([tasks[i] for i in left], capacities)
        speeds = known[mix]
        step_s = min(
            (share / speed for share, speed in zip(left.values(), speeds, strict=True)),
            default=math.inf,
        )
        if launching and launching[0][0] - now_s < step_s:
            step_s = launching[0][0] - now_s
            now_s = launching[0][0]
        else:
            now_s += step_s
        for i, speed in zip(left, speeds, strict=True):
            left[i] -= step_s * speed
    return [
        Span(task.name, task.lane, start_s, end_s, dict(task.args))
        for task, start_s, end_s in zip(tasks, started_s, ended_s, strict=True)
    ]
