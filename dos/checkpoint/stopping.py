"""SIGTERM, turned into one last checkpoint at a step that every rank reaches."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
import time
import weakref
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from dos.checkpoint.handle import Handle
from dos.checkpoint.ranks import Ranks
from dos.errors import CheckpointError, ConfigError

_log = logging.getLogger(__name__)

EXIT_STATUS = 128 + signal.SIGTERM
_LOOK_S = 0.5
"""How often a rank looks whether another was told to stop."""
_TOPIC = "stop"


class Stopping:
    """Waits for SIGTERM, and says at which step to save and leave.

    The signal is heard of by the wakeup descriptor, so also while the main thread is within a
    long call. From then on the process has `grace_s`; after that it is ended as it is. A handler
    that was there before is called too, and comes back with `close`.

    Args:
        grace_s: from the signal to the end of the process, in seconds.
        ranks: all that stop together, wherever the signal arrives.

    Raises:
        ConfigError: not made on the main thread.
    """

    def __init__(self, grace_s: float, ranks: Ranks) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "signals can be handled on the main thread only",
                where="sigterm_grace_s",
                fix="make the Checkpointer there, or leave this option out",
            )
        self._grace_s, self._ranks = grace_s, ranks
        self._lock = threading.Lock()
        self._begun: int | None = None  # the step that this rank is in, where that is known
        self._last: int | None = None  # the step to save and leave at
        self._told, self._closed = threading.Event(), threading.Event()
        self._heard_all = False  # until it was closed; only passed on from then on
        self._muted = threading.Event()  # nobody writes to the mouth any more
        self._mouth, self._ear = socket.socketpair()
        self._mouth.setblocking(False)
        self._ear.setblocking(False)
        self._handler: Any = signal.signal(signal.SIGTERM, self._handle)
        self._wakeup_fd = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        _listening.add(self)
        threading.Thread(target=self._listen, name="sigterm", daemon=True).start()

    def is_last(self, step: int) -> bool:
        """Is this the step to save and leave at? To be called at the end of each."""
        with self._lock:
            if not self._told.is_set():
                self._begun = step + 1
                return False
        if self._last is None:
            try:
                begun = self._ranks.told(_TOPIC, self._grace_s)
            except CheckpointError as error:
                _log.error("SIGTERM: no last checkpoint, since the ranks did not agree: %s", error)
                raise SystemExit(EXIT_STATUS) from error
            self._last = max((number for number in begun if number is not None), default=step)
        return step >= self._last

    def leave(self, handle: Handle) -> NoReturn:
        """End the process by SystemExit, once the last save is durable or has failed."""
        with suppress(CheckpointError):  # it is in the log
            _log.warning("SIGTERM: leaving, saved as %s", handle.result())
        raise SystemExit(EXIT_STATUS)

    def close(self) -> None:
        """Stop listening; idempotent. Once the signal was heard, the process still has to end.

        Off the main thread, and where somebody has put theirs over it since, the handler or the
        wakeup descriptor cannot be given back: it stays, and passes on what it is told.
        """
        if not self._told.is_set():
            self._closed.set()
        self.mute()
        if self._closed.is_set():
            with suppress(OSError):
                self._mouth.send(b"\0")  # wakes the thread

    def mute(self) -> None:
        """Let signals be handled as they were before, as far as that can be."""
        with suppress(ValueError):  # not on the main thread
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, self._handler)
            if self._muted.is_set():
                return
            found = signal.set_wakeup_fd(-1)
            if found == self._mouth.fileno():
                found = self._wakeup_fd
                self._muted.set()
                _listening.discard(self)
            with suppress(OSError):  # who put it there has closed it
                signal.set_wakeup_fd(found)

    def forget(self) -> None:
        """In a child process, whose signals are none of its parent's."""
        self.mute()
        signal.set_wakeup_fd(-1)
        self._close_ends()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        with suppress(OSError):  # again, in case somebody took the wakeup descriptor over
            self._mouth.send(bytes([number]))
        if callable(self._handler):
            self._handler(number, frame)
        elif self._closed.is_set():
            self.close()  # here it can be given back
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.raise_signal(number)

    def _close_ends(self) -> None:
        for end in (self._ear, self._mouth):
            end.close()

    def _listen(self) -> None:
        try:
            while not self._hears():
                if self._heard_all and self._muted.is_set():
                    return
            end_s = time.monotonic() + self._grace_s
            self._tell()
            time.sleep(max(0, end_s - time.monotonic()))
            _log.error("SIGTERM: %g s are over, so that this process ends as it is", self._grace_s)
            os._exit(EXIT_STATUS)
        finally:
            self._close_ends()

    def _hears(self) -> bool:
        """Wait a while for the signal, here or on another rank."""
        alone = self._ranks.world == 1 or self._heard_all
        ready, _, _ = select.select([self._ear], [], [], None if alone else _LOOK_S)
        told, closing, after = (self._ear.recv(4096) if ready else b"").partition(b"\0")
        if told + after and self._wakeup_fd != -1:
            with suppress(OSError):
                os.write(self._wakeup_fd, told + after)
        if signal.SIGTERM in told and not self._heard_all:
            return True
        if closing:
            self._heard_all = True
            return False
        with suppress(CheckpointError):
            return not alone and self._ranks.is_called(_TOPIC)
        return False

    def _tell(self) -> None:
        with self._lock:
            begun = self._begun
            self._told.set()
        with suppress(CheckpointError):  # then nobody agrees, and `is_last` says so
            self._ranks.call(_TOPIC)
            self._ranks.tell(_TOPIC, begun)


_listening: weakref.WeakSet[Stopping] = weakref.WeakSet()


_fork = threading.local()


def _before_fork() -> None:
    """A signal to the child waits until it is one of its own."""
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM} if _listening else ())


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _mute_in_child() -> None:
    """A worker that is ended by SIGTERM does not end the training."""
    for stopping in list(_listening):
        stopping.forget()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_mute_in_child)
