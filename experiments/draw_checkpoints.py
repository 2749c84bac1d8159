"""Pictures of checkpoints: the I/O study, the parts of a save, ranks, and how often to save."""

from __future__ import annotations

import statistics
from typing import Any

from perfmodel.checkpoint_interval import checkpoint_interval, wasted

FAILURE_S = (3600.0, 86400.0)
"""Mean times between failures that the interval's picture is drawn for: an hour, a day."""


def machine_of(figures: dict[str, Any]) -> str:
    """What a picture says of where its numbers are from."""
    its = figures["environment"]
    disk = its.get("disk", {})
    where = f", {disk['file_system']} on {disk['device']}" if disk else ""
    return f"{its['cpu']}, {its['cores']} cores{where}, {its['date']}"


def io(figure: Any, numbers: dict[str, Any]) -> None:
    """Rates of every combination, a panel per layout of the files; write above read."""
    found = numbers["bench_io"]
    rows = list(found["strategies"].values())
    layouts = sorted({(row["files"], row["coalesced"]) for row in rows}, key=str)
    panels = figure.subplots(2, len(layouts), sharey="row", squeeze=False)
    for column, layout in enumerate(layouts):
        own = [row for row in rows if (row["files"], row["coalesced"]) == layout]
        engines = sorted({(row["engine"], row["direct"]) for row in own})
        for line, kind in enumerate(("save", "load")):
            axes = panels[line][column]
            for engine, direct in engines:
                points = sorted(
                    (row["depth"], row[kind])
                    for row in own
                    if (row["engine"], row["direct"]) == (engine, direct)
                )
                style = {"io_uring": "C0", "threads": "C1", "posix": "C2"}[engine]
                label = f"{engine}, {'direct' if direct else 'buffered'}"
                axes.plot(
                    [str(depth) for depth, _ in points],
                    [rate for _, rate in points],
                    "o-" if direct else "s--",
                    color=style,
                    label=label,
                )
            joined = "coalesced" if layout[1] else "by tensor"
            files = "one file" if layout[0] == "all" else f"file per {layout[0]}"
            axes.set_title(
                f"{'write' if kind == 'save' else 'read'}: {files}, {joined}", loc="left"
            )
    for axes in panels[1]:
        axes.set_xlabel("requests in flight of each rank")
    for line in panels:
        line[0].set_ylabel("GiB/s")
        line[0].set_ylim(bottom=0)
    panels[0][0].legend()
    figure.suptitle("{gib} GiB of {ranks} ranks; ".format(**found) + machine_of(found), fontsize=9)


def ablation(figure: Any, numbers: dict[str, Any]) -> None:
    """Seconds of saves that do one part, two and all three."""
    found = numbers["bench_ablation"]
    axes = figure.subplots()
    ways = list(found["ways"])
    parts = {"serialize": "serialization", "stage": "+ staging", "flush": "+ flush: durable"}
    for number, (part, label) in enumerate(parts.items()):
        its = [found["ways"][way] for way in ways]
        middle = [way[f"{part}_s"] for way in its]
        lows, highs = zip(*(way[f"{part}_quartiles_s"] for way in its), strict=True)
        errors = [
            [m - low for m, low in zip(middle, lows, strict=True)],
            [high - m for m, high in zip(middle, highs, strict=True)],
        ]
        at = [place + 0.27 * (number - 1) for place in range(len(ways))]
        axes.barh(at, middle, height=0.25, xerr=errors, label=label, ecolor="#555555")
    axes.set_yticks(range(len(ways)), ways)
    axes.invert_yaxis()
    axes.set_xlabel(
        f"seconds of a save of {found['gib']} GiB that does so much (medians, quartiles)"
    )
    axes.legend()
    axes.set_title(machine_of(found))


def ranks(figure: Any, numbers: dict[str, Any]) -> None:
    """Rates of saves over the number of processes that make them together."""
    found = numbers["bench_ranks"]
    axes = figure.subplots()
    worlds = list(found["worlds"])
    names = {"dos": "ours", "raw": "the bare disk, one process"}
    for name in dict.fromkeys(name for world in worlds for name in found["worlds"][world]):
        its = [found["worlds"][world][name] for world in worlds]
        rates = [each["gib_per_s"] for each in its]
        low, high = zip(*(each["quartiles"] for each in its), strict=True)
        line = axes.plot(
            worlds, rates, "k--" if name == "raw" else "o-", label=names.get(name, name)
        )
        axes.fill_between(worlds, low, high, alpha=0.15, color=line[0].get_color())
    axes.set_xlabel(f"ranks, processes of one machine, {found['gib']} GiB in all")
    axes.set_ylabel("durable save (GiB/s)")
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.set_title(machine_of(found))


def interval(figure: Any, numbers: dict[str, Any]) -> None:
    """Share of the time lost over the interval between saves: computed from measured stalls."""
    found = numbers["bench_capture"]
    panels = figure.subplots(1, len(FAILURE_S), sharey=True)
    at = [10 ** (n / 20) for n in range(100)]
    for axes, failure_s in zip(panels, FAILURE_S, strict=True):
        for name, stalls_s in found["added_s"].items():
            # A stall below what can be measured is drawn as one millisecond.
            stall_s = max(statistics.median(stalls_s), 1e-3)
            lost = [100 * wasted(each_s, failure_s, stall_s) for each_s in at]
            (line,) = axes.plot(at, lost, label=f"{name}: {stall_s:.2g} s a save")
            best = checkpoint_interval(failure_s, stall_s)
            least = 100 * wasted(best.daly_s, failure_s, stall_s)
            axes.plot([best.daly_s], [least], "o", color=line.get_color())
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylim(0.001, 100)
        axes.set_xlabel("training between two saves (s)")
        axes.set_title(f"computed: a failure every {failure_s / 3600:g} h")
        axes.legend(title="measured; dots: Daly's interval")
    panels[0].set_ylabel("time lost (%)")
    gib = found["state_bytes"] / (1 << 30)
    figure.suptitle(f"stalls of {gib:.2g} GiB: {machine_of(found)}", fontsize=9)
