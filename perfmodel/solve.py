"""The fastest step that fits: stride, residents, slots, subgroup size and wire format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor
from typing import Literal, NamedTuple

from dos.errors import ConfigError
from perfmodel.closed_form import STATE_BYTES, closed_form_s
from perfmodel.profile import NodeProfile
from perfmodel.timeline import Plan, PlanBytes, capacities, least_s, simulate, step_s, tasks_of

WAITING = 0.15
"""Share of a step by which it exceeds its busiest resource, above which waits bound it."""

_ALL_TRIED = 16
"""Up to so many subgroups, every number of streamed and of resident ones is tried."""

_DECIMALS = 12
"""Of a stride or share: enough to tell the numbers of streamed subgroups apart."""


class Option(NamedTuple):
    """What a user may choose. Stride and residents are decimal text, as in a plan.

    `wire_bytes` is the width of a gradient on its way to the host.
    """

    subgroup_size: int
    stride: str
    resident_ratio: str
    slots: int
    wire_bytes: int


class Space(NamedTuple):
    """What a search chooses from, beside stride and residents."""

    subgroup_sizes: Sequence[int] = (50_000_000, 100_000_000, 200_000_000)
    slots: Sequence[int] = (1, 2, 3)
    wires_bytes: Sequence[int] = (2, 4)


USUAL = Space()


class Planned(NamedTuple):
    """A plan of one step, and the memory that training with it needs, gradients included."""

    plan: Plan
    memory: PlanBytes


Planner = Callable[[Option], Planned]
"""Builds the plan of an option for a given model; handed in, so that this knows no plans."""


@dataclass(frozen=True, slots=True)
class Choice:
    """An option, what it is predicted to take, what it needs, and whether that fits."""

    option: Option
    step_s: float
    host_bytes: int
    device_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Solution:
    """What `solve` found.

    Attributes:
        best: the fastest that fits.
        choices: per residents, slots, subgroup size and wire format, with its own best stride;
            those that fit first, the fastest first.
        busy: per lane and shared resource, its share of the best step at full speed.
        bound: what bounds the best step: "host compute", "host memory", "link", "device", or
            "tail" where it exceeds the busiest of these by more than `WAITING`.
        gains: per remedy, the share of the step that it would save.
    """

    best: Choice
    choices: tuple[Choice, ...]
    busy: dict[str, float]
    bound: str
    gains: dict[str, float]


_BOUND = {
    "host": "host compute",
    "host_memory": "host memory",
    "h2d": "link",
    "d2h": "link",
    "link": "link",
    "device": "device",
    "device_memory": "device",
}

_REMEDIES = {
    "10% faster link": ("h2d_bytes_per_s", "d2h_bytes_per_s", "link_bytes_per_s"),
    "10% more host memory bandwidth": ("host_memory_bytes_per_s",),
    "10% faster host update": ("host_params_per_s",),
    "10% faster device": ("device_params_per_s", "device_memory_bytes_per_s"),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Memory that may be used, in bytes. None is no limit; 0 for the device means without one."""

    host_bytes: int | None = None
    device_bytes: int | None = None

    def hold(self, memory: PlanBytes) -> bool:
        """Whether memory fits."""
        return (self.host_bytes is None or memory.host_bytes <= self.host_bytes) and (
            self.device_bytes is None or memory.device_bytes <= self.device_bytes
        )


