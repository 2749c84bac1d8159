"""Which rank writes what of a state that several have: each a share, so that all disks work."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch

from dos.checkpoint.dtypes import header_name
from dos.checkpoint.format import BLOCK_BYTES
from dos.checkpoint.paths import component, join
from dos.errors import ConfigError, FormatError
from dos.memory.pieces import Pieces
from dos.shards import copy_of, is_sharded, local_of, runs_of

REPLICATED = ("model", "optimizer")
"""Keys of a state whose tensors every rank has, and whose DTensors lie over all ranks."""
PER_RANK = "rank"
"""Key of what is each rank's own."""

_NOTHING = object()
_MAPPINGS = (dict, OrderedDict)
_SEQUENCES = (list, tuple)


def part_of(
    state: dict[str, Any], rank: int, world: int, whole: Container[int] = ()
) -> dict[str, Any]:
    """What one rank saves of a state, so that the ranks together save all of it, once.

    Tensors below "model" and "optimizer" are taken to be the same on all ranks (`outline_of` tells
    of their form, nobody compares their values): their bytes, one behind the other, are cut in as
    many parts as there are ranks. Elements of a DTensor are saved by those that have them, copies
    cut likewise. What is below "rank" is saved by each rank for itself, everything else by rank 0,
    whose part has the place of all.

    Args:
        state: of this rank; tensors, DTensors and `Pieces` in dicts, lists and tuples.
        rank: of this process.
        world: how many ranks call this, each with its own state.
        whole: ids of tensors that are not the same on all ranks: those of rank 0 are saved.

    Returns:
        A state of the same tensors and views of them.

    Raises:
        FormatError: a DTensor that does not lie over all ranks, or not in chunks.
    """
    found: dict[int, _Found] = {}
    below = {key: state[key] for key in REPLICATED if key in state}
    for path, value in _tensors(below, ""):
        found.setdefault(id(value), _look(path, value, rank, world, id(value) in whole))
    parts = _shares(_without_twins(list(found.values())), rank)
    made = {} if rank else dict(state)
    for key, value in below.items():
        part = _replaced(value, parts, all_of_it=rank == 0)
        if part is not _NOTHING:
            made[key] = part
    if PER_RANK in state:
        made[PER_RANK] = state[PER_RANK]
    return made


def outline_of(state: dict[str, Any]) -> dict[str, str]:
    """What `part_of` needs to be the same on all ranks, as a short text for each key of it.

    Names, dtypes and shapes of tensors, in their order; of a DTensor those of the whole.
    """
    outline = {}
    for key in filter(state.__contains__, REPLICATED):
        lines = [
            f"{path} {value.dtype} {tuple(value.shape)}" for path, value in _tensors(state[key], "")
        ]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        outline[key] = f"{len(lines)} tensors of digest {digest[:16]}"
    return outline


def share(
    sizes: Sequence[int], count: int, index: int, ahead_bytes: int = 0
) -> list[tuple[int, int]]:
    """Which bytes of each item one of several takes, so that all take about as many.

    Items are cut at multiples of 4096, so that what begins at a page goes on doing so.

    Args:
        sizes: of the items in bytes.
        count: among how many they are shared out.
        index: of the one.
        ahead_bytes: what the first has to take besides.

    Returns:
        Per item the first byte and the one behind the last.
    """
    total = sum(sizes)
    of_first = total if count == 1 else max(0, (total + ahead_bytes) // count - ahead_bytes)
    bounds = [0, of_first]
    bounds += [of_first + (total - of_first) * n // (count - 1) for n in range(1, count)]
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] + size)

    def rounded(bound: int) -> int:
        begin = begins[bisect_right(begins, bound) - 1]
        return bound if bound == total else bound - (bound - begin) % BLOCK_BYTES

    low, high = rounded(bounds[index]), rounded(bounds[index + 1])
    found = []
    for begin, size in zip(begins, sizes, strict=False):
        first = min(max(low - begin, 0), size)
        found.append((first, max(first, min(max(high - begin, 0), size))))
    return found


class _Found(NamedTuple):
    """A tensor of the state: its elements here as runs, and who has them too.

    Attributes:
        value: as it stands in the state.
        memory: what it lies in, to find others that do.
        shape: of the whole.
        runs: first element in the whole, and contiguous elements.
        copies: which copy it is, and of how many; None: it stays whole, with rank 0.
        everywhere: all ranks have all of it.
    """

    value: Any
    memory: torch.Tensor | None
    shape: tuple[int, ...]
    runs: list[tuple[int, torch.Tensor]]
    copies: tuple[int, int] | None
    everywhere: bool

    @property
    def n_bytes(self) -> int:
        return sum(elements.nbytes for _, elements in self.runs)


