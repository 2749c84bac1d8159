"""Compiled kernels; absent where no C++ compiler was found when the project was built."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

class ThreadPool:
    """Persistent worker threads that share the work of a call with its caller.

    Each has a seat, the caller of a call seat 0. Task i of n is at home on seat
    ``i * threads // n``; a thread does the tasks of its own seat first, in order, then what
    is left of the others'.

    Safe to use from several threads at once. In a forked child, and after `close`, all
    work runs on the caller.
    """

    def __init__(
        self, threads: int = 0, pin: bool = False, nodes: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Start ``threads - 1`` workers; 0: `default_thread_count` threads.

        Threads are bound to CPUs as `seat_cpus` says; the caller only for the duration of a
        call, and only one of several callers. ``nodes`` None: `numa_nodes`.

        Raises ValueError if negative.
        """

    @property
    def threads(self) -> int:
        """Threads that work on one call, its caller included."""

    def run(self, n_tasks: int, fn: Callable[[int], object]) -> None:
        """Call ``fn(i)`` for every i below ``n_tasks``, in any order between the seats.

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

def sweep(
    p: int,
    m: int,
    v: int,
    g: int,
    w: int,
    numel: int,
    *,
    stream: bool,
    pool: ThreadPool | None = None,
) -> None:
    """Move the bytes of an update: what memory allows it, as a measure beside its own time.

    Adds 1 to ``p``, ``m`` and ``v`` (fp32) and copies ``g`` to ``w`` (16-bit), 28 bytes per
    element; a rest of less than 32 elements is left out. The arrays are given by address and
    do not overlap. ``stream``: write ``w`` past the caches, where the machine can; which is
    faster depends on the machine.

    Raises ValueError for an array that does not begin on a cache line.
    """

def available_isas() -> list[str]:
    """Instruction sets that both this build and this machine have, best first."""

def first_touch(blocks: Sequence[tuple[int, int]], pool: ThreadPool) -> None:
    """Make pages of new, zeroed memory present, each near the thread that will update it.

    Each thread touches its share of each block of (address, size in bytes), as
    `adam_update` shares out an array; in the pages that begin there one byte becomes zero.
    """

def default_thread_count() -> int:
    """CPUs in the affinity mask, or the cgroup's CPU quota rounded up if that is less."""

def cpu_quota(groups: str = "/proc/self/cgroup", mount: str = "/sys/fs/cgroup") -> float:
    """CPUs' worth of time that the control groups of this process allow; inf: no limit."""

def numa_nodes(
    cpus: Sequence[int] | None = None, root: str = "/sys/devices/system"
) -> list[list[int]]:
    """``cpus`` (None: those in the affinity mask) by NUMA node, none of them empty.

    Within a node one CPU of each core comes first, then their hyperthreads. One node where
    the system does not tell the node of every CPU.
    """

def seat_cpus(threads: int, nodes: Sequence[Sequence[int]], pin: bool) -> list[list[int]]:
    """The CPUs that each seat of a pool is bound to; empty: not bound.

    Seats are divided over the nodes in runs, in proportion to their CPUs, and bound to all
    CPUs of their node; with ``pin`` each to one, which nobody shares before all are taken.
    With one node and no ``pin`` nobody is bound.
    """

class IoQueue:
    """Reads and writes in flight by io_uring, or by threads that call pread and pwrite.

    Used by one thread at a time, which gives the GIL away while it waits or reads. A buffer must
    stay alive and as it is until its token is told by `completed`. In a forked child it refuses.
    """

    def __init__(
        self, engine: Literal["io_uring", "threads"], depth: int, registered: Sequence[memoryview]
    ) -> None:
        """Of at most ``depth`` transfers; io_uring prepares as much of ``registered`` as it may.

        Raises ValueError for a depth that is not 1 to 4096, OSError where io_uring is refused.
        """

    def submit(
        self,
        write: bool,
        fd: int,
        offset_bytes: int,
        buffer: memoryview,
        offset_align_bytes: int,
        token: int,
    ) -> None:
        """Begin a transfer of a whole buffer; waits while the queue is full.

        Raises ValueError for a closed queue, a buffer above 64 MiB or with gaps.
        """

    def completed(self, wait: bool) -> list[tuple[int, int]]:
        """Tokens that ended, each with an errno or 0; with ``wait`` at least one, if any is left.

        ENODATA: the file ends 4096 bytes or more before what was to be read.
        """

    @property
    def registered_bytes(self) -> int:
        """How much of the memory named when it was made io_uring prepared."""

    def close(self) -> None:
        """Wait for all in flight, and end; a second call does nothing."""

def io_uring_refusal() -> str:
    """Why io_uring cannot be used here; empty if it can."""

def gather(target: memoryview, pieces: Sequence[tuple[int, int, int]]) -> None:
    """Fill a buffer from memory at addresses, without the GIL; zeros where there is no piece.

    A piece is an offset in the buffer, an address and a size in bytes. Raises ValueError unless
    they ascend, do not overlap and lie in the buffer; nothing has been written then.
    """

def fill(chunks: Sequence[tuple[memoryview, Sequence[tuple[int, int, int]], int]]) -> list[bytes]:
    """The XXH3-128 of buffers, each with its seed, that are filled as by `gather` before.

    A piece may be memory of the buffer's own, where it belongs. Raises ValueError, too, for a
    buffer below 241 bytes; nothing has been written then.
    """

def scatter(source: memoryview, pieces: Sequence[tuple[int, int, int]]) -> None:
    """Copy pieces of a buffer to memory at addresses; otherwise as `gather`."""
