"""How a step went, as measured."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dos.errors import ConfigError
from dos.execute.backend import Event, Interval
from dos.plan import Lane, OpKind, UpdatePlan
from dos.trace import Span, busy_s, write_trace


@dataclass(frozen=True, slots=True)
class Transfer:
    """A gradient, or a piece of one, on its way to a subgroup's lease since before the step."""

    subgroup: int
    n_bytes: int
    event: Event


@dataclass(frozen=True, slots=True)
class Backward:
    """What was sent while backward ran.

    Attributes:
        transfers: in the order in which they were enqueued, also those that were in vain.
        marks: when the first and the last gradient of them were made.
        check_s: seconds that it took to compare gradients with what was sent.
    """

    transfers: tuple[Transfer, ...] = ()
    marks: tuple[Event, ...] = ()
    check_s: float = 0.0


NO_BACKWARD = Backward()
"""Nothing was sent."""


@dataclass(frozen=True, slots=True)
class Gated:
    """An update that was held back because its subgroup was being captured."""

    lane: Lane
    subgroup: int
    interval: Interval


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as it ran.

    Attributes:
        plan: what ran.
        label: the device, with its label where it is an emulation.
        wall_s: seconds from when the lanes could start to the end, divided by the time scale.
        events: per op, its completion.
        begin_s: when the lanes could start, on the backend's clock.
        time_scale: what paced times were stretched by.
        backward: gradients that were sent before the step.
        held: when callers were held by it, in seconds since the lanes could start: first `step`,
            then who waits for a part of it that ran on after `step`.
        gated: updates that nothing but a capture held back.
    """

    plan: UpdatePlan
    label: str
    wall_s: float
    events: tuple[Event, ...]
    begin_s: float
    time_scale: float
    backward: Backward = NO_BACKWARD
    held: tuple[Interval, ...] = ()
    gated: tuple[Gated, ...] = ()

    @property
    def exposed_s(self) -> float:
        """Seconds of the step that callers were held by it, by the time scale."""
        return sum(interval.end_s - interval.start_s for interval in self.held) / self.time_scale

    @property
    def waited_s(self) -> float:
        """Seconds in which some lane stood still for a capture, by the time scale."""
        return covered_s(its.interval for its in self.gated) / self.time_scale

    @property
    def stride(self) -> str:
        """The stride that ran, as text."""
        return self.plan.stride

    @property
    def h2d_bytes(self) -> int:
        """Bytes sent to the device."""
        return self._link_bytes(Lane.H2D)

    @property
    def d2h_bytes(self) -> int:
        """Bytes sent to the host, gradients during backward included."""
        return self._link_bytes(Lane.D2H) + self.early_grad_bytes

    @property
    def early_grad_bytes(self) -> int:
        """Bytes of gradients sent during backward."""
        return sum(transfer.n_bytes for transfer in self.backward.transfers)

    @property
    def grad_bytes(self) -> int:
        """Bytes of gradients sent to the host, during backward and in the step."""
        late = (op for op in self.plan.ops if op.kind is OpKind.GRAD_TO_HOST)
        return self.early_grad_bytes + sum(self.plan.link_bytes(op) for op in late)

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds of work per lane in the step, by the time scale; waits for device ops."""
        return busy_s(self.spans())

    @property
    def phases_s(self) -> dict[str, float]:
        """Seconds of work per kind of op, by the time scale, and of the comparison before.

        Phases overlap: they do not add up to `wall_s`. Waits for device ops.
        """
        phases_s = {"compare_gradients": self.backward.check_s / self.time_scale}
        for op, span in zip(self.plan.ops, self.spans(), strict=True):
            kind = op.kind.value
            phases_s[kind] = phases_s.get(kind, 0.0) + span.end_s - span.start_s
        return phases_s

    @property
    def overran(self) -> int:
        """Number of paced ops that missed their slot: if any, the times say nothing."""
        return sum(event.wait().overran for event in self.events)

    def spans(self) -> list[Span]:
        """One span per op, in plan order; waits for device ops still under way."""
        return [
            self._span(
                f"{op.kind.value} {op.subgroup}",
                op.kind.lane.value,
                event.wait(),
                {"op": op.index, "link_bytes": self.plan.link_bytes(op)},
            )
            for op, event in zip(self.plan.ops, self.events, strict=True)
        ]

    def backward_spans(self) -> list[Span]:
        """Spans before the step, at negative times: each transfer, and the backward around them.

        The backward is known from the first gradient that was sent to the last.
        """
        kind = OpKind.GRAD_TO_HOST
        spans = [
            self._span(
                f"{kind.value} {sent.subgroup}",
                kind.lane.value,
                sent.event.wait(),
                {"link_bytes": sent.n_bytes},
            )
            for sent in self.backward.transfers
        ]
        if self.backward.marks:
            marks = [mark.wait().end_s for mark in self.backward.marks]
            made = Interval(min(marks), max(marks))
            spans.append(self._span("backward", "backward", made, {}))
        return spans

    def caller_spans(self) -> list[Span]:
        """Spans of the caller: held by `step`, then by parts of it that ran on after it."""
        names = ["step", *["wait for step"] * len(self.held)]
        scale = self.time_scale
        return [
            Span(name, "caller", its.start_s / scale, its.end_s / scale)
            for name, its in zip(names, self.held, strict=False)
        ]

    def gate_spans(self) -> list[Span]:
        """Spans of updates that were held back by a capture, beside the lane that they held up."""
        return [
            self._span(f"capture of {its.subgroup}", f"{its.lane.value} gate", its.interval, {})
            for its in self.gated
        ]

    def metrics(self) -> dict[str, float]:
        """A flat dict for loggers; waits for device ops."""
        busy = {f"{lane}_busy_s": seconds for lane, seconds in self.busy_s.items()}
        phases = {f"{phase}_s": seconds for phase, seconds in self.phases_s.items()}
        numel = sum(
            self.plan.sizes[op.subgroup].numel
            for op in self.plan.ops
            if op.kind in (OpKind.UPDATE_HOST, OpKind.UPDATE_DEVICE)
        )
        return {
            "step_s": self.wall_s,
            "exposed_s": self.exposed_s,
            "waited_s": self.waited_s,
            "params_per_s": numel / self.wall_s if self.wall_s > 0 else 0.0,
            "h2d_bytes": self.h2d_bytes,
            "d2h_bytes": self.d2h_bytes,
            "grad_bytes": self.grad_bytes,
            "early_grad_bytes": self.early_grad_bytes,
            **busy,
            **phases,
        }

    def _span(self, name: str, lane: str, ran: Interval, args: dict[str, int | str]) -> Span:
        scale = self.time_scale
        start_s, end_s = ran.start_s - self.begin_s, ran.end_s - self.begin_s
        return Span(name, lane, start_s / scale, end_s / scale, args)

    def _link_bytes(self, lane: Lane) -> int:
        return sum(self.plan.link_bytes(op) for op in self.plan.ops if op.kind.lane is lane)


