"""A tensor as one flat range of its own memory."""

from __future__ import annotations

import torch


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory range without holes or overlaps, in any order."""
    if tensor.numel() == 0:
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A 1-D view of a dense tensor's elements in memory order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def flat_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`tensor`'s elements, 1-D, in the memory order of `like`, a dense tensor of its shape.

    A view where the orders agree, else a copy; a negated view is resolved.
    """
    if tensor.is_neg() or tensor.stride() != like.stride():
        ordered = torch.empty_strided(
            like.size(), like.stride(), dtype=tensor.dtype, device=tensor.device
        )
        tensor = ordered.copy_(tensor)
    return flat(tensor)


def unflatten(elements: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of `flat`: 1-D `elements` as a view in the shape and order of `like`."""
    return elements.as_strided(like.size(), like.stride())
