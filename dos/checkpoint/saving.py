"""`save`: what is written is fixed at once, and written in the background."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dos.checkpoint.capture import Held
from dos.checkpoint.capture_ring import CaptureRing
from dos.checkpoint.commit import LATEST
from dos.checkpoint.draft import Draft
from dos.checkpoint.handle import Handle, RunningSave, ended
from dos.checkpoint.in_flight import register, unregister
from dos.checkpoint.ranks import Ranks
from dos.checkpoint.rounds import Round
from dos.checkpoint.storage import Storage, make_storage
from dos.errors import ConfigError

_log = logging.getLogger(__name__)

_CLEAN_UP_S = 10.0
STALL_S = 600.0
"""So long a save may stand still, and longer where it waits longer for other ranks."""
_threads: weakref.WeakKeyDictionary[threading.Thread, Handle] = weakref.WeakKeyDictionary()


def save(
    state: Any,
    path: str | os.PathLike[str],
    *,
    latest: bool = False,
    checkpoint_id: str | None = None,
    storage: Storage | None = None,
    ranks: Ranks | None = None,
) -> Handle:
    """Save a nested state of tensors, arrays and objects as a checkpoint, in the background.

    Objects are taken as they are now; tensors and arrays must not change before `captured` is
    done. Until the new checkpoint is durable, an old one of the same name stays. Saves beside
    each other become durable in their order: a second one waits here until the first is
    captured, and is written once that is durable. One that stands still for ten minutes is waited
    for no longer.

    Args:
        state: dicts, lists, tuples, dataclasses and so on, to any depth.
        path: the checkpoint's directory; what is above it is made.
        latest: make the file `latest` beside it name it.
        checkpoint_id: of letters, digits, `-` and `_`, different for each checkpoint; None: a
            random one.
        storage: the file system; None: the best engine there is.
        ranks: all of these processes call this, in the same order, each with its own state, and
            it is durable on all of them or on none; what it has in its path is seen by all of
            them. The tree that is read is that of rank 0. None: this process alone.

    Raises:
        FormatError: something in the state cannot be saved; nothing was written.
        CheckpointError: another process is writing it, the name is taken by something else, or
            a save before it stands still.
    """
    return begin_save(
        state,
        path,
        held=None,
        latest=latest,
        checkpoint_id=checkpoint_id,
        storage=storage,
        ranks=ranks,
    )


def begin_save(
    state: Any,
    path: str | os.PathLike[str],
    *,
    held: Sequence[Held] | None,
    outline: Mapping[str, str] | None = None,
    ring: CaptureRing | None = None,
    latest: bool = False,
    checkpoint_id: str | None = None,
    storage: Storage | None = None,
    ranks: Ranks | None = None,
) -> Handle:
    """`save` beside training: what is not held is copied before this returns.

    Args:
        state, path, latest, checkpoint_id, storage, ranks: see `save`.
        held: states whose owners wait, part by part, until they are captured; all of it is
            released also where the save fails. At the end of the process the caller has to wait
            for it. None: as `save`.
        outline: what has to be the same on all ranks, a text for each part: else the save fails.
        ring: where what is not written as it lies is copied; None: memory of its own.

    Raises:
        CheckpointError: as `save`, also where it is itself what stands still.
        FormatError: as `save`.
    """
    path = os.path.abspath(os.fspath(path))
    name = os.path.basename(path)
    storage, ranks, draft = storage or make_storage(), ranks or Ranks.alone(), None
    stall_s = STALL_S if ranks.world == 1 else max(STALL_S, ranks.commit_timeout_s)
    handle = RunningSave(path, stall_s)
    try:
        if not name or (latest and name == LATEST):
            raise ConfigError(f"{path!r} names no checkpoint", where="path", fix="name one")
        with Round(ranks, storage, path, checkpoint_id, outline) as taken:
            draft = Draft(taken.file_id, state, held, handle.set_captured)
            handle.expect(draft.file_bytes)
            _start(_Save(storage, taken, path, draft, ring, latest, handle), held is not None)
        if held is not None:
            handle.outwait(draft.wait_frozen)
    except BaseException:  # an interrupt too: its caller goes on, and changes what is read
        if draft is not None:
            draft.abandon()
        for one in held or ():
            one.abandon()
        raise
    return handle


def _start(work: _Save, daemon: bool) -> None:
    """Begin to write, as soon as the saves before it leave the memory alone.

    Args:
        work: what to do.
        daemon: the process does not wait for it at its end, unless its caller has it do so.
    """
    earlier = before, beside = register(work.path, work.handle)
    try:
        work.handle.behind = beside
        if beside is not None:
            beside.outwait(ended(beside.captured))
        if before is not None:
            before.outwait(ended(before.durable))
        work.round.claim()
        try:
            name = f"save {os.path.basename(work.path)}"
            thread = threading.Thread(target=work.run, name=name, daemon=daemon)
            _threads[thread] = work.handle
            thread.start()
        except RuntimeError:  # at the end of the process there are no new ones
            work.run()
    except BaseException as error:
        work.handle.fail(error)
        unregister(work.path, work.handle, earlier)
        raise


class _Save(NamedTuple):
    storage: Storage
    round: Round
    path: str
    draft: Draft
    ring: CaptureRing | None
    latest: bool
    handle: RunningSave

    def run(self) -> None:
        try:
            self._write()
            self.handle.durable.set_result(self.path)
        except BaseException as error:
            self.draft.abandon()  # first: nobody is to wait while others are told
            failure = error
            if isinstance(error, OSError):
                failure = self.round.failure(error)
                failure.__cause__ = error
            _log.error("saving failed: %s", failure)
            try:
                self.round.fail(failure)
            finally:
                self.handle.fail(failure)
        finally:
            unregister(self.path, self.handle, (None, self.handle.behind))

    def _write(self) -> None:
        while (before := self.handle.behind) is not None:
            before.outwait(ended(before.durable))
            self.handle.behind = before.behind
        self.round.begin()
        partial = self.round.partial
        record = self.draft.write(self.storage, partial, self.ring, self.handle.advance)
        self.round.commit([record], latest=self.latest)


@atexit.register
def _join_ended() -> None:
    """Let threads end whose saves have: one that is cut short in native code aborts the process."""
    for thread, handle in list(_threads.items()):
        if handle.durable.done() and thread.is_alive():
            thread.join(_CLEAN_UP_S)
