"""The same Adam in plain torch operations, for accelerators without a kernel of their own.

Each operation is a kernel that rounds once. Not used, because a backend may fuse inside
them: ``alpha=``, addcmul, addcdiv, lerp; nor division by a scalar, which CUDA turns into
a multiplication by its reciprocal.
"""

from __future__ import annotations

import torch

from dos.kernels.float_mode import exact_float_mode
from dos.kernels.scalars import AdamScalars


# torch narrows the scalars on this thread, which would flush a tiny eps where it was told to.
@exact_float_mode()
@torch.no_grad()
def update(
    p: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    w: torch.Tensor | None,
    scalars: AdamScalars,
) -> None:
    """Update flat tensors of one length and device in place: p, m, v, and w if there is one.

    Needs temporaries of 12 bytes per element.

    Args:
        p, m, v: parameter, momentum, variance; float32.
        g: gradient; float32, bfloat16 or float16; not changed.
        w: receives p rounded to its own dtype, nearest even.
        scalars: hyperparameters; torch casts each to the tensor's float32, which is exact.
    """
    # Rounding is symmetric: (-g) * scale and g * (-scale) are the same bits.
    scale = -scalars.scale if scalars.maximize else scalars.scale
    grad = g * scale if g.dtype == torch.float32 else g.to(torch.float32).mul_(scale)
    if scalars.decoupled:
        p.mul_(scalars.decay)
        scratch = grad * scalars.d1
    else:
        scratch = p * scalars.weight_decay
        grad.add_(scratch)
        torch.mul(grad, scalars.d1, out=scratch)
    m.mul_(scalars.c1).add_(scratch)
    v.mul_(scalars.c2).add_(grad.mul_(grad).mul_(scalars.d2))
    del grad  # its memory is free for the wide root
    # Through float64, because torch.sqrt of float32 is not rounded correctly everywhere (MKL
    # misses by a last bit in one of twelve). Twice the digits and two more make the second
    # rounding harmless: the root of an fp32 value lies 4 float64 units or more from any
    # halfway point between fp32 values.
    scratch.copy_(v.to(torch.float64).sqrt_())
    scratch.mul_(scalars.inv_sqrt_bc2).add_(scalars.eps)
    p.sub_(torch.div(m, scratch, out=scratch).mul_(scalars.step_size))
    if w is not None:
        w.copy_(p)
