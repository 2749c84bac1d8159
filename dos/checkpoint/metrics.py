"""Figures of a save beside a training, for a logger."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dos.memory import HeldState


class SaveMetrics:
    """Times one save.

    Args:
        began_s: when `save` was called, on the monotonic clock.
        held: what steps may have to wait for.
    """

    def __init__(self, began_s: float, held: Sequence[HeldState]) -> None:
        # The gates alone: what is held has the whole state in it.
        self._began_s, self._gates = began_s, [one.gates for one in held]
        self._waited_before_s = self._waited_s()
        self._frozen_s = 0.0

    def started(self) -> None:
        """`save` is about to return."""
        self._frozen_s = time.monotonic() - self._began_s

    def durable(self, n_bytes: int, ring_bytes: int) -> dict[str, float]:
        """See `Checkpointer.metrics`."""
        took_s = time.monotonic() - self._began_s
        return {
            "bytes": n_bytes,
            "seconds": took_s,
            "gib_per_s": n_bytes / took_s / 2**30,
            "frozen_s": self._frozen_s,
            "waited_s": self._waited_s() - self._waited_before_s,
            "ring_bytes": ring_bytes,
        }

    def _waited_s(self) -> float:
        return sum(gates.waited_s for gates in self._gates)
