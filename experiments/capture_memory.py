"""The most memory that a process takes while something runs, above what it had before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SELF = Path("/proc/self")


class Peak:
    """What was measured, once the block is over.

    Attributes:
        bytes: the peak of resident memory, above what was resident before.
    """

    bytes = 0


@contextmanager
def peak_above() -> Iterator[Peak]:
    """Measure a block, by the kernel's own high-water mark, which is set back for it."""
    peak, before = Peak(), _status_bytes("VmRSS")
    (_SELF / "clear_refs").write_text("5")  # proc(5): set VmHWM to VmRSS
    yield peak
    peak.bytes = max(0, _status_bytes("VmHWM") - before)


def _status_bytes(key: str) -> int:
    for line in (_SELF / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) << 10
    raise KeyError(key)
