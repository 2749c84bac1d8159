"""What of the tensors and arrays of a state is written: extents, named once each.

Tensors whose live bytes overlap share one extent. One of them, or the extent alone, has a name
in the file's header; the others are told of in the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dos.checkpoint.bulk import make_tuple
from dos.checkpoint.dtypes import header_name, header_name_of_numpy, torch_name
from dos.checkpoint.encode import Leaf
from dos.checkpoint.objects import describe_dtype
from dos.checkpoint.paths import RESERVED, ROOT_ENTRY, text_of
from dos.checkpoint.sources import ArrayElements, Elements, Memory, Source, Span
from dos.checkpoint.strides import DIMENSIONS, is_dense, reach
from dos.errors import FormatError

_STRIDED, _PARAMETER = torch.strided, torch.nn.Parameter


class Extent(NamedTuple):
    """Bytes that are written one behind the other, under one name.

    Attributes:
        name: of its entry.
        dtype: as the header calls it.
        shape: of the entry.
        n_bytes: size.
        item_bytes: of the largest elements that are seen in it.
        source: where the bytes come from.
        span: the memory that they are read from; None: nobody else has it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    n_bytes: int
    item_bytes: int
    source: Source
    span: Span | None = None


class _Look(NamedTuple):
    """What is known of a leaf: where its live bytes lie, and how."""

    leaf: Leaf
    place: str  # of the memory: a device, and after a space whose alone it is
    begin: int  # address of the first live byte
    end: int
    first: int  # address of the element with index 0
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]  # () for row-major
    item_bytes: int
    dtype: str | None  # in a header
    n_bytes: int  # of all elements
    plain: bool  # the bytes are the values, not their conjugates or negatives
    in_order: bool  # the bytes are the values in row-major order
    told: dict[str, Any]

    @property
    def name(self) -> str:
        return self.leaf.path or ROOT_ENTRY


def plan_extents(leaves: Iterable[Leaf], repeats: Iterable[tuple[Leaf, Leaf]]) -> list[Extent]:
    """The extents of all leaves, in the tree's order; completes the nodes that tell of them.

    Raises:
        FormatError: a kind of tensor that is not saved, with its path.
    """
    looks = [_look(leaf) for leaf in leaves]
    extents = []
    for number, group in enumerate(_overlapping(looks)):
        if len(group) == 1 and group[0].in_order:
            extents.append(_own(group[0], group[0].item_bytes))
            continue
        piece = next((one for one in group if "#" in one.name), None)
        if piece is not None and len(group) > 1:
            raise FormatError(
                "a piece shares memory with another tensor",
                where=text_of(piece.name),
                fix="give the same `Pieces` at both places, or a copy at one",
            )
        base = piece or next((one for one in group if _covers(one, group)), None)
        if base is None:
            extents.append(_shared(group, f"{RESERVED}extent/{number}"))
            continue
        extents.append(_own(base, max(one.item_bytes for one in group)))
        for look in group:
            if look is not base:
                _tell_view(look, base.name, base.begin)
    for look in looks:
        if look.told:
            look.leaf.node[:] = ["t", look.told]
    for leaf, again in repeats:
        told = leaf.node[1] if leaf.node else {}
        again.node[:] = ["t", {"entry": leaf.path or ROOT_ENTRY, **told, "same": leaf.path}]
    return extents


def _look(leaf: Leaf) -> _Look:
    if isinstance(leaf.value, np.ndarray):
        return _look_at_array(leaf, leaf.value)
    tensor: torch.Tensor = leaf.value
    # As few calls as will do, because there may be tens of thousands of tensors.
    dtype, on_host = header_name(tensor.dtype), tensor.is_cpu
    if dtype is None or not on_host or tensor.layout is not _STRIDED or tensor.is_nested:
        _check_kind(leaf.path, tensor)
    shape = tensor.shape
    if len(shape) > DIMENSIONS:
        raise FormatError(
            f"a tensor of {len(shape)} dimensions; at most {DIMENSIONS} can be saved",
            where=text_of(leaf.path),
            fix="reshape it",
        )
    item_bytes, n_bytes = tensor.itemsize, tensor.nbytes
    first = tensor.data_ptr() if n_bytes else 0
    plain = not (tensor.is_conj() or tensor.is_neg())
    in_order = plain and tensor.is_contiguous()
    strides: tuple[int, ...] = ()
    end = first + n_bytes
    if not in_order or 1 in shape or not n_bytes:
        strides = _unusual(shape, tuple(step * item_bytes for step in tensor.stride()), item_bytes)
        if strides and n_bytes:
            end = first + reach(shape, strides)[1] + item_bytes
    told: dict[str, Any] = {}
    if dtype is None:
        told["dtype"], told["shape"] = torch_name(tensor.dtype), list(shape)
    if type(tensor) is _PARAMETER:
        told["parameter"] = True
    if tensor.requires_grad:
        told["grad"] = True
    place = "cpu" if on_host else str(tensor.device)
    if not plain:  # bytes that are not the values are no part of another's extent
        place += f" {leaf.path}"
    parts = (leaf, place, first, end, first, shape, strides, item_bytes)
    return make_tuple(_Look, (*parts, dtype, n_bytes, plain, in_order, told))


def _check_kind(path: str, tensor: torch.Tensor) -> None:
    """Those that are not saved have no dtype of the header's, another layout, or no host memory."""
    if tensor.layout is not _STRIDED or tensor.is_quantized or tensor.is_nested:
        raise FormatError(
            "sparse, quantized and nested tensors cannot be saved",
            where=text_of(path),
            fix="save it dense and dequantized, or its parts",
        )
    if tensor.is_meta:
        raise FormatError(
            "a tensor on the device `meta` has no elements",
            where=text_of(path),
            fix="materialize the module before saving it, or leave the tensor out",
        )


