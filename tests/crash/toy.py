"""The least checkpoint that survives a crash, each of its steps named, to be left out."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable
from typing import Any

BLOCK = 4096

STEPS = ("sync data", "sync directory", "sync parent")


def save_value(value: bytes, *, but: str = "") -> Callable[[Any, str], None]:
    """A save of some blocks of bytes, without one of its steps.

    A directory is built under another name: a data file of blocks, and a digest of it in a
    second file. It gets its name by one rename or exchange.
    """

    def save(storage: Any, path: str) -> None:
        parent, partial = os.path.dirname(path), path + ".partial"
        if storage.exists(partial):
            remove(storage, partial)
        storage.mkdir(partial)
        _write_blocks(storage, os.path.join(partial, "data"), value, but)
        seal = os.path.join(partial, "seal")
        storage.write_bytes(seal, hashlib.sha256(value).digest())
        file = storage.open(seal, write=True, direct=False)
        if but != "sync seal":
            storage.fsync(file)
        storage.close(file)
        if but != "sync directory":
            storage.fsync_directory(partial)
        if storage.exists(path):
            storage.exchange(partial, path)
        else:
            storage.rename(partial, path)
        if but != "sync parent":
            storage.fsync_directory(parent)
        if storage.exists(partial):
            remove(storage, partial)

    return save


def _write_blocks(storage: Any, path: str, value: bytes, but: str) -> None:
    file = storage.open(path, write=True, create=True)
    storage.preallocate(file, len(value))
    memory = memoryview(mmap.mmap(-1, len(value)))
    memory[:] = value
    queue = storage.queue(depth=2)
    try:
        for at in range(0, len(value), BLOCK):
            queue.write(file, at, memory[at : at + BLOCK], at)
        errors = [error for _, error in queue.drain() if error]
    finally:
        queue.close()
        if "errors" in locals() and not errors and but != "sync data":
            storage.fsync(file)
        storage.close(file)
    if errors:
        raise errors[0]


def remove(storage: Any, path: str) -> None:
    for name in storage.listing(path):
        storage.unlink(os.path.join(path, name))
    storage.rmdir(path)


def restore_value(storage: Any, path: str) -> bytes:
    value: bytes = storage.read_bytes(os.path.join(path, "data"))
    if storage.read_bytes(os.path.join(path, "seal")) != hashlib.sha256(value).digest():
        raise ValueError("this is no checkpoint")
    return value
