"""Measuring on a paced virtual device: how far to stretch time, and which steps count."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import torch
import typer

import dos
from dos.execute.record import StepRecord
from perfmodel.profile import NodeProfile

SLOT_PER_SOLO = 16
"""A paced slot is this many times what its op takes alone. On two cores 16 held while other
lanes were busy, 8 did not."""

Stretch: TypeAlias = Annotated[
    float, typer.Option(min=1.0, help="time scale over that of a quiet machine")
]

VOID_SHARE = 0.2
"""A measurement that loses more than this share of its steps to missed slots is void."""


def time_scale_for(profile: NodeProfile, subgroup_size: int) -> float:
    """The time scale at which every op of a subgroup fits its slot `SLOT_PER_SOLO` times over.

    Measured with single subgroups, so that each op runs alone.
    """
    scale = 1.0
    for stride in ("host", 1):
        parameter = torch.nn.Parameter(torch.zeros(subgroup_size, dtype=torch.bfloat16))
        optimizer = dos.DOSOptimizer(
            torch.optim.AdamW([parameter]),
            stride=stride,
            subgroup_size=subgroup_size,
            device="virtual",
        )
        solo_s: dict[int, list[float]] = {}
        for _ in range(12):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            assert optimizer.last_step is not None
            for index, span in enumerate(optimizer.last_step.spans()):
                solo_s.setdefault(index, []).append(span.end_s - span.start_s)
        plan = optimizer.plan
        for op in plan.ops:
            slot_s = profile.op_s(
                op.kind.lane.value, numel=subgroup_size, link_bytes=plan.link_bytes(op)
            )
            scale = max(scale, SLOT_PER_SOLO * statistics.median(solo_s[op.index]) / slot_s)
        optimizer.close()
    return scale


@dataclass
class MeasuredSteps:
    """The steps of a run; those in which a paced op missed its slot do not count."""

    counted: list[StepRecord] = field(default_factory=list)
    left_out: int = 0
    latest: StepRecord | None = None

    def add(self, step: StepRecord) -> None:
        """Take in one step."""
        self.latest = step
        if step.overran:
            self.left_out += 1
        else:
            self.counted.append(step)

    @property
    def void(self) -> bool:
        """Whether too many steps were lost for the times to say anything."""
        return self.left_out > VOID_SHARE * (self.left_out + len(self.counted))

    @property
    def step_s(self) -> float:
        """Median step time in seconds; of a run none of whose steps counts, its latest."""
        return statistics.median(step.wall_s for step in self._shown)

    def median_step(self) -> StepRecord:
        """The step whose time is nearest to the median."""
        return min(self._shown, key=lambda step: abs(step.wall_s - self.step_s))

    @property
    def _shown(self) -> list[StepRecord]:
        """What figures are made of. A run without any step that counts is void in any case."""
        assert self.latest is not None, "no step was added"
        return self.counted or [self.latest]

    def busy_share(self) -> dict[str, float]:
        """Per lane, the median share of the step's time in which it worked."""
        shares: dict[str, list[float]] = {}
        for step in self._shown:
            for lane, busy_s in step.busy_s.items():
                shares.setdefault(lane, []).append(busy_s / step.wall_s)
        return {lane: round(statistics.median(values), 3) for lane, values in shares.items()}
