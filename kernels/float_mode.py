"""Round to nearest and keep subnormals, whatever this thread was told before.

``torch.set_flush_denormal(True)`` changes the thread for every library, numpy and numba
included, and would change the bits of an update. The C++ kernels guard themselves; this
is for the others, through the C library so that it works without compiled code.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

# Larger than fenv_t anywhere (32 bytes on x86-64, 8 on AArch64).
_ENVIRONMENT_BYTES = 64
# FE_DFL_ENV of glibc and musl on every machine that they run on.
_DEFAULT_ENVIRONMENT = ctypes.c_void_p(-1)


@contextmanager
def exact_float_mode() -> Iterator[None]:
    """Give the calling thread the default floating-point environment, then restore its own.

    Does nothing where the C library has no such calls.
    """
    calls = _environment_calls()
    if calls is None:
        yield
        return
    save, load = calls
    before = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    save(before)
    load(_DEFAULT_ENVIRONMENT)
    try:
        yield
    finally:
        load(before)


@cache
def _environment_calls() -> tuple[Callable[..., int], Callable[..., int]] | None:
    try:
        # With the GIL held: to give it up for so short a call would be to queue for it again.
        libc = ctypes.PyDLL(None)
        return libc.fegetenv, libc.fesetenv
    except (AttributeError, OSError, TypeError):
        return None
