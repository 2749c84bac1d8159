"""Measure what this machine can do, as a `NodeProfile`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dos.config import VirtualDevice
from dos.errors import DOSError
from dos.kernels import adam
from dos.kernels.thread_pool import ThreadPool
from perfmodel.bench import Accelerator, Bench, Effort, MeasuredDevice, VirtualAccelerator
from perfmodel.machine import machine_of
from perfmodel.profile import NodeProfile
from perfmodel.stages import FOR_STRIDE, NEEDED, Lacking, Stage, further

FULL = Effort(window_s=1.5, params=50_000_000, copy_bytes=256 << 20, disk_bytes=4 << 30)
"""About a minute, 1.8 GiB of host memory, 1 GiB of the device's."""

QUICK = Effort(window_s=0.1, params=16_000_000, copy_bytes=64 << 20, disk_bytes=256 << 20)
"""A second or two, 0.4 GiB of host memory, 0.25 GiB of the device's."""


_OF_A_DEVICE = ("h2d_bytes_per_s", "d2h_bytes_per_s", "device_params_per_s")


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured, and why the other fields of the profile were left out, by name."""

    profile: NodeProfile
    left_out: dict[str, str]


def calibrate(
    device: torch.device | VirtualDevice | None,
    *,
    directory: Path | None = None,
    threads: int | None = None,
    effort: Effort = FULL,
    quick: bool = False,
    progress: Callable[[str, float], None] = lambda stage, share: None,
) -> Calibration:
    """Measure everything that this machine has; alone, when nothing else runs.

    Args:
        device: None where there is none.
        directory: on the disk to be measured; None: no disk.
        threads: of the host update; None for all that this process has.
        effort: time and memory to take.
        quick: measure only what a stride is solved from.
        progress: told each stage's name as it begins, and which share of all is over.

    Raises:
        DOSError, RuntimeError: not even the host's update can be measured.
    """
    with closing(adam.make_pool(threads)) as pool:
        return _measured(device, pool, directory, effort, quick=quick, progress=progress)


def quick_profile(
    device: torch.device | VirtualDevice, pool: ThreadPool, effort: Effort = QUICK
) -> NodeProfile:
    """What a stride is solved from, in a second or two, with the threads of an optimizer.

    Raises:
        DOSError, RuntimeError: host or device cannot be measured, for want of memory for one.
    """
    found = _measured(device, pool, None, effort, quick=True)
    if not found.profile.has_device:
        raise RuntimeError(found.left_out["device_params_per_s"])
    return found.profile


def _measured(
    device: torch.device | VirtualDevice | None,
    pool: ThreadPool,
    directory: Path | None,
    effort: Effort,
    *,
    quick: bool,
    progress: Callable[[str, float], None] = lambda stage, share: None,
) -> Calibration:
    rest = further(directory)
    stages = [*NEEDED, *FOR_STRIDE, *([] if quick else rest)]
    found: dict[str, Any] = dict.fromkeys(_OF_A_DEVICE)
    left_out = {name: "a quick calibration" for stage in rest for name in stage.fields}
    started_s = time.perf_counter()
    # Tensors made under inference_mode could not be written to by other threads.
    with torch.inference_mode(False), closing(_bench(device, pool, effort)) as bench:
        for number, stage in enumerate(stages):
            progress(stage.name, number / len(stages))
            _measure(stage, bench, found, left_out)
    progress("done", 1.0)
    took_s = time.perf_counter() - started_s
    machine = machine_of(device)
    left_out = {name: why for name, why in left_out.items() if found.get(name) is None}
    profile = NodeProfile(
        name=", ".join(str(machine[key]) for key in ("processor", "device") if key in machine),
        source=f"measured {machine['date']} in {took_s:.0f} s by perfmodel.calibrate"
        + (", quickly" if quick else ""),
        machine=machine,
        **found,
    )
    return Calibration(profile, left_out)


def _measure(stage: Stage, bench: Bench, found: dict[str, Any], left_out: dict[str, str]) -> None:
    try:
        found.update(stage.measure(bench))
        return
    except (Lacking, DOSError, OSError, RuntimeError) as error:
        if stage in NEEDED:
            raise
        why = str(error)
    left_out.update(dict.fromkeys(stage.fields, why))


def _bench(device: torch.device | VirtualDevice | None, pool: ThreadPool, effort: Effort) -> Bench:
    measured: MeasuredDevice | None = None
    if device is not None:
        measured = (
            VirtualAccelerator(device) if isinstance(device, VirtualDevice) else Accelerator(device)
        )
    return Bench(measured, pool, effort)
