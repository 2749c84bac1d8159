"""Saves in the background of a training: which are under way, which failed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from dos.checkpoint.handle import Handle
from dos.errors import CheckpointError
from dos.memory import HeldState

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
        self._in_flight: dict[Handle, tuple[str, Sequence[HeldState]]] = {}
        self._of_thread = threading.local()
        self._failures = self._in_a_row = 0
        self._last: tuple[str, BaseException] | None = None

    def add(
        self, name: str, handle: Handle, held: Sequence[HeldState], then: Callable[[], None]
    ) -> None:
        """A save of what is `held` was started; call `then` once it is durable."""
        with self._changed:
            self._in_flight[handle] = name, held

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

    @contextmanager
    def failure_told(self) -> Iterator[None]:
        """What failed before is raised after the body; or if that fails, by a later one.

        Raises:
            CheckpointError: a save failed.
        """
        with self._changed:
            last = self._last
        yield
        if last is None:
            return
        with self._changed:
            if self._last is last:
                self._last = None
        name, cause = last
        raise CheckpointError(f"an earlier save failed: {cause}", where=name) from cause

    def wait(self) -> None:
        """Until all have ended; but for one whose error `on_error` is handling, who calls this.

        Raises:
            CheckpointError: some have not in time, which is logged too.
        """
        ends = {getattr(self._of_thread, "ends", None)}
        with self._changed:
            if self._changed.wait_for(lambda: self._in_flight.keys() <= ends, self._timeout_s):
                return
            names = ", ".join(name for name, _ in self._in_flight.values())
        error = CheckpointError(
            f"it is not durable after {self._timeout_s:g} s, and was given up",
            where=names,
            fix="raise `close_timeout_s`, or save to a faster disk",
        )
        _log.error("%s", error)
        raise error

    def release(self) -> None:
        """What is held for saves that are under way may change; they must not succeed any more."""
        with self._changed:
            holding = [held for _, held in self._in_flight.values()]
        for held in holding:
            for one in held:
                one.abandon()

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
