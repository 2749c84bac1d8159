"""Pictures of what was predicted or measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dos.errors import ConfigError
from dos.trace import Span

_LANES = ("h2d", "device", "d2h", "host")
_COLORS = {
    "fetch": "#4477aa",
    "publish": "#66ccee",
    "update_device": "#228833",
    "flush": "#aa3377",
    "grad_to_host": "#ccbb44",
    "update_host": "#ee6677",
}


def new_figure(width_inches: float, height_inches: float) -> Any:
    """An empty matplotlib figure that needs no display.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "matplotlib is not installed",
            where="pictures",
            fix="pip install 'deep-optimizer-states[plot]'",
        ) from None
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plot_timeline(steps: Mapping[str, Sequence[Span]], path: str | Path, *, title: str) -> None:
    """Draw the lanes of several steps, one below the other on a common time axis, as a PNG.

    `steps` maps a heading to the spans of one step. `title` names the device, with its label
    where it is an emulation.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = new_figure(11, 0.9 + 1.5 * len(steps))
    from matplotlib.patches import Patch

    found = {span.lane for spans in steps.values() for span in spans}
    lanes = [*_LANES, *sorted(found - set(_LANES))]
    axes = figure.subplots(len(steps), 1, sharex=True, squeeze=False)[:, 0]
    seen: set[str] = set()
    for axis, (heading, spans) in zip(axes, steps.items(), strict=True):
        for span in spans:
            kind = span.name.split()[0]
            seen.add(kind)
            # A white edge keeps neighbours apart, also where they touch.
            axis.barh(
                lanes.index(span.lane),
                (span.end_s - span.start_s) * 1e3,
                left=span.start_s * 1e3,
                color=_COLORS.get(kind, "#bbbbbb"),
                edgecolor="white",
                linewidth=0.3,
            )
        axis.set_yticks(range(len(lanes)), lanes)
        axis.invert_yaxis()
        axis.set_title(heading, loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("milliseconds from the start of the step")
    figure.suptitle(title, fontsize=11)
    patches = [Patch(color=color, label=kind) for kind, color in _COLORS.items() if kind in seen]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8)
    figure.savefig(path, dpi=120)


def plot_sweep(curves: Mapping[str, Mapping[str, float]], path: str | Path, *, title: str) -> None:
    """Draw step times in seconds over the stride, a curve per heading, as a PNG.

    Strides are decimal text, or "host", which stands at the right end.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = new_figure(7, 4)
    axes = figure.subplots()
    strides = {stride for curve in curves.values() for stride in curve}
    ordered = [*sorted(strides - {"host"}, key=float), *(strides & {"host"})]
    for heading, curve in curves.items():
        shown = [stride for stride in ordered if stride in curve]
        at = [ordered.index(stride) for stride in shown]
        axes.plot(at, [curve[stride] * 1e3 for stride in shown], marker="o", label=heading)
    axes.set_xticks(range(len(ordered)), ordered, fontsize=8)
    axes.set_xlabel("stride")
    axes.set_ylabel("step (ms)")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)
