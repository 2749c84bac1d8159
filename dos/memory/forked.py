"""Keeps a forked child off memory that it does not inherit."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref

from dos.errors import PoolError

_MAP_FIXED_NOREPLACE = 0x100000
_PROT_NONE = 0

_Memory = ctypes.Array[ctypes.c_char]

_live: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()
_kept_in_child: list[_Memory] = []


def guard_in_children(memory: _Memory) -> None:
    """Have every forked child hold the addresses of ``memory``, mapped with MADV_DONTFORK.

    Its pages are missing in a child, so the kernel would give the range to the child's next
    allocation: a stale tensor would read and write that, and freeing the parent's mapping
    object would unmap it. An inaccessible mapping in its place makes stale use fault.
    """
    _live[ctypes.addressof(memory)] = memory


def check_process(owner_pid: int) -> None:
    """Refuse to work in any process but the one that made the memory.

    Raises:
        PoolError: this process is a forked child of ``owner_pid``.
    """
    if os.getpid() != owner_pid:
        raise PoolError(
            f"the pool was made in process {owner_pid} and its pages are not inherited by "
            f"fork; this is process {os.getpid()}",
            where="pool",
            fix="call step(), state_dict() and load_state_dict() in the parent only, or make "
            "the optimizer after the fork",
        )


def _after_fork_in_child() -> None:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    for memory in list(_live.values()):
        # Kept for good: releasing it here would unmap, or unregister with a driver that does
        # not work in a child.
        _kept_in_child.append(memory)
        start = ctypes.addressof(memory)
        libc.mmap(start, ctypes.sizeof(memory), _PROT_NONE, flags, -1, 0)


if sys.platform == "linux":
    os.register_at_fork(after_in_child=_after_fork_in_child)
