"""One step on one node: what a user asks for, and what the model answers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dos.errors import ConfigError
from dos.plan import PlanMemory, UpdatePlan, verify
from dos.trace import Span
from perfmodel.closed_form import closed_form_s
from perfmodel.planned import cut, plan_of
from perfmodel.profile import NodeProfile
from perfmodel.published import Schedule, simulate_published
from perfmodel.solve import Limits, Option, Planned, best_stride
from perfmodel.timeline import capacities, least_s, simulate, step_s, tasks_of

AnySchedule = Literal["dos"] | Schedule


@dataclass(frozen=True, slots=True)
class Request:
    """A step to predict.

    Attributes:
        numels: parameters of each subgroup, in order.
        schedule: "dos" is this library's plan; else see `perfmodel.published`.
        stride: decimal text, "host", or None: the best one of "dos", none of the others.
        slots: device staging slots; None is what the schedule has.
        resident_ratio: decimal text.
        gradients_sent: all gradients came during backward; the published code has no other way.
    """

    numels: Sequence[int]
    schedule: AnySchedule = "dos"
    stride: str | None = None
    slots: int | None = None
    resident_ratio: str = "0"
    gradients_sent: bool = True


@dataclass(frozen=True, slots=True)
class Prediction:
    """A step as predicted.

    Attributes:
        step_s: seconds.
        spans: every op; of the published code also copies that outlast the step.
        stride: decimal text, "host", or None where the schedule has none.
        closed_form_s: of "dos" without residents; see `perfmodel.closed_form`.
        busy: per lane and shared resource, its share of the step at full speed; of "dos".
        plan: of "dos".
        memory: what training with that plan needs, gradients sent included.
    """

    step_s: float
    spans: list[Span]
    stride: str | None
    closed_form_s: float | None = None
    busy: dict[str, float] | None = None
    plan: UpdatePlan | None = None
    memory: PlanMemory | None = None


def predict(profile: NodeProfile, asked: Request) -> Prediction:
    """What the model says of one step.

    Raises:
        ConfigError: a stride, slots or residents that the schedule does not have; a rate that the
            profile lacks.
    """
    if asked.schedule == "dos":
        return _predict_ours(profile, asked)
    if asked.slots not in (None, 1):
        raise ConfigError(
            f"{asked.schedule} has one staging set, not {asked.slots}",
            where="--device-slots",
            fix="leave it out, or ask for schedule dos",
        )
    stride = _whole(asked.stride) if asked.schedule == "dos-paper" else None
    spans, seconds = simulate_published(
        profile,
        asked.numels,
        schedule=asked.schedule,
        stride=stride,
        resident_ratio=asked.resident_ratio,
    )
    return Prediction(seconds, spans, None if stride is None else str(stride))


def _predict_ours(profile: NodeProfile, asked: Request) -> Prediction:
    option = Option(
        subgroup_size=max(asked.numels, default=1),
        stride=_real(asked.stride),
        resident_ratio=asked.resident_ratio,
        slots=asked.slots or 2,
        wire_bytes=2,
    )

    def plan_for(option: Option, *, gradients_sent: bool) -> UpdatePlan:
        return plan_of(
            asked.numels,
            option,
            gradients_sent=gradients_sent,
            host_parameters=not profile.has_device,
        )

    def planner(option: Option) -> Planned:
        plan = plan_for(option, gradients_sent=asked.gradients_sent)
        return Planned(plan, plan.memory())

    if asked.stride is None:
        option = best_stride(profile, planner, Limits(), option).option
    plan = plan_for(option, gradients_sent=asked.gradients_sent)
    verify(plan)
    spans = simulate(plan, profile)
    seconds = step_s(spans)
    busiest = least_s(tasks_of(plan, profile), capacities(profile))
    closed_s = None
    if not float(option.resident_ratio):
        stride: float | Literal["host"] = (
            "host" if option.stride == "host" else float(option.stride)
        )
        closed_s = closed_form_s(profile, sum(asked.numels), stride)
    return Prediction(
        step_s=seconds,
        spans=spans,
        stride=option.stride,
        closed_form_s=closed_s,
        busy={name: busy_s / seconds for name, busy_s in busiest.items()},
        plan=plan,
        memory=plan_for(option, gradients_sent=False).memory(),
    )


def _real(stride: str | None) -> str:
    if stride in (None, "host"):
        return "host"
    try:
        if 1 <= float(stride) < math.inf:
            return stride
    except ValueError:
        pass
    raise ConfigError(
        f"{stride!r} is no stride", where="--stride", fix='give a number >= 1, or "host"'
    )


def _whole(stride: str | None) -> int:
    try:
        return int(stride or "")
    except ValueError:
        raise ConfigError(
            f"{stride!r} is no stride of dos-paper",
            where="--stride",
            fix="give a whole number of at least 1, or ask for schedule dos",
        ) from None


def read_subgroups(path: Path) -> list[int]:
    """The sizes in a JSON list.

    Raises:
        ConfigError: no such file, or no list of positive whole numbers.
    """
    try:
        sizes = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sizes = error
    whole = isinstance(sizes, list) and all(type(n) is int and n > 0 for n in sizes)
    if not whole or not sizes:
        raise ConfigError(
            f"no list of subgroup sizes: {str(sizes)[:80]}",
            where=str(path),
            fix="give a JSON list of positive whole numbers, the parameters of each subgroup",
        )
    return list(sizes)


def numels_of(params: int, subgroup_size: int, subgroups: Path | None) -> list[int]:
    """Subgroups as listed in a file, or else cut to a size.

    Raises:
        ConfigError: see `read_subgroups`; the list is of another number of parameters.
    """
    if subgroups is None:
        return cut(params, subgroup_size)
    sizes = read_subgroups(subgroups)
    if abs(sum(sizes) - params) > 0.01 * params:
        raise ConfigError(
            f"holds {sum(sizes):,} parameters, not {params:,}",
            where=str(subgroups),
            fix="give the subgroups of one rank, and its parameters as --params-per-rank",
        )
    return sizes
