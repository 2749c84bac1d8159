"""Results of processes compared."""

from __future__ import annotations

import torch

from tests.cpu.tolerances import AFTER_STEPS_OF_A_MODEL


def same_bits(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Whether all tensors agree in every bit."""
    pairs = zip(left, right, strict=True)
    return all(
        one.dtype == two.dtype and torch.equal(_words(one), _words(two)) for one, two in pairs
    )


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def assert_near(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Weights after a few steps, ours and torch's."""
    near = AFTER_STEPS_OF_A_MODEL
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=near.relative, atol=near.absolute)
