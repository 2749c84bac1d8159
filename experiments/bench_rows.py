"""The rows of `make bench`: what each benchmark's numbers say of us, a rival and a bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.figures import median_and_quartiles

Figures = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """Ours beside one other.

    Attributes:
        what: is done.
        unit: of both figures.
        ours, other: them; None where a benchmark tells their ratio only.
        beside: who the other is; "bound: ..." where nothing can be faster.
        ratio: how many times as fast ours is.
        spread: of it: what most rounds lie between; None where there is one round or no pairs.
        note: what it is of, where it is not this machine's time.
    """

    what: str
    unit: str
    ours: float | None
    beside: str
    other: float | None
    ratio: float | None
    spread: Sequence[float] | None = None
    note: str = ""


def update(figures: Figures) -> Iterator[Row]:
    """`bench_update`."""
    beside = {
        "vs_deepspeed": ("deepspeed", "DeepSpeedCPUAdam, as ZeRO-3 offload uses it"),
        "vs_torch_fused": ("torch_fused", "torch's fused AdamW"),
        "of_bandwidth": ("sweep", "bound: bare sweep of the memory"),
    }
    for key, (name, title) in beside.items():
        if figures[key] is not None:
            ours_s, its_s = (1e3 * figures["step_s"][one] for one in ("ours", name))
            spread = figures["quartiles"][key]
            yield Row("host update", "ms", ours_s, title, its_s, figures[key], spread)


def gpu_update(figures: Figures) -> Iterator[Row]:
    """`bench_gpu_update`."""
    device = figures["device"]
    ours_s = 1e3 * figures["update"][figures["kernel"]]["time_s"]
    for key, name, title in (
        ("vs_torch_fused", "torch_fused", "torch's fused AdamW"),
        ("of_bandwidth", "copy", "bound: copy of as many bytes"),
    ):
        its_s = 1e3 * figures["update"][name]["time_s"]
        found = figures[key]
        yield Row(
            "device update", "ms", ours_s, title, its_s, found["median"], found["quartiles"], device
        )


def zero3(figures: Figures) -> Iterator[Row]:
    """`bench_zero3`."""
    for setting in ("host", "gpu"):
        found = figures["settings"][setting]
        for name in ("zero_offload", "twin_flow", "super_offload") if found else ():
            for what in ("step", "iteration"):
                key = f"{what}_vs_{name}"
                if key not in found:
                    continue
                ours_s, its_s = (1e3 * found[f"{who}_{what}_s"] for who in ("ours", name))
                spread = found[f"{key}_quartiles"]
                yield Row(f"ZeRO-3 {what}", "ms", ours_s, name, its_s, found[key], spread)
    if (virtual := figures["settings"]["virtual"]) is not None:
        host_s, auto_s = (1e3 * virtual["step_s"][name] for name in ("host", "auto"))
        note = _emulated(virtual["label"], virtual["void"])
        ratio = virtual["step_vs_host_only"]
        yield Row("ZeRO-3 step", "ms", auto_s, "ours, host only", host_s, ratio, None, note)


def overlap(figures: Figures) -> Iterator[Row]:
    """`bench_overlap`."""
    on, off = figures["on"], figures["off"]
    ours_s, its_s = (1e3 * run["iteration_s"] for run in (on, off))
    note = _emulated(figures["label"], on["void"] or off["void"])
    title = "ours, without overlap_forward"
    spread = [1e3 * quartile / ours_s for quartile in off["iteration_quartiles_s"]]
    yield Row("iteration", "ms", ours_s, title, its_s, its_s / ours_s, spread, note)


def model(figures: Figures) -> Iterator[Row]:
    """`bench_model`: the model's time over the paced one."""
    sound = [1 / (1 + plan["off"]) for plan in figures["plans"] if not plan["void"]]
    if sound:
        ratio, spread = median_and_quartiles(sound)
        note = _emulated(figures["label"], False)
        title = "bound: simulation of the same plan"
        yield Row("step", "", None, title, None, ratio, spread, note)


def ckpt(figures: Figures) -> Iterator[Row]:
    """`dos bench ckpt`."""
    for kind in ("save", "load"):
        rates, spreads = figures[kind], figures["spreads"]
        for name, rate in rates.items():
            if name == "dos":
                continue
            # Rivals have few rounds, which are no pairs: over the extremes of their rates.
            ratio, spread = rates["dos"] / rate, [rates["dos"] / its for its in spreads[kind][name]]
            title = "bound: memory never touched before" if name == "fresh memory" else name
            if name == "raw":
                title, ratio = "bound: bare disk (fio)", figures[f"{kind}_of_raw"]
                spread = spreads[f"{kind}_of_raw"]
            yield Row(
                f"checkpoint {kind}", "GiB/s", rates["dos"], title, rate, ratio, sorted(spread)
            )


def capture(figures: Figures) -> Iterator[Row]:
    """`bench_capture`: what a save adds to a training loop."""
    ours_s = figures["added_s"]["ours"]
    mine, _ = median_and_quartiles(ours_s)
    for name, added_s in figures["added_s"].items():
        if name == "ours":
            continue
        its, _ = median_and_quartiles(added_s)
        ratio = spread = None
        if min(ours_s) > 0:  # ours may add less than the noise, and then there is no ratio
            pairs = zip(added_s, ours_s, strict=True)
            ratio, spread = median_and_quartiles([other / my for other, my in pairs])
        yield Row("stall of a save", "s", mine, name, its, ratio, spread, figures["emulated"])
    speed, ends = 1 / figures["slowdown"], sorted(1 / q for q in figures["slowdown_quartiles"])
    title = "bound: the same loop without saves"
    yield Row("loop with saves", "", None, title, None, speed, ends, figures["emulated"])


def io(figures: Figures) -> Iterator[Row]:
    """`bench_io`: the product's strategy, which is the first, beside the others."""
    (first, ours), *others = figures["strategies"].items()
    for name, other in others:
        differs = ", ".join(part for part in name.split(", ") if part not in first.split(", "))
        for what, kind in (("write", "save"), ("read", "load")):
            spread = sorted(1 / q for q in other[f"{kind}_of_first_quartiles"])
            ratio = 1 / other[f"{kind}_of_first"]
            yield Row(what, "GiB/s", ours[kind], differs, other[kind], ratio, spread)


def ranks(figures: Figures) -> Iterator[Row]:
    """`bench_ranks`."""
    for world, found in figures["worlds"].items():
        for name, its in found.items():
            if name == "dos":
                continue
            title = "bound: bare disk (fio), one process" if name == "raw" else name
            ours, rate = found["dos"]["gib_per_s"], its["gib_per_s"]
            what = f"save of {world} ranks"
            ratio, spread = its["ours_over"], its["ours_over_quartiles"]
            yield Row(what, "GiB/s", ours, title, rate, ratio, spread)


def _emulated(label: str, void: bool) -> str:
    return f"EMULATION: {label}" + (", void: too busy" if void else "")


ROWS: dict[str, Callable[[Figures], Iterator[Row]]] = {
    "bench_update": update,
    "bench_gpu_update": gpu_update,
    "bench_zero3": zero3,
    "bench_overlap": overlap,
    "bench_model": model,
    "bench_ckpt": ckpt,
    "bench_capture": capture,
    "bench_io": io,
    "bench_ranks": ranks,
}
"""Of each measurement that has a reduced form."""
