"""The same Adam as one Triton kernel: every array passes through the GPU once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dos.kernels.gpu.formats import launching_on, rounded, widened
from dos.kernels.scalars import AdamScalars

_BLOCK_ELEMENTS = 1024


@torch.no_grad()
def update(
    p: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    w: torch.Tensor | None,
    scalars: AdamScalars,
) -> None:
    """Update flat tensors of one length and CUDA device in place, on its current stream.

    Same arguments and same bits as `torch_adam.update`, without temporaries.

    Args:
        p, m, v: parameter, momentum, variance; contiguous, float32.
        g: gradient; contiguous, float32, bfloat16 or float16; not changed.
        w: receives p rounded to its own dtype, nearest even; contiguous.
        scalars: hyperparameters, see `AdamScalars`.
    """
    if not p.numel():
        return
    with launching_on(p):
        update_kernel[(triton.cdiv(p.numel(), _BLOCK_ELEMENTS),)](
            p,
            m,
            v,
            g,
            w,
            p.numel(),
            scalars.c1,
            scalars.d1,
            scalars.c2,
            scalars.d2,
            scalars.step_size,
            scalars.inv_sqrt_bc2,
            # Each is unused where the other is used.
            scalars.decay if scalars.decoupled else scalars.weight_decay,
            scalars.eps,
            # Rounding is symmetric: (-g) * scale and g * (-scale) are the same bits.
            -scalars.scale if scalars.maximize else scalars.scale,
            DECOUPLED=scalars.decoupled,
            BLOCK=_BLOCK_ELEMENTS,
            enable_fp_fusion=False,
        )


@triton.jit
def update_kernel(
    p_at: tl.tensor,
    m_at: tl.tensor,
    v_at: tl.tensor,
    g_at: tl.tensor,
    w_at: tl.tensor,
    numel: tl.tensor,
    c1: tl.float32,
    d1: tl.float32,
    c2: tl.float32,
    d2: tl.float32,
    step_size: tl.float32,
    inv_sqrt_bc2: tl.float32,
    decay: tl.float32,
    eps: tl.float32,
    scale: tl.float32,
    DECOUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program per BLOCK elements; ``decay`` is the weight decay itself unless DECOUPLED."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < numel
    param = tl.load(p_at + index, inside)
    grad = widened(tl.load(g_at + index, inside)) * scale
    if DECOUPLED:
        param = param * decay
    else:
        grad = grad + param * decay
    momentum = tl.load(m_at + index, inside) * c1 + grad * d1
    variance = tl.load(v_at + index, inside) * c2 + (grad * grad) * d2
    denominator = tl.sqrt_rn(variance) * inv_sqrt_bc2 + eps
    param = param - tl.div_rn(momentum, denominator) * step_size
    tl.store(p_at + index, param, inside)
    tl.store(m_at + index, momentum, inside)
    tl.store(v_at + index, variance, inside)
    if w_at is not None:
        tl.store(w_at + index, rounded(param, w_at.dtype.element_ty), inside)
