"""What a gradient is known by, and its formats, on a CUDA device; the host waits for nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dos.kernels.gpu.formats import launching_on, raw, rounded, widened
from dos.kernels.scalars import BLOCK_ELEMENTS, FINGERPRINT_STEP, LANES, ROW_ELEMENTS
from dos.kernels.torch_cast import DeviceExamined

_DOWNSCALE_ELEMENTS = 1024


@torch.no_grad()
def examine(g: torch.Tensor, out: torch.Tensor | None = None) -> DeviceExamined:
    """Read a gradient once, on its device's current stream.

    Args:
        g: contiguous; float32, bfloat16 or float16.
        out: receives the gradient in float32; as many elements, contiguous.
    """
    n_blocks = triton.cdiv(g.numel(), BLOCK_ELEMENTS)
    squares = torch.empty(n_blocks, dtype=torch.float64, device=g.device)
    max_abs = torch.empty(n_blocks, dtype=torch.float32, device=g.device)
    fingerprints = torch.empty(n_blocks, dtype=torch.int64, device=g.device)
    if n_blocks:
        with launching_on(g):
            examine_kernel[(n_blocks,)](
                g,
                out,
                squares,
                max_abs,
                fingerprints,
                g.numel(),
                ROWS=BLOCK_ELEMENTS // ROW_ELEMENTS,
                STEPS=ROW_ELEMENTS // LANES,
                LANES=LANES,
                KEY_STEP=FINGERPRINT_STEP,
                num_warps=16,
                enable_fp_fusion=False,
            )
    return DeviceExamined(squares, max_abs, fingerprints.sum())


@triton.jit
def examine_kernel(
    g_at: tl.tensor,
    out_at: tl.tensor,
    squares_at: tl.tensor,
    max_abs_at: tl.tensor,
    fingerprints_at: tl.tensor,
    numel: tl.tensor,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    KEY_STEP: tl.constexpr,
) -> None:
    """One program per block: all its rows side by side, one step of each at a time."""
    block = tl.program_id(0).to(tl.int64)
    start = block * (ROWS * STEPS * LANES)
    left = tl.minimum(numel - start, ROWS * STEPS * LANES).to(tl.int32)
    row = tl.arange(0, ROWS)[:, None] * (STEPS * LANES)
    squares = tl.zeros([ROWS, LANES], tl.float64)
    magnitude = tl.zeros([ROWS, LANES // 4], tl.int32)
    fingerprint = tl.zeros([ROWS, LANES // 4], tl.uint64)
    for step in range(STEPS):
        index = row + step * LANES + tl.arange(0, LANES)[None, :]
        inside = index < left
        words = tl.load(g_at + start + index, inside, other=0.0)
        values = widened(words)
        if out_at is not None:
            tl.store(out_at + start + index, values, inside)
        wide = values.to(tl.float64)
        squares += wide * wide
        # As an integer a NaN's magnitude is above infinity's, so that it wins.
        bits = (raw(values) & 0x7FFFFFFF).to(tl.int32)
        magnitude = tl.maximum(magnitude, tl.max(_in_fours(bits), 2))
        mixed = tl.where(inside, _mixed(words, start + index, KEY_STEP), 0)
        fingerprint += tl.sum(_in_fours(mixed), 2)
    tl.store(squares_at + block + tl.arange(0, 1), _folded(_folded(squares)[None, :]))
    tl.store(max_abs_at + block, tl.max(tl.max(magnitude, 1), 0).to(tl.float32, bitcast=True))
    tl.store(fingerprints_at + block, tl.sum(tl.sum(fingerprint, 1), 0).to(tl.int64))


@triton.jit
def _in_fours(tile: tl.tensor) -> tl.tensor:
    """Four neighbours along a last axis of their own: as many as a thread loads at once or fewer.

    What may be added in any order is added there first, and needs fewer registers.
    """
    return tl.reshape(tile, [tile.shape[0], tile.shape[1] // 4, 4])


@triton.jit
def _mixed(words: tl.tensor, index: tl.tensor, KEY_STEP: tl.constexpr) -> tl.tensor:
    """Every word with the key of its place, see `reference.fingerprint`; uint64 wraps around."""
    key = (index + 1).to(tl.uint64) * KEY_STEP
    mixed = (raw(words).to(tl.uint64) ^ (key & 0xFFFFFFFF)) * ((key >> 32) | 1)
    return mixed ^ (mixed >> 32)


@triton.jit
def _folded(rows: tl.tensor) -> tl.tensor:
    """Each row of 64 added up by halves, in a certain order: every sum has two terms."""
    rows = tl.sum(tl.reshape(rows, [rows.shape[0], 2, 32]), 1)
    rows = tl.sum(tl.reshape(rows, [rows.shape[0], 2, 16]), 1)
    rows = tl.sum(tl.reshape(rows, [rows.shape[0], 2, 8]), 1)
    rows = tl.sum(tl.reshape(rows, [rows.shape[0], 2, 4]), 1)
    rows = tl.sum(tl.reshape(rows, [rows.shape[0], 2, 2]), 1)
    return tl.sum(rows, 1)


@torch.no_grad()
def downscale(source: torch.Tensor, target: torch.Tensor) -> None:
    """Round ``source`` (float32) to the dtype of ``target``, nearest even; both contiguous."""
    if not source.numel():
        return
    with launching_on(source):
        downscale_kernel[(triton.cdiv(source.numel(), _DOWNSCALE_ELEMENTS),)](
            source, target, source.numel(), BLOCK=_DOWNSCALE_ELEMENTS, enable_fp_fusion=False
        )


@triton.jit
def downscale_kernel(
    source_at: tl.tensor, target_at: tl.tensor, numel: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """One program per BLOCK elements."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    values = tl.load(source_at + index, inside)
    tl.store(target_at + index, rounded(values, target_at.dtype.element_ty), inside)
