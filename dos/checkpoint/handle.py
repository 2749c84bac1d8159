"""What `save` returns: a save in the background, as its user and as its writer hold it."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
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

        What a `Checkpointer` does then, its metrics and the removal of older checkpoints, may still
        be under way; its `close` waits for that too.

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
    """A handle as who writes the save holds it: tells it how far the save is.

    Args:
        path: of the checkpoint.
        stall_s: how long a save may stand still before those that wait for it give up.

    Attributes:
        behind: the save that this one is written after, until that is durable.
    """

    def __init__(self, path: str, stall_s: float) -> None:
        super().__init__()
        self.path, self._stall_s = path, stall_s
        self.behind: RunningSave | None = None

    def outwait(self, over: Callable[[float], bool]) -> None:
        """Wait for something of this save, for as long as it, or one that it is behind, gets on.

        Args:
            over: waits so many seconds at most, and says whether what is waited for has come.

        Raises:
            CheckpointError: not a byte was written for `stall_s`.
        """
        so_far = self._so_far()
        while not over(self._stall_s):
            before, so_far = so_far, self._so_far()
            if so_far == before:
                raise CheckpointError(
                    f"it has not got on for {self._stall_s:g} s, and was waited for",
                    where=self.path,
                    fix="look for a stalled disk",
                )

    def _so_far(self) -> int:
        behind = self.behind
        return self._done_bytes + (0 if behind is None else behind._so_far())

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


def ended(future: Future[Any]) -> Callable[[float], bool]:
    """To `outwait` a future, whether it succeeds or not."""

    def over(timeout_s: float) -> bool:
        try:
            future.exception(timeout_s)
        except concurrent.futures.TimeoutError:
            return False
        return True

    return over


def _running() -> Future[Any]:
    """A future that nobody can cancel."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
