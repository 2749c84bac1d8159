"""Parameters put together of the pieces that ranks and subgroups wrote."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dos.checkpoint.dtypes import torch_dtype
from dos.checkpoint.opened import OpenedFile
from dos.checkpoint.paths import text_of
from dos.checkpoint.strides import DIMENSIONS
from dos.errors import FormatError


@dataclass(frozen=True)
class Part:
    """Where a piece is.

    Attributes:
        opened: its file.
        name: of its entry.
        start: its first element.
        numel: how many.
    """

    opened: OpenedFile
    name: str
    start: int
    numel: int


@dataclass(frozen=True)
class Whole:
    """A tensor that is put together: its shape, its dtype and its parts, ascending."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[Part]

    def within(self, first: int, last: int) -> Iterator[Part]:
        """The parts that have any of the elements from `first` to before `last`."""
        number = bisect_right(self.parts, first, key=lambda part: part.start + part.numel)
        for part in self.parts[number:]:
            if part.start >= last:
                return
            yield part


def find_wholes(files: Sequence[OpenedFile]) -> dict[str, Whole]:
    """All tensors that were written in pieces, by path.

    Raises:
        FormatError: pieces of one tensor disagree, overlap, or leave elements out.
    """
    parts: defaultdict[str, list[Part]] = defaultdict(list)
    kinds: dict[str, set[tuple[tuple[int, ...], torch.dtype]]] = defaultdict(set)
    for opened in files:
        said = opened.index.said.get("pieces", {})
        try:
            for name, (path, start, shape) in said.items():
                entry = opened.header.entries[name]
                (numel,) = entry.shape
                if type(path) is not str or type(start) is not int:
                    raise TypeError(f"piece {name[:80]!r} of {path!r:.80} from {start!r:.80} on")
                kinds[path].add((_checked_shape(shape), torch_dtype(entry.dtype)))
                parts[path].append(Part(opened, name, start, numel))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FormatError(f"malformed pieces: {error!r}", where=opened.name) from error
    return {path: _whole(path, found, kinds[path]) for path, found in parts.items()}


def _checked_shape(shape: Any) -> tuple[int, ...]:
    if len(shape) > DIMENSIONS or not all(type(n) is int and 0 <= n < 1 << 63 for n in shape):
        raise ValueError(f"shape {str(shape)[:200]}")
    return tuple(shape)


def _whole(path: str, parts: list[Part], kinds: set[tuple[tuple[int, ...], torch.dtype]]) -> Whole:
    if len(kinds) != 1:
        raise FormatError("its pieces are of different tensors", where=text_of(path))
    ((shape, dtype),) = kinds
    numel, end = math.prod(shape), 0
    parts = sorted(parts, key=lambda part: (part.start, part.numel))
    for start, stop in [*((part.start, part.start + part.numel) for part in parts), (numel, numel)]:
        if start > end:
            raise FormatError(
                f"pieces are missing: elements {end} to {start - 1} of {numel}",
                where=text_of(path),
                fix="load an older checkpoint: a rank did not save its part of this one",
            )
        if start < end:
            raise FormatError(
                f"pieces overlap: elements {start} to {min(end, stop) - 1}"
                if start < min(end, stop)
                else f"pieces reach to element {end - 1} of {numel}",
                where=text_of(path),
            )
        end = stop
    return Whole(shape, dtype, parts)
