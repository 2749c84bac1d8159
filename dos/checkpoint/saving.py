"""`save`: what is written is fixed at once, and written in the background."""

from __future__ import annotations

import errno
import logging
import os
import threading
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dos.checkpoint.capture import Capture, Held, leases_of
from dos.checkpoint.capture_ring import CaptureRing
from dos.checkpoint.collector import collector_paused
from dos.checkpoint.commit import LATEST, check_replaceable, commit, make_parents, write_latest
from dos.checkpoint.encode import Leaf, encode_state
from dos.checkpoint.format import FileId, check_id, index_text
from dos.checkpoint.handle import Handle
from dos.checkpoint.in_flight import register, unregister
from dos.checkpoint.layout import Layout, lay_out
from dos.checkpoint.owner import claim, clean_up
from dos.checkpoint.providers import plan_extents
from dos.checkpoint.storage import Storage, make_storage
from dos.checkpoint.tuning import shape_for
from dos.checkpoint.writer import FileWriter
from dos.errors import CheckpointError, ConfigError

_log = logging.getLogger(__name__)

_FIXES = {
    errno.ENOSPC: "free space on the disk, or save elsewhere",
    errno.EDQUOT: "raise the quota, or save elsewhere",
    errno.EACCES: "save where this user may write",
    errno.EROFS: "save where this user may write",
    errno.EIO: "the disk failed: save to another",
}


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
    return begin_save(
        state, path, latest=latest, checkpoint_id=checkpoint_id, storage=storage, held=None
    )


def begin_save(
    state: Any,
    path: str | os.PathLike[str],
    *,
    held: Sequence[Held] | None,
    ring: CaptureRing | None = None,
    latest: bool = False,
    checkpoint_id: str | None = None,
    storage: Storage | None = None,
) -> Handle:
    """`save` beside training: what is not held is copied before this returns.

    Args:
        state, path, latest, checkpoint_id, storage: see `save`.
        held: states whose owners wait, part by part, until they are captured; all of it is
            released also where the save fails. None: as `save`.
        ring: where what is not written as it lies is copied; None: memory of its own.
    """
    path = os.path.abspath(os.fspath(path))
    try:
        work = _prepare(state, path, held, ring, latest, checkpoint_id, storage)
    except BaseException:
        for one in held or ():
            one.abandon()
        raise
    handle = work.handle
    earlier = before, beside = register(path, handle)
    try:
        if beside is not None:
            beside.captured.exception()
        if before is not None:
            before.durable.exception()
        partial = _claim(work.storage, path, work.layout.file_id.checkpoint_id)
        work = work._replace(partial=partial, beside=beside)
        try:
            threading.Thread(target=work.run, name=f"save {os.path.basename(path)}").start()
        except RuntimeError:  # at the end of the process there are no new ones
            work.run()
    except BaseException as error:
        work.give_up(error)
        unregister(path, handle, earlier)
        raise
    if held is not None:
        work.capture.wait_frozen()
    return handle


def _prepare(
    state: Any,
    path: str,
    held: Sequence[Held] | None,
    ring: CaptureRing | None,
    latest: bool,
    checkpoint_id: str | None,
    storage: Storage | None,
) -> _Save:
    """Fix what is written, and where."""
    name = os.path.basename(path)
    if not name or (latest and name == LATEST):
        raise ConfigError(f"{path!r} is no name for a checkpoint", where="path", fix="name one")
    file_id = FileId(check_id(checkpoint_id or uuid.uuid4().hex), 0, 0)
    with collector_paused():
        node, encoder = encode_state(state)
        extents = plan_extents(encoder.leaves, encoder.repeats)
        text = index_text({"tree": node, "pieces": encoder.pieces})
        layout = lay_out(file_id, extents, encoder.blobs, text, leases=leases_of(held or ()))
    ready = _events(encoder.leaves)
    handle = Handle(layout.file_bytes)
    capture = Capture(layout, held, handle.set_captured)
    storage = storage or make_storage()
    return _Save(storage, "", path, layout, text, latest, ready, handle, None, capture, ring)


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
    capture: Capture
    ring: CaptureRing | None

    def run(self) -> None:
        try:
            self._write()
            self.handle.durable.set_result(self.path)
        except BaseException as error:
            failure = _failure(error, self.path) if isinstance(error, OSError) else error
            failure.__cause__ = None if failure is error else error
            _log.error("saving failed: %s", failure)
            self.give_up(failure)
        finally:
            unregister(self.path, self.handle)

    def give_up(self, error: BaseException) -> None:
        """Nothing is read any more; remove what was written, and tell why."""
        if self.partial:
            clean_up(self.storage, self.partial)
        self.handle.fail(error)
        self.capture.abandon()

    def _write(self) -> None:
        if self.beside is not None:
            self.beside.durable.exception()
        for event in self.ready:
            event.synchronize()
        self.capture.ready()
        writer = FileWriter(
            self.storage,
            os.path.join(self.partial, self.layout.file_id.name),
            self.layout,
            self.index_text,
            shape_for(os.path.dirname(self.path)),
            progress=self.handle.advance,
            captured=self.capture.took,
            order=self.capture.order,
            ring=None if self.ring is None else self.ring.memory(),
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


def _failure(error: OSError, path: str) -> CheckpointError:
    return CheckpointError(
        f"it could not be written: {error.strerror or error}",
        where=path,
        fix=_FIXES.get(error.errno or 0, "see the cause, and save again"),
    )
