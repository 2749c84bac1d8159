"""What `save` returns: a save in the background, as its user and as its writer hold it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NamedTuple

from dos.errors import CheckpointError


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

    def __init__(self) -> None:
        self.captured: Future[None] = _running()
        self.durable: Future[str] = _running()
        self._done_bytes = self._total_bytes = 0

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


class RunningSave(Handle):
    """A handle as who writes the save holds it: tells it how far the save is."""

    def expect(self, n_bytes: int) -> None:
        """So many bytes more there will be."""
        self._total_bytes += n_bytes

    def advance(self, n_bytes: int) -> None:
        """So many bytes more are on their way."""
        self._done_bytes += n_bytes

    def set_captured(self) -> None:
        """The state may change again."""
        if not self.captured.done():
            self.captured.set_result(None)

    def orphan(self) -> None:
        """In a child process, where no thread writes it: other futures, whose locks are free."""
        self.captured, self.durable = _running(), _running()
        self.fail(CheckpointError("the parent process is writing it", fix="ask there"))

    def fail(self, error: BaseException) -> None:
        """It will not be there, for this reason."""
        for future in (self.captured, self.durable):
            if not future.done():
                future.set_exception(error)


def _running() -> Future[Any]:
    """A future that nobody can cancel."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
