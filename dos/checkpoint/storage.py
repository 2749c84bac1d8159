"""What a checkpoint asks of a file system, and the choice of who does it.

Every call of a checkpoint to the file system goes through a `Storage`, so that tests can put
one in its place that fails, reorders and forgets. Errors are `OSError` with an errno. What a
short read or write leaves is done inside, as are repetitions after EINTR and EAGAIN, which
are bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from dos.checkpoint.linux import BLOCK_BYTES
from dos.checkpoint.native import NativeStorage, refusal, warn_once
from dos.checkpoint.posix import Completion, PosixStorage
from dos.errors import ConfigError

__all__ = ["BLOCK_BYTES", "REQUEST_LIMIT_BYTES", "Completion", "File", "Queue", "Storage"]

REQUEST_LIMIT_BYTES = 64 << 20
"""What one read or write of a queue may move."""

ENGINES = ("io_uring", "threads", "posix")
"""What `make_storage` knows, the best first."""


class File(Protocol):
    """An open file."""

    @property
    def path(self) -> str:
        """As it was opened."""

    @property
    def direct(self) -> bool:
        """Does it pass the page cache by? Tried with a transfer, not only asked for."""

    @property
    def memory_align_bytes(self) -> int:
        """Of buffers; 1 where buffered."""

    @property
    def offset_align_bytes(self) -> int:
        """Of offsets and lengths; 1 where buffered."""


class Queue(Protocol):
    """Reads and writes in flight, never more than the depth it was made with.

    Used by one thread at a time. They may overtake each other. A buffer stays alive until its
    token is completed, and must not change; tokens in flight differ.
    """

    def write(self, file: Any, offset_bytes: int, buffer: memoryview, token: int) -> None:
        """Begin to write a buffer; waits while the queue is full.

        Raises ValueError for a closed queue, a token in flight or a buffer above
        `REQUEST_LIMIT_BYTES`; what fails later is told by `completed`.
        """

    def read(self, file: Any, offset_bytes: int, buffer: memoryview, token: int) -> None:
        """Begin to fill a buffer; as `write`.

        Less than `BLOCK_BYTES` of it may lie behind the end of the file, and is left
        undefined; if more does, the error is ENODATA.
        """

    def completed(self, *, wait: bool) -> list[Completion]:
        """Tokens that ended since the last call, each with its error or None.

        With `wait` at least one, if any is in flight.
        """

    def drain(self) -> list[Completion]:
        """Wait for all in flight; the same list."""

    def close(self) -> None:
        """Wait for all in flight and give back what the queue holds; a second call does nothing."""


class Storage(Protocol):
    """The file system. Nothing is durable before `fsync`, no name before `fsync_directory`."""

    @property
    def name(self) -> str:
        """Which implementation this is: "io_uring", "threads" or "posix"."""

    def open(self, path: str, *, write: bool, create: bool = False, direct: bool = True) -> Any:
        """Open a `File`, for reading too if for writing; buffered where direct I/O is refused.

        With `create` the file must not exist, and is empty.
        """

    def close(self, file: Any) -> None:
        """Close it. Not while a queue has a read or write of it in flight."""

    def preallocate(self, file: Any, n_bytes: int) -> None:
        """Reserve space and set the size of an empty file.

        ENOSPC comes here, not while writing, and may leave space reserved: unlink the file.
        """

    def truncate(self, file: Any, n_bytes: int) -> None:
        """Set the size."""

    def fsync(self, file: Any) -> None:
        """Make content and size durable. After an error it is unknown what is; never repeat it."""

    def queue(self, *, depth: int = 32, registered: Sequence[memoryview] = ()) -> Queue:
        """A queue of at most `depth` reads and writes.

        Args:
            depth: how many may be in flight.
            registered: memory that buffers will lie in again and again, piece by piece. As
                much of it as the system allows is prepared once, each piece when it is first
                used, instead of for each transfer; for memory that is used once that takes
                longer.
        """

    def rename(self, old: str, new: str) -> None:
        """Give another name, in one step; a file of the new name is replaced."""

    def exchange(self, a: str, b: str) -> None:
        """Swap what two names mean, in one step. EINVAL or ENOSYS where unsupported."""

    def fsync_directory(self, path: str) -> None:
        """Make the names in a directory durable."""

    def unlink(self, path: str) -> None:
        """Remove a file."""

    def mkdir(self, path: str) -> None:
        """Make a directory."""

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""

    def listing(self, path: str) -> list[str]:
        """Names in a directory, sorted."""

    def size(self, path: str) -> int:
        """Bytes of a file."""

    def exists(self, path: str) -> bool:
        """Is there anything of that name?"""

    def free_bytes(self, path: str) -> int:
        """Space that this user may still fill on the file system of a directory."""

    def read_bytes(self, path: str) -> bytes:
        """All of a small file; an error for one above 64 MiB, or for what is no file."""

    def write_bytes(self, path: str, data: bytes) -> None:
        """Make or overwrite a small file; not durable by itself."""


def make_storage(engine: str = "auto") -> Storage:
    """The best implementation here, or the one named.

    Args:
        engine: "io_uring"; "threads", which call pread and pwrite; "posix", which needs no
            compiled extension; or "auto", the first of these that works here. What "auto"
            had to do without is said once, with the reason.

    Raises:
        ConfigError: no such implementation here.
    """
    missing: list[str] = []
    for name in ENGINES if engine == "auto" else (engine,):
        why = _refusal(name)
        if not why:
            if missing:
                warn_once(f"checkpoints go through the engine {name!r}; {'; '.join(missing)}")
            return PosixStorage() if name == "posix" else NativeStorage(name)
        missing.append(f"{name!r} cannot be had: {why}")
    raise ConfigError("; ".join(missing), where="engine", fix="use 'auto'")


def _refusal(engine: str) -> str:
    if engine not in ENGINES:
        return f"there are {', '.join(map(repr, ENGINES))} and 'auto'"
    return "" if engine == "posix" else refusal(engine)
