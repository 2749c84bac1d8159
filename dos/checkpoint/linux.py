"""Calls of Linux that `os` lacks: allocation, exchange of names, direct I/O that works."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from contextlib import suppress

BLOCK_BYTES = 4096
"""Aligned enough for direct I/O wherever nothing is told of it."""

_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000
_RENAME_EXCHANGE = 2
_STATX_DIOALIGN, _STATX_BYTES, _STATX_DIO_OFFSET = 0x2000, 256, 0x98


def allocate(fd: int, n_bytes: int, path: str) -> bool:
    """Make a file this long, its blocks reserved; False where the file system cannot.

    Not `os.posix_fallocate`, which then writes to every block.
    """
    if n_bytes == 0:
        return True
    try:
        _call("fallocate", path, fd, 0, ctypes.c_int64(0), ctypes.c_int64(n_bytes))
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        raise
    return True


def exchange(a: str, b: str) -> None:
    """Swap what two names mean, in one step. OSError EINVAL or ENOSYS where unsupported."""
    names = os.fsencode(a), os.fsencode(b)
    _call("renameat2", a, _AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)


def make_direct(fd: int, *, write: bool) -> tuple[int, int] | None:
    """Switch O_DIRECT on where a transfer succeeds with it, else leave the file as it is.

    Some file systems take the flag and refuse every transfer, and some that allow them tell
    no alignment. The flag is set on an open file: an open that is refused for it may have
    created the file.

    Returns:
        Alignment in bytes of buffers, and of offsets and lengths; None: buffered.
    """
    empty = os.fstat(fd).st_size == 0
    if empty and not write:
        return None
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    with suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        for aligns in _possible_aligns(fd):
            if _transfers(fd, *aligns, write=empty):
                return aligns
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return None


def direct_io_aligns(fd: int) -> tuple[int, int] | None:
    """Alignment in bytes of buffers and of offsets as statx tells it; (0, 0): no direct I/O.

    None: the kernel, the C library or the file system does not tell.
    """
    result = ctypes.create_string_buffer(_STATX_BYTES)
    try:
        _call("statx", "", fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, result)
    except OSError:
        return None
    (told,) = struct.unpack_from("=I", result)
    if not told & _STATX_DIOALIGN:
        return None
    memory, offset = struct.unpack_from("=II", result, _STATX_DIO_OFFSET)
    return memory, offset


def _possible_aligns(fd: int) -> list[tuple[int, int]]:
    told = direct_io_aligns(fd)
    if told is not None and 0 in told:
        return []
    usual = (BLOCK_BYTES, BLOCK_BYTES)
    return [usual] if told in (None, usual) else [told, usual]


def _transfers(fd: int, memory_align_bytes: int, offset_align_bytes: int, *, write: bool) -> bool:
    """Does one transfer of the least size and alignment succeed? Writes to an empty file only."""
    pages = mmap.mmap(-1, memory_align_bytes + offset_align_bytes)
    block = memoryview(pages)[memory_align_bytes:]  # aligned so, and to nothing larger
    try:
        if write:
            os.pwritev(fd, [block], 0)
            os.ftruncate(fd, 0)
        else:
            os.preadv(fd, [block], 0)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.EIO):
            return False
        raise
    return True


def _call(name: str, path: str, *arguments: object) -> None:
    function = getattr(_libc, name, None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), path)
    while function(*arguments) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number), path)
