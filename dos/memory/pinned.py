"""One block of host memory that an accelerator can copy from and to at full speed."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dos.errors import PoolError
from dos.memory.forked import check_process, guard_in_children
from dos.memory.sizes import PAGE_BYTES, bytes_text, padded_bytes

HUGE_PAGE_BYTES = 2 << 20

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context, not the current one alone
_warn_lock = threading.Lock()
_warned = False


class Slab:
    """Zeroed private memory, aligned to 2 MiB, pinned where ``device`` allows it.

    The memory is returned to the system once `close` was called or the slab is gone, *and* no
    tensor or view of it is left. Forked children do not inherit it.

    Args:
        n_bytes: size, pinned exactly; at least 1.
        device: the accelerator that will copy from and to it; None or a CPU device: not pinned.
        touch: called with the address of the new memory, no page of which is present yet;
            pinning makes the rest present near the thread that pins.

    Attributes:
        address: first byte, a multiple of 2 MiB.
        n_bytes: as given.
        pinned: whether the accelerator's driver took it.
        why_pageable: where it did not, its reason; else empty.
        pid: process that made it, the only one that can use it.

    Raises:
        PoolError: the system does not give so much memory.
    """

    def __init__(
        self,
        n_bytes: int,
        *,
        device: torch.device | None = None,
        touch: Callable[[int], None] | None = None,
    ) -> None:
        assert n_bytes >= 1, f"a slab of {n_bytes} bytes"
        self.n_bytes = n_bytes
        self.pid = os.getpid()
        memory = _map_aligned(n_bytes)
        self.address = ctypes.addressof(memory)
        if touch is not None:
            touch(self.address)
        self.why_pageable = "" if device is None else _pin(memory, device)
        self.pinned = not self.why_pageable and device is not None and device.type != "cpu"
        if self.why_pageable:
            _warn_once(self.why_pageable)
        self._memory: memoryview | None = memoryview(memory).cast("B")

    def check_process(self) -> None:
        """Raise PoolError in a forked child; costs one getpid."""
        check_process(self.pid)

    def view(self, offset_bytes: int, n_bytes: int) -> memoryview:
        """The writable bytes ``[offset_bytes, offset_bytes + n_bytes)``, valid while referenced.

        Raises:
            PoolError: the slab is closed, or this is a forked child.
        """
        self.check_process()
        memory = self._memory
        if memory is None:
            raise PoolError(
                "the pool is closed", where="pool", fix="make a new optimizer; this one has ended"
            )
        assert 0 <= offset_bytes <= offset_bytes + n_bytes <= self.n_bytes, "outside of the slab"
        return memory[offset_bytes : offset_bytes + n_bytes]

    def tensor(
        self,
        offset_bytes: int,
        numel: int,
        dtype: torch.dtype,
        shape: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """A tensor over ``numel`` elements from ``offset_bytes`` on; see `tensor_over`."""
        view = self.view(offset_bytes, numel * dtype.itemsize)
        return tensor_over(view, dtype, shape, strides)

    def close(self) -> None:
        """Drop the slab's own hold on its memory. Idempotent."""
        self._memory = None


def tensor_over(
    view: memoryview,
    dtype: torch.dtype,
    shape: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> torch.Tensor:
    """A tensor whose storage is exactly ``view``'s bytes and keeps them alive.

    So saving it writes these bytes and no more.

    Args:
        view: bytes, a whole number of ``dtype``'s elements, aligned to them.
        dtype: of the elements.
        shape: dimensions, holding every element; None: one dimension.
        strides: steps in elements along ``shape``; None: row-major.
    """
    numel, rest = divmod(view.nbytes, dtype.itemsize)
    assert not rest, f"{view.nbytes} bytes are no whole number of {dtype}"
    shape = (numel,) if shape is None else tuple(shape)
    assert math.prod(shape) == numel, f"{numel} elements do not have the shape {shape}"
    if numel == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(view, dtype=dtype)
    assert flat.data_ptr() % dtype.itemsize == 0, f"address not aligned to {dtype}"
    # set_, not view or as_strided: the result is no view of another tensor for autograd.
    tensor = torch.empty(0, dtype=dtype, device="cpu")  # whatever the default device is
    return tensor.set_(flat.untyped_storage(), 0, shape, tuple(strides or ()))


def _map_aligned(n_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """Zeroed memory from a 2 MiB boundary on, unmapped when its last user goes."""
    length_bytes = padded_bytes(n_bytes, PAGE_BYTES) + HUGE_PAGE_BYTES
    try:
        mapping = mmap.mmap(-1, length_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise PoolError(
            f"the system refused {bytes_text(n_bytes)} of host memory: {error}",
            where="host_memory_bytes",
            fix="free memory, raise `ulimit -v` or vm.overcommit_memory, or set a larger "
            "resident_ratio",
        ) from error
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    # The kernel copies pinned pages at fork, so that each DataLoader worker would double them.
    mapping.madvise(mmap.MADV_DONTFORK)
    memory = (ctypes.c_char * n_bytes).from_buffer(mapping, -start % HUGE_PAGE_BYTES)
    with contextlib.suppress(OSError):  # a kernel built without huge pages: the same bytes
        mapping.madvise(mmap.MADV_HUGEPAGE)
    guard_in_children(memory)
    return memory


def _pin(memory: ctypes.Array[ctypes.c_char], device: torch.device) -> str:
    """Register ``memory`` with ``device``'s driver; why it cannot be, or empty."""
    if device.type == "cpu":
        return ""
    if device.type != "cuda":
        return f"host memory cannot be registered with a device of type {device.type!r}"
    address, n_bytes = ctypes.addressof(memory), ctypes.sizeof(memory)
    # Without it a rank on another GPU would open a context on the first one.
    with torch.cuda.device(device):
        runtime = _cuda_runtime()
        code = int(runtime.cudaHostRegister(address, n_bytes, _PORTABLE))
        if code:
            reason = runtime.cudaGetErrorString(runtime.cudaError(code))
            _clear_cuda_error(device)
            return f"cudaHostRegister refused {bytes_text(n_bytes)}: {reason} (error {code})"
    # Runs before the memory goes: a finalizer of the mmap object would run after the unmapping.
    # Not at exit: transfers may be under way, and the driver unpins what a process leaves.
    weakref.finalize(memory, _unpin, address, device).atexit = False
    return ""


def _unpin(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        code = int(_cuda_runtime().cudaHostUnregister(address))
    assert code == 0, f"cudaHostUnregister failed with error {code}"


def _cuda_runtime() -> Any:
    cuda: Any = torch.cuda  # typed in some versions of torch only
    return cuda.cudart()


def _clear_cuda_error(device: torch.device) -> None:
    """Take the refusal out of CUDA's last error, or torch would raise it at its next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def _warn_once(why_pageable: str) -> None:
    global _warned
    with _warn_lock:
        first, _warned = not _warned, True
    if first:
        warnings.warn(
            f"host memory is pageable, so copies are slower and block: {why_pageable}",
            RuntimeWarning,
            stacklevel=4,
        )
