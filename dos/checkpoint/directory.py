"""A directory of checkpoints: what it holds, which of them stay, and which are pinned.

    step-00000100/   a checkpoint
    latest           name of the one written last
    pins.json        steps whose checkpoints are never removed

The checkpoints stand in the order in which they were written, which their ids tell
(`<number>-<nonce>`): a run that went back to an earlier step writes lower steps after higher ones.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
from collections.abc import Container
from typing import NamedTuple

from dos.checkpoint.commit import read_latest, remove, replace_durably
from dos.checkpoint.format import FILE_NAME
from dos.checkpoint.manifest import MANIFEST, FileRecord, parse_manifest
from dos.checkpoint.owner import clear_dead
from dos.checkpoint.ranks import Ranks
from dos.checkpoint.storage import Storage
from dos.errors import CheckpointError, ConfigError, DOSError, IntegrityError
from dos.memory.sizes import bytes_text

_log = logging.getLogger(__name__)

PINS = "pins.json"
_NAMES = r"step-\d{8,}"
_NAME = re.compile(_NAMES)
_NUMBERED = re.compile(r"(\d+)-.*")


class Saved(NamedTuple):
    """A checkpoint of a directory, complete as far as its manifest tells.

    Attributes:
        step: that it was saved at.
        path: its directory.
        pinned: whether it is kept whatever comes.
        n_bytes: of all its files.
    """

    step: int
    path: str
    pinned: bool
    n_bytes: int


class CheckpointDirectory:
    """What lies in a directory of checkpoints. Any thread may call any method.

    Args:
        path: of the directory, absolute; it need not be there yet.
        keep: how many of those written last stay; None: all.
        keep_every: of steps that are multiples of this the checkpoints stay too.
        storage: the file system.
    """

    def __init__(
        self, path: str, keep: int | None, keep_every: int | None, storage: Storage
    ) -> None:
        self.path = path
        self._keep, self._keep_every, self._storage = keep, keep_every, storage
        self._has_room = False
        self._lock = threading.Lock()  # of pins: one reads them while another writes

    def path_of(self, step: int) -> str:
        """Where the checkpoint of a step is; ConfigError where it is no step."""
        if step < 0:
            raise ConfigError(f"it is {step}", where="step", fix="give how many steps were done")
        return os.path.join(self.path, f"step-{step:08d}")

    def open(self, ranks: Ranks) -> int:
        """Make it ready for all ranks, who call this together; the number of the next checkpoint.

        What dead processes left that were building checkpoints here is removed.

        Raises:
            CheckpointError: the ranks do not share it, or it cannot be listed.
        """
        if ranks.world > 1:
            ranks.prove_shared(self._storage, self.path)
        number = 0
        if ranks.rank == 0:
            if self._names():
                clear_dead(self._storage, self.path, _NAMES)
            number = 1 + max((number for number, _ in self._numbered()), default=0)
        return int(ranks.exchange("number", number)[0])

    def saved(self) -> list[Saved]:
        """All checkpoints, the one written last at the end."""
        return [saved for _, saved in self._numbered()]

    def damaged(self) -> list[tuple[str, DOSError]]:
        """Those whose manifest is damaged, and how."""
        errors = []
        for path in self._paths():
            try:
                self._manifest(path)
            except DOSError as error:
                errors.append((path, error))
        return errors

    def steps(self) -> list[int]:
        """The steps of all, damaged or not, the one written last first.

        A damaged manifest does not tell when it was written: it stands before those of lower steps,
        or first where the file `latest` names it.
        """
        steps = [one.step for one in reversed(self.saved())]
        latest = read_latest(self._storage, self.path)
        for path, _ in self.damaged():
            step = _step_of(path)
            older = (at for at, other in enumerate(steps) if other < step)
            steps.insert(0 if path == latest else next(older, len(steps)), step)
        return steps

    def of(self, step: int) -> Saved:
        """The checkpoint of a step.

        Raises:
            ConfigError: there is none.
            FormatError, IntegrityError: its manifest is damaged.
        """
        saved = self.saved()
        for one in saved:
            if one.step == step:
                return one
        for path, error in self.damaged():
            if path == self.path_of(step):
                raise error
        raise self._missing(step, saved)

    def pin(self, step: int, pinned: bool) -> None:
        """Keep the checkpoint of a step whatever comes, or no more.

        Raises:
            ConfigError: there is none.
            CheckpointError: the file that says so cannot be read or written.
        """
        with self._lock:
            saved = self.saved()
            steps = {one.step for one in saved}
            if step not in steps:
                raise self._missing(step, saved)
            pins = (self._pins() & steps) - {step} | ({step} if pinned else set())
            try:
                text = json.dumps({"pinned": sorted(pins)}).encode()
                replace_durably(self._storage, self.path, PINS, text)
            except OSError as error:
                raise CheckpointError(
                    f"it cannot be written: {error.strerror or error}",
                    where=os.path.join(self.path, PINS),
                    fix="see the cause; what was pinned before still is",
                ) from error

    def check_room(self, n_bytes: int) -> None:
        """The first time, raise CheckpointError unless there is so much space."""
        if self._has_room:
            return
        above = self.path
        while not self._storage.exists(above):
            above = os.path.dirname(above)
        free_bytes = self._storage.free_bytes(above)
        if free_bytes < n_bytes:
            raise CheckpointError(
                f"a checkpoint takes {bytes_text(n_bytes)}, and {bytes_text(free_bytes)} are free",
                where=self.path,
                fix="free space on the disk, or save elsewhere",
            )
        self._has_room = True

    def retain(self) -> None:
        """Remove what need not stay. What cannot be removed is logged, and tried again later."""
        try:
            with self._lock:
                for path in self._superfluous():
                    remove(self._storage, path)
        except (OSError, CheckpointError) as error:
            _log.warning("checkpoints that need not stay do: %s", error)

    def _missing(self, step: int, saved: list[Saved]) -> ConfigError:
        there = ", ".join(str(one.step) for one in saved)
        return ConfigError(
            f"there is no checkpoint of step {step}, only of steps: {there or 'none'}",
            where=self.path,
            fix="name one of these, or none for the newest",
        )

    def _superfluous(self) -> list[str]:
        """What removals left that were cut short, and checkpoints to remove, oldest first."""
        halves = [path for path in self._paths() if self._is_half(path)]
        if self._keep is None:
            return halves
        return halves + [
            saved.path
            for saved in self.saved()[: -self._keep]
            if not saved.pinned and (not self._keep_every or saved.step % self._keep_every)
        ]

    def _is_half(self, path: str) -> bool:
        try:
            names = self._storage.listing(path)
        except NotADirectoryError:
            return False
        return all(map(FILE_NAME.fullmatch, names))

    def _numbered(self) -> list[tuple[int, Saved]]:
        found = []
        try:
            pins: Container[int] = self._pins()
        except CheckpointError as error:
            _log.warning("every checkpoint counts as pinned: %s", error)
            pins = range(sys.maxsize)
        for path in self._paths():
            try:
                records = self._manifest(path)
            except DOSError:
                continue  # `damaged` tells
            if records is None:
                continue
            step = _step_of(path)
            numbered = _NUMBERED.fullmatch(records[0].file_id.checkpoint_id)
            n_bytes = sum(record.file_bytes for record in records)
            saved = Saved(step, path, step in pins, n_bytes)
            found.append((int(numbered[1]) if numbered else 0, saved))
        return sorted(found)

    def _manifest(self, path: str) -> list[FileRecord] | None:
        """The files of a checkpoint; None: it is none, or none any more."""
        try:
            return parse_manifest(self._storage.read_bytes(os.path.join(path, MANIFEST)), path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise IntegrityError(
                f"its manifest cannot be read: {error.strerror or error}", where=path
            ) from error

    def _paths(self) -> list[str]:
        names = self._names()
        return [os.path.join(self.path, name) for name in names if _NAME.fullmatch(name)]

    def _names(self) -> list[str]:
        try:
            return self._storage.listing(self.path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"it cannot be listed: {error.strerror or error}",
                where=self.path,
                fix="see the cause, and that it is a directory which this user may read",
            ) from error

    def _pins(self) -> set[int]:
        path = os.path.join(self.path, PINS)
        try:
            return set(map(int, json.loads(self._storage.read_bytes(path))["pinned"]))
        except FileNotFoundError:
            return set()
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"it cannot be read, so that nothing is known of what is pinned: {error}",
                where=path,
                fix="mend or remove it; until then no checkpoint is removed",
            ) from error


def _step_of(path: str) -> int:
    return int(os.path.basename(path).removeprefix("step-"))
