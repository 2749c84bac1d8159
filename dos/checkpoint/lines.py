"""Connections to the store of torch.distributed, on which a wait holds up nobody else."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from dos.errors import CheckpointError, first_line

_POLL_S = 0.02
_T = TypeVar("_T")


class Line(Protocol):
    """A map of texts that all ranks share. CheckpointError where it is gone."""

    def set(self, key: str, text: str) -> None:
        """Put a text."""

    def set_first(self, key: str, text: str) -> str:
        """Put a text that is not empty where there is none; the text that is there then."""

    def add(self, key: str, number: int) -> int:
        """Add to a number that begins with 0; the sum."""

    def get(self, key: str) -> str:
        """A text that is there."""

    def has(self, *keys: str) -> bool:
        """Are all of them there?"""

    def delete(self, *keys: str) -> None:
        """Remove those that are there."""

    def wait(self, key: str, timeout_s: float) -> bool:
        """Sleep until it is there, for one thread at a time; False: it was not in time."""


class LocalLine:
    """That of a process that is alone: what it waits for and is not there will not come."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def set(self, key: str, text: str) -> None:
        """See `Line`."""
        self._texts[key] = text

    def set_first(self, key: str, text: str) -> str:
        """See `Line`."""
        return self._texts.setdefault(key, text)

    def add(self, key: str, number: int) -> int:
        """See `Line`."""
        self._texts[key] = str(int(self._texts.get(key, "0")) + number)
        return int(self._texts[key])

    def get(self, key: str) -> str:
        """See `Line`."""
        return self._texts[key]

    def has(self, *keys: str) -> bool:
        """See `Line`."""
        return all(key in self._texts for key in keys)

    def delete(self, *keys: str) -> None:
        """See `Line`."""
        for key in keys:
            self._texts.pop(key, None)

    def wait(self, key: str, timeout_s: float) -> bool:
        """See `Line`."""
        return key in self._texts


class StoreLine:
    """Two connections of our own to a store: one for short calls, one to wait on.

    A wait on a connection that others use would hold up their calls: training's. Where a store
    cannot be connected to again, waits are short questions, again and again.

    Args:
        store: of torch.distributed, with or without a prefix.
        timeout_s: longest time that a short call may take.
    """

    def __init__(self, store: Any, timeout_s: float) -> None:
        # With its own prefix gone: our keys bear one that no other keys bear.
        self._shared = getattr(store, "_underlying_non_prefix_store", store)  # a server lives on
        own = _connected(self._shared, timeout_s)
        self._waits = None if own is None else _connected(self._shared, timeout_s)
        self._short = self._shared if own is None else own

    def set(self, key: str, text: str) -> None:
        """See `Line`."""
        _told(lambda: self._short.set(key, text))

    def set_first(self, key: str, text: str) -> str:
        """See `Line`."""
        return bytes(_told(lambda: self._short.compare_set(key, "", text))).decode()

    def add(self, key: str, number: int) -> int:
        """See `Line`."""
        return int(_told(lambda: self._short.add(key, number)))

    def get(self, key: str) -> str:
        """See `Line`."""
        return bytes(_told(lambda: self._short.get(key))).decode()

    def has(self, *keys: str) -> bool:
        """See `Line`."""
        return bool(_told(lambda: self._short.check(list(keys))))

    def delete(self, *keys: str) -> None:
        """See `Line`."""
        for key in keys:
            _told(lambda key=key: self._short.delete_key(key))  # type: ignore[misc]

    def wait(self, key: str, timeout_s: float) -> bool:
        """See `Line`."""
        if self._waits is None:
            return poll(lambda: self.has(key), timeout_s)
        try:
            self._waits.wait([key], timedelta(seconds=max(timeout_s, 1e-3)))
            return True
        except (RuntimeError, ValueError):  # out of time, or the store is gone, as this tells
            return self.has(key)


def poll(is_so: Callable[[], bool], timeout_s: float) -> bool:
    """Ask again and again until it is so; False: it was not in time."""
    end = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
    return True


def _connected(store: Any, timeout_s: float) -> Any:
    """Another connection to the same store; None where there can be none."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=timeout_s)
    try:
        if hasattr(store, "clone"):
            own = store.clone()
        elif isinstance(store, TCPStore):
            own = TCPStore(
                store.host, store.port, is_master=False, timeout=timeout, wait_for_workers=False
            )
        else:
            return None
        if own is not store:
            own.set_timeout(timeout)
        return own
    except (RuntimeError, NotImplementedError):
        return None


def _told(call: Callable[[], _T]) -> _T:
    try:
        return call()
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"the store that the ranks talk through is gone: {first_line(error)}",
            where="torch.distributed",
            fix="see why the process that serves it ended",
        ) from error
