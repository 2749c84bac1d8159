"""Who writes a checkpoint: one process at a time, and what a dead one left is removed."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass

from dos.checkpoint.storage import Storage
from dos.errors import CheckpointError

_log = logging.getLogger(__name__)

_PARTIAL = re.compile(r"\.(.+)\.[0-9A-Za-z_-]+\.partial(?:\.owner)?", re.DOTALL)
_TRIES = 5
_building: set[str] = set()
"""Directories in which this process is building."""


@dataclass(frozen=True)
class Owner:
    """A process of a host, told from a later one of the same number by its start."""

    host: str
    boot: str
    pid: int
    start: int

    @classmethod
    def here(cls) -> Owner:
        """This process."""
        pid = os.getpid()
        return cls(socket.gethostname(), _boot(), pid, _start(pid) or 0)

    def may_live(self) -> bool:
        """Is it alive? Of another host that is not known: it may be."""
        if self.host != socket.gethostname():
            return True
        return self.boot == _boot() and _start(self.pid) == self.start


def partial_path(path: str, checkpoint_id: str) -> str:
    """The directory in which a checkpoint is built."""
    parent, name = os.path.split(path)
    return os.path.join(parent, f".{name}.{checkpoint_id}.partial")


def claim(storage: Storage, path: str, partial: str) -> None:
    """Make the directory in which a checkpoint is built, once no other process does.

    What dead processes left beside it is removed.

    Raises:
        CheckpointError: another process is writing the same checkpoint; it is named.
    """
    parent, name = os.path.split(path)
    _clear(storage, parent, name)
    if storage.exists(partial):
        raise CheckpointError(
            "a checkpoint of the same id is being written, or another host left it",
            where=partial,
            fix="save under another id, or remove that directory if nobody writes it",
        )
    _building.add(partial)
    try:
        storage.write_bytes(_owner_file(partial), json.dumps(asdict(Owner.here())).encode())
        storage.mkdir(partial)
        # Again, because another may have begun meanwhile; if both see each other, neither goes on.
        _clear(storage, parent, name, but=partial)
    except BaseException:
        with suppress(OSError):  # the next save removes what stays
            release(storage, partial)
        raise


def release(storage: Storage, partial: str) -> None:
    """Remove what is left of a directory in which a checkpoint was built.

    Nobody looks for a checkpoint there, so that the order does not matter.
    """
    _building.discard(partial)
    with suppress(FileNotFoundError):
        try:
            storage.unlink(partial)  # of a link nothing but itself: what it leads to is not ours
        except IsADirectoryError:
            _remove(storage, partial)
    with suppress(FileNotFoundError):
        storage.unlink(_owner_file(partial))


def _remove(storage: Storage, directory: str) -> None:
    """Remove a directory in which ranks that are not yet told of it may make and remove files."""
    for left in reversed(range(_TRIES)):
        for name in storage.listing(directory):
            with suppress(FileNotFoundError):
                storage.unlink(os.path.join(directory, name))
        try:
            return storage.rmdir(directory)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or not left:
                raise


def is_building(partial: str) -> bool:
    """Is this process building there?"""
    return partial in _building


def leave(partial: str) -> None:
    """This process builds there no more; what is there stays until the next save beside it."""
    _building.discard(partial)


def clean_up(storage: Storage, partial: str) -> None:
    """`release`, or say that it has to be tried again: nothing depends on it."""
    try:
        release(storage, partial)
    except OSError as error:
        _log.warning("%s stays until the next save beside it: %s", partial, error)


def clear_dead(storage: Storage, parent: str, names: str) -> dict[str, Owner]:
    """Remove what dead writers of checkpoints left in a directory.

    Args:
        storage: the file system.
        parent: the directory.
        names: regular expression of checkpoints of which also goes what nobody is known to write.

    Returns:
        Where checkpoints of these names may be being built, and by whom.
    """
    living, dead = dict[str, Owner](), []
    for partial, name in _partials(storage, parent):
        is_named = re.fullmatch(names, name) is not None
        owner = _owner_of(storage, partial)
        if owner is not None and _may_build(owner, partial):
            if is_named:
                living[partial] = owner
        elif owner is not None or is_named:
            dead.append(partial)
    try:
        # It may have been exchanged for a checkpoint whose name is not durable yet.
        if any(map(storage.exists, dead)):
            storage.fsync_directory(parent)
    except OSError as error:
        _log.warning("%s: what dead writers left there stays: %s", parent, error)
        return living
    for partial in dead:
        clean_up(storage, partial)
    return living


def _clear(storage: Storage, parent: str, name: str, but: str = "") -> None:
    """`clear_dead`, and CheckpointError if a writer of this checkpoint may live."""
    for partial, owner in clear_dead(storage, parent, re.escape(name)).items():
        if partial != but:
            raise CheckpointError(
                f"process {owner.pid} of host {owner.host} is writing this checkpoint",
                where=os.path.join(parent, name),
                fix=f"wait for it, or remove {partial} and {_owner_file(partial)} if it is gone",
            )


def _partials(storage: Storage, parent: str) -> list[tuple[str, str]]:
    """Directories in which checkpoints are or were built, if only the owner is left, and names."""
    found = filter(None, map(_PARTIAL.fullmatch, storage.listing(parent)))
    return sorted({(os.path.join(parent, one[0].removesuffix(".owner")), one[1]) for one in found})


def _may_build(owner: Owner, partial: str) -> bool:
    left_by_us = owner == Owner.here() and partial not in _building
    return not left_by_us and owner.may_live()


def _owner_file(partial: str) -> str:
    return partial + ".owner"


def _owner_of(storage: Storage, partial: str) -> Owner | None:
    """Who is building in a directory; None: nobody, or what a power loss left of the name."""
    try:
        return Owner(**json.loads(storage.read_bytes(_owner_file(partial))))
    except (OSError, ValueError, TypeError):
        return None


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _start(pid: int) -> int | None:
    """When a process of this host began, in ticks since boot; None: there is none that runs."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The name in parentheses may hold anything.
            fields = file.read().rpartition(")")[2].split()
            return None if fields[0] in "ZX" else int(fields[19])  # dead, but not waited for
    except OSError:
        return None
