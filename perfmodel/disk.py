"""How fast a disk takes and gives bytes, past the system's cache."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BLOCK_BYTES = 8 << 20
"""Of one request: large enough that its fixed cost is small on any disk."""

DEPTH = 4
"""Requests under way at a time."""


def disk_rates(directory: Path, n_bytes: int) -> tuple[float, float]:
    """Bytes per second written and synced, and read, by O_DIRECT pwrite and pread.

    On a new file of whole blocks, at most `n_bytes` and a quarter of what the disk has free,
    which is gone afterwards.

    Raises:
        OSError: the file system takes no direct I/O, the directory no file, the disk is full.
    """
    if not hasattr(os, "O_DIRECT"):
        raise OSError("this system knows no O_DIRECT")
    free = os.statvfs(directory)
    blocks = min(n_bytes, free.f_bavail * free.f_frsize // 4) // BLOCK_BYTES
    if not blocks:
        raise OSError(f"too little space is free in {directory}")
    made, path = tempfile.mkstemp(prefix=".dos-calibrate-", dir=directory)
    try:
        os.close(made)
        file = os.open(path, os.O_RDWR | os.O_DIRECT)
    finally:
        os.unlink(path)
    try:
        written_s = _all_blocks(blocks, lambda buffer, at: os.pwritev(file, [buffer], at), file)
        read_s = _all_blocks(blocks, lambda buffer, at: os.preadv(file, [buffer], at), file)
    finally:
        os.close(file)
    return blocks * BLOCK_BYTES / written_s, blocks * BLOCK_BYTES / read_s


def _all_blocks(blocks: int, move: Callable[[mmap.mmap, int], int], file: int) -> float:
    """Seconds until every block was moved and the file is synced."""
    content = os.urandom(BLOCK_BYTES)  # some disks make zeros of a block out of nothing

    def of_one_thread(first: int) -> None:
        for block in range(first, blocks, DEPTH):
            moved = move(buffers[first], block * BLOCK_BYTES)
            if moved != BLOCK_BYTES:
                raise OSError(f"{moved} of {BLOCK_BYTES} bytes were moved")

    buffers = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(DEPTH)]  # page-aligned, as O_DIRECT asks
    for buffer in buffers:
        buffer[:] = content
    with ThreadPoolExecutor(DEPTH, "dos-calibrate") as threads:
        started_s = time.perf_counter()
        list(threads.map(of_one_thread, range(DEPTH)))
        os.fsync(file)
        return time.perf_counter() - started_s
