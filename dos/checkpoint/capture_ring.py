"""The ring: memory of a fixed size through which goes what is not written where it lies."""

from __future__ import annotations

import torch

from dos.checkpoint.format import CHUNK_BYTES
from dos.errors import ConfigError
from dos.memory.available import available_host_bytes
from dos.memory.pinned import Slab

_LARGEST_BYTES = 2 << 30
_SHARE = 10
_FEWEST_CHUNKS = 4
"""Two for each of the two threads that write."""


class CaptureRing:
    """Host memory for chunks on their way to the disk; pinned if an accelerator is copied from.

    It is taken from the system when it is first used, and then kept: a save begins with as much
    room as the one before.

    Args:
        n_bytes: its size, rounded down to whole chunks; None: 2 GiB or a tenth of the memory that
            is available, whichever is less.

    Raises:
        ConfigError: less than a chunk.
    """

    def __init__(self, n_bytes: int | None = None) -> None:
        if n_bytes is None:
            available = available_host_bytes()
            share = _LARGEST_BYTES if available is None else available // _SHARE
            n_bytes = max(min(_LARGEST_BYTES, share), _FEWEST_CHUNKS * CHUNK_BYTES)
        if n_bytes < CHUNK_BYTES:
            raise ConfigError(
                f"{n_bytes} bytes hold no chunk",
                where="ring_bytes",
                fix=f"give at least {CHUNK_BYTES}; more lets a save return sooner",
            )
        self.n_bytes = n_bytes // CHUNK_BYTES * CHUNK_BYTES
        self._slab: Slab | None = None

    def memory(self, device: torch.device | None) -> memoryview:
        """All of it. Used by one save at a time.

        Args:
            device: the accelerator that the first save copies from, for which it is pinned; so none
                is started that the training does not use. None: not pinned.
        """
        if self._slab is None:
            self._slab = Slab(self.n_bytes, device=device)
        return self._slab.view(0, self.n_bytes)

    def close(self) -> None:
        """Give the memory back, once nothing uses it; idempotent."""
        if self._slab is not None:
            self._slab.close()
        self._slab = None
