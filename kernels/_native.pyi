"""Compiled kernels; absent where no C++ compiler was found when the project was built."""

from collections.abc import Callable, Sequence
from typing import Any

class ThreadPool:
    """Persistent worker threads that share the work of a call with its caller.

    Safe to use from several threads at once. In a forked child, and after `close`, all
    work runs on the caller.
    """

    def __init__(self, threads: int = 0) -> None:
        """Start ``threads - 1`` workers; 0: `default_thread_count` threads.

        Raises ValueError if negative.
        """

    @property
    def threads(self) -> int:
        """Threads that work on one call, its caller included."""

    def run(self, n_tasks: int, fn: Callable[[int], object]) -> None:
        """Call ``fn(i)`` for every i below ``n_tasks``, in any order, on any thread.

        The first exception is raised here, after the calls in progress have ended; calls
        not begun by then are left out.
        """

    def close(self) -> None:
        """End the workers and wait for them; a second call does nothing."""

def adam_update(tasks: Sequence[tuple[Any, ...]], isa: str, pool: ThreadPool | None = None) -> None:
    """Update segments given as the fields of `dos.kernels.scalars.Segment`, in their order.

    Raises ValueError for an unknown instruction set, an unknown number format or a
    negative number of elements; nothing has been changed then.
    """

def examine(
    g: int,
    numel: int,
    g_dtype: int,
    out: int,
    squares: int,
    isa: str,
    pool: ThreadPool | None = None,
) -> tuple[float, int]:
    """The largest magnitude and the fingerprint of the gradient at an address.

    Writes the float64 sum of squares of each block to the address ``squares``, and the gradient
    as fp32 to ``out`` unless that is 0. Raises ValueError for an unknown instruction set, an
    unknown number format or a negative number of elements; nothing has been written then.
    """

def downscale(
    source: int,
    target: int,
    numel: int,
    w_dtype: int,
    isa: str,
    pool: ThreadPool | None = None,
) -> None:
    """Round fp32 values to a 16-bit format. Raises as `examine` does."""

def available_isas() -> list[str]:
    """Instruction sets that both this build and this machine have, best first."""

def default_thread_count() -> int:
    """CPUs in the affinity mask, or the cgroup's CPU quota rounded up if that is less."""
