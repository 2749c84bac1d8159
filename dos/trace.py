"""Spans of work on lanes, and the trace file that a timeline viewer opens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dos.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work on one lane. Times in seconds from the start of the step."""

    name: str
    lane: str
    start_s: float
    end_s: float
    args: dict[str, int | str] = field(default_factory=dict)


def busy_s(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds of work per lane. A lane is FIFO, so its spans do not overlap."""
    total: dict[str, float] = {}
    for span in spans:
        total[span.lane] = total.get(span.lane, 0.0) + span.end_s - span.start_s
    return total


def write_trace(
    spans: Iterable[Span],
    path: str | Path,
    *,
    process: str,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Write a Chrome trace (JSON) of `spans`; Perfetto and chrome://tracing open it.

    `process` names the row group: the device, with its label where it is an emulation. `notes`
    are kept beside the spans.
    """
    spans = list(spans)
    lanes = sorted({span.lane for span in spans})
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": process}}
    ]
    for thread, lane in enumerate(lanes):
        events.append(
            {"ph": "M", "pid": 0, "tid": thread, "name": "thread_name", "args": {"name": lane}}
        )
    for span in spans:
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": lanes.index(span.lane),
                "name": span.name,
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": span.args,
            }
        )
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(notes or {})}
    Path(path).write_text(json.dumps(content))


def read_trace(path: str | Path) -> tuple[list[Span], str, dict[str, str]]:
    """The spans, process and notes of a file that `write_trace` wrote.

    Raises:
        ConfigError: no such file, or no such trace.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        first, *events = content["traceEvents"]
        lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
        spans = [
            Span(e["name"], lanes[e["tid"]], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, e["args"])
            for e in events
            if e["ph"] == "X"
        ]
        return spans, first["args"]["name"], content["otherData"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"no trace of this library: {type(error).__name__}: {error}",
            where=str(path),
            fix="record one: optimizer.record_trace(path), or python -m perfmodel simulate --trace",
        ) from None