def solve(
    profile: NodeProfile,
    params: int,
    planner: Planner,
    limits: Limits,
    space: Space = USUAL,
) -> Solution:
    """Search all that a user may choose for the fastest step within memory limits.

    Subgroup sizes, slots and wire formats are all tried; residents none, half of what fits and
    all of that (every number, where subgroups are few); the number of streamed subgroups, which a
    real-valued stride sets freely, by climbing from the closed form's (all, where they are few).

    Args:
        profile: of the node.
        params: parameters of this rank.
        planner: makes the plan of an option for these parameters.
        limits: memory.
        space: to choose from.

    Raises:
        ConfigError: a budget too small for one subgroup, or for any choice at all.
    """
    _check_device_budget(params, limits, space)
    choices = _judged(profile, params, planner, limits, space)
    choices.sort(key=_preference)
    best = choices[0]
    if not best.fits:
        raise ConfigError(
            f"the choice of least memory needs {_least_host_bytes(planner, limits, choices):,} "
            f"bytes on the host; allowed are {limits.host_bytes:,}",
            where="host memory budget",
            fix="raise it, spread the model over more ranks, or allow the device more memory",
        )
    tasks = tasks_of(planner(best.option).plan, with_wire(profile, best.option.wire_bytes))
    busy = {
        name: seconds / best.step_s for name, seconds in least_s(tasks, capacities(profile)).items()
    }
    busiest = max(busy, key=lambda name: busy[name], default="host")
    waits = bool(busy) and busy[busiest] < 1 - WAITING
    return Solution(
        best=best,
        choices=tuple(choices),
        busy=busy,
        bound="tail" if waits else _BOUND[busiest],
        gains=_gains(profile, planner, limits, best),
    )


def _least_host_bytes(planner: Planner, limits: Limits, choices: Sequence[Choice]) -> int:
    """Of all choices within the device's limit, each also with everything streamed."""
    options = {choice.option._replace(stride=k) for choice in choices for k in ("host", "1")}
    of_device = replace(limits, host_bytes=None)
    memories = (planner(option).memory for option in options)
    return min(memory.host_bytes for memory in memories if of_device.hold(memory))


def _judged(
    profile: NodeProfile,
    params: int,
    planner: Planner,
    limits: Limits,
    space: Space,
) -> list[Choice]:
    """Every combination of sizes, slots, residents and wires, each with its best stride."""
    choices = []
    for shape in (
        Option(size, "host", "0", slots, space.wires_bytes[0])
        for size in space.subgroup_sizes
        for slots in (space.slots if _may_stream(profile, limits) else space.slots[:1])
    ):
        count = len(planner(shape).plan.sizes)
        for residents in _resident_counts(profile, limits, shape, params, count):
            shaped = shape._replace(resident_ratio=_ratio(residents, count))
            found = best_stride(profile, planner, limits, shaped)
            choices.append(found)
            # The wire moves no optimum: only what the host update reads differs.
            for wire in space.wires_bytes[1:]:
                choices.append(
                    judge(profile, planner, limits, found.option._replace(wire_bytes=wire))
                )
        if _may_stream(profile, limits):
            unlimited = best_stride(profile, planner, Limits(), shape)
            if not limits.hold(unlimited):
                choices.append(replace(unlimited, fits=False))
    return choices


def best_stride(profile: NodeProfile, planner: Planner, limits: Limits, shape: Option) -> Choice:
    """The fastest number of streamed subgroups for an option whose stride is left open.

    One that does not fit is taken only if none fits.
    """
    count = len(planner(shape).plan.sizes)
    streamable = count - floor(count * Fraction(shape.resident_ratio))
    if not _may_stream(profile, limits):
        streamable = 0
    tried: dict[int, Choice] = {}

    def attempt(streamed: int) -> None:
        if streamed not in tried and 0 <= streamed <= streamable:
            option = shape._replace(stride=_stride(streamed, streamable))
            tried[streamed] = judge(profile, planner, limits, option)

    def best_so_far() -> int:
        return min(tried, key=lambda streamed: _preference(tried[streamed]))

    def closed_form(streamed: int) -> float:
        stride: float | Literal["host"] = streamable / streamed if streamed else "host"
        return closed_form_s(profile, 1, stride)

    if streamable <= _ALL_TRIED:
        for streamed in range(streamable + 1):
            attempt(streamed)
        return tried[best_so_far()]
    step = streamable // _ALL_TRIED + 1
    for streamed in (0, streamable, min(range(streamable + 1), key=closed_form)):
        attempt(streamed)
    while True:
        at = best_so_far()
        attempt(at - step)
        attempt(at + step)
        if best_so_far() == at:
            if step == 1:
                return tried[at]
            step = ceil(step / 2)


