"""What a fact about disks and their engines means for checkpoints; looks at none itself."""

from __future__ import annotations

from dataclasses import asdict

from dos.doctor.disks import Disk
from dos.doctor.findings import Finding

SMALL_MEMLOCK_BYTES = 1 << 30
IN_MEMORY = ("tmpfs", "ramfs", "rootfs")
"""File systems that are gone with the machine's power."""


def memlock(limit_bytes: int | None) -> Finding:
    """How much memory this process may lock; None: without limit."""
    figures = {"limit_bytes": limit_bytes}
    if limit_bytes is None or limit_bytes >= SMALL_MEMLOCK_BYTES:
        value = "unlimited" if limit_bytes is None else f"{limit_bytes / 1e9:.1f} GB"
        return Finding("memlock", value, figures=figures)
    return Finding(
        "memlock",
        f"{limit_bytes / 1e6:.1f} MB",
        "note",
        "nothing for CUDA's pinning; buffers of checkpoints beyond it are not registered with "
        "io_uring, so that the kernel prepares them again for each transfer",
        "the line `* - memlock unlimited` in /etc/security/limits.conf, and a new login; "
        "LimitMEMLOCK=infinity for systemd; docker's --ulimit memlock=-1",
        figures,
    )


def io_uring(refusal: str, disabled: int = 0) -> Finding:
    """Whether checkpoints go through io_uring.

    Args:
        refusal: why not, in the words of the system or of this build; empty where it works.
        disabled: the value of the sysctl kernel.io_uring_disabled.
    """
    figures = {"works": not refusal, "disabled": disabled}
    if not refusal:
        return Finding("io_uring", "works", figures=figures)
    if disabled:
        fix = f"sysctl kernel.io_uring_disabled=0; it is {disabled}"
    elif "without liburing" in refusal or "extension" in refusal:
        fix = "apt-get install g++ python3-dev liburing-dev, then deep-optimizer-states again"
    elif refusal == "Cannot allocate memory":
        fix = "raise the limit of locked memory: see memlock"
    else:
        fix = "a container's seccomp profile that allows io_uring, or Linux 5.13 or newer"
    costs = "checkpoints are read and written by threads, at the cost of more switches between them"
    return Finding("io_uring", refusal, "note", costs, fix, figures)


def directory(path: str, disk: Disk) -> Finding:
    """What a directory's file system lets checkpoints do."""
    name = f"directory {path}"
    free = f"{disk.free_bytes / 1e9:.1f} GB free"
    figures = asdict(disk)
    if disk.direct_aligns_bytes is None:
        value = f"{disk.file_system}, no direct I/O, {free}"
        costs = "checkpoints pass through the page cache: one more copy, and bursts of writing back"
        fix = "a directory on ext4 or xfs, or on another file system that takes O_DIRECT"
        return Finding(name, value, "warning", costs, fix, figures)
    memory, offset = disk.direct_aligns_bytes
    told = "" if disk.told_aligns_bytes else ", which it does not tell"
    value = f"{disk.file_system}, direct I/O aligned to {memory} in memory and {offset} in files"
    value += f"{told}, {free}"
    if disk.file_system in IN_MEMORY:
        costs = "checkpoints there take memory, and are gone with the machine's power"
        return Finding(name, value, "warning", costs, "a directory on a disk", figures)
    if not disk.exchanges:
        costs = "a checkpoint cannot take the name of one that is there: its save is refused"
        fix = "give each checkpoint a name of its own, or use ext4, xfs or btrfs"
        return Finding(name, f"{value}; names cannot be exchanged", "note", costs, fix, figures)
    return Finding(name, value, figures=figures)


def no_directory(path: str, why: str) -> Finding:
    """A directory that could not be looked at."""
    costs, fix = "no checkpoint can be written there", "make it, with the right to write in it"
    return Finding(f"directory {path}", why, "warning", costs, fix)