class Recording:
    """Steps that are to be written to a trace file: `steps` of them, to `path`.

    Raises:
        ConfigError: fewer than one step, or no directory to write to.
    """

    def __init__(self, path: Path, steps: int) -> None:
        if steps < 1:
            raise ConfigError(f"{steps} steps", where="record_trace", fix="record at least 1")
        if not path.parent.is_dir():
            raise ConfigError(
                f"there is no directory {path.parent}", where="record_trace", fix="make it first"
            )
        self._path, self._steps = path, steps
        self._records: list[StepRecord] = []

    def add(self, record: StepRecord) -> bool:
        """Take one more step; with the last one write the file and return True."""
        self._records.append(record)
        if len(self._records) < self._steps:
            return False
        plans = {f"plan {n}": str(one.plan) for n, one in enumerate(self._records)}
        try:
            write_trace(_spans_of(self._records), self._path, process=record.label, notes=plans)
        except OSError as error:  # no reason to end a training, whose step is made
            warnings.warn(f"no trace was written: {error}", stacklevel=2)
        return True


def _spans_of(records: Sequence[StepRecord]) -> list[Span]:
    """All steps on one axis, backwards included; 0 is where the first step begins."""
    spans = []
    for number, record in enumerate(records):
        offset_s = (record.begin_s - records[0].begin_s) / record.time_scale
        callers, gates = record.caller_spans(), record.gate_spans()
        for span in (*record.backward_spans(), *callers, *gates, *record.spans()):
            start_s, end_s = span.start_s + offset_s, span.end_s + offset_s
            args = {**span.args, "step": number}
            spans.append(Span(span.name, span.lane, start_s, end_s, args))
    return spans


def covered_s(intervals: Iterable[Interval]) -> float:
    """Seconds that lie in at least one of them."""
    total_s, end_s = 0.0, float("-inf")
    for its in sorted(intervals, key=lambda interval: interval.start_s):
        total_s += max(0.0, its.end_s - max(its.start_s, end_s))
        end_s = max(end_s, its.end_s)
    return total_s