def judge(profile: NodeProfile, planner: Planner, limits: Limits, option: Option) -> Choice:
    """Predict one option, and see whether it fits."""
    plan, memory = planner(option)
    seconds = step_s(simulate(plan, with_wire(profile, option.wire_bytes)))
    return Choice(option, seconds, memory.host_bytes, memory.device_bytes, limits.hold(memory))


def with_wire(profile: NodeProfile, wire_bytes: int) -> NodeProfile:
    """The profile of a host update that reads gradients of that width; 2 bytes is what it is of."""
    return replace(profile, host_bytes_per_param=profile.host_bytes_per_param + wire_bytes - 2)


def _preference(choice: Choice) -> tuple[bool, float, int, int]:
    """What fits first, then what is fastest; of equals, what needs less memory."""
    return not choice.fits, choice.step_s, choice.device_bytes, choice.host_bytes


def _may_stream(profile: NodeProfile, limits: Limits) -> bool:
    return profile.has_device and limits.device_bytes != 0


def _stride(streamed: int, streamable: int) -> str:
    """The stride that streams exactly so many, with as few decimals as that takes."""
    if not streamed:
        return "host"
    ks = (Fraction(floor(streamable * 10**n / streamed), 10**n) for n in range(_DECIMALS))
    return _decimal(next(k for k in ks if floor(streamable / k) == streamed))


def _ratio(part: int, whole: int) -> str:
    """The share that picks exactly so many, with as few decimals as that takes."""
    shares = (Fraction(ceil(part * 10**n / whole), 10**n) for n in range(_DECIMALS))
    return _decimal(next(x for x in shares if floor(whole * x) == part))


def _decimal(number: Fraction) -> str:
    return f"{float(number):.{_DECIMALS}f}".rstrip("0").rstrip(".")


def _resident_counts(
    profile: NodeProfile, limits: Limits, shape: Option, params: int, count: int
) -> list[int]:
    """None, half of what fits beside the slots and all of that; every number of few subgroups."""
    if not _may_stream(profile, limits):
        return [0]
    room = count
    if limits.device_bytes is not None:
        subgroup_bytes = STATE_BYTES * min(shape.subgroup_size, params)
        room = min(count, limits.device_bytes // subgroup_bytes)
    if count <= _ALL_TRIED:
        return list(range(room + 1))
    beside = room if room == count else max(room - shape.slots, 0)
    return sorted({0, beside // 2, beside, room})


def _check_device_budget(params: int, limits: Limits, space: Space) -> None:
    smallest, slots = min(*space.subgroup_sizes, params), min(space.slots)
    least_bytes = STATE_BYTES * smallest * slots
    if limits.device_bytes and limits.device_bytes < least_bytes:
        raise ConfigError(
            f"{limits.device_bytes:,} bytes cannot hold one subgroup: {slots} slot(s) of the "
            f"smallest, {smallest:,} parameters, need {least_bytes:,}",
            where="device memory budget",
            fix="raise it, allow smaller subgroups, or give 0 to do without the device",
        )


def _gains(
    profile: NodeProfile, planner: Planner, limits: Limits, best: Choice
) -> dict[str, float]:
    """Per remedy, the share of the step that it saves, the stride being chosen anew."""
    gains = {}
    for remedy, rates in _REMEDIES.items():
        faster = {
            name: 1.1 * getattr(profile, name)
            for name in rates
            if getattr(profile, name) is not None
        }
        if faster:
            better = best_stride(replace(profile, **faster), planner, limits, best.option)
            gains[remedy] = 1 - better.step_s / best.step_s
    return gains
