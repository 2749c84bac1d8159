"""One save by all ranks: where it is built, and how it becomes a checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType

from dos.checkpoint.commit import (
    LATEST,
    check_replaceable,
    commit,
    make_parents,
    write_failure,
    write_latest,
)
from dos.checkpoint.format import FileId, check_id
from dos.checkpoint.lines import poll
from dos.checkpoint.manifest import FileRecord
from dos.checkpoint.opened import open_checked
from dos.checkpoint.owner import claim, clean_up, is_building, partial_path
from dos.checkpoint.ranks import Ranks
from dos.checkpoint.storage import Queue, Storage
from dos.checkpoint.tuning import IoShape, shape_for
from dos.errors import CheckpointError, DOSError

_AGAIN_S = 0.05


@contextmanager
def taking_part(
    ranks: Ranks, storage: Storage, path: str, checkpoint_id: str | None = None
) -> Iterator[None]:
    """What precedes a save: an error in it fails the save on all ranks, as one within it does."""
    try:
        yield
    except BaseException as error:
        Round(ranks, storage, path, checkpoint_id).fail(error)
        raise


class Round:
    """One save, as one of its ranks takes part in it; in `with`, an error is told to all.

    Args:
        ranks: all that save.
        storage: the file system.
        path: the checkpoint's, absolute.
        checkpoint_id: the same on all ranks; None: one that nobody has used.
        outline: what has to be the same on all ranks, a text for each part.

    Attributes:
        file_id: of this rank's first file.
        partial: the directory in which the files are made.
    """

    def __init__(
        self,
        ranks: Ranks,
        storage: Storage,
        path: str,
        checkpoint_id: str | None = None,
        outline: Mapping[str, str] | None = None,
    ) -> None:
        self._ranks, self._storage, self._path = ranks, storage, path
        self._outline = outline or {}
        self._id = ranks.enter(checkpoint_id and check_id(checkpoint_id))
        self.file_id = FileId(self._id, ranks.rank, 0)
        self.partial = partial_path(path, self._id)
        self._claimed = False

    def __enter__(self) -> Round:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.fail(error)

    def claim(self) -> None:
        """On rank 0, make the directory; before anything is written.

        Raises:
            CheckpointError: another process is writing it, the name is taken by something else,
                or the directory cannot be made.
        """
        if self._ranks.rank != 0:
            return
        try:
            make_parents(self._storage, os.path.dirname(self._path))
            check_replaceable(self._storage, self._path)
            claim(self._storage, self._path, self.partial)
        except OSError as error:
            raise write_failure(error, self._path) from error
        self._claimed = True

    def begin(self) -> None:
        """The directory is there after this, which waits for rank 0 to make it.

        Raises:
            CheckpointError: another rank failed, or is saving something else, under another name
                or of another outline.
        """
        name = os.path.basename(self._path)
        if self._ranks.rank == 0:
            self._ranks.begin(self._id, name, self._outline)
            return
        self._ranks.await_begin(self._id, name, self._outline)
        if not poll(self._is_seen, self._ranks.commit_timeout_s):
            raise CheckpointError(
                "it is not seen here, though rank 0 has made it",
                where=self.partial,
                fix="save to a file system that all ranks share",
            )

    def commit(self, records: Sequence[FileRecord], *, latest: bool) -> None:
        """Make it a checkpoint, once every rank has called this; on return it is one.

        Args:
            records: this rank's files, which are durable; there may be none.
            latest: make the file `latest` beside it name it.

        Raises:
            CheckpointError: a rank failed, or was not heard of in time.
            DOSError: the file of another rank is not as that rank says.
            OSError: of the file system.
        """
        ranks, storage = self._ranks, self._storage
        if ranks.rank != 0:
            # On a file system of several hosts the names that a host made may be known to it alone.
            storage.fsync_directory(self.partial)
        ranks.report(self._id, records)
        if ranks.rank != 0:
            ranks.await_commit(self._id)
            return
        files = ranks.gather(self._id)
        if ranks.world > 1:
            self._check([record for record in files if record.file_id.rank != 0])
        commit(storage, self.partial, self._path, files)
        self._claimed = False
        if latest:
            parent, name = os.path.split(self._path)
            try:
                write_latest(storage, parent, name)
            except OSError as error:  # the checkpoint itself is there
                raise write_failure(error, os.path.join(parent, LATEST)) from error
        ranks.announce(self._id)

    def failure(self, error: OSError) -> CheckpointError:
        """What to tell of an error of the file system.

        That of a rank which failed before, if one did: once that is told the directory is removed,
        and what this rank sees may be but that.
        """
        first = None
        with suppress(CheckpointError):  # the store is gone: nothing is known of others
            first = self._ranks.failure(self._id)
        return first or write_failure(error, self._path)

    def fail(self, error: BaseException) -> None:
        """This rank cannot take part in it any more; nothing stays of it, and no rank waits."""
        self._ranks.fail(self._id, error)
        if self._claimed and is_building(self.partial):
            clean_up(self._storage, self.partial)
        self._claimed = False

    def _is_seen(self) -> bool:
        """Is the directory there? Raises the failure of a rank, after which it may be no more."""
        if self._storage.exists(self.partial):
            return True
        if (failure := self._ranks.failure(self._id)) is not None:
            raise failure
        return False

    def _check(self, records: Sequence[FileRecord]) -> None:
        """See that files that others made are seen here as they made them."""
        end_s = time.monotonic() + self._ranks.commit_timeout_s
        shape = shape_for(os.path.dirname(self._path))
        queue = self._storage.queue(depth=2)
        try:
            for record in records:
                while not self._is_there(record, shape, queue, last=time.monotonic() > end_s):
                    time.sleep(_AGAIN_S)
        finally:
            queue.close()

    def _is_there(self, record: FileRecord, shape: IoShape, queue: Queue, *, last: bool) -> bool:
        try:
            file, _ = open_checked(self._storage, self.partial, record, shape, queue)
        except DOSError:  # it may be what was known of the file before it was whole
            if last:
                raise
            return False
        self._storage.close(file)
        return True
