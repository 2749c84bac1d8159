"""The checkpoint engine that DeepSpeed calls: a tag becomes one checkpoint, in the background."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from dos.checkpoint.capture_ring import CaptureRing
from dos.checkpoint.handle import Handle
from dos.checkpoint.ranks import Ranks
from dos.checkpoint.replicas import PER_RANK
from dos.checkpoint.rounds import taking_part
from dos.checkpoint.saving import begin_save
from dos.checkpoint.storage import make_storage
from dos.config import DeepSpeedCheckpoint
from dos.errors import CheckpointError
from dos.integrations.deepspeed_objects import by_fields
from dos.integrations.deepspeed_tags import is_tag, open_tag
from dos.memory.gates import Gates, HeldState

_log = logging.getLogger(__name__)

_engines: WeakSet[DOSCheckpointEngine] = WeakSet()

_EXIT_S = 60.0
"""How long a process that ends waits for the others to end, too."""


class DOSCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Saves what upstream hands over for a tag as one checkpoint, without stopping the training.

    All ranks have one, and call everything together as they call upstream's.

    Args:
        options: of the configuration.

    Attributes:
        options: as given.
        ranks: all of the default process group.
        storage: the file system.
        gates: closed while what only a step of upstream's changes is written where it lies.
        loaded: states by the names of their files, read before upstream asks for them.
    """

    def __init__(self, options: DeepSpeedCheckpoint) -> None:
        super().__init__()
        self.name = type(self).__name__
        self.options, self.storage, self.gates = options, make_storage(), Gates()
        self.ranks = Ranks.of(commit_timeout_s=options.commit_timeout_s)
        self.loaded: dict[str, Any] = {}
        self._ring = CaptureRing(options.ring_bytes)
        self._open = ""  # the directory of the tag that is being saved
        self._files: dict[str, Any] = {}
        self._saves: dict[int, tuple[str, Handle]] = {}  # whose end nobody was told of
        self._begun = 0
        self._in_use = self.gates  # by what is held
        self._proven = self.ranks.world == 1
        atexit.register(self._at_exit)
        _engines.add(self)

    def create(self, info: object) -> None:
        """Nothing: see `saving`."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory; that of a tag appears when all that is in it is durable."""
        if os.path.abspath(path) != self._open:
            os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Take a file of the tag that is open; write any other as torch does, in one step."""
        directory, name = os.path.split(os.path.abspath(path))
        if directory == self._open:
            self._files[name] = by_fields(state_dict)
            return
        new = os.path.join(directory, f".{name}.new")
        with open(new, "wb") as file:
            torch.save(state_dict, file)
            file.flush()
            os.fsync(file.fileno())
        self.storage.rename(new, os.path.join(directory, name))
        self.storage.fsync_directory(directory)

    def load(self, path: str, map_location: Any = None) -> Any:
        """What was saved in a file, by us or by torch.

        Raises:
            FormatError: the tag has no such file, or one that cannot be read so.
            IntegrityError: damaged bytes.
        """
        directory, name = os.path.split(os.path.abspath(path))
        name = getattr(path, "name", name)
        if not is_tag(directory):
            return torch.load(path, map_location=map_location, weights_only=False)
        if name in self.loaded:
            return self.loaded[name]
        # By its functions upstream says that a tensor shall stay in host memory.
        device = None if callable(map_location) else map_location
        tag = open_tag(directory, self.storage)
        return tag.read(name, map_location=device, trusted=self.options.trusted)

    def commit(self, info: object) -> bool:
        """Nothing: a tag is committed once it is durable on all ranks."""
        return True

    def get_commit_info(self) -> None:
        """None, so that upstream neither waits nor writes `latest`."""

    def is_decoupled(self) -> bool:
        """True, so that upstream does not write `latest` as `save_checkpoint` returns."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """False: of views what they show is written, so that nothing need be cloned before."""
        return False

    def cleanup(self) -> None:
        """Wait until the last save is durable; idempotent.

        A save that fails is logged, and one that takes longer than `close_timeout_s` is given up
        on all ranks.
        """
        try:
            self.wait(self.options.close_timeout_s)
        except FutureTimeoutError:
            why = f"the last save is not durable after {self.options.close_timeout_s:g} s"
            _log.error("%s", why)
            self.ranks.abandon(why)
        else:
            self._ring.close()

    @contextmanager
    def saving(
        self, path: str, hold: Callable[[str], HeldState], *, latest: bool
    ) -> Iterator[None]:
        """Within this, what upstream saves in a directory is a tag; at its end all is frozen.

        Args:
            path: the directory.
            hold: holds, for what it is told, what does not change before the next step.
            latest: make the file `latest` beside it name it, once it is durable.

        Raises:
            CheckpointError: it cannot be saved; or one before it failed, and this one is under way.
        """
        path = os.path.abspath(path)
        failed = self._failures()
        # Its number says when it was saved, whatever becomes of the times of its files.
        checkpoint_id = f"{self.agree(time.time_ns())[0]}-{self.ranks.nonce}"
        self._begun += 1
        self._open = path
        try:
            with taking_part(self.ranks, self.storage, path, checkpoint_id):
                yield
                self._make_ready(os.path.dirname(path))
                held = hold(os.path.basename(path))
                self._in_use = held.gates
            self._saves[self._begun] = (
                path,
                begin_save(
                    {PER_RANK: self._files},
                    path,
                    held=[held],
                    ring=self._ring,
                    latest=latest,
                    checkpoint_id=checkpoint_id,
                    storage=self.storage,
                    ranks=self.ranks,
                ),
            )
        finally:
            self._open, self._files = "", {}
        if failed:
            raise CheckpointError(
                f"a save before this one failed: {failed[0]}",
                where=path,
                fix="this one is under way",
            )

    def wait(self, timeout_s: float | None = None) -> None:
        """Until no save is under way, whether it succeeds or not. TimeoutError: one still is."""
        for _, handle in self._saves.values():
            handle.durable.exception(timeout_s)

    def await_durable(self) -> None:
        """Wait until all that was saved is durable, on all ranks, which call this together.

        Raises:
            CheckpointError: a save failed.
        """
        self.wait()
        failed = self._failures()
        if failed:
            raise CheckpointError(f"a save failed: {failed[0]}")

    def await_captured(self, what: str) -> None:
        """Wait until nothing is held, for `what` is about to change it.

        Raises:
            PoolError: a capture does not end.
        """
        self._in_use.wait(what)

    def agree(self, value: Any) -> list[Any]:
        """The values of all ranks, which call this together."""
        values = [value] * self.ranks.world
        if self.ranks.world > 1:
            torch.distributed.all_gather_object(values, value)
        return values

    def _make_ready(self, directory: str) -> None:
        if any(os.path.dirname(path) != directory for path, _ in self._saves.values()):
            self.wait()  # saves in one directory follow each other; the ring serves one at a time
        if not self._proven:
            self.ranks.prove_shared(self.storage, directory)
            self._proven = True

    def _failures(self) -> list[str]:
        """Why saves failed that nobody was told of, the same on all ranks.

        A failure is one of all ranks, which may hear of it at different times.
        """
        over = {
            number: handle.durable.exception()
            for number, (_, handle) in self._saves.items()
            if handle.durable.done()
        }
        told: dict[int, str] = {}
        for failures in self.agree({n: str(error) for n, error in over.items() if error}):
            told.update(failures)
        for number in {n for n, error in over.items() if error is None} | told.keys():
            self._saves.pop(number, None)
        return [told[number] for number in sorted(told)]

    def _at_exit(self) -> None:
        self.cleanup()
        if self._begun:  # the store that the others still need may live in this process
            self.ranks.close(_EXIT_S)


def await_all_captured(what: str) -> None:
    """As `DOSCheckpointEngine.await_captured`, of all there are."""
    for engine in list(_engines):
        engine.await_captured(what)


def await_all_saves() -> None:
    """As `DOSCheckpointEngine.wait`, of all there are."""
    for engine in list(_engines):
        engine.wait()
