"""FSDP2 and DistributedDataParallel on a GPU: what they reduce on streams of their own is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

import dos

pytestmark = pytest.mark.gpu

WIDTH, STEPS = 128, 4
PLANS: dict[str, dict[str, Any]] = {
    "host": {"stride": "host"},
    "two": {"stride": 2, "resident_ratio": 0.3},
    "all": {"stride": 1},
}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[torch.device]:
    """The GPU of the only process of a group."""
    if not (torch.cuda.is_available() and distributed.is_nccl_available()):
        pytest.skip("needs a CUDA device and NCCL")
    device = torch.device("cuda", torch.cuda.current_device())
    distributed.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, device_id=device
    )
    yield device
    distributed.destroy_process_group()


def make_model(home: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(home)


def trained(model: nn.Module, optimizer: dos.DOSOptimizer, home: torch.device) -> list[bytes]:
    """The bits of all weights; all gradients of the last step were sent during backward."""
    with closing(optimizer):
        for step in range(STEPS):
            x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step))
            model(x.to(home)).square().mean().backward()
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        record = optimizer.last_step
        assert record is not None
        assert record.early_grad_bytes == record.grad_bytes
        whole = (getattr(p.detach(), "full_tensor", p.detach)() for p in model.parameters())
        return [weight.cpu().view(torch.uint8).numpy().tobytes() for weight in whole]


def of_fsdp(home: torch.device, plan: dict[str, Any]) -> list[bytes]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = make_model(home), init_device_mesh(home.type, (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return trained(model, dos.DOSOptimizer(inner, subgroup_size=5000, **plan), home)


def of_ddp(home: torch.device, plan: dict[str, Any], *, bucket_views: bool) -> list[bytes]:
    module = make_model(home)
    model = nn.parallel.DistributedDataParallel(
        module, bucket_cap_mb=0.1, gradient_as_bucket_view=bucket_views
    )
    inner = torch.optim.AdamW(module.parameters(), lr=1e-2)
    optimizer = dos.DOSOptimizer(inner, subgroup_size=5000, **plan)
    dos.register_ddp(model, optimizer)
    return trained(model, optimizer, home)


@pytest.mark.parametrize("plan", PLANS)
def test_shards_train_the_same_bits_under_every_plan(home: torch.device, plan: str) -> None:
    assert of_fsdp(home, PLANS[plan]) == of_fsdp(home, PLANS["host"])


@pytest.mark.parametrize("bucket_views", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_reduced_gradients_train_the_same_bits_under_every_plan(
    home: torch.device, plan: str, bucket_views: bool
) -> None:
    expected = of_ddp(home, PLANS["host"], bucket_views=False)
    assert of_ddp(home, PLANS[plan], bucket_views=bucket_views) == expected


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators")
def test_an_optimizer_of_another_accelerator_leaves_the_current_one() -> None:
    current = torch.accelerator.current_accelerator()
    assert current is not None
    torch.accelerator.set_device_index(0)
    other = torch.device(current.type, 1)
    model = make_model(other)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained(model, dos.DOSOptimizer(inner, subgroup_size=5000, stride=2), other)
    assert torch.accelerator.current_device_index() == 0


def test_parameters_of_two_devices_are_refused() -> None:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    both = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, device=found))]
    with pytest.raises(dos.ConfigError, match="one DOSOptimizer per device"):
        dos.DOSOptimizer(torch.optim.AdamW(both))
