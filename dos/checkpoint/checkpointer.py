"""`Checkpointer`: periodic checkpoints of a training, and the way back into it."""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

from dos.checkpoint.background import Background
from dos.checkpoint.capture_ring import CaptureRing
from dos.checkpoint.directory import CheckpointDirectory, Saved
from dos.checkpoint.fallback import newest_whole
from dos.checkpoint.handle import Handle
from dos.checkpoint.metrics import SaveMetrics
from dos.checkpoint.ranks import COMMIT_TIMEOUT_S, Ranks
from dos.checkpoint.reader import load
from dos.checkpoint.restoring import Restoration, Restored
from dos.checkpoint.rounds import taking_part
from dos.checkpoint.saving import begin_save
from dos.checkpoint.stopping import Stopping
from dos.checkpoint.storage import Storage, make_storage
from dos.checkpoint.training import Models, Optimizers, Training
from dos.checkpoint.verifying import verify
from dos.errors import CheckpointError, ConfigError
from dos.memory import HeldState


class Checkpointer:
    """Saves a training again and again beside it, keeps the newest, and restores them.

    A save returns at once and is written in the background. Use it in `with`, or `close` it:
    that waits for what is in flight, as the end of the process does.

    Args:
        directory: for the checkpoints of one training, `step-00000100` and so on.
        every: saves are due at the steps that are multiples of this; None: whenever `save` is
            called.
        keep: how many checkpoints stay, the one written last included; None: all.
        keep_every: the checkpoints of steps that are multiples of this stay, too.
        ring_bytes: host memory through which goes what is not written from where it lies; None:
            2 GiB, or a tenth of what is available where that is less.
        process_group: of the ranks that save together, all of which call every method together
            with a directory that they share; None: the default group, if there is one.
        commit_timeout_s: how long a rank waits for the others before a save fails.
        close_timeout_s: how long `close` and the end of the process wait.
        sigterm_grace_s: on SIGTERM, save at the end of the step that is under way, due or not,
            and raise SystemExit from `save`, which is to be called at every step then. After so
            many seconds the process is ended as it is. None: SIGTERM is left alone.
        max_failures: after so many saves in a row that failed in the background `save` starts no
            other. What `save` itself raises, since it started none, does not count.
        on_error: called with the error of a save that failed in the background, there.
        storage: the file system; None: the best engine there is.

    Raises:
        ConfigError: an option is out of range.
        CheckpointError: the ranks do not share the directory.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int | None = None,
        keep: int | None = 3,
        keep_every: int | None = None,
        ring_bytes: int | None = None,
        process_group: Any = None,
        commit_timeout_s: float = COMMIT_TIMEOUT_S,
        close_timeout_s: float = 600.0,
        sigterm_grace_s: float | None = None,
        max_failures: int = 3,
        on_error: Callable[[BaseException], None] | None = None,
        storage: Storage | None = None,
    ) -> None:
        counts = {
            "every": every,
            "keep": keep,
            "keep_every": keep_every,
            "max_failures": max_failures,
        }
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ConfigError(f"it is {value}", where=name, fix="give a number above 0")
        self._every, self._keep = every, keep
        self._storage = storage or make_storage()
        path = os.path.abspath(os.fspath(directory))
        self._directory = CheckpointDirectory(path, keep, keep_every, self._storage)
        self._ranks = Ranks.of(process_group, commit_timeout_s=commit_timeout_s)
        self._ring = CaptureRing(ring_bytes)
        self._number = self._directory.open(self._ranks)
        grace_s = sigterm_grace_s
        self._stopping = None if grace_s is None else Stopping(grace_s, self._ranks)
        self._close_timeout_s = close_timeout_s
        self._background = Background(close_timeout_s, max_failures, on_error)
        self._metrics: dict[str, float] = {}
        self._closed = False
        self._pid = os.getpid()
        self._at_exit = partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def save(
        self,
        step: int,
        *,
        model: Models = None,
        optimizer: Optimizers = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Handle | None:
        """Save the training as it is now, if one is due; at once, or as soon as there is room.

        Call it at the end of a step, once the optimizer and what is in `extra` were stepped.
        Gradients are not saved. The states of the generators of Python, numpy, torch and the
        device are.

        Args:
            step: how many steps were done.
            model: a module, or several by name; its parameters bear the same names whether it
                is wrapped by DistributedDataParallel and torch.compile or not.
            optimizer: an optimizer, or several by name.
            extra: whatever else is needed to go on, by key: objects with `state_dict` and
                `load_state_dict` (a scheduler, a scaler, a loader), or values.

        Returns:
            The save that was started; None: none is due.

        Raises:
            CheckpointError: an earlier save failed, and this one was started; or so many in a
                row did that this one was not; or there is no room for it; or the disk stands still.
            FormatError: something in it cannot be saved; nothing was written.
        """
        self._check_open()
        last = self.is_last(step)
        if not last and self._every and step % self._every:
            return None
        began_s, path = time.monotonic(), self._directory.path_of(step)
        checkpoint_id = f"{self._number}-{self._ranks.nonce}"
        self._number += 1  # on every rank, whatever becomes of it
        with self._background.failure_told():
            with taking_part(self._ranks, self._storage, path, checkpoint_id):
                if not last:
                    self._background.check()
                part, held, outline = Training.of(model, optimizer, extra).part(
                    step, self._ranks.rank, self._ranks.world, self._directory.check_room
                )
            handle = self._start(path, checkpoint_id, part, held, outline, began_s)
            if last and self._stopping is not None:
                self._stopping.leave(handle)
        return handle

    def is_last(self, step: int) -> bool:
        """Has SIGTERM come, and is this the step to save and leave at? `save` will then do so.

        Ask at the end of every step, on every rank; where `save` is called at each, it asks.
        """
        return self._stopping is not None and self._stopping.is_last(step)

    def newest(self, *, allow: Iterable[type] = (), trusted: bool = False) -> Restored | None:
        """Where `restore` would go on, every byte of it checked, and nothing restored.

        Arguments and errors are those of `restore`.
        """
        self._check_open()
        how: dict[str, Any] = {"allow": tuple(allow), "trusted": trusted}
        how |= {"only": "rank/extra", "storage": self._storage}

        def read(saved: Saved) -> Restored:
            for damage in verify(saved.path, storage=self._storage):
                raise damage
            return Restored(saved.step, load(saved.path, **how)["rank"]["extra"], saved.path)

        return newest_whole(self._directory, self._ranks, read, ready=self._background.wait)

    def restore(
        self,
        step: int | None = None,
        *,
        model: Models = None,
        optimizer: Optimizers = None,
        extra: Mapping[str, Any] | None = None,
        strict: bool = True,
        allow: Iterable[type] = (),
        trusted: bool = False,
    ) -> Restored | None:
        """Take a training back to a checkpoint: all that is given is overwritten in place.

        The newest that is whole is taken: the one written last, or where that is damaged the one
        before, with a warning. The states of the generators are set, after all else.

        Args:
            step: take the checkpoint of this step, and no other.
            model: as for `save`.
            optimizer: as for `save`.
            extra: as for `save`.
            strict: the model must have the tensors that were saved, and no other; every object
                in `extra` must have been saved.
            allow: see `dos.checkpoint.load`.
            trusted: see `dos.checkpoint.load`.

        Returns:
            None: the directory has no checkpoint.

        Raises:
            ConfigError: there is no checkpoint of this step, or it does not fit: nothing changed.
            RefusedError: the newest that is whole needs `allow`, `trusted` or a newer version.
            FormatError, IntegrityError: none is whole; what is given may be partly overwritten.
        """
        self._check_open()
        training, allowed = Training.of(model, optimizer, extra), tuple(allow)

        def read(saved: Saved) -> Restored:
            how: dict[str, Any] = {"strict": strict, "allow": allowed, "trusted": trusted}
            how |= {"rank": self._ranks.rank, "storage": self._storage}
            restoration = Restoration(training, saved.path, **how)
            restoration.run()
            return Restored(saved.step, restoration.extra, saved.path)

        return newest_whole(self._directory, self._ranks, read, step, ready=self._background.wait)

    def list(self) -> list[Saved]:
        """All checkpoints, the one written last at the end."""
        return self._directory.saved()

    def pin(self, step: int) -> None:
        """Keep the checkpoint of a step whatever comes.

        Raises:
            ConfigError: there is none.
            CheckpointError: that cannot be written.
        """
        if self._ranks.rank == 0:
            self._directory.pin(step, True)

    def unpin(self, step: int) -> None:
        """Keep it no longer than others are kept. Raises as `pin`."""
        if self._ranks.rank == 0:
            self._directory.pin(step, False)

    @property
    def metrics(self) -> dict[str, float]:
        """Figures of the last durable save, and how many have failed so far, for a logger.

        "bytes" on this rank, "seconds" until they were durable, "gib_per_s"; "frozen_s", for which
        `save` held up the training, and "waited_s", for which steps did, until what they change
        was captured; "ring_bytes", the host memory for copies; "failures".
        """
        return {**self._metrics, "failures": self._background.failures}

    def close(self) -> None:
        """Wait until all saves have ended, as long as `close_timeout_s`; idempotent.

        Raises:
            CheckpointError: a save failed, or one is not durable yet: it is given up.
        """
        self._close(await_ranks=True)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._close(await_ranks=error is None or isinstance(error, SystemExit))
        except CheckpointError:
            if error is None:  # else that one matters more; this one is in the log
                raise

    def _start(
        self,
        path: str,
        checkpoint_id: str,
        part: dict[str, Any],
        held: Sequence[HeldState],
        outline: Mapping[str, str],
        began_s: float,
    ) -> Handle:
        metrics = SaveMetrics(began_s, held)
        handle = begin_save(
            part,
            path,
            held=held,
            outline=outline,
            ring=self._ring,
            latest=True,
            checkpoint_id=checkpoint_id,
            storage=self._storage,
            ranks=self._ranks,
        )
        metrics.started()
        n_bytes = handle.progress.total_bytes

        def durable() -> None:
            self._metrics = metrics.durable(n_bytes, self._ring.n_bytes)
            if self._ranks.rank == 0:
                self._directory.retain()

        self._background.add(path, handle, held, durable)
        return handle

    def _close(self, *, await_ranks: bool) -> None:
        """See `close`. A process that has failed does not wait for others, who wait for it."""
        if self._closed or os.getpid() != self._pid:
            return
        if self._stopping is not None:
            self._stopping.close()
        self._closed = True
        try:
            self._background.wait()
        except CheckpointError as error:
            self._ranks.abandon(str(error))
            self._background.release()
            raise
        except BaseException:  # an interrupt: another call, or the end of the process, waits on
            self._closed = False
            raise
        atexit.unregister(self._at_exit)
        self._ring.close()
        if await_ranks:
            self._ranks.close(self._close_timeout_s)
        with self._background.failure_told():
            pass

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("it was closed", where="Checkpointer", fix="make a new one")


def _close_at_exit(reference: weakref.ref[Checkpointer]) -> None:
    checkpointer = reference()
    if checkpointer is not None:
        with suppress(CheckpointError):  # the log has it
            checkpointer._close(await_ranks=not hasattr(sys, "last_type"))
