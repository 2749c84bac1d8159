"""What a file tells of a tensor or array, checked before any byte of it is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dos.checkpoint.dtypes import (
    header_name,
    header_name_of_numpy,
    torch_dtype,
    torch_dtype_named,
)
from dos.checkpoint.format import Entry
from dos.checkpoint.objects import dtype_of
from dos.checkpoint.paths import ROOT_ENTRY, text_of
from dos.checkpoint.strides import DIMENSIONS, is_dense, reach
from dos.checkpoint.wholes import Whole
from dos.errors import FormatError


class Spec(NamedTuple):
    """A leaf: which bytes it is made of, and how.

    Attributes:
        name: of the entry that it lies in; "" for one put together of pieces.
        whole: the pieces, or None.
        dtype: of torch or numpy.
        shape: of the leaf.
        offset: of its first element in the entry, bytes.
        strides_bytes: of the bytes in the entry; None: row-major.
        order: strides in bytes that the tensor had, whose bytes are row-major; None: those.
        grad: requires_grad.
        parameter: is it a torch.nn.Parameter?
        same: the path at which the same object stands first.
    """

    name: str
    whole: Whole | None
    dtype: Any
    shape: tuple[int, ...]
    offset: int
    strides_bytes: tuple[int, ...] | None
    order: tuple[int, ...] | None
    grad: bool
    parameter: bool
    same: str

    @property
    def is_array(self) -> bool:
        """Is it a numpy array?"""
        return isinstance(self.dtype, np.dtype)

    @property
    def n_bytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * int(self.dtype.itemsize)

    def steps(self, strides_bytes: tuple[int, ...]) -> tuple[int, ...]:
        """Strides in elements."""
        return tuple(step // self.dtype.itemsize for step in strides_bytes)


def make_spec(
    path: str, told: dict[str, Any], entries: Mapping[str, Entry], wholes: Mapping[str, Whole]
) -> Spec:
    """What a node tells of a leaf.

    Raises:
        FormatError: it is malformed or reaches beyond its entry.
    """
    try:
        return _make(path, told, entries, wholes)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FormatError(f"malformed tensor: {error!r}", where=text_of(path)) from error


def _make(
    path: str, told: dict[str, Any], entries: Mapping[str, Entry], wholes: Mapping[str, Whole]
) -> Spec:
    grad, parameter = told.get("grad") is True, told.get("parameter") is True
    same = str(told.get("same", path))
    pieces = told.get("pieces")
    if pieces:
        whole = wholes[path if pieces is True else pieces]
        return Spec("", whole, whole.dtype, whole.shape, 0, None, None, grad, parameter, same)
    name = told.get("entry", path or ROOT_ENTRY)
    entry = entries[name]
    dtype: Any
    if "numpy" in told:
        dtype = dtype_of(told["numpy"])
        as_is = header_name_of_numpy(dtype)
    else:
        dtype = torch_dtype_named(told["dtype"]) if "dtype" in told else torch_dtype(entry.dtype)
        as_is = header_name(dtype)
        if grad and not (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(f"{dtype} cannot require a gradient")
    shape = _integers(told["shape"]) if "shape" in told else entry.shape
    if len(shape) > DIMENSIONS:
        raise ValueError(f"{len(shape)} dimensions")
    if len(told) == grad + parameter:  # all else is as the header says, which was checked
        if entry.begin % dtype.itemsize and entry.end > entry.begin:
            raise ValueError("its elements are not aligned")
        return Spec(name, None, dtype, shape, 0, None, None, grad, parameter, same)
    if any(n < 0 for n in shape):
        raise ValueError(f"shape {shape}")
    is_view = "offset" in told
    offset = told.get("offset", 0)
    strides = _integers(told["stride"]) if "stride" in told else None
    order = _integers(told["order"]) if "order" in told else None
    spec = Spec(name, None, dtype, shape, offset, strides, order, grad, parameter, same)
    if not is_view and (as_is or "U8") != entry.dtype:
        raise ValueError(f"{dtype} in an entry of {entry.dtype}")
    _check_within(spec, entry, is_view=is_view)
    return spec


def _check_within(spec: Spec, entry: Entry, *, is_view: bool) -> None:
    """Do the elements lie in the entry, and fill it if it is theirs alone?"""
    size = entry.end - entry.begin
    item_bytes = spec.dtype.itemsize
    if type(spec.offset) is not int or spec.offset < 0:
        raise ValueError(f"offset {spec.offset!r}")
    for strides in (spec.strides_bytes, spec.order):
        if strides is not None and len(strides) != len(spec.shape):
            raise ValueError(f"strides {strides} of shape {spec.shape}")
        if strides is not None and not spec.is_array and any(s % item_bytes for s in strides):
            raise ValueError(f"strides {strides} of elements of {item_bytes} bytes")
    if not is_view and spec.n_bytes != size:
        raise ValueError(f"{spec.n_bytes} bytes in an entry of {size}")
    if not is_view and spec.strides_bytes is not None:
        raise ValueError("strides of what is no view")
    if spec.order is not None and (
        is_view or (size and not is_dense(spec.shape, spec.order, item_bytes))
    ):  # so that no more memory is taken than was written, and none of it twice
        raise ValueError(f"order {spec.order} of {size} bytes")
    if is_view and 0 not in spec.shape:
        if spec.strides_bytes is None:
            low, high = 0, spec.n_bytes
        else:
            low, high = reach(spec.shape, spec.strides_bytes)
            high += item_bytes
        if spec.offset + low < 0 or spec.offset + high > size:
            raise ValueError(f"it lies from {spec.offset + low} to {spec.offset + high} of {size}")
    if not spec.is_array and (entry.begin + spec.offset) % item_bytes and size:
        raise ValueError("its elements are not aligned")
    if not spec.is_array and spec.strides_bytes and min(spec.strides_bytes) < 0:
        raise ValueError("strides below zero")


def _integers(said: Any) -> tuple[int, ...]:
    if not isinstance(said, list) or not all(type(n) is int and abs(n) < 1 << 62 for n in said):
        raise ValueError(f"{said!r} is no list of integers")
    return tuple(said)
