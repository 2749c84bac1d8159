"""Number formats inside Triton kernels, by their bits, so that compiler and interpreter agree.

The interpreter truncates when it casts to bfloat16, and no format may depend on an instruction
that one generation of GPUs has and another has not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl

from dos.kernels.float_mode import exact_float_mode


@contextmanager
def launching_on(tensor: torch.Tensor) -> Iterator[None]:
    """Launch on the device of ``tensor``, with scalars that arrive as they are.

    The launcher narrows a Python float by a cast on this thread, which would flush a tiny eps
    to zero where the thread was told to.
    """
    with exact_float_mode(), torch.cuda.device_of(tensor):
        yield


@triton.jit
def raw(words: tl.tensor) -> tl.tensor:
    """The bits of float32, bfloat16 or float16 as unsigned integers of the same size."""
    if words.dtype == tl.float32:
        return words.to(tl.uint32, bitcast=True)
    else:
        return words.to(tl.uint16, bitcast=True)


@triton.jit
def widened(words: tl.tensor) -> tl.tensor:
    """float32 values of float32, bfloat16 or float16; exact."""
    if words.dtype == tl.bfloat16:
        return (raw(words).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return words.to(tl.float32)


@triton.jit
def rounded(values: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """float32 values in another format, nearest even; NaN stays NaN. See `reference.round_to`."""
    if dtype == tl.bfloat16:
        bits = raw(values)
        nearest = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
        words = tl.where(values != values, (bits >> 16) | 0x40, nearest)
        return words.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(dtype)
