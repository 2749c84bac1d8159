"""Saves in the background of a training: which are under way, which failed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from dos.checkpoint.handle import Handle
from dos.errors import CheckpointError

_log = logging.getLogger(__name__)


class Background:
    """The saves of one training. Any thread may call any method.

    Args:
        timeout_s: how long `wait` does.
        max_failures: so many in a row, and `check` raises.
        on_error: called with the error of a failed save, on the thread that wrote it.
    """

    def __init__(
        self,
        timeout_s: float,
        max_failures: int,
        on_error: Callable[[BaseException], None] | None,
    ) -> None:
        self._timeout_s, self._max_failures, self._on_error = timeout_s, max_failures, on_error
        self._changed = threading.Condition()
        self._in_flight: dict[Handle, str] = {}
        self._of_thread = threading.local()
        self._failures = self._in_a_row = 0
        self._last: tuple[str, BaseException] | None = None

    def add(self, name: str, handle: Handle, then: Callable[[], None]) -> None:
        """A save was started; call `then` once it is durable."""
        with self._changed:
            self._in_flight[handle] = name

        def ended(durable: Future[str]) -> None:
            error = durable.exception()
            self._of_thread.ends = handle
            try:
                if error is None:
                    self._in_a_row = 0
                    then()
                else:
                    self._failed(name, error)
            finally:
                self._of_thread.ends = None
                with self._changed:
                    del self._in_flight[handle]
                    self._changed.notify_all()

        handle.durable.add_done_callback(ended)

    def check(self) -> None:
        """Raise CheckpointError if so many saves in a row failed; who goes on has as many again."""
        with self._changed:
            if self._in_a_row < self._max_failures or self._last is None:
                return
            (name, error), count = self._last, self._in_a_row
            self._last, self._in_a_row = None, 0
        raise CheckpointError(
            f"{count} saves in a row failed, so that no other was started; of the last: {error}",
            where=name,
        ) from error

    def take_failure(self) -> CheckpointError | None:
        """What to raise for a save that failed since this was last asked."""
        with self._changed:
            last, self._last = self._last, None
        if last is None:
            return None
        name, cause = last
        error = CheckpointError(f"an earlier save failed: {cause}", where=name)
        error.__cause__ = cause
        return error

    def wait(self) -> None:
        """Until all have ended; but for one whose error `on_error` is handling, who calls this.

        Raises:
            CheckpointError: some have not in time, which is logged too.
        """
        ends = {getattr(self._of_thread, "ends", None)}
        with self._changed:
            if self._changed.wait_for(lambda: self._in_flight.keys() <= ends, self._timeout_s):
                return
            names = ", ".join(self._in_flight.values())
        error = CheckpointError(
            f"it is not durable after {self._timeout_s:g} s, and was given up",
            where=names,
            fix="raise `close_timeout_s`, or save to a faster disk",
        )
        _log.error("%s", error)
        raise error

    @property
    def failures(self) -> int:
        """How many saves have failed."""
        return self._failures

    def _failed(self, name: str, error: BaseException) -> None:
        with self._changed:
            self._failures += 1
            self._in_a_row += 1
            self._last = name, error
        if self._on_error is not None:
            try:
                self._on_error(error)
            except Exception:
                _log.exception("on_error failed")
