"""What a gradient is known by, in plain torch operations: any device that has float64.

The bits of `reference`, without waiting for the device. Casts need nothing here: torch's
``copy_`` widens exactly and rounds to nearest even.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dos.kernels import norm
from dos.kernels.cast import Examined
from dos.kernels.scalars import BLOCK_ELEMENTS, FINGERPRINT_STEP, LANES, ROW_ELEMENTS

# Elements whose temporaries exist at a time: a GPU is busy with as many, and they are 48 MiB.
_CHUNK_ELEMENTS = 32 * BLOCK_ELEMENTS
_LOW_32 = 0xFFFFFFFF
# int64 arithmetic wraps, so it is that of unsigned numbers, but for shifts to the right.
_SIGNED_STEP = FINGERPRINT_STEP - 2**64


@dataclass(frozen=True, eq=False)
class DeviceExamined:
    """An `Examined` that is still on the device, and perhaps not computed yet.

    Attributes:
        squares: float64, one per block.
        max_abs: float32, one per block.
        fingerprint: int64, a scalar: the 64 bits of the unsigned number.
    """

    squares: torch.Tensor
    max_abs: torch.Tensor
    fingerprint: torch.Tensor


def on_host(examined: Sequence[DeviceExamined]) -> list[Examined]:
    """The figures in host memory, by one transfer of each kind; waits for the device."""
    if not examined:
        return []
    lengths = [each.squares.numel() for each in examined]
    squares = torch.cat([each.squares for each in examined]).cpu().split(lengths)
    max_abs = torch.cat([each.max_abs for each in examined]).cpu().split(lengths)
    fingerprints = torch.stack([each.fingerprint for each in examined]).tolist()
    return [
        Examined(blocks.numpy(), norm.infinity_norm(maxima.tolist()), fingerprint % 2**64)
        for blocks, maxima, fingerprint in zip(squares, max_abs, fingerprints, strict=True)
    ]


@torch.no_grad()
def examine(g: torch.Tensor, *, out: torch.Tensor | None = None) -> DeviceExamined:
    """Read a flat gradient and work out its figures on its device.

    Needs temporaries of 24 bytes per element, for 2,097,152 elements at most.

    Args:
        g: float32, bfloat16 or float16; contiguous, of one dimension.
        out: float32 of the same length; receives the gradient.
    """
    n_blocks = -(-g.numel() // BLOCK_ELEMENTS)
    squares = torch.empty(n_blocks, dtype=torch.float64, device=g.device)
    max_abs = torch.empty(n_blocks, dtype=torch.float32, device=g.device)
    fingerprint = torch.zeros((), dtype=torch.int64, device=g.device)
    for first in range(0, g.numel(), _CHUNK_ELEMENTS):
        part = g[first : first + _CHUNK_ELEMENTS]
        start = first // BLOCK_ELEMENTS
        blocks = slice(start, start + _CHUNK_ELEMENTS // BLOCK_ELEMENTS)
        _examine_blocks(part, squares[blocks], max_abs[blocks])
        fingerprint += _fingerprint(part, first)
    if out is not None:
        out.copy_(g)
    return DeviceExamined(squares, max_abs, fingerprint)


def _examine_blocks(part: torch.Tensor, squares: torch.Tensor, max_abs: torch.Tensor) -> None:
    n_blocks = squares.numel()
    padded = torch.zeros(n_blocks * BLOCK_ELEMENTS, dtype=torch.float64, device=part.device)
    padded[: part.numel()] = part
    padded.abs_()
    max_abs.copy_(padded.view(n_blocks, -1).amax(1))
    steps = padded.mul_(padded).view(n_blocks, -1, ROW_ELEMENTS // LANES, LANES)
    lanes = steps[:, :, 0]
    for step in range(1, steps.shape[2]):
        lanes += steps[:, :, step]
    squares.copy_(_folded(_folded(lanes)))


def _folded(sums: torch.Tensor) -> torch.Tensor:
    # Not torch.sum, whose order is its own.
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


def _fingerprint(part: torch.Tensor, first: int) -> torch.Tensor:
    four = part.element_size() == 4
    raw = part.view(torch.int32 if four else torch.int16).to(torch.int64)
    raw &= _LOW_32 if four else 0xFFFF
    key = torch.arange(first + 1, first + 1 + part.numel(), device=part.device)
    key *= _SIGNED_STEP
    raw ^= key & _LOW_32
    raw *= _upper_half(key).bitwise_or_(1)
    raw ^= _upper_half(raw)
    return raw.sum()


def _upper_half(words: torch.Tensor) -> torch.Tensor:
    return (words >> 32).bitwise_and_(_LOW_32)
