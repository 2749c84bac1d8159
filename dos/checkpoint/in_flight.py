"""Saves under way in this process: the last of each name, and of each directory."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from itertools import zip_longest

from dos.checkpoint.handle import RunningSave

_in_flight: dict[tuple[str, str], RunningSave] = {}
_lock = threading.Lock()


def _places(path: str) -> list[tuple[str, str]]:
    return [("name", path), ("beside", os.path.dirname(path))]


def register(path: str, handle: RunningSave) -> list[RunningSave | None]:
    """Make a save the last one of its name and directory; the ones before, if not done."""
    with _lock:
        before = [_in_flight.get(place) for place in _places(path)]
        _in_flight.update(dict.fromkeys(_places(path), handle))
        return before


def unregister(path: str, handle: RunningSave, earlier: Sequence[RunningSave | None] = ()) -> None:
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
        handle.orphan()
    _in_flight.clear()


os.register_at_fork(after_in_child=_forget_parent)
