"""Prediction against what was published, and what this library's plan is predicted to reach.

`python -m experiments.predictions` draws both pictures of experiments/README.md and prints one
JSON object. It reads the shipped profiles and the equally good fits beside them; nothing is
measured here.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dos.stdout import own_stdout
from perfmodel.prediction import Request, predict
from perfmodel.profile import NodeProfile
from perfmodel.published_runs import MACHINES, Row, predict_row, profile_from, read_rows
from perfmodel.report import new_figure

HERE = Path(__file__).parent
STRIDES = range(2, 11)


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


def draw_strides(rows: Sequence[Row], fits: dict[str, list[NodeProfile]], path: Path) -> None:
    """Step over stride per machine and model: measured, and predicted at every whole stride."""
    groups = sorted({(row.machine, row.model) for row in rows}, key=str)
    figure = new_figure(9, 6)
    for axes, (machine, model) in zip(figure.subplots(2, 2).flat, groups, strict=True):
        own = [r for r in rows if (r.machine, r.model, r.resident_ratio) == (machine, model, "0")]
        swept = [row for row in own if row.stride is not None]
        predicted = [spread(fits[machine], swept[0]._replace(stride=stride)) for stride in STRIDES]
        best, low, high = zip(*predicted, strict=True)
        axes.fill_between(STRIDES, low, high, alpha=0.25, label="equally good fits")
        axes.plot(STRIDES, best, label="predicted, dos-paper")
        axes.plot([r.stride for r in swept], [r.step_s for r in swept], "ko", label="measured")
        baseline = [row for row in own if row.stride is None]
        axes.axhline(spread(fits[machine], baseline[0])[0], ls="--", label="predicted, host only")
        axes.plot([STRIDES[-1]] * len(baseline), [r.step_s for r in baseline], "kx")
        axes.set_ylim(bottom=0)
        axes.set_title(f"{machine}, {model}", loc="left", fontsize=10)
        axes.set_xlabel("stride")
        axes.set_ylabel("step (s)")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=80)


def draw_ratios(rows: Sequence[Row], fits: list[NodeProfile], path: Path) -> None:
    """Step over residents on H100, of Twin-Flow and of interleaving at stride 2."""
    own = [row for row in rows if (row.machine, row.model) == ("h100", "20B")]
    ratios = [n / 20 for n in range(21)]
    figure = new_figure(6, 3.6)
    axes = figure.subplots()
    for label, stride in (("twin-flow", None), ("dos-paper, stride 2", 2)):
        measured = [row for row in own if row.stride == stride and row.schedule != "zero-offload"]
        curve = [
            spread(fits, measured[0]._replace(resident_ratio=f"{ratio:g}")) for ratio in ratios
        ]
        best, low, high = zip(*curve, strict=True)
        line = axes.plot(ratios, best, label=f"predicted, {label}")
        axes.fill_between(ratios, low, high, alpha=0.25, color=line[0].get_color())
        shown = [row for row in own if row.stride == stride]
        axes.plot([float(r.resident_ratio) for r in shown], [r.step_s for r in shown], "ko")
    axes.set_xlabel("share of the optimizer that stays on the GPU (dots: measured)")
    axes.set_ylabel("step (s)")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=80)


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
    rows = read_rows(HERE / "data" / "paper_runs.json")
    with own_stdout() as stdout:
        fits = {machine: equally_good(machine) for machine in MACHINES}
        pictures = HERE / "pictures"
        pictures.mkdir(exist_ok=True)
        draw_strides(rows, fits, pictures / "stride_sweep.png")
        draw_ratios(rows, fits["h100"], pictures / "ratio_sweep.png")
        predicted = {
            f"{machine} {model}": own_plan(
                [row for row in rows if (row.machine, row.model) == (machine, model)],
                fits[machine],
            )
            for machine, model in sorted({(row.machine, row.model) for row in rows})
        }
        figures = {"label": "predicted, not measured", **predicted}
        stdout.write(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
