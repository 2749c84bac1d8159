"""Host memory that direct I/O takes: slots for chunks on their way, and memory that stays."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from contextlib import suppress

from dos.memory.sizes import PAGE_BYTES, padded_bytes

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


def view_of(address: int, n_bytes: int) -> memoryview:
    """Bytes at an address, which the caller keeps alive."""
    return memoryview((ctypes.c_char * n_bytes).from_address(address)).cast("B")


def aligned_buffer(n_bytes: int) -> memoryview:
    """Zeroed memory from a page on."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return memoryview(mmap.mmap(-1, max(n_bytes, 1), flags=flags))[:n_bytes]


class Slots:
    """Equal pieces of memory, for what is on its way.

    Args:
        memory: writable, from a page on; a whole number of pieces.
        slot_bytes: size of each, a multiple of a page.

    Attributes:
        views: the slots.
        addresses: where each begins.
        free: numbers of those that are not in use.
    """

    def __init__(self, memory: memoryview, slot_bytes: int) -> None:
        begins = range(0, len(memory), slot_bytes)
        self.views = [memory[begin : begin + slot_bytes] for begin in begins]
        start = address_of(memory)
        self.addresses = [start + begin for begin in begins]
        self.free = list(range(len(begins)))

    def view(self, slot: int, n_bytes: int) -> memoryview:
        """The first bytes of a slot."""
        return self.views[slot][:n_bytes]


def address_of(view: memoryview) -> int:
    """Where writable memory begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Arena:
    """Fresh memory of which parts stay, each until its last user goes; the rest goes with `close`.

    Its pages are huge ones where the kernel gives them: to touch gigabytes of small ones for the
    first time takes longer than a fast disk takes to fill them.

    Attributes:
        address: of the first byte; a page begins there.
        n_bytes: size.
    """

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self._length_bytes = padded_bytes(n_bytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, self._length_bytes, protection, flags, -1, 0)
        if address is None or address == _MAP_FAILED:
            raise MemoryError(f"{n_bytes:,} bytes: {os.strerror(ctypes.get_errno())}")
        self.address: int = address
        with suppress(AttributeError):
            _libc.madvise(address, self._length_bytes, mmap.MADV_HUGEPAGE)
        self._kept: list[tuple[int, int]] = []

    def keep(self, begin: int, end: int) -> memoryview:
        """Bytes that stay as long as the view lives, and with them the pages that they lie on.

        Args:
            begin: offset of a page.
            end: offset behind the last byte; no two kept parts share a page.
        """
        assert begin % PAGE_BYTES == 0
        memory = (ctypes.c_char * (end - begin)).from_address(self.address + begin)
        pages = padded_bytes(end - begin)
        self._kept.append((begin, begin + pages))
        goes = weakref.finalize(memory, _libc.munmap, self.address + begin, pages)
        goes.atexit = False  # tensors may outlive it
        return memoryview(memory).cast("B")

    def close(self) -> None:
        """Give back what is not kept."""
        end = 0
        for begin, next_end in [*sorted(self._kept), (self._length_bytes, self._length_bytes)]:
            if begin > end:
                _libc.munmap(self.address + end, begin - end)
            end = max(end, next_end)
        self._length_bytes = 0
        self._kept = []
