"""A part of a larger tensor, as a leaf of a state."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True, eq=False)
class Pieces:
    """Elements of a larger tensor, as a leaf of a state.

    On loading, the pieces of all files that bear the same path become the whole tensor.

    Attributes:
        shape: of the whole.
        dtype: of the whole.
        parts: by the first element in row-major order, contiguous elements from there on.
        copies: which copy of these elements it is, and of how many that as many ranks have;
            None: every rank has all elements of the whole.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: dict[int, torch.Tensor]
    copies: tuple[int, int] | None = None

    @property
    def numel(self) -> int:
        """How many elements the whole has."""
        return prod(self.shape)
