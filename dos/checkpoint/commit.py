"""From a directory under construction to a checkpoint, in one step that survives a crash."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress

from dos.checkpoint.format import FILE_NAME
from dos.checkpoint.manifest import MANIFEST, FileRecord, manifest_bytes
from dos.checkpoint.owner import clean_up, leave
from dos.checkpoint.storage import Storage
from dos.errors import CheckpointError

LATEST = "latest"
"""Name of the file that holds the name of the newest checkpoint beside it."""

_FIXES = {
    errno.ENOSPC: "free space on the disk, or save elsewhere",
    errno.EDQUOT: "raise the quota, or save elsewhere",
    errno.EACCES: "save where this user may write",
    errno.EROFS: "save where this user may write",
    errno.EIO: "the disk failed: save to another",
}


def make_parents(storage: Storage, directory: str) -> None:
    """Make a directory and what is above it, durably."""
    if storage.exists(directory):
        return
    above = os.path.dirname(directory)
    make_parents(storage, above)
    with suppress(FileExistsError):  # by another meanwhile
        storage.mkdir(directory)
    storage.fsync_directory(above)


def check_replaceable(storage: Storage, path: str) -> None:
    """CheckpointError if what has the name is no checkpoint, or more: it would be removed."""
    if not storage.exists(path):
        return
    try:
        names = storage.listing(path)
    except NotADirectoryError:
        names = [os.path.basename(path)]
    others = [name for name in names if name != MANIFEST and not FILE_NAME.fullmatch(name)]
    if others or (names and (MANIFEST not in names or len(names) == 1)):
        what = f"{others[0]!r} in it is no part of one" if MANIFEST in names and others else ""
        raise CheckpointError(
            f"there is something of this name that is no checkpoint{what and ': '}{what}",
            where=path,
            fix="save under another name, or move it away",
        )


def commit(storage: Storage, partial: str, path: str, records: Sequence[FileRecord]) -> None:
    """Give a directory, whose files are durable, its manifest and its name.

    At every instant `path` is the old checkpoint or the new one, whole.

    Args:
        storage: the file system.
        partial: the directory; gone afterwards.
        path: the checkpoint's name; a checkpoint that has it is replaced.
        records: of all its files.

    Raises:
        CheckpointError: the name is taken, and the file system cannot exchange names.
        OSError: of the file system. It may come after the exchange: either may have the name
            after a crash then, so that both stay.
    """
    parent = os.path.dirname(path)
    write_durably(storage, os.path.join(partial, MANIFEST), manifest_bytes(records))
    storage.fsync_directory(partial)
    if storage.exists(path):
        try:
            storage.exchange(partial, path)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):
                raise
            raise CheckpointError(
                "this file system cannot replace a checkpoint in one step",
                where=path,
                fix="save under a new name, and remove the old checkpoint after",
            ) from error
    else:
        storage.rename(partial, path)
    try:
        storage.fsync_directory(parent)
    except OSError:
        leave(partial)
        raise
    clean_up(storage, partial)  # which by now is the old one, if there was one


def remove(storage: Storage, path: str) -> None:
    """Remove a checkpoint: first what makes it one, so that no crash leaves half of one.

    What a removal left that was cut short is removed too.
    """
    with suppress(FileNotFoundError):
        storage.unlink(os.path.join(path, MANIFEST))
        storage.fsync_directory(path)
    for name in storage.listing(path):
        storage.unlink(os.path.join(path, name))
    storage.rmdir(path)


def write_latest(storage: Storage, parent: str, name: str) -> None:
    """Say which checkpoint of a directory is the newest, in one durable step."""
    replace_durably(storage, parent, LATEST, name.encode())


def replace_durably(storage: Storage, parent: str, name: str, data: bytes) -> None:
    """Write a small file of a directory: after any crash it is the old one or the new one."""
    new = os.path.join(parent, f".{name}.new")
    write_durably(storage, new, data)
    storage.rename(new, os.path.join(parent, name))
    storage.fsync_directory(parent)


def read_latest(storage: Storage, parent: str) -> str | None:
    """Path of the checkpoint that is said to be the newest; None: it is not there."""
    try:
        name = storage.read_bytes(os.path.join(parent, LATEST)).decode()
        names = storage.listing(parent)
    except (OSError, UnicodeDecodeError):
        return None
    # Only a name that is there: what a file says is never made a path.
    return os.path.join(parent, name) if name in names else None


def write_durably(storage: Storage, path: str, data: bytes) -> None:
    """Write a small file whose content is on the disk; its name is not yet."""
    storage.write_bytes(path, data)
    file = storage.open(path, write=True, direct=False)
    try:
        storage.fsync(file)
    finally:
        storage.close(file)


def write_failure(error: OSError, path: str) -> CheckpointError:
    """What to tell a user of an error of the file system."""
    return CheckpointError(
        f"it could not be written: {error.strerror or error}",
        where=path,
        fix=_FIXES.get(error.errno or 0, "see the cause, and save again"),
    )
