"""`save`: what is written is fixed at once, and written in the background."""

from __future__ import annotations

import errno
import logging
import os
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from dos.checkpoint.collector import collector_paused
from dos.checkpoint.commit import LATEST, check_replaceable, commit, make_parents, write_latest
from dos.checkpoint.encode import Leaf, encode_state
from dos.checkpoint.format import FileId, check_id, index_text
from dos.checkpoint.layout import Layout, lay_out
from dos.checkpoint.owner import claim, clean_up
from dos.checkpoint.providers import plan_extents
from dos.checkpoint.storage import Storage, make_storage
from dos.checkpoint.tuning import shape_for
from dos.checkpoint.writer import FileWriter
from dos.errors import CheckpointError, ConfigError

_log = logging.getLogger(__name__)

_in_flight: dict[tuple[str, str], Handle] = {}
"""The last save of a name, and the last one of a directory."""
_lock = threading.Lock()

_FIXES = {
    errno.ENOSPC: "free space on the disk, or save elsewhere",
    errno.EDQUOT: "raise the quota, or save elsewhere",
    errno.EACCES: "save where this user may write",
    errno.EROFS: "save where this user may write",
    errno.EIO: "the disk failed: save to another",
}


class Progress(NamedTuple):
    """How far a save is."""

    done_bytes: int
    total_bytes: int


class Handle:
    """A save in the background.

    Attributes:
        captured: done when the state may change again.
        durable: done when the checkpoint is there, whole, after any crash; its result is the
            checkpoint's path. If the save fails, both raise why.
    """

    def __init__(self, total_bytes: int) -> None:
        self.captured: Future[None] = _running()
        self.durable: Future[str] = _running()
        self._done_bytes, self._total_bytes = 0, total_bytes

    def result(self, timeout_s: float | None = None) -> str:
        """Wait until it is durable; the checkpoint's path.

        Raises:
            CheckpointError: it could not be written; what was there before is intact.
            TimeoutError: it is not durable yet.
        """
        return self.durable.result(timeout_s)

    @property
    def progress(self) -> Progress:
        """Bytes on their way to the disk, and all."""
        return Progress(self._done_bytes, self._total_bytes)

    def _advance(self, n_bytes: int) -> None:
        self._done_bytes += n_bytes

    def _set_captured(self) -> None:
        if not self.captured.done():
            self.captured.set_result(None)

    def _orphan(self) -> None:
        """In a child process, where no thread writes it: other futures, whose locks are free."""
        self.captured, self.durable = _running(), _running()
        self._fail(CheckpointError("the parent process is writing it", fix="ask there"))

    def _fail(self, error: BaseException) -> None:
        for future in (self.captured, self.durable):
            if not future.done():
                future.set_exception(error)


