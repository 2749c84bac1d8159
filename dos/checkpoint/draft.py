"""One file of a save: everything about it is fixed before the first byte is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from dos.checkpoint.bulk import collector_paused
from dos.checkpoint.capture import Capture, Held, leases_of, small_copied
from dos.checkpoint.capture_ring import CaptureRing
from dos.checkpoint.encode import encode_state
from dos.checkpoint.format import FileId, index_text
from dos.checkpoint.layout import lay_out
from dos.checkpoint.manifest import FileRecord
from dos.checkpoint.providers import plan_extents
from dos.checkpoint.sources import Elements, Source
from dos.checkpoint.storage import Storage
from dos.checkpoint.tuning import shape_for
from dos.checkpoint.writer import FileWriter


class Draft:
    """A state as a file that is to be written.

    Objects are as they were when it was made, as are a few small tensors that nobody holds; other
    tensors and arrays are read by `write`.

    Args:
        file_id: which file of which checkpoint.
        state: see `dos.checkpoint.save`.
        held: see `dos.checkpoint.saving.begin_save`.
        captured: called once nothing is read from memory any more.

    Attributes:
        file_bytes: its size.

    Raises:
        FormatError: something in the state cannot be saved.
    """

    def __init__(
        self,
        file_id: FileId,
        state: Any,
        held: Sequence[Held] | None,
        captured: Callable[[], None],
    ) -> None:
        with collector_paused():
            node, encoder = encode_state(state)
            extents = plan_extents(encoder.leaves, encoder.repeats)
            if held is not None:
                extents = small_copied(extents, held)
            self._text = index_text({"tree": node, "pieces": encoder.pieces})
            leases = leases_of(held or ())
            self._layout = lay_out(file_id, extents, encoder.blobs, self._text, leases=leases)
        self._devices = _accelerators(run.source for run in self._layout.runs)
        self._produced = [_event(device) for device in self._devices]
        self._capture = Capture(self._layout, held, captured)
        self.file_bytes = self._layout.file_bytes

    def write(
        self,
        storage: Storage,
        directory: str,
        ring: CaptureRing | None,
        progress: Callable[[int], None],
    ) -> FileRecord:
        """Write it, durably.

        Args:
            storage: the file system.
            directory: where it is made.
            ring: where what is not written as it lies is copied; None: memory of its own.
            progress: called with the bytes of each part that is on its way.

        Raises:
            OSError: of the file system; the file may be incomplete.
        """
        for event in self._produced:
            event.synchronize()
        return FileWriter(
            storage,
            os.path.join(directory, self._layout.file_id.name),
            self._layout,
            self._text,
            shape_for(directory),
            progress=progress,
            capture=self._capture,
            ring=None if ring is None else ring.memory(next(iter(self._devices), None)),
        ).write()

    def wait_frozen(self, timeout_s: float) -> bool:
        """Until all that nobody holds is copied, or it was abandoned; whether that was in time."""
        return self._capture.wait_frozen(timeout_s)

    def abandon(self) -> None:
        """Whoever holds something may change it; `write` fails, unless all is captured."""
        self._capture.abandon()


def _accelerators(sources: Iterable[Source]) -> set[torch.device]:
    """Where sources are copied from, but for the host."""
    devices = {source.device for source in sources if isinstance(source, Elements)}
    return devices - {torch.device("cpu")}


def _event(device: torch.device) -> torch.Event:
    """After it, what the current stream of an accelerator had to do is done."""
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event
