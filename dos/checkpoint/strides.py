"""Where elements lie: how far they reach, and whether each has bytes of its own."""

from __future__ import annotations

from collections.abc import Sequence

DIMENSIONS = 64
"""At most; numpy holds no more, and a product of more lengths could take for ever."""


def reach(shape: Sequence[int], strides_bytes: Sequence[int]) -> tuple[int, int]:
    """Offsets of the lowest and the highest element from the first, in bytes."""
    ends = [(n - 1) * step for n, step in zip(shape, strides_bytes, strict=True)]
    return sum(end for end in ends if end < 0), sum(end for end in ends if end > 0)


def is_dense(shape: Sequence[int], strides_bytes: Sequence[int], item_bytes: int) -> bool:
    """Do the elements fill a piece of memory from the first on, each in bytes of its own?"""
    step = item_bytes
    dimensions = zip(strides_bytes, shape, strict=True)
    for stride, length in sorted((stride, n) for stride, n in dimensions if n != 1):
        if stride != step:
            return False
        step *= length
    return True
