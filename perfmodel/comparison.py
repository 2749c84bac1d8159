"""A recorded step beside what the model says of the same plan, op by op."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dos.errors import ConfigError
from dos.plan import parse_plan
from dos.trace import Span, read_trace
from perfmodel.profile import NodeProfile
from perfmodel.timeline import simulate, step_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """One step, measured and predicted.

    Attributes:
        label: what was measured on, with its label where it is an emulation.
        measured, predicted: per op of the plan, both counted from their first op's start.
    """

    label: str
    measured: list[Span]
    predicted: list[Span]

    @property
    def measured_s(self) -> float:
        """From the first op's start to the last one's end."""
        return step_s(self.measured)

    @property
    def predicted_s(self) -> float:
        """The same of the prediction."""
        return step_s(self.predicted)

    def by_kind(self) -> dict[str, tuple[float, float]]:
        """Per kind of op, the seconds of work: measured, predicted."""
        total: dict[str, tuple[float, float]] = {}
        for real, model in zip(self.measured, self.predicted, strict=True):
            kind = real.name.split()[0]
            real_s, model_s = total.get(kind, (0.0, 0.0))
            total[kind] = (
                real_s + real.end_s - real.start_s,
                model_s + model.end_s - model.start_s,
            )
        return total


def compare(profile: NodeProfile, trace: str | Path, *, step: int = 0) -> Comparison:
    """Put a step of a trace that `record_trace` or `simulate` wrote beside its prediction.

    Args:
        profile: of the node.
        trace: the file; it holds the plan of every step.
        step: which of its steps, from 0.

    Raises:
        ConfigError: no such file or step.
    """
    spans, label, notes = read_trace(trace)
    if f"plan {step}" not in notes:
        recorded = sum(name.startswith("plan ") for name in notes)
        raise ConfigError(
            f"has no plan of step {step}",
            where=str(trace),
            fix=f"it holds {recorded} of them, counted from 0; record with optimizer.record_trace",
        )
    plan = parse_plan(notes[f"plan {step}"])
    ran = {
        span.args["op"]: span
        for span in spans
        if "op" in span.args and span.args.get("step", 0) == step
    }
    if len(ran) != len(plan.ops):
        raise ConfigError(
            f"has {len(ran)} ops of step {step}, its plan {len(plan.ops)}",
            where=str(trace),
            fix="record it anew",
        )
    begin_s = min((span.start_s for span in ran.values()), default=0.0)
    measured = [
        Span(each.name, each.lane, each.start_s - begin_s, each.end_s - begin_s, each.args)
        for each in (ran[op.index] for op in plan.ops)
    ]
    return Comparison(label, measured, simulate(plan, profile))
