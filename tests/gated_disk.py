"""A disk that can be told to wait."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from dos.checkpoint.posix import PosixQueue, PosixStorage

WAIT_S = 60


def join_saves() -> None:
    """Until no thread writes a save any more."""
    for thread in threading.enumerate():
        if thread.name.startswith("save "):
            thread.join(WAIT_S)


class Gated(PosixStorage):
    """A disk that takes nothing until it is opened."""

    def __init__(self) -> None:
        self.open_now = threading.Event()

    def queue(self, *, depth: int = 32, registered: Sequence[memoryview] = ()) -> PosixQueue:
        """Whose writes end when the disk is opened."""
        outer = self

        class Waiting(PosixQueue):
            def completed(self, *, wait: bool) -> list[tuple[int, OSError | None]]:
                if wait:
                    assert outer.open_now.wait(WAIT_S)
                return super().completed(wait=wait) if outer.open_now.is_set() else []

        return Waiting()
