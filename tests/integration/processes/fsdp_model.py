"""A small model for FSDP2, the plans that it is trained by, and what is looked at afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dos

PLANS: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu"},
    "host": {"device": "virtual", "stride": "host", "subgroup_size": 16},
    "all": {"device": "virtual", "stride": 1},
    "two": {"device": "virtual", "stride": 2, "subgroup_size": 16},
    "released": {"device": "virtual", "stride": 1.5, "subgroup_size": 8, "release_grads": True},
    "residents": {"device": dos.VirtualDevice(poison=True, jitter_seed=1), "resident_ratio": 0.5},
}
TWO = PLANS["two"]
Clip = Callable[[nn.Module, Any], Any]


class Model(nn.Module):
    """Sizes that two processes cannot share evenly; of the last layer one of them has nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 13)
        self.second = nn.Linear(13, 5)
        self.factor = nn.Parameter(torch.ones(1))
        self.last = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(torch.tanh(self.first(x))) * self.factor
        return self.last(hidden)  # type: ignore[no-any-return]


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


def sharded(dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    model = Model().to(dtype)
    options = {"mesh": mesh(), **options}
    fully_shard(model.first, **options)
    return fully_shard(model, **options)


def optimize(model: nn.Module, plan: dict[str, Any] | None) -> Any:
    """A DOSOptimizer by `plan`, or torch's own without one."""
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return inner if plan is None else dos.DOSOptimizer(inner, **plan)


def backward(model: nn.Module, step: int, scaler: torch.amp.GradScaler | None = None) -> None:
    """Each process with data of its own."""
    seed = 2 * step + distributed.get_rank()
    x = torch.randn(6, 7, generator=torch.Generator().manual_seed(seed))
    dtype = next(model.parameters()).dtype
    loss = model(x.to(dtype)).float().square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()


def train(model: nn.Module, optimizer: Any, steps: range, clip: Clip | None = None) -> list[Any]:
    """Returns the norms before clipping."""
    norms = []
    for step in steps:
        backward(model, step)
        if clip is not None:
            total = clip(model, optimizer)
            norms.append((total.full_tensor() if isinstance(total, DTensor) else total).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [whole(parameter) for parameter in model.parameters()]


def grad_bytes(optimizer: dos.DOSOptimizer) -> dict[str, int]:
    """Of the last step: sent during backward, sent in all, and what one gradient has."""
    record = optimizer.last_step
    assert record is not None
    early_bytes = sum(transfer.n_bytes for transfer in record.backward.transfers)
    one = sum(4 * p._local_tensor.numel() for p in optimizer.param_groups[0]["params"])
    return {"early": early_bytes, "all": record.grad_bytes, "one": one}


def trained(plan: dict[str, Any] | None, clip: Clip | None = None, **options: Any) -> Any:
    model = sharded(**options)
    optimizer = optimize(model, plan)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="gradients were changed after")
        norms = train(model, optimizer, range(5), clip)
    sent = {} if plan is None or plan["device"] == "cpu" else grad_bytes(optimizer)
    return {"weights": weights(model), "norms": norms, "bytes": sent}
