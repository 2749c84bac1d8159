"""What a measured rate depends on besides the code, in words."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dos.config import VirtualDevice

_SAME = ("processor", "cpus", "device")


def machine_of(device: torch.device | VirtualDevice | None) -> dict[str, str | int | float]:
    """Processor, its CPUs as far as this process may use them, device, versions, date.

    `device` None: what there is besides one.
    """
    found: dict[str, str | int | float] = {
        "processor": processor_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    if device is not None:
        found["device"] = _device_name(device)
    return found


def same_machine(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two descriptions are of machines alike: processor, CPUs, device."""
    return all(one.get(key) == other.get(key) for key in _SAME)


def processor_name() -> str:
    """The processor's name as the system tells it, else its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _device_name(device: torch.device | VirtualDevice) -> str:
    if isinstance(device, VirtualDevice):
        return device.label
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
