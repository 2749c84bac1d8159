"""Front door of the host update: picks an implementation and checks what it is given."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from dos.errors import ConfigError
from dos.kernels import numba_adam, reference
from dos.kernels.float_mode import exact_float_mode
from dos.kernels.host_array import host_array
from dos.kernels.scalars import AdamScalars, DType, Segment

if TYPE_CHECKING:
    from dos.kernels._native import ThreadPool

try:
    import dos.kernels._native as _native
except ModuleNotFoundError:  # Any other ImportError is a broken build and should be heard.
    _HAS_NATIVE = False
else:
    _HAS_NATIVE = True

# One C call per segment: a training step may bring hundreds of small ones.
_fields = attrgetter("p", "m", "v", "g", "w", "numel", "g_dtype", "w_dtype", "scalars")
# Elements per call of a Python implementation: its temporaries then stay in the L2 cache.
_BLOCK_ELEMENTS = 1 << 15


@cache
def _implementations() -> tuple[str, ...]:
    native = tuple(_native.available_isas()) if _HAS_NATIVE else ()
    numba = ("numba",) if importlib.util.find_spec("numba") else ()
    return (*native, *numba, "reference")


def available() -> list[str]:
    """Implementations that this machine can run, best first; "reference" is always there."""
    return list(_implementations())


def make_pool(threads: int | None = None) -> ThreadPool | None:
    """A thread pool for `update`; None when the compiled extension is missing.

    Args:
        threads: how many threads work, the caller of `update` included; None: as many as
            the affinity mask and the cgroup's CPU quota allow.

    Raises:
        ConfigError: fewer than one thread.
    """
    if threads is not None and threads < 1:
        raise ConfigError(
            f"a pool of {threads} threads cannot work",
            where="threads",
            fix="give at least 1, or None for as many as this process may use",
        )
    return _native.ThreadPool(threads or 0) if _HAS_NATIVE else None


def update(
    segments: Sequence[Segment], *, impl: str = "auto", pool: ThreadPool | None = None
) -> None:
    """Update every segment in host memory; the same bits with any implementation and pool.

    Returns when all is written. The GIL is released meanwhile (numba: most of the time).

    Args:
        segments: what to update; their arrays must not overlap.
        impl: a name out of `available()`, or "auto" for the best one.
        pool: threads to share the work; None: the calling thread alone. The Python
            implementations always run on the calling thread.

    Raises:
        ConfigError: unknown implementation, or a segment that cannot be right; nothing
            has been changed then.
    """
    names = _implementations()
    if impl == "auto":
        impl = names[0]
    elif impl not in names:
        raise ConfigError(
            f"no implementation {impl!r} on this machine",
            where="impl",
            fix=f"use 'auto' or one of {', '.join(names)}",
        )
    tasks = [_fields(segment) for segment in segments]
    _check(tasks)
    if impl == "numba" or impl == "reference":
        _update_blocks(tasks, impl)
    else:
        _native.adam_update(tasks, impl, pool)


def _check(tasks: list[tuple[Any, ...]]) -> None:
    for i, (p, m, v, g, w, numel, g_dtype, w_dtype, _) in enumerate(tasks):
        if numel > 0 and p and m and v and g and g_dtype and (w or not w_dtype):
            continue
        if numel == 0:
            continue
        if numel < 0:
            what = f"numel is {numel}"
        elif not g_dtype:
            what = "a gradient without a number format"
        else:
            what = f"null address among p={p:#x} m={m:#x} v={v:#x} g={g:#x} w={w:#x}"
        raise ConfigError(
            what,
            where=f"segments[{i}]",
            fix="give the address of each array, its format, and the number of its elements",
        )


def _update_blocks(tasks: list[tuple[Any, ...]], impl: str) -> None:
    kernel = numba_adam.update if impl == "numba" else reference.update
    with exact_float_mode():
        for task in tasks:
            scalars: AdamScalars = task[-1]
            for p, m, v, g, w in _blocks(task):
                kernel(p, m, v, g, w, scalars, g_dtype=task[6], w_dtype=task[7])


def _blocks(task: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    *addresses, numel, g_dtype, w_dtype, _ = task
    formats = (DType.FP32, DType.FP32, DType.FP32, g_dtype, w_dtype)
    arrays = [
        host_array(address, numel, dtype) if dtype is not DType.NONE else None
        for address, dtype in zip(addresses, formats, strict=True)
    ]
    for start in range(0, numel, _BLOCK_ELEMENTS):
        block = slice(start, start + _BLOCK_ELEMENTS)
        yield tuple(None if a is None else a[block] for a in arrays)
