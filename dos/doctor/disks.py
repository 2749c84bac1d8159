"""What a directory's file system lets a checkpoint do, by trying."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dos.checkpoint.linux import direct_io_aligns
from dos.checkpoint.posix import PosixFiles

MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class Disk:
    """The file system of one directory.

    Attributes:
        file_system: its type, as "ext4".
        mount: the mount point.
        direct_aligns_bytes: alignment of buffers, and of offsets and lengths, with which a direct
            transfer succeeds; None where none does.
        told_aligns_bytes: the same as statx tells it; None where it does not.
        exchanges: whether two names can be swapped in one step.
        free_bytes: what this user may still write.
    """

    file_system: str
    mount: str
    direct_aligns_bytes: tuple[int, int] | None
    told_aligns_bytes: tuple[int, int] | None
    exchanges: bool
    free_bytes: int


def look_at(directory: Path) -> Disk:
    """Try it with a small file and a folder, which are gone afterwards.

    Raises:
        OSError: there is no such directory, or nothing can be made in it.
    """
    mount, file_system = mount_and_type(directory)
    with tempfile.TemporaryDirectory(prefix=".dos-doctor-", dir=directory) as made:
        files = PosixFiles()
        probe = files.open(f"{made}/file", write=True, create=True)
        try:
            told = direct_io_aligns(probe.fd)
        finally:
            files.close(probe)
        aligns = (probe.memory_align_bytes, probe.offset_align_bytes) if probe.direct else None
        space = os.statvfs(made)
        free_bytes = space.f_bavail * space.f_frsize
        return Disk(file_system, mount, aligns, told, _exchanges(files, made), free_bytes)


def mount_and_type(directory: Path) -> tuple[str, str]:
    """The mount point that a directory lies below, and the type of what is mounted there."""
    path = os.path.realpath(directory)
    mount, file_system = "/", "unknown"
    for line in MOUNTS.read_text().splitlines():
        before, after = line.split(" - ", 1)
        # Spaces and the like stand there as octal numbers.
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), before.split()[4])
        # Of two on one point the later one hides the other.
        if len(point) >= len(mount) and os.path.commonpath([point, path]) == point:
            mount, file_system = point, after.split()[0]
    return mount, file_system


def _exchanges(files: PosixFiles, folder: str) -> bool:
    names = f"{folder}/one", f"{folder}/other"
    for name in names:
        files.mkdir(name)
    try:
        files.exchange(*names)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            return False
        raise
    return True