def _look_at_array(leaf: Leaf, array: np.ndarray[Any, Any]) -> _Look:
    shape, item_bytes = array.shape, array.itemsize
    strides = _unusual(shape, array.strides, item_bytes)
    first = array.__array_interface__["data"][0]
    low, high = reach(shape, array.strides)
    begin, end = (first + low, first + high + item_bytes) if array.nbytes else (0, 0)
    dtype = header_name_of_numpy(array.dtype)
    told: dict[str, Any] = {"numpy": describe_dtype(array.dtype)}
    if dtype is None:
        told["shape"] = list(shape)
    in_order = array.flags.c_contiguous
    return _Look(
        leaf,
        "cpu",
        begin,
        end,
        first,
        shape,
        strides,
        item_bytes,
        dtype,
        array.nbytes,
        True,
        in_order,
        told,
    )


def _unusual(
    shape: Sequence[int], strides_bytes: tuple[int, ...], item_bytes: int
) -> tuple[int, ...]:
    """The strides, or () if they are those of row-major elements."""
    step = item_bytes
    for length, stride in zip(reversed(shape), reversed(strides_bytes), strict=True):
        if stride != step:
            return strides_bytes
        step *= max(length, 1)
    return ()


def _overlapping(looks: Sequence[_Look]) -> Iterator[list[_Look]]:
    """Groups whose live bytes overlap, in the order of their first leaf."""
    places, begins = [look.place for look in looks], [look.begin for look in looks]
    order = sorted(range(len(looks)), key=begins.__getitem__)
    order.sort(key=places.__getitem__)
    groups: dict[int, list[int]] = {}  # of more than one
    place, end, last = "", 0, -1
    for number in order:
        look = looks[number]
        if not look.n_bytes:
            continue
        if begins[number] < end and places[number] == place:
            groups.setdefault(last, [last]).append(number)
            end = max(end, look.end)
        else:
            place, end, last = places[number], look.end, number
    heads = {min(group): group for group in groups.values()}
    inside = {number for group in groups.values() for number in group}
    for number, look in enumerate(looks):
        if number in heads:
            yield [looks[member] for member in sorted(heads[number])]
        elif number not in inside:
            yield [look]


def _covers(look: _Look, group: Sequence[_Look]) -> bool:
    """Can the group be written as this leaf's elements in row-major order?"""
    if len(group) == 1:
        # An expanded tensor would grow; one with gaps could not have its strides back.
        return look.in_order or not look.plain or _is_dense(look)
    low, high = min(one.begin for one in group), max(one.end for one in group)
    aligned = all((one.first - low) % one.item_bytes == 0 for one in group)
    return look.in_order and aligned and (look.begin, look.end) == (low, high)


def _is_dense(look: _Look) -> bool:
    if not look.n_bytes:
        return min(look.strides_bytes, default=0) >= 0
    return is_dense(look.shape, look.strides_bytes, look.item_bytes)


def _own(look: _Look, item_bytes: int) -> Extent:
    """The extent of a leaf, aligned for the largest element that is seen in it."""
    leaf, place, begin, end, first, shape, strides, _, dtype, n_bytes, _, in_order, told = look
    if strides and in_order:  # of lengths of one, or of nothing
        told["offset"], told["stride"] = 0, list(strides)
    elif strides and _is_dense(look):
        told["order"] = list(strides)
    source: Source
    if in_order and place == "cpu":
        source = Memory(first, leaf.value)
    elif isinstance(leaf.value, np.ndarray):
        source = ArrayElements(leaf.value)
    else:
        source = Elements(leaf.value)
    if dtype is None:
        dtype, shape = "U8", (n_bytes,)
    parts = (look.name, dtype, shape, n_bytes, item_bytes, source, _span(place, begin, end))
    return make_tuple(Extent, parts)


def _shared(group: Sequence[_Look], name: str) -> Extent:
    """The extent of leaves none of which is all of it."""
    item_bytes = max(one.item_bytes for one in group)
    low, high = min(one.begin for one in group), max(one.end for one in group)
    if any((one.first - low) % one.item_bytes for one in group):
        low -= low % 16  # the same alignment in the file as in memory
    source: Source
    if group[0].place == "cpu":
        source = Memory(low, [one.leaf.value for one in group])
    else:
        source = Elements(_bytes_of_storage(group[0].leaf.value, low, high))
    for look in group:
        _tell_view(look, name, low)
    span = _span(group[0].place, low, high)
    return Extent(name, "U8", (high - low,), high - low, item_bytes, source, span)


def _span(place: str, begin: int, end: int) -> Span:
    return make_tuple(Span, (place.partition(" ")[0], begin, end))


def _bytes_of_storage(tensor: torch.Tensor, low: int, high: int) -> torch.Tensor:
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return whole[low - storage.data_ptr() : high - storage.data_ptr()]


def _tell_view(look: _Look, name: str, base: int) -> None:
    """Say of a leaf that it is a view of an extent."""
    told = look.told
    told["entry"], told["offset"], told["shape"] = name, look.first - base, list(look.shape)
    if "numpy" not in told:
        told["dtype"] = torch_name(look.leaf.value.dtype)
    if look.strides_bytes:
        told["stride"] = list(look.strides_bytes)
