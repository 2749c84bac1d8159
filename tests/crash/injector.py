"""A file system in front of another one: calls fail, are left out, or end late and in disorder."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

CHANGES = frozenset(
    {"preallocate", "truncate", "fsync", "write", "write_bytes", "rename", "exchange"}
    | {"fsync_directory", "unlink", "mkdir", "rmdir"}
)
"""Calls that change something; so does an `open` that creates."""

DROP = -1


class Injector:
    """See `dos.checkpoint.storage.Storage`.

    Args:
        inner: does what is let through.
        fault: told the number and the name of each call before it is made (a queue's `read` and
            `write` count too); returns an errno to fail with, `DROP` to do nothing, 0 to go on.
        after: told the name of each call that changed something, once it was made.
        seed: of the order and delay of a queue's completions; None: as they come.

    Attributes:
        calls: the names of all calls so far.
    """

    def __init__(
        self,
        inner: Any,
        *,
        fault: Callable[[int, str], int] = lambda number, name: 0,
        after: Callable[[str], None] = lambda name: None,
        seed: int | None = None,
    ) -> None:
        self.inner, self.after, self.seed = inner, after, seed
        self.name: str = inner.name
        self.calls: list[str] = []
        self.lock = threading.RLock()
        self._fault = fault

    def fault(self, name: str) -> int:
        """Count a call; what becomes of it."""
        self.calls.append(name)
        return self._fault(len(self.calls) - 1, name)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if name in ("close", "lose"):
            return method

        def call(*arguments: Any, **options: Any) -> Any:
            with self.lock:
                return self._call(name, method, arguments, options)

        return call

    def _call(
        self, name: str, method: Callable[..., Any], arguments: Any, options: dict[str, Any]
    ) -> Any:
        number = self.fault(name)
        if number == DROP:
            return None
        if number:
            if name == "fsync" and hasattr(self.inner, "lose"):
                self.inner.lose(*arguments)
            path = next((a for a in arguments if isinstance(a, str)), "")
            raise OSError(number, os.strerror(number), path)
        result = method(*arguments, **options)
        if name in CHANGES or options.get("create"):
            self.after(name)
        return result

    def queue(self, *, depth: int = 32, registered: Sequence[memoryview] = ()) -> InjectorQueue:
        return InjectorQueue(self, self.inner.queue(depth=depth, registered=registered))


class InjectorQueue:
    """See `dos.checkpoint.storage.Queue`; one call at a time, of all queues and the injector."""

    def __init__(self, injector: Injector, inner: Any) -> None:
        self._injector, self._inner = injector, inner
        self._random = None if injector.seed is None else Random(injector.seed)
        self._failed: dict[int, OSError] = {}
        self._held: list[tuple[int, OSError | None]] = []

    def write(self, file: Any, offset_bytes: int, buffer: memoryview, token: int) -> None:
        with self._injector.lock:
            number = self._injector.fault("write")
            if number:
                # What fails has moved a part of it all the same.
                self._failed[token] = OSError(number, os.strerror(number), file.path)
                half = len(buffer) // 2 // file.offset_align_bytes * file.offset_align_bytes
                buffer = buffer[:half]
            self._inner.write(file, offset_bytes, buffer, token)
            self._injector.after("write")

    def read(self, file: Any, offset_bytes: int, buffer: memoryview, token: int) -> None:
        with self._injector.lock:
            number = self._injector.fault("read")
            if number:
                self._failed[token] = OSError(number, os.strerror(number), file.path)
            self._inner.read(file, offset_bytes, buffer, token)

    def completed(self, *, wait: bool) -> list[tuple[int, OSError | None]]:
        with self._injector.lock:
            if wait and self._random and self._random.random() < 0.5:
                self._held += self._inner.drain()  # all, so that the order can be another
            self._held += self._inner.completed(wait=wait and not self._held)
            done = self._held
            if self._random and done:
                self._random.shuffle(done)
                done = done[: self._random.randint(1 if wait else 0, len(done))]
            self._held = [one for one in self._held if one not in done]
            return self._told(done)

    def drain(self) -> list[tuple[int, OSError | None]]:
        with self._injector.lock:
            done, self._held = self._held + self._inner.drain(), []
            if self._random:
                self._random.shuffle(done)
            return self._told(done)

    def close(self) -> None:
        with self._injector.lock:
            self._inner.close()

    def _told(self, done: list[tuple[int, OSError | None]]) -> list[tuple[int, OSError | None]]:
        if done:
            self._injector.after("completed")
        return [(token, self._failed.pop(token, error)) for token, error in done]
