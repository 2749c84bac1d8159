"""Pictures of updates: over strides, over residents, and the phases of an iteration."""

from __future__ import annotations

from typing import Any

BILLION = 1e9
GROUND = "#fff4e0"
"""Behind every panel of a paced virtual device, whose title says so, too."""


def strides(figure: Any, numbers: dict[str, Any]) -> None:
    """Update throughput over the stride: published, emulated, and on a GPU where one was."""
    predictions = numbers["predictions"]
    panels = figure.subplots(2, 3).flat
    for axes, name in zip(panels, (n for n in predictions if _is_machine(n)), strict=False):
        _published_strides(axes, name, predictions[name]["over_strides"])
    figure.axes[0].legend()
    if _emulated(figure.axes[4], numbers["bench_sweep"]):
        points = numbers["bench_sweep"]["points"]
        swept = [point for point in reversed(points) if not point["resident_ratio"]]
        _points(figure.axes[4], swept, "stride", "C0", "")
        figure.axes[4].legend()
    _of_gpu(figure.axes[5], numbers["bench_gpu_update"])
    for axes in figure.axes:
        axes.set_xlabel("stride (host: nothing on the GPU)")
        axes.set_ylabel("updates (G parameters/s)")
        axes.set_ylim(bottom=0)


def _is_machine(name: str) -> bool:
    return name.split()[0] in ("a100", "h100")


def _curve(axes: Any, params: float, found: dict[str, Any], over: str, color: str) -> None:
    """A predicted rate, and its range over fits that are equally good."""
    at = found[over]
    slow, fast = ([params / time_s for time_s in found[key]] for key in ("most_s", "least_s"))
    axes.fill_between(at, slow, fast, alpha=0.25, color=color, linewidth=0)
    axes.plot(at, [params / time_s for time_s in found["step_s"]], color=color)


def _dots(axes: Any, params: float, measured: list[list[float]], style: str, label: str) -> None:
    at = [place for place, _ in measured]
    axes.plot(at, [params / step_s for _, step_s in measured], style, label=label)


def _published_strides(axes: Any, name: str, swept: dict[str, Any]) -> None:
    params = swept["params"] / BILLION
    _curve(axes, params, swept["predicted"], "stride", "C0")
    axes.plot([], [], "C0", label="predicted; shade: equally good fits")
    _dots(axes, params, swept["measured"], "ko", "published, interleaved")
    axes.axhline(params / swept["host_only_predicted_s"], ls="--", label="predicted, host only")
    last = swept["predicted"]["stride"][-1] + 1
    alone = [[last, step_s] for step_s in swept["host_only_measured_s"]]
    _dots(axes, params, alone, "kx", "published, host only")
    axes.set_title(f"published code: one rank of 4x {name.upper()}")


def _emulated(axes: Any, figures: dict[str, Any] | None) -> bool:
    """Whether there is an emulation to show; the panel says what it is, or that there is none."""
    if figures is None:
        return _nothing(axes, "an emulation")
    axes.set_facecolor(GROUND)
    axes.set_title(f"EMULATION, no GPU:\n{figures['label']}")
    return True


def _nothing(axes: Any, what: str) -> bool:
    axes.set_title(f"{what}: not measured")
    axes.set_xticks([])
    axes.set_yticks([])
    return False


def _points(axes: Any, points: list[dict[str, Any]], over: str, color: str, label: str) -> None:
    """Measured and predicted rates, in the order of the points; void ones are hollow."""
    at = [str(point[over]) for point in points]
    predicted = [point["predicted_params_per_s"] / BILLION for point in points]
    axes.plot(at, predicted, color=color, label=f"{label}predicted")
    for point, x in zip(points, at, strict=True):
        face = "none" if point["void"] else color
        rate = point["params_per_s"] / BILLION
        axes.plot([x], [rate], "o", color=color, markerfacecolor=face)
    axes.plot([], [], "o", color=color, label=f"{label}paced (hollow: void)")


