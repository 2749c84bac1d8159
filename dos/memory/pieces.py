"""A part of a larger tensor, as a leaf of a state."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Pieces:
    """Elements of a larger tensor, as a leaf of a state.

    On loading, the pieces of all files that bear the same path become the whole tensor.

    Attributes:
        shape: of the whole.
        dtype: of the whole.
        parts: by the first element in row-major order, contiguous elements from there on.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: dict[int, torch.Tensor]
