"""Parameters put together of the pieces that ranks and subgroups wrote."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dos.checkpoint.dtypes import torch_dtype
from dos.checkpoint.opened import OpenedFile
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
    """A tensor that is put together: its shape, its dtype and its parts by their start."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[Part]


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
        raise FormatError("its pieces are of different tensors", where=path)
    ((shape, dtype),) = kinds
    end = 0
    for part in sorted(parts, key=lambda one: one.start):
        if part.start != end:
            what = "overlap" if part.start < end else "are missing"
            raise FormatError(f"pieces {what} at element {min(end, part.start)}", where=path)
        end += part.numel
    if end != math.prod(shape):
        raise FormatError(f"pieces are missing from element {end} on", where=path)
    return Whole(shape, dtype, parts)
