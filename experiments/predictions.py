"""Prediction against what was published, and what this library's plan is predicted to reach.

`python -m experiments.predictions` prints one JSON object. It reads the shipped profiles, the
equally good fits beside them and the published rows; nothing is measured here.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dos.stdout import own_stdout
from experiments.figures import environment
from perfmodel.prediction import Request, predict
from perfmodel.profile import NodeProfile
from perfmodel.published_runs import MACHINES, Row, predict_row, profile_from, read_rows

HERE = Path(__file__).parent
STRIDES = range(2, 11)
RATIOS = [n / 20 for n in range(17)]


def equally_good(machine: str) -> list[NodeProfile]:
    """Profiles of the fits that the published rows cannot tell apart; the shipped one first."""
    report = json.loads((HERE / "results" / f"fit_{machine}.json").read_text())
    shipped = NodeProfile.load(HERE / "profiles" / f"{machine}.json")
    others = [
        profile_from(MACHINES[machine], fit["figures"], fit["streams"], source=shipped.source)
        for fit in report["equally_good"][1:]
    ]
    return [shipped, *others]


def spread(node_profiles: Sequence[NodeProfile], row: Row) -> tuple[float, float, float]:
    """Seconds of a row: by the best fit, and the least and most of all equally good ones."""
    times = [predict_row(node, row) for node in node_profiles]
    return times[0], min(times), max(times)


def curve(node_profiles: Sequence[NodeProfile], rows: Sequence[Row]) -> dict[str, list[float]]:
    """Predicted seconds of rows, one after the other, with their range over equally good fits."""
    best, low, high = zip(*(spread(node_profiles, row) for row in rows), strict=True)
    return {"step_s": list(best), "least_s": list(low), "most_s": list(high)}


def over_strides(rows: Sequence[Row], node_profiles: Sequence[NodeProfile]) -> dict[str, Any]:
    """Steps of one machine and model without residents: measured, and predicted at each stride."""
    own = [row for row in rows if row.resident_ratio == "0"]
    swept = [row for row in own if row.stride is not None]
    baseline = [row for row in own if row.stride is None]
    asked = [swept[0]._replace(stride=stride) for stride in STRIDES]
    return {
        "params": sum(swept[0].numels),
        "measured": [[row.stride, row.step_s] for row in swept],
        "host_only_measured_s": [row.step_s for row in baseline],
        "predicted": {"stride": list(STRIDES), **curve(node_profiles, asked)},
        "host_only_predicted_s": curve(node_profiles, baseline[:1])["step_s"][0],
    }


def over_ratios(rows: Sequence[Row], node_profiles: Sequence[NodeProfile]) -> dict[str, Any]:
    """Steps on one machine over the share of residents, of Twin-Flow and of stride 2."""
    found: dict[str, Any] = {"params": sum(rows[0].numels)}
    for label, stride in (("twin-flow", None), ("dos-paper, stride 2", 2)):
        of_kind = [row for row in rows if row.stride == stride]
        one = next(row for row in of_kind if row.schedule != "zero-offload")
        asked = [one._replace(resident_ratio=f"{ratio:g}") for ratio in RATIOS]
        found[label] = {
            "measured": [[float(row.resident_ratio), row.step_s] for row in of_kind],
            "predicted": {"resident_ratio": list(RATIOS), **curve(node_profiles, asked)},
        }
    return found


def own_plan(rows: Sequence[Row], node_profiles: Sequence[NodeProfile]) -> dict[str, Any]:
    """What this library's plan is predicted to take where they measured, and against that."""
    swept = [row for row in rows if row.schedule == "dos-paper" and row.resident_ratio == "0"]
    theirs_s = min(row.step_s for row in swept)
    baseline_s = statistics.median(row.step_s for row in rows if row.schedule == "zero-offload")
    found = [predict(node, Request(swept[0].numels)) for node in node_profiles]
    times = [each.step_s for each in found]
    least_s, most_s = min(times), max(times)
    return {
        "fits": len(found),
        "step_s": [round(least_s, 3), round(most_s, 3)],
        "strides": sorted({str(each.stride) for each in found}),
        "best_measured_s": theirs_s,
        "host_only_measured_s": baseline_s,
        "against_best_measured": [round(theirs_s / most_s, 2), round(theirs_s / least_s, 2)],
        "against_host_only": [round(baseline_s / most_s, 2), round(baseline_s / least_s, 2)],
    }


def main() -> None:
    """Entry point."""
    published = read_rows(HERE / "data" / "paper_runs.json")
    figures: dict[str, Any] = {"label": "predicted, not measured"}
    with own_stdout() as stdout:
        fits = {machine: equally_good(machine) for machine in MACHINES}
        for machine, model in sorted({(row.machine, row.model) for row in published}):
            rows = [row for row in published if (row.machine, row.model) == (machine, model)]
            figures[f"{machine} {model}"] = {
                **own_plan(rows, fits[machine]),
                "over_strides": over_strides(rows, fits[machine]),
            }
            if len({row.resident_ratio for row in rows}) > 1:
                figures[f"{machine} {model}"]["over_ratios"] = over_ratios(rows, fits[machine])
        figures["environment"] = environment()
        stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
