"""Pictures of what was predicted or measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

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


def plot_timeline(steps: Mapping[str, Sequence[Span]], path: str | Path, *, title: str) -> None:
    """Draw the lanes of several steps, one below the other on a common time axis, as a PNG.

    `steps` maps a heading to the spans of one step. `title` names the device, with its label
    where it is an emulation.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ConfigError(
            "matplotlib is not installed",
            where="plot_timeline",
            fix="pip install 'deep-optimizer-states[plot]'",
        ) from None
    figure = Figure(figsize=(11, 0.9 + 1.5 * len(steps)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(steps), 1, sharex=True, squeeze=False)[:, 0]
    seen: set[str] = set()
    for axis, (heading, spans) in zip(axes, steps.items(), strict=True):
        for span in spans:
            kind = span.name.split()[0]
            seen.add(kind)
            # A white edge keeps neighbours apart, also where they touch.
            axis.barh(
                _LANES.index(span.lane),
                (span.end_s - span.start_s) * 1e3,
                left=span.start_s * 1e3,
                color=_COLORS.get(kind, "#bbbbbb"),
                edgecolor="white",
                linewidth=0.3,
            )
        axis.set_yticks(range(len(_LANES)), _LANES)
        axis.invert_yaxis()
        axis.set_title(heading, loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("milliseconds from the start of the step")
    figure.suptitle(title, fontsize=11)
    patches = [Patch(color=color, label=kind) for kind, color in _COLORS.items() if kind in seen]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8)
    figure.savefig(path, dpi=120)
