"""Front door of the host update: picks an implementation and checks what it is given."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

from dos.errors import ConfigError
from dos.kernels import reference
from dos.kernels.float_mode import exact_float_mode
from dos.kernels.host_array import host_array
from dos.kernels.scalars import AdamScalars, DType, Segment
from dos.kernels.thread_pool import PythonPool, ThreadPool

try:
    import dos.kernels._native as _native
except ModuleNotFoundError:  # Any other ImportError is a broken build and should be heard.
    _HAS_NATIVE = False
else:
    _HAS_NATIVE = True

# One C call per segment: a training step may bring hundreds of small ones.
_fields = attrgetter("p", "m", "v", "g", "w", "numel", "g_dtype", "w_dtype", "scalars")
_Piece = tuple[tuple[Any, ...], int, int]  # of a segment: its fields, first element, end
# Elements per task of the reference: its temporaries then stay in the L2 cache.
_REFERENCE_ELEMENTS = 1 << 15
# Of numba: fewer take less time than Python needs to hand them out, more leave the other
# threads idle at the end for longer (about 1 ms of work).
_SMALLEST_SHARE, _LARGEST_SHARE = 1 << 16, 1 << 20
_SHARES_PER_THREAD = 8


@cache
def _implementations() -> tuple[str, ...]:
    native = tuple(_native.available_isas()) if _HAS_NATIVE else ()
    numba = ("numba",) if importlib.util.find_spec("numba") else ()
    return (*native, *numba, "reference")


def available() -> list[str]:
    """Implementations that this machine can run, best first; "reference" is always there."""
    return list(_implementations())


def make_pool(threads: int | None = None, *, pin: bool = False) -> ThreadPool:
    """A thread pool for `update`; of Python threads when the compiled extension is missing.

    Args:
        threads: how many threads work, the caller of `update` included; None: as many as
            the affinity mask and the cgroup's CPU quota allow.
        pin: bind each thread to a core of its own, the caller of `update` for the call.
            Without it threads are bound to the CPUs of a NUMA node, where there are several.

    Raises:
        ConfigError: fewer than one thread.
    """
    if threads is not None and threads < 1:
        raise ConfigError(
            f"a pool of {threads} threads cannot work",
            where="threads",
            fix="give at least 1, or None for as many as this process may use",
        )
    return _native.ThreadPool(threads or 0, pin) if _HAS_NATIVE else PythonPool(threads)


def first_touch(blocks: Sequence[tuple[int, int]], pool: ThreadPool) -> None:
    """Make new memory present, each page near the thread of `pool` that will update it.

    A pool of Python threads does nothing.

    Args:
        blocks: address and size in bytes of each piece of new, zeroed memory that an
            `update` covers as a whole, or of any other memory to be made present.
        pool: the one that will be used.
    """
    if _HAS_NATIVE and isinstance(pool, _native.ThreadPool):
        _native.first_touch(list(blocks), pool)


def update(
    segments: Sequence[Segment], *, impl: str = "auto", pool: ThreadPool | None = None
) -> None:
    """Update every segment in host memory; the same bits with any implementation and pool.

    Returns when all is written. The GIL is released meanwhile (numba: most of the time).

    Args:
        segments: what to update; their arrays must not overlap.
        impl: a name out of `available()`, or "auto" for the best one.
        pool: threads to share the work; None: the calling thread alone.

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
        _update_in_python(tasks, impl, pool)
    else:
        assert pool is None or isinstance(pool, _native.ThreadPool), (
            "C++ works with its own threads only"
        )
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


def _update_in_python(tasks: list[tuple[Any, ...]], impl: str, pool: ThreadPool | None) -> None:
    kernel, share_elements = _update_by_reference, _REFERENCE_ELEMENTS
    if impl == "numba":
        from dos.kernels import numba_adam  # here, because it compiles

        threads = pool.threads if pool else 1
        fair = sum(task[5] for task in tasks) // (threads * _SHARES_PER_THREAD)
        kernel = numba_adam.update
        share_elements = min(max(fair, _SMALLEST_SHARE), _LARGEST_SHARE)
    shares = list(_shares(tasks, share_elements))

    def work(index: int) -> None:
        with exact_float_mode():
            for task, start, stop in shares[index]:
                _update_piece(kernel, task, start, stop)

    if pool:
        pool.run(len(shares), work)
    else:
        for index in range(len(shares)):
            work(index)


def _shares(tasks: list[tuple[Any, ...]], elements: int) -> Iterator[list[_Piece]]:
    """All elements in order, cut into lists of pieces that hold ``elements`` together."""
    share: list[_Piece] = []
    room = elements
    for task in tasks:
        numel, start = task[5], 0
        while start < numel:
            stop = min(numel, start + room)
            share.append((task, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield share
                share, room = [], elements
    if share:
        yield share


def _update_piece(
    kernel: Callable[..., None], task: tuple[Any, ...], start: int, stop: int
) -> None:
    p, m, v, g, w, _, g_dtype, w_dtype, scalars = task
    state = (p + 4 * start, m + 4 * start, v + 4 * start)
    wire = (g + g_dtype.itemsize * start, w + w_dtype.itemsize * start)
    kernel(*state, *wire, stop - start, g_dtype, w_dtype, scalars)


def _update_by_reference(
    p: int,
    m: int,
    v: int,
    g: int,
    w: int,
    numel: int,
    g_dtype: DType,
    w_dtype: DType,
    scalars: AdamScalars,
) -> None:
    formats = (DType.FP32, DType.FP32, DType.FP32, g_dtype, w_dtype)
    param, momentum, variance, grad, weight = (
        host_array(address, numel, dtype) if dtype is not DType.NONE else None
        for address, dtype in zip((p, m, v, g, w), formats, strict=True)
    )
    assert param is not None
    assert momentum is not None
    assert variance is not None
    assert grad is not None
    reference.update(
        param, momentum, variance, grad, weight, scalars, g_dtype=g_dtype, w_dtype=w_dtype
    )
