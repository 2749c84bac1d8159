"""What two processes do with DistributedDataParallel; `test_ddp.py` says what is to come of it."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import dos
from dos.errors import ConfigError
from tests.integration.processes.pair import scenario

HOST: dict[str, Any] = {"device": "virtual", "stride": "host", "subgroup_size": 2048}
TWO: dict[str, Any] = {
    "device": dos.VirtualDevice(poison=True, jitter_seed=1),
    "stride": 2,
    "subgroup_size": 2048,
}
OVERLAPPED: dict[str, Any] = {**TWO, "overlap_forward": True}
CPU: dict[str, Any] = {"device": "cpu"}

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "static graph, bucket views": {"static_graph": True, "gradient_as_bucket_view": True},
    "no_sync": {"backwards": 3},
    "no_sync, bucket views": {"backwards": 3, "gradient_as_bucket_view": True},
    "every backward reduces": {"backwards": 2, "no_sync": False},
    "every backward reduces, bucket views": {
        "backwards": 2,
        "no_sync": False,
        "gradient_as_bucket_view": True,
    },
    "zeroed": {"set_to_none": False},
    "zeroed, bucket views": {"set_to_none": False, "gradient_as_bucket_view": True},
    "unused in one process": {"find_unused_parameters": True, "unused": "in one process"},
    "unused in one process, bucket views": {
        "find_unused_parameters": True,
        "gradient_as_bucket_view": True,
        "unused": "in one process",
    },
    "unused at times": {"find_unused_parameters": True, "unused": "at times"},
}
WIDTH = 64  # so that every piece is a whole number of cache lines


class Model(nn.Module):
    """Several buckets; one layer may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, use_all: bool = True) -> torch.Tensor:
        for layer in self.layers if use_all else self.layers[:2]:
            x = torch.tanh(layer(x))
        return x


def optimize(model: nn.Module, plan: dict[str, Any] | None) -> Any:
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return inner if plan is None else dos.DOSOptimizer(inner, **plan)


def uses_all(unused: str, step: int) -> bool:
    """Whether this process needs the last layer in this step."""
    if unused == "in one process":
        return (step + distributed.get_rank()) % 2 == 0
    return unused != "at times" or step % 2 == 0


def backward(model: nn.Module, number: int, use_all: bool = True) -> None:
    seed = 2 * number + distributed.get_rank()
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
    model(x, use_all).square().mean().backward()


def trained(
    plan: dict[str, Any] | None,
    *,
    register: bool = False,
    backwards: int = 1,
    no_sync: bool = True,
    set_to_none: bool = True,
    unused: str = "nowhere",
    hook: Any = None,
    **ddp: Any,
) -> dict[str, Any]:
    """Weights after four steps; per step, bytes sent during backward and in all; warnings."""
    module = Model()
    model = DistributedDataParallel(module, bucket_cap_mb=0.02, **ddp)  # type: ignore[arg-type]
    optimizer = optimize(module, plan)
    if register:
        dos.register_ddp(model, optimizer, **({} if hook is None else {"hook": hook}))
    elif hook is not None:
        model.register_comm_hook(None, hook)
    early, total = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            for part in range(backwards):
                last = part == backwards - 1
                with model.no_sync() if no_sync and not last else nullcontext():
                    backward(model, backwards * step + part, uses_all(unused, step))
            optimizer.step()
            if plan is not None and not plan.get("overlap_forward"):
                record = optimizer.last_step
                early.append(sum(transfer.n_bytes for transfer in record.backward.transfers))
                total.append(record.grad_bytes)
            optimizer.zero_grad(set_to_none=set_to_none)
    if plan is not None:
        optimizer.synchronize()
    return {
        "weights": [parameter.detach() for parameter in module.parameters()],
        "early": early,
        "all": total,
        "one": 4 * sum(parameter.numel() for parameter in module.parameters()),
        "warnings": [str(w.message) for w in caught if "gradients were changed" in str(w.message)],
    }


@scenario
def ddp_modes() -> Any:
    return {
        mode: {
            "torch": trained(None, **options),
            "cpu": trained(CPU, **options),
            "registered": trained(HOST, register=True, **options),
            "registered, two": trained(TWO, register=True, **options),
            "registered, overlapped": trained(OVERLAPPED, register=True, **options),
            "unregistered": trained(HOST, **options),
            "unregistered, two": trained(TWO, **options),
            "unregistered, overlapped": trained(OVERLAPPED, **options),
        }
        for mode, options in MODES.items()
    }


@scenario
def ddp_hook() -> Any:
    """With a communication hook of the user's own."""
    return {
        "cpu": trained(CPU, hook=fp16_compress_hook),
        "registered": trained(HOST, register=True, hook=fp16_compress_hook),
    }


@scenario
def ddp_on_the_host() -> Any:
    """Where nothing is sent the model's one hook stays free."""
    model = DistributedDataParallel(Model())
    dos.register_ddp(model, optimize(model.module, CPU))
    model.register_comm_hook(None, fp16_compress_hook)
    try:
        dos.register_ddp(model, optimize(model.module, HOST))
    except RuntimeError as error:
        return str(error)
    return "no error"


@scenario
def ddp_released() -> Any:
    """`release_grads`: nothing of DDP's is released; unregistered it is refused."""
    plan = {**HOST, "release_grads": True}
    try:
        trained(plan)
        error = "no error"
    except ConfigError as refused:
        error = str(refused)
    return {"error": error, "registered": trained(plan, register=True), "cpu": trained(CPU)}


@scenario
def ddp_two_optimizers() -> Any:
    """Of one model; one of them is lost before the last backward."""
    found = {}
    for name, plan in [("cpu", CPU), ("registered", HOST)]:
        module = Model()
        model = DistributedDataParallel(module)
        both = [optimize(layer, plan) for layer in module.layers[:2]]
        if name == "registered":
            dos.register_ddp(model, *both)
        for step in range(3):
            backward(model, step)
            for optimizer in both:
                optimizer.step()
            model.zero_grad()
        early = [
            sum(transfer.n_bytes for transfer in optimizer.last_step.backward.transfers)
            for optimizer in both
        ]
        both.pop().close()
        backward(model, 3)
        both[0].step()
        found[name] = {"weights": [p.detach() for p in module.parameters()], "early": early}
    return found