def _running() -> Future[Any]:
    """A future that nobody can cancel."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def save(
    state: Any,
    path: str | os.PathLike[str],
    *,
    latest: bool = False,
    checkpoint_id: str | None = None,
    storage: Storage | None = None,
) -> Handle:
    """Save a nested state of tensors, arrays and objects as a checkpoint, in the background.

    Objects are taken as they are now; tensors and arrays must not change before `captured` is
    done. Until the new checkpoint is durable, an old one of the same name stays. Saves beside
    each other become durable in their order: a second one waits here until the first is
    captured, and is written once that is durable.

    Args:
        state: dicts, lists, tuples, dataclasses and so on, to any depth.
        path: the checkpoint's directory; what is above it is made.
        latest: make the file `latest` beside it name it.
        checkpoint_id: of letters, digits, `-` and `_`, different for each checkpoint; None: a
            random one.
        storage: the file system; None: the best engine there is.

    Raises:
        FormatError: something in the state cannot be saved; nothing was written.
        CheckpointError: another process is writing it, or the name is taken by something else.
    """
    path = os.path.abspath(os.fspath(path))
    name = os.path.basename(path)
    if not name or (latest and name == LATEST):
        raise ConfigError(f"{path!r} is no name for a checkpoint", where="path", fix="name one")
    file_id = FileId(check_id(checkpoint_id or uuid.uuid4().hex), 0, 0)
    storage = storage or make_storage()
    with collector_paused():
        node, encoder = encode_state(state)
        extents = plan_extents(encoder.leaves, encoder.repeats)
        text = index_text({"tree": node, "pieces": encoder.pieces})
        layout = lay_out(file_id, extents, encoder.blobs, text)
    ready = _events(encoder.leaves)
    handle = Handle(layout.file_bytes)
    earlier = before, beside = _register(path, handle)
    partial = None
    try:
        if beside is not None:
            beside.captured.exception()
        if before is not None:
            before.durable.exception()
        partial = _claim(storage, path, file_id.checkpoint_id)
        work = _Save(storage, partial, path, layout, text, latest, ready, handle, beside)
        try:
            threading.Thread(target=work.run, name=f"save {name}").start()
        except RuntimeError:  # at the end of the process there are no new ones
            work.run()
    except BaseException as error:
        if partial is not None:
            clean_up(storage, partial)
        handle._fail(error)
        _unregister(path, handle, earlier)
        raise
    return handle


def _claim(storage: Storage, path: str, checkpoint_id: str) -> str:
    """Make the directory in which a checkpoint is built."""
    parent, name = os.path.split(path)
    try:
        make_parents(storage, parent)
        check_replaceable(storage, path)
        return claim(storage, parent, name, checkpoint_id)
    except OSError as error:
        raise _failure(error, path) from error


class _Save(NamedTuple):
    storage: Storage
    partial: str
    path: str
    layout: Layout
    index_text: bytes
    latest: bool
    ready: list[torch.Event]
    handle: Handle
    beside: Handle | None

    def run(self) -> None:
        try:
            self._write()
            self.handle.durable.set_result(self.path)
        except BaseException as error:
            failure = _failure(error, self.path) if isinstance(error, OSError) else error
            failure.__cause__ = None if failure is error else error
            _log.error("saving failed: %s", failure)
            clean_up(self.storage, self.partial)
            self.handle._fail(failure)
        finally:
            _unregister(self.path, self.handle)

    def _write(self) -> None:
        if self.beside is not None:
            self.beside.durable.exception()
        for event in self.ready:
            event.synchronize()
        writer = FileWriter(
            self.storage,
            os.path.join(self.partial, self.layout.file_id.name),
            self.layout,
            self.index_text,
            shape_for(os.path.dirname(self.path)),
            progress=self.handle._advance,
            captured=self.handle._set_captured,
        )
        record = writer.write()
        commit(self.storage, self.partial, self.path, [record])
        if self.latest:
            parent, name = os.path.split(self.path)
            try:
                write_latest(self.storage, parent, name)
            except OSError as error:  # the checkpoint itself is there
                raise _failure(error, os.path.join(parent, LATEST)) from error


def _events(leaves: Sequence[Leaf]) -> list[torch.Event]:
    """One event for each accelerator: after it, what the current streams had to do is done."""
    tensors = (leaf.value for leaf in leaves if isinstance(leaf.value, torch.Tensor))
    events = []
    for device in {tensor.device for tensor in tensors if not tensor.is_cpu}:
        events.append(torch.Event(device))
        events[-1].record(torch.accelerator.current_stream(device))
    return events


def _places(path: str) -> list[tuple[str, str]]:
    return [("name", path), ("beside", os.path.dirname(path))]


def _register(path: str, handle: Handle) -> list[Handle | None]:
    """Make a save the last one of its name and directory; the ones before, if not done."""
    with _lock:
        before = [_in_flight.get(place) for place in _places(path)]
        _in_flight.update(dict.fromkeys(_places(path), handle))
        return before


def _unregister(path: str, handle: Handle, earlier: Sequence[Handle | None] = ()) -> None:
    """It is no more in flight; where it never was, what was before it may still be."""
    with _lock:
        for place, before in zip_longest(_places(path), earlier):
            if _in_flight.get(place) is handle:
                del _in_flight[place]
                if before is not None and not before.durable.done():
                    _in_flight[place] = before


def _forget_parent() -> None:
    """In a child process no thread writes what is in flight."""
    global _lock
    _lock = threading.Lock()
    for handle in set(_in_flight.values()):
        handle._orphan()
    _in_flight.clear()


os.register_at_fork(after_in_child=_forget_parent)


def _failure(error: OSError, path: str) -> CheckpointError:
    return CheckpointError(
        f"it could not be written: {error.strerror or error}",
        where=path,
        fix=_FIXES.get(error.errno or 0, "see the cause, and save again"),
    )
