"""`overlap_forward` on an accelerator: the same bits, and readers that wait on their own stream."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch

import dos

pytestmark = pytest.mark.gpu
WIDTH, LAYERS, STEPS = 512, 6, 5


def weights(model: torch.nn.Module, optimizer: dos.DOSOptimizer) -> list[torch.Tensor]:
    optimizer.synchronize()
    return [p.detach() for p in model.parameters()]


def saved(model: torch.nn.Module, optimizer: dos.DOSOptimizer) -> list[torch.Tensor]:
    return list(model.state_dict().values())


def evaluated(model: torch.nn.Module, optimizer: dos.DOSOptimizer) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model.eval()(torch.ones(4, WIDTH, dtype=torch.bfloat16, device=device_of(model)))]


def device_of(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device


def trained(read: Callable[..., list[torch.Tensor]], **options: Any) -> list[torch.Tensor]:
    """What `read` finds right after the last step, on the CPU."""
    home = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers).to(home)
    made = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = dos.DOSOptimizer(made, subgroup_size=100_000, **options)
    with closing(optimizer):
        for step in range(STEPS):
            x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step))
            model(x.to(home, torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [tensor.cpu() for tensor in read(model, optimizer)]


@pytest.mark.parametrize("read", [weights, saved, evaluated])
@pytest.mark.parametrize(
    "plan", [{"stride": "host"}, {"stride": 1}, {"stride": 2, "resident_ratio": 0.3}], ids=str
)
def test_an_overlapped_step_gives_the_same_bits(
    plan: dict[str, Any], read: Callable[..., list[torch.Tensor]]
) -> None:
    pairs = zip(trained(read, **plan, overlap_forward=True), trained(read, **plan), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
