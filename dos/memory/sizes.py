"""Sizes of host memory: how they are rounded and how they are written in messages."""

from __future__ import annotations

PAGE_BYTES = 4096
"""Alignment of state and ring leases: what O_DIRECT and the kernel's pages ask for."""

LINE_BYTES = 64
"""Alignment of gradient leases: one cache line, one AVX-512 vector."""

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def padded_bytes(n_bytes: int, alignment_bytes: int = PAGE_BYTES) -> int:
    """``n_bytes`` rounded up to a multiple of ``alignment_bytes``."""
    return -(-n_bytes // alignment_bytes) * alignment_bytes


def bytes_text(n_bytes: int) -> str:
    """A size for a message: exact bytes, and a rounded figure where that is easier to read."""
    amount, unit = float(n_bytes), ""
    for larger in _UNITS:
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{n_bytes:,} bytes ({amount:.1f} {unit})" if unit else f"{n_bytes} bytes"
