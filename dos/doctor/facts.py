"""Reads the facts off the machine; what can be missing is imported where it is asked for."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import platform
import re
import resource
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import dos
from dos.checkpoint import native
from dos.doctor import disks, findings, storage_findings
from dos.doctor.findings import Finding
from dos.errors import PoolError
from dos.kernels.thread_pool import PythonPool

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CPU_INFO = Path("/proc/cpuinfo")
IO_URING_DISABLED = Path("/proc/sys/kernel/io_uring_disabled")
PACKAGES = ("numpy", "pydantic", "typer", "rich", "xxhash", *findings.OPTIONAL)
PINNED_PROBE_BYTES = 1 << 20


def examine(*, quick: bool = False, directories: Sequence[Path] = (Path(),)) -> list[Finding]:
    """Everything, in the order in which it is told.

    Args:
        quick: leave out what takes time.
        directories: where checkpoints are to go; a small file is made in each, and removed.
    """
    found = [*_versions(), *_processor(), *_memory(), *_storage(directories)]
    usable = not any(finding.status == "broken" for finding in found)
    return found + (list(_accelerator()) if usable else []) + [_probe(quick, usable)]


def _versions() -> Iterator[Finding]:
    yield findings.version("dos", dos.__version__)
    yield findings.version("python", platform.python_version())
    yield findings.version(platform.system(), platform.release())
    try:
        import torch
    except (ImportError, OSError) as error:  # a library that torch loads may be missing
        yield findings.version("torch", None, str(error))
    else:
        yield findings.version("torch", str(torch.__version__))
    yield findings.packages({name: _installed(name) for name in PACKAGES})
    yield _deepspeed()


def _deepspeed() -> Finding:
    if (version := _installed("deepspeed")) is None:
        return findings.deepspeed(None, False)
    from dos.integrations.zero3_seams import is_tested  # it needs what DeepSpeed installs

    return findings.deepspeed(version, is_tested(version))


def _processor() -> Iterator[Finding]:
    isas: list[str] = []
    error = ""
    quota, nodes, seats = math.inf, [], []
    # The same mask and quota that the compiled pool reads.
    count = PythonPool().threads
    try:
        import dos.kernels._native as native
    except ModuleNotFoundError:
        pass
    except ImportError as broken:
        error = str(broken)
    else:
        isas, quota = native.available_isas(), native.cpu_quota()
        count, nodes = native.default_thread_count(), native.numa_nodes()
        seats = native.seat_cpus(count, nodes, False)
    yield findings.extension(isas, _installed("numba"), error)
    if better := findings.better_isa(isas, _cpu_flags()):
        yield better
    yield findings.threads(count, len(os.sched_getaffinity(0)), os.cpu_count() or 1, quota)
    yield findings.numa(nodes, seats)


def _memory() -> Iterator[Finding]:
    yield findings.huge_pages(_huge_pages())
    with contextlib.suppress(ImportError, OSError):  # torch, told of above
        from dos.memory import available_host_bytes

        yield findings.host_memory(available_host_bytes())


def _storage(directories: Sequence[Path]) -> Iterator[Finding]:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield storage_findings.memlock(None if limit == resource.RLIM_INFINITY else limit)
    yield storage_findings.io_uring(native.refusal("io_uring"), _io_uring_disabled())
    for directory in dict.fromkeys(path.resolve() for path in directories):
        try:
            yield storage_findings.directory(str(directory), disks.look_at(directory))
        except OSError as error:
            yield storage_findings.no_directory(str(directory), error.strerror or str(error))


def _accelerator() -> Iterator[Finding]:
    import torch

    from dos.memory import Slab

    name, error, why_pageable = None, "", ""
    try:
        if torch.accelerator.is_available() and (device := torch.accelerator.current_accelerator()):
            name = torch.cuda.get_device_name() if device.type == "cuda" else str(device)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it warns of what is told here
                slab = Slab(PINNED_PROBE_BYTES, device=device)
            why_pageable = slab.why_pageable
            slab.close()
    except RuntimeError as failure:  # a driver that does not fit
        error = str(failure).splitlines()[0]
    yield findings.accelerator(name, error)
    yield findings.pinning(None if error else name, why_pageable)
    yield findings.triton(_installed("triton"), name)


def _probe(quick: bool, usable: bool) -> Finding:
    if quick:
        return findings.no_probe("--quick")
    if not usable:
        return findings.no_probe("this installation is broken")
    from dos.doctor import probe

    try:
        return probe.update()
    except PoolError as error:
        return findings.no_probe(error.what)


def _huge_pages() -> str | None:
    """The word in brackets: ``always [madvise] never``."""
    with contextlib.suppress(OSError):
        if chosen := re.search(r"\[(\w+)\]", HUGE_PAGES.read_text()):
            return chosen.group(1)
    return None


def _io_uring_disabled() -> int:
    """0: for nobody; 1: for all but a group; 2: for all. Kernels before 6.6 have no such switch."""
    with contextlib.suppress(OSError, ValueError):
        return int(IO_URING_DISABLED.read_text())
    return 0


def _cpu_flags() -> list[str]:
    with contextlib.suppress(OSError):
        for line in CPU_INFO.read_text().splitlines():
            if line.startswith("flags"):
                return line.split(":", 1)[1].split()
    return []


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