def _of_gpu(axes: Any, figures: dict[str, Any] | None) -> None:
    if figures is None or "mean nothing" in figures["device"]:
        _nothing(axes, "a GPU")
        return
    steps = figures["steps"]
    params = steps["params"] / BILLION
    found = dict(reversed(steps["strides"].items()))
    busiest = [params / one["busy_s"][one["busiest_lane"]] for one in found.values()]
    axes.plot(list(found), busiest, ls="--", label="its busiest lane alone: the bound")
    axes.plot(list(found), [params / one["step_s"] for one in found.values()], "ko", label="ours")
    axes.set_title(f"measured: {figures['device']}")
    axes.legend()


def residents(figure: Any, numbers: dict[str, Any]) -> None:
    """Update throughput over the share of residents, Twin-Flow's ratio: published, emulated."""
    published, emulated = figure.subplots(1, 2)
    predictions = numbers["predictions"]
    for name in (n for n in predictions if "over_ratios" in predictions[n]):
        swept = predictions[name]["over_ratios"]
        params = swept["params"] / BILLION
        for color, label in zip(("C0", "C1"), (k for k in swept if k != "params"), strict=True):
            _curve(published, params, swept[label]["predicted"], "resident_ratio", color)
            published.plot([], [], color, label=f"{label}, predicted")
            _dots(published, params, swept[label]["measured"], f"{color}o", "")
        published.set_xlim(-0.02, 0.82)
        published.set_title(f"published code: one rank of 4x {name.upper()}")
    published.legend(title="dots: published")
    if _emulated(emulated, numbers["bench_sweep"]):
        swept = numbers["bench_sweep"]
        kinds = {"host": "as Twin-Flow, ", 2: "stride 2, ", 1.5: "stride 1.5, "}
        for number, (stride, label) in enumerate(kinds.items()):
            points = [point for point in swept["points"] if point["stride"] == stride]
            _points(emulated, points, "resident_ratio", f"C{number}", label)
        emulated.legend()
    for axes in (published, emulated):
        axes.set_xlabel("share of the optimizer that stays on the GPU")
        axes.set_ylabel("updates (G parameters/s)")
        axes.set_ylim(bottom=0)


PHASES = ("forward", "backward", "step")
SCHEDULES = ("plain", "flush", "interleaved")


def phases(figure: Any, numbers: dict[str, Any]) -> None:
    """Seconds of forward, backward and step under three schedules: published, emulated."""
    panels = figure.subplots(1, 3)
    rows = numbers["paper_runs"]["rows"]
    for axes, machine in zip(panels, ("a100", "h100"), strict=False):
        _bars(axes, {name: _published_phases(rows, machine, name) for name in SCHEDULES}, 1.0)
        axes.set_title(f"published: one rank of 4x {machine.upper()}, 20B")
        axes.set_ylabel("forward + backward + step (s)")
    panels[0].legend()
    emulated = numbers["bench_phases"]
    if _emulated(panels[2], emulated):
        shown = {
            name: [emulated["schedules"][name][f"{phase}_s"] for phase in PHASES]
            for name in SCHEDULES
        }
        _bars(panels[2], shown, 1e3)
        panels[2].set_xlabel("plain here: our gradients sent in the step")
        panels[2].set_ylabel("forward + backward + step (ms, emulated)")


def _published_phases(rows: list[dict[str, Any]], machine: str, schedule: str) -> list[float]:
    """Of the row of 20B without residents at stride 2, if it has one: seconds per phase."""
    flush, prefetch = int(schedule != "plain"), int(schedule == "interleaved")
    row = next(
        row
        for row in rows
        if (row["machine"], row["model_B"], row["ratio"]) == (machine, 20.0, 1.0)
        and "fwd_ms" in row
        and (row["flush_async"], row["prefetch"]) == (flush, prefetch)
        and row["k"] in (0, 2)
    )
    return [row[key] / 1e3 for key in ("fwd_ms", "bwd_ms", "step_ms")]


def _bars(axes: Any, times_s: dict[str, list[float]], scale: float) -> None:
    base = [0.0] * len(times_s)
    for phase, each_s in zip(PHASES, zip(*times_s.values(), strict=True), strict=True):
        heights = [time_s * scale for time_s in each_s]
        axes.bar(list(times_s), heights, bottom=base, label=phase)
        base = [low + height for low, height in zip(base, heights, strict=True)]
