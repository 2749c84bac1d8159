"""What a fact about the machine means: whether it is well, what it costs, how to fix it.

Nothing here looks at the machine, so that every answer can be asked for anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

Status = Literal["ok", "note", "warning", "broken"]
STATUSES: tuple[Status, ...] = ("ok", "note", "warning", "broken")

FAR_BELOW_SWEEP = 0.7
"""An update that reaches less of the sweep's rate than this is not limited by memory."""
SLOW_MEMORY_BYTES_PER_S = 8e9
"""Less than half of what one DDR4-2400 channel carries (19.2e9): something is in the way."""
STATE_PARAM_BYTES = 16
"""Host memory of a parameter: 12 of fp32 state, a 16-bit gradient, the same of staging at most."""

OPTIONAL = {
    "numba": "fast update where the compiled extension is missing",
    "scipy": "`python -m perfmodel fit`",
    "matplotlib": "pictures of steps",
    "transformers": "Trainer",
    "accelerate": "training loops of its own",
}
"""What each package that may be missing is for."""

# What /proc/cpuinfo must list for each instruction set, best first, as `dispatch.cpp` asks.
CPU_FLAGS = {
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx2": {"avx2", "f16c"},
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what, in a word or two; unique in a report.
        value: how it is, for people.
        status: "ok"; "note": worth knowing; "warning": costs speed or memory; "broken": this
            installation cannot work as it is.
        costs: what that costs; empty where it costs nothing.
        fix: what to do about it; empty where there is nothing to do.
        figures: the numbers in `value`, for programs; JSON values.
    """

    name: str
    value: str
    status: Status = "ok"
    costs: str = ""
    fix: str = ""
    figures: Mapping[str, object] = field(default_factory=dict)


def report(findings: Iterable[Finding]) -> dict[str, object]:
    """All findings as one JSON object, with the number of each status."""
    findings = list(findings)
    counts = {status: sum(f.status == status for f in findings) for status in STATUSES}
    return {"findings": [asdict(finding) for finding in findings], "counts": counts}


def version(name: str, found: str | None, error: str = "") -> Finding:
    """A package that the library cannot do without, or this library itself."""
    if found is not None and not error:
        return Finding(name, found, figures={"version": found})
    return Finding(
        name,
        f"does not import: {error}",
        "broken",
        "no optimizer can be made",
        f"reinstall it: pip install --force-reinstall {name}",
    )


def deepspeed(found: str | None, tested: bool) -> Finding:
    """The installed DeepSpeed, and whether this library is tested with it."""
    figures = {"version": found, "tested": found is not None and tested}
    if found is None:
        costs, fix = "ZeRO-3 needs it", "pip install 'deep-optimizer-states[deepspeed]'"
        return Finding("DeepSpeed", "missing", "note", costs, fix, figures)
    if tested:
        return Finding("DeepSpeed", found, figures=figures)
    costs = "its ZeRO-3 is refused where it is not as known, and may differ unnoticed elsewhere"
    fix = "install a tested version: docs/deepspeed.md names them"
    return Finding("DeepSpeed", f"{found}, not tested", "warning", costs, fix, figures)


def packages(found: Mapping[str, str | None]) -> Finding:
    """Versions of the other packages by name; None: not installed, which an optional one may be."""
    figures = {"versions": dict(found)}
    value = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    missing = [name for name, version in found.items() if version is None]
    if not missing:
        return Finding("packages", value, figures=figures)
    costs = "; ".join(f"without {name} no {OPTIONAL.get(name, 'optimizer')}" for name in missing)
    fix = f"pip install {' '.join(missing)}"
    return Finding("packages", value, "note", costs, fix, figures)


def extension(isas: Sequence[str], numba: str | None, error: str = "") -> Finding:
    """The compiled kernels: instruction sets best first; none where they are missing."""
    name, rebuild = "extension", "install g++ and python3-dev, then deep-optimizer-states again"
    figures = {"isas": list(isas), "chosen": isas[0] if isas else None, "numba": numba}
    if error:
        costs = "no optimizer can be made"
        value = f"is there but does not import: {error}"
        return Finding(name, value, "broken", costs, f"build it again: {rebuild}", figures)
    if isas:
        others = ", ".join(isas[1:])
        value = f"uses {isas[0]}" + (f"; has {others} too" if others else "")
        return Finding(name, value, figures=figures)
    if numba:
        value = f"missing; numba {numba} takes its place"
        costs = "the first step compiles; gradients are read by numpy; no NUMA nodes, no pinning"
        return Finding(name, value, "warning", costs, rebuild, figures)
    costs = "the host update runs in numpy, many times slower"
    return Finding(
        name, "missing, and so is numba", "warning", costs, f"{rebuild}; or numba", figures
    )


def better_isa(isas: Sequence[str], cpu_flags: Iterable[str]) -> Finding | None:
    """A note where the processor has an instruction set that the extension does not use."""
    flags = set(cpu_flags)
    best = next((isa for isa, needed in CPU_FLAGS.items() if needed <= flags), None)
    if not isas or best is None or best in isas:
        return None
    return Finding(
        "instruction set",
        f"the processor has {best}; the extension does not use it",
        "note",
        "the update may be limited by arithmetic instead of memory",
        "build the extension here, with a current g++",
        {"could": best},
    )


def threads(count: int, affinity: int, cpus: int, quota: float) -> Finding:
    """How many threads an update has, and what says so.

    Args:
        count: threads of a default pool.
        affinity: CPUs in this process's mask. cpus: of the machine.
        quota: CPUs' worth of time that the control groups allow; inf: no limit.
    """
    figures = {
        "threads": count,
        "affinity": affinity,
        "cpus": cpus,
        "quota": quota if math.isfinite(quota) else None,
    }
    by = "all CPUs of the machine"
    if quota < affinity:
        by = f"the control group's quota of {quota:g} CPUs"
    elif affinity < cpus:
        by = f"the affinity mask, {affinity} of {cpus} CPUs"
    value = f"{count}, by {by}"
    if quota < affinity and quota != int(quota):
        return Finding(
            "threads",
            value,
            "note",
            "the last thread is stopped for a part of each period, and the others wait for it",
            "give the control group a whole number of CPUs, or set threads",
            figures,
        )
    if count == 1:
        costs = "one core seldom uses all of the memory's bandwidth"
        fix = "widen the mask (taskset, Slurm's --cpus-per-task) or the quota"
        return Finding("threads", value, "warning", costs, fix, figures)
    return Finding("threads", value, figures=figures)


def numa(nodes: Sequence[Sequence[int]], seats: Sequence[Sequence[int]]) -> Finding:
    """The NUMA nodes of the process's CPUs, and where the threads sit.

    Args:
        nodes: CPUs by node.
        seats: per thread the CPUs that it is bound to, as `seat_cpus` gives them.
    """
    figures = {"nodes": [len(node) for node in nodes]}
    if len(nodes) <= 1:
        return Finding("NUMA", "one node; threads are not bound", figures=figures)
    homes = [sum(bool(seat) and set(seat) <= set(node) for seat in seats) for node in nodes]
    spread = "+".join(map(str, homes))
    value = f"{len(nodes)} nodes; {spread} threads bound to them, memory touched by its own"
    return Finding("NUMA", value, figures={**figures, "threads": homes})


def huge_pages(setting: str | None) -> Finding:
    """Transparent huge pages: "always", "madvise", "never"; None: the kernel has none."""
    figures = {"setting": setting}
    if setting in ("always", "madvise"):
        return Finding("huge pages", f"{setting}: the pool has them", figures=figures)
    return Finding(
        "huge pages",
        setting or "not in this kernel",
        "warning",
        "more TLB misses, so updates take longer",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        figures,
    )


def host_memory(available_bytes: int | None) -> Finding:
    """What the pool may take at most; None where the system does not say."""
    figures: dict[str, object] = {"available_bytes": available_bytes}
    if available_bytes is None:
        costs = "a pool that is too large is killed instead of refused"
        return Finding("host memory", "unknown", "note", costs, "set host_memory_bytes", figures)
    params = available_bytes // STATE_PARAM_BYTES
    value = f"{available_bytes / 1e9:.1f} GB available, for about {params / 1e9:.2g} G parameters"
    return Finding("host memory", value, figures={**figures, "params": params})


def accelerator(name: str | None, error: str = "") -> Finding:
    """The accelerator that torch finds, by its name; what it said if it could not be used."""
    figures = {"device": name}
    if error:
        costs = "all updates run on the host, or fail"
        fix = "run nvidia-smi; compare the driver with the version that torch was built for"
        return Finding("accelerator", f"fails: {error}", "warning", costs, fix, figures)
    if name:
        return Finding("accelerator", name, figures=figures)
    return Finding(
        "accelerator",
        "none",
        "note",
        "all updates run on the host",
        'device="virtual" plays one, for tests',
        figures,
    )


def pinning(device: str | None, why_pageable: str) -> Finding:
    """Whether the accelerator's driver takes the pool's memory; why not, or empty."""
    figures = {"pinned": None if device is None else not why_pageable}
    if device is None:
        return Finding("pinning", "not tried: no accelerator", figures=figures)
    if not why_pageable:
        return Finding("pinning", f"works with {device}", figures=figures)
    costs = "copies are slower, block, and do not overlap with anything"
    fix = "free memory; in a container allow locked memory; look at the driver's log (dmesg)"
    return Finding("pinning", why_pageable, "warning", costs, fix, figures)


def triton(version: str | None, device: str | None) -> Finding:
    """The version of Triton, of use only with an accelerator."""
    figures = {"version": version}
    if version:
        return Finding("triton", version, figures=figures)
    if device is None:
        return Finding("triton", "missing; nothing needs it here", figures=figures)
    costs = "updates on the device are plain torch operations, which pass over memory many times"
    return Finding("triton", "missing", "warning", costs, "pip install triton", figures)


def update_probe(
    update_bytes_per_s: float, sweep_bytes_per_s: float, ratio: float, params: int
) -> Finding:
    """An update's rate beside that of the sweep over the same bytes, and the ratio of both."""
    figures = {
        "update_bytes_per_s": update_bytes_per_s,
        "sweep_bytes_per_s": sweep_bytes_per_s,
        "ratio": ratio,
        "params": params,
    }
    rates = f"{update_bytes_per_s / 1e9:.1f} GB/s of {sweep_bytes_per_s / 1e9:.1f}"
    value = f"{rates} that a sweep reaches: {ratio:.2f}"
    if ratio < FAR_BELOW_SWEEP:
        costs = f"an update takes {1 / ratio:.1f} times as long as memory asks for"
        fix = (
            "see whether others use these cores, a slow instruction set was chosen, or the "
            "processor is throttled; measure with python -m experiments.bench_update in a clone"
        )
        return Finding("update", value, "warning", costs, fix, figures)
    if sweep_bytes_per_s < SLOW_MEMORY_BYTES_PER_S:
        costs = "memory limits every update, and this one is slower than half a DDR4 channel"
        fix = "look for other users of the memory, empty channels, too few threads (see threads)"
        return Finding("update", value, "warning", costs, fix, figures)
    return Finding("update", value, figures=figures)


def no_probe(why: str) -> Finding:
    """The update was not measured."""
    return Finding("update", f"not measured: {why}", "note")
