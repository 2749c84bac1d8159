"""Where the bytes of an extent come from: memory as it lies, or elements in another order."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from dos.checkpoint.dtypes import as_bits


class Span(NamedTuple):
    """Bytes of some memory, by address: of the host ("cpu"), or of the device named."""

    place: str
    begin: int
    end: int


class Source(Protocol):
    """A stream of bytes that is read once, in parts."""

    @property
    def address(self) -> int:
        """Where the bytes lie in host memory, one behind the other; 0: `fill` has to be asked."""

    def fill(self, begin: int, end: int, address: int) -> None:
        """Copy the bytes `begin` to `end` to an address of host memory."""


class Memory:
    """Bytes of host memory.

    Args:
        address: of the first.
        keep: what keeps them alive.
    """

    __slots__ = ("_keep", "address")

    def __init__(self, address: int, keep: Any) -> None:
        self.address = address
        self._keep = keep

    def fill(self, begin: int, end: int, address: int) -> None:
        """See `Source.fill`."""
        ctypes.memmove(address, self.address + begin, end - begin)


class Elements:
    """The elements of a tensor in row-major order, wherever and in whatever order it lies."""

    address = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = as_bits(tensor.detach().resolve_conj().resolve_neg())

    @property
    def device(self) -> torch.device:
        """Where they are copied from."""
        return self._tensor.device

    def fill(self, begin: int, end: int, address: int) -> None:
        """See `Source.fill`."""
        item_bytes = self._tensor.element_size()
        first, last = begin // item_bytes, -(-end // item_bytes)
        cut = begin % item_bytes or end % item_bytes or address % item_bytes
        if cut:  # by a chunk's end, through an element
            part = torch.empty(last - first, dtype=self._tensor.dtype, device="cpu")
        else:
            part = torch.frombuffer(
                (ctypes.c_char * (end - begin)).from_address(address), dtype=self._tensor.dtype
            )
        with _beside_training(self._tensor.device):
            _copy_elements(self._tensor, first, last, part)
        if cut:
            ctypes.memmove(address, part.data_ptr() + begin - first * item_bytes, end - begin)


class ArrayElements:
    """The elements of a numpy array of any dtype, in row-major order."""

    address = 0

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def fill(self, begin: int, end: int, address: int) -> None:
        """See `Source.fill`."""
        item_bytes = self._array.itemsize
        first, last = begin // item_bytes, -(-end // item_bytes)
        part = self._array.flat[first:last].tobytes()
        offset = begin - first * item_bytes
        ctypes.memmove(address, part[offset : offset + end - begin], end - begin)


def memory_of_bytes(data: bytes | bytearray) -> Memory:
    """The bytes of an object, which is kept alive."""
    array = np.frombuffer(data, dtype=np.uint8)
    return Memory(array.ctypes.data, array)


@contextmanager
def _beside_training(device: torch.device) -> Iterator[None]:
    """On a stream of its own, not behind what training has queued on the device."""
    if device.type == "cpu":
        yield
        return
    before = torch.accelerator.current_stream(device)
    torch.accelerator.set_stream(torch.Stream(device=device))
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def _copy_elements(tensor: torch.Tensor, first: int, last: int, out: torch.Tensor) -> None:
    """Copy elements `first` to `last` of a tensor's row-major order; whole rows at once."""
    if tensor.dim() == 0 or first >= last:
        if last > first:
            out.copy_(tensor.reshape(1))
        return
    row = tensor.numel() // tensor.shape[0]
    begin, end = -(-first // row), last // row  # whole rows
    if begin > end:  # the part of one row
        row_index = first // row
        _copy_elements(tensor[row_index], first - row_index * row, last - row_index * row, out)
        return
    head, body = begin * row - first, (end - begin) * row
    if head:
        _copy_elements(tensor[begin - 1], row - head, row, out[:head])
    if body:
        out[head : head + body].view(end - begin, *tensor.shape[1:]).copy_(tensor[begin:end])
    if head + body < last - first:
        _copy_elements(tensor[end], 0, last - end * row, out[head + body :])
