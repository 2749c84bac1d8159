"""The update against torch's own optimizer: not the same bits, but the same mathematics."""

from __future__ import annotations

import pytest
import torch

from dos.kernels import adam
from dos.kernels.scalars import AdamScalars, DType, Segment
from tests.cpu.tolerances import AFTER_100_STEPS

NUMEL = 4096
STEPS = 100
LR, BETA1, BETA2, EPS, WEIGHT_DECAY = 1e-2, 0.9, 0.999, 1e-8, 0.1


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(NUMEL, generator=generator) for _ in range(STEPS)]


def start() -> torch.Tensor:
    return 1.0 + 0.1 * torch.randn(NUMEL, generator=torch.Generator().manual_seed(11))


def ours(decoupled: bool, maximize: bool) -> dict[str, torch.Tensor]:
    state = {"p": start(), "exp_avg": torch.zeros(NUMEL), "exp_avg_sq": torch.zeros(NUMEL)}
    for step, grad in enumerate(gradients(), start=1):
        scalars = AdamScalars.at_step(
            lr=LR,
            beta1=BETA1,
            beta2=BETA2,
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            step=step,
            decoupled=decoupled,
            maximize=maximize,
        )
        p, m, v = (tensor.data_ptr() for tensor in state.values())
        adam.update([Segment(p, m, v, grad.data_ptr(), 0, NUMEL, DType.FP32, DType.NONE, scalars)])
    return state


def theirs(decoupled: bool, maximize: bool) -> dict[str, torch.Tensor]:
    p = start().requires_grad_()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind(
        [p],
        lr=LR,
        betas=(BETA1, BETA2),
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        maximize=maximize,
    )
    for p.grad in gradients():
        optimizer.step()
    return {"p": p.detach(), **optimizer.state[p]}


@pytest.mark.parametrize("quantity", AFTER_100_STEPS)
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_agrees_with_torch_after_100_steps(decoupled: bool, maximize: bool, quantity: str) -> None:
    tolerance = AFTER_100_STEPS[quantity]
    torch.testing.assert_close(
        ours(decoupled, maximize)[quantity],
        theirs(decoupled, maximize)[quantity],
        rtol=tolerance.relative,
        atol=tolerance.absolute,
    )