def _look(path: str, value: Any, rank: int, world: int, whole: bool) -> _Found:
    if isinstance(value, Pieces):
        runs = sorted(value.parts.items())
        copies = value.copies or (rank, world)
        return _Found(value, None, value.shape, runs, copies, value.copies is None)
    shape = tuple(value.shape)
    if is_sharded(value):
        if value.device_mesh.size() != world:
            raise FormatError(
                f"a DTensor over {value.device_mesh.size()} of {world} ranks",
                where=path,
                fix="save it with the ranks of its mesh only",
            )
        try:
            places = list(runs_of(value))
        except ConfigError as error:
            raise FormatError(error.what, where=path, fix=error.fix) from None
        local = local_of(value).detach()
        flat = local.reshape(-1)
        runs = [(start, flat[here : here + length]) for start, here, length in places]
        return _Found(value, local, shape, runs, copy_of(value), False)
    cuts = (
        not whole
        and type(value) is torch.Tensor
        and value.layout is torch.strided
        and not (value.requires_grad or value.is_meta or value.is_conj() or value.is_neg())
        and value.numel() > 0
        and value.is_contiguous()
        and header_name(value.dtype) is not None
    )
    runs = [(0, value.view(-1))] if cuts else []
    return _Found(value, value, shape, runs, (rank, world) if cuts else None, True)


def _without_twins(found: list[_Found]) -> list[list[_Found]]:
    """The tensors, those that are the same in memory together; what overlaps else is not cut."""
    twins: dict[Any, list[_Found]] = {}
    for one in found:
        twins.setdefault(_place(one), []).append(one)
    ends: dict[Any, tuple[int, Any]] = {}  # of each device: the furthest end so far, and whose
    shared = set()
    for key in sorted((key for key in twins if key[0] == "memory"), key=lambda key: key[:4]):
        _, device, begin, end, *_ = key
        furthest, whose = ends.get(device, (0, None))
        if begin < furthest:
            shared |= {key, whose}
        if end > furthest:
            ends[device] = end, key
    return [
        [one._replace(copies=None) if key in shared and one.everywhere else one for one in group]
        for key, group in twins.items()
    ]


def _place(one: _Found) -> tuple[Any, ...]:
    memory = one.memory
    if memory is None or memory.layout is not torch.strided or memory.is_meta:
        return ("alone", id(one.value))
    if not memory.numel():
        return ("alone", id(one.value))
    begin = memory.data_ptr()
    reach = sum((n - 1) * step for n, step in zip(memory.shape, memory.stride(), strict=True))
    end = begin + (reach + 1) * memory.element_size()
    same = (tuple(memory.shape), memory.stride(), str(memory.dtype), one.shape, one.everywhere)
    return ("memory", str(memory.device), begin, end, same)


def _shares(groups: list[list[_Found]], rank: int) -> dict[int, Any]:
    """What becomes of each tensor on this rank, by its id; what stays as it is is left out."""
    made: dict[int, Any] = {}
    ahead_bytes = sum(_size(group[0].value) for group in groups if group[0].copies is None)
    kinds: dict[tuple[bool, tuple[int, int]], list[list[_Found]]] = {}
    for group in groups:
        if group[0].copies is not None:
            kinds.setdefault((group[0].everywhere, group[0].copies), []).append(group)
    for (everywhere, (index, count)), its in kinds.items():
        sizes = [group[0].n_bytes for group in its]
        shares = share(sizes, count, index, ahead_bytes if everywhere else 0)
        of_first = share(sizes, count, 0, ahead_bytes if everywhere else 0)
        for group, span, firsts in zip(its, shares, of_first, strict=True):
            one = group[0]
            if isinstance(one.value, torch.Tensor) and everywhere and firsts == (0, one.n_bytes):
                continue  # rank 0 saves it as it is
            part = _cut(one, *span)
            if rank == 0 or part.parts:
                made.update(dict.fromkeys((id(twin.value) for twin in group), part))
    return made


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _cut(one: _Found, begin: int, end: int) -> Pieces:
    """The elements of some bytes of what lies here."""
    parts, at = {}, 0
    for start, elements in one.runs:
        item_bytes = elements.element_size()
        low, high = max(begin - at, 0) // item_bytes, min(end - at, elements.nbytes) // item_bytes
        if low < high:
            parts[start + low] = elements[low:high]
        at += elements.nbytes
    dtype = one.value.dtype
    return Pieces(one.shape, dtype, parts)


def _tensors(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, (torch.Tensor, Pieces)):
        yield path, node
    elif type(node) in _MAPPINGS:
        for key, child in node.items():
            yield from _tensors(child, join(path, component(str(key))))
    elif type(node) in _SEQUENCES:
        for number, child in enumerate(node):
            yield from _tensors(child, join(path, str(number)))


def _replaced(node: Any, parts: dict[int, Any], *, all_of_it: bool) -> Any:
    """The tree with its parts in their places; only branches that have any, or all of it."""
    if type(node) in _MAPPINGS:
        its = {key: _replaced(one, parts, all_of_it=all_of_it) for key, one in node.items()}
        made = copy(node)  # with the attributes of a module's state
        made.clear()
        made.update((key, one) for key, one in its.items() if one is not _NOTHING)
        return made if made or all_of_it else _NOTHING
    if type(node) in _SEQUENCES:
        items = [_replaced(one, parts, all_of_it=all_of_it) for one in node]
        if not all_of_it and all(one is _NOTHING for one in items):
            return _NOTHING
        return type(node)(None if one is _NOTHING else one for one in items)
    return parts.get(id(node), node if all_of_it else _NOTHING)
