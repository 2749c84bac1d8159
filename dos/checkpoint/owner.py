"""Who writes a checkpoint: one process at a time, and what a dead one left is removed."""

from __future__ import annotations

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

    What dead processes left of theirs is removed.

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
            for name in storage.listing(partial):
                storage.unlink(os.path.join(partial, name))
            storage.rmdir(partial)
    with suppress(FileNotFoundError):
        storage.unlink(_owner_file(partial))


def clean_up(storage: Storage, partial: str) -> None:
    """`release`, or say that it has to be tried again: nothing depends on it."""
    try:
        release(storage, partial)
    except OSError as error:
        _log.warning("%s stays until the next save of this name: %s", partial, error)


def clear_dead(storage: Storage, parent: str, names: str) -> None:
    """Remove what dead writers of checkpoints left, whose names match a regular expression."""
    for partial in _partials(storage, parent, names):
        if _living_owner(storage, partial) is None:
            clean_up(storage, partial)


def _clear(storage: Storage, parent: str, name: str, but: str = "") -> None:
    """Remove what dead writers of this checkpoint left. CheckpointError if one may live."""
    for partial in _partials(storage, parent, re.escape(name)):
        if partial == but:
            continue
        owner = _living_owner(storage, partial)
        if owner is not None:
            raise CheckpointError(
                f"process {owner.pid} of host {owner.host} is writing this checkpoint",
                where=os.path.join(parent, name),
                fix=f"wait for it, or remove {partial} and {_owner_file(partial)} if it is gone",
            )
        clean_up(storage, partial)


def _partials(storage: Storage, parent: str, names: str) -> list[str]:
    """Directories in which checkpoints are or were built, and those of which but the owner is."""
    pattern = re.compile(rf"\.(?:{names})\.[0-9A-Za-z_-]+\.partial(?:\.owner)?")
    entries = filter(pattern.fullmatch, storage.listing(parent))
    return sorted({os.path.join(parent, entry.removesuffix(".owner")) for entry in entries})


def _living_owner(storage: Storage, partial: str) -> Owner | None:
    """Who may be building there now."""
    owner = _owner_of(storage, partial)
    left_by_us = owner == Owner.here() and partial not in _building
    return None if owner is None or left_by_us or not owner.may_live() else owner


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
