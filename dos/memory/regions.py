"""A block of a tensor of any shape: where it begins and ends, and its runs in row-major order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple


class Cut(NamedTuple):
    """A dimension in chunks as `torch.chunk` makes them, and the number of one of them.

    Attributes:
        dim: which dimension.
        n_parts: among how many it is cut; the last ones may be short or empty.
        position: which chunk.
    """

    dim: int
    n_parts: int
    position: int


Region = tuple[tuple[int, int], ...]
"""Of each dimension the first index and how many."""


def region_of(shape: Sequence[int], cuts: Iterable[Cut]) -> Region:
    """The block that is left after one cut has been made after the other."""
    region = [(0, size) for size in shape]
    for dim, n_parts, position in cuts:
        first, size = region[dim]
        chunk = -(-size // n_parts)
        begin = min(size, chunk * position)
        region[dim] = first + begin, min(chunk, size - begin)
    return tuple(region)


def runs_of_region(shape: Sequence[int], region: Region) -> Iterator[tuple[int, int, int]]:
    """Contiguous runs of a block, ascending.

    Per run: its first element in the whole and in the block alone, both in row-major order, and
    its length. One run for a block of whole rows.
    """
    if not all(size for _, size in region):
        return
    cut = [dim for dim, (_, size) in enumerate(region) if size < shape[dim]]
    inner = max(cut, default=0)  # from there on all is contiguous
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = prod(size for _, size in region[inner:])
    outer = [range(start, start + size) for start, size in region[:inner]]
    first = region[inner][0] * strides[inner] if shape else 0
    for number, place in enumerate(product(*outer)):
        start = sum(i * stride for i, stride in zip(place, strides, strict=False))
        yield start + first, number * length, length
