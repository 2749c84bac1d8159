"""Leases: named pieces of the pool, handed to one user each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from dos.errors import PoolError
from dos.memory.fence import WAIT_S, Fence
from dos.memory.pinned import Slab, tensor_over

if TYPE_CHECKING:
    from types import TracebackType


class Lease:
    """``n_bytes`` of host memory from ``address`` on, valid as long as the lease or one of its
    tensors lives, even when the pool is closed.

    Attributes:
        address: first byte.
        n_bytes: size as asked for; padding after it belongs to nobody.
        what: its name in messages.
        fence: its unfinished readers and writers.
    """

    def __init__(self, slab: Slab, offset_bytes: int, n_bytes: int, what: str) -> None:
        self.address = slab.address + offset_bytes
        self.n_bytes = n_bytes
        self.what = what
        self.fence = Fence(what)
        self._slab = slab
        self._view: memoryview | None = slab.view(offset_bytes, n_bytes)

    def tensor(
        self,
        dtype: torch.dtype,
        numel: int | None = None,
        offset_bytes: int = 0,
        shape: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """A CPU tensor over this memory with a storage of exactly its bytes.

        Args:
            dtype: of its elements.
            numel: how many; None: as many whole ones as there are from ``offset_bytes`` on.
            offset_bytes: where in the lease it begins, a multiple of the item size.
            shape: its dimensions, ``numel`` elements in all; None: one dimension.
            strides: in elements; None: row-major.

        Raises:
            PoolError: it would reach beyond the lease, the lease was released, or this process
                is a forked child.
        """
        self._slab.check_process()
        if self._view is None:
            raise PoolError("the lease was released", where=self.what, fix="acquire a new one")
        if numel is None:
            numel = (self.n_bytes - offset_bytes) // dtype.itemsize
        end_bytes = offset_bytes + numel * dtype.itemsize
        if not 0 <= offset_bytes <= end_bytes <= self.n_bytes:
            raise PoolError(
                f"bytes {offset_bytes} to {end_bytes} were asked of a lease of {self.n_bytes}",
                where=self.what,
                fix="report it: sizes were reserved wrongly",
            )
        return tensor_over(self._view[offset_bytes:end_bytes], dtype, shape, strides)


def tensor_across(
    parts: Sequence[tuple[Lease, int, int]],
    dtype: torch.dtype,
    shape: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> torch.Tensor | None:
    """One tensor over parts of leases, if they lie one right behind the other, else None.

    Its storage is exactly their bytes, and keeps the memory of all of them.

    Args:
        parts: per part its lease, first byte and number of bytes; at least one.
        dtype: of the elements.
        shape, strides: see `Lease.tensor`.

    Raises:
        PoolError: the pool is closed, or this process is a forked child.
    """
    first, offset_bytes, _ = parts[0]
    end = start = first.address + offset_bytes
    for lease, lease_offset_bytes, n_bytes in parts:
        assert 0 <= lease_offset_bytes <= lease_offset_bytes + n_bytes <= lease.n_bytes, "outside"
        if lease._slab is not first._slab or lease.address + lease_offset_bytes != end:
            return None
        end += n_bytes
    view = first._slab.view(start - first._slab.address, end - start)
    return tensor_over(view, dtype, shape, strides)


class RingLease(Lease):
    """A piece of the ring, held until `release` or the end of its ``with`` block.

    ``give_back`` returns it to the ring; calling it again does nothing.
    """

    def __init__(
        self, give_back: Callable[[], None], slab: Slab, offset_bytes: int, n_bytes: int, what: str
    ) -> None:
        super().__init__(slab, offset_bytes, n_bytes, what)
        self._give_back = give_back

    def release(self, timeout_s: float = WAIT_S) -> None:
        """Give the memory back once its own fence has no unfinished user. Idempotent.

        Tensors made from it must not be used any more: the next holder writes over them.

        Raises:
            PoolError: a user of it does not end within ``timeout_s`` seconds; the memory stays
                held, because that user may still touch it.
        """
        self._slab.check_process()
        self.fence.wait_writable(timeout_s, "the release")
        self._view = None
        self._give_back()

    def __enter__(self) -> RingLease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
