"""How two processes train with FSDP2; `test_fsdp.py` says what is to come of it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dos
from dos.execute.work import DTYPES
from dos.kernels import cast, norm
from tests.integration.processes.fsdp_model import (
    PLANS,
    TWO,
    backward,
    grad_bytes,
    mesh,
    optimize,
    sharded,
    train,
    trained,
    weights,
    whole,
)
from tests.integration.processes.pair import scenario

MAX_NORM = 0.05


@scenario
def plain() -> Any:
    return {name: trained(plan) for name, plan in [("torch", None), *PLANS.items()]}


@scenario
def bf16_weights() -> Any:
    return {name: trained(plan, dtype=torch.bfloat16) for name, plan in PLANS.items()}


@scenario
def mixed_precision() -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    chosen = [("torch", None), ("cpu", PLANS["cpu"]), ("host", PLANS["host"]), ("two", TWO)]
    return {name: trained(plan, mp_policy=policy) for name, plan in chosen}


def clip_ours(model: nn.Module, optimizer: Any, norm_type: float = 2.0) -> Any:
    return optimizer.clip_grad_norm_(MAX_NORM, norm_type)


def clip_torch(model: nn.Module, optimizer: Any, foreach: bool) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=foreach)


@scenario
def clipped_by_the_optimizer() -> Any:
    return {
        f"{name}, {norm_type}": trained(plan, partial(clip_ours, norm_type=norm_type))
        for name, plan in PLANS.items()
        for norm_type in (2.0, math.inf)
    }


@scenario
def clipped_by_torch() -> Any:
    chosen = [("torch", None), ("cpu", PLANS["cpu"]), ("two", TWO), ("all", PLANS["all"])]
    return {
        f"{name}, foreach={foreach}": trained(plan, partial(clip_torch, foreach=foreach))
        for name, plan in chosen
        for foreach in (False, True)
    }


@scenario
def norms() -> Any:
    """Ours, what it is to be by the stated order, and by all gradients in one place."""
    model = sharded()
    optimizer = optimize(model, TWO)
    backward(model, 0)
    grads = [parameter.grad for parameter in model.parameters()]
    shards = [grad._local_tensor for grad in grads]
    fp32 = DTYPES[torch.float32]
    looked = [cast.examine(shard.data_ptr(), shard.numel(), fp32) for shard in shards]
    here = norm.square_sum([its.square_sum for its in looked])
    both = [torch.zeros(1, dtype=torch.float64) for _ in range(2)]
    distributed.all_gather(both, torch.tensor([here], dtype=torch.float64))
    flat = torch.cat([whole(grad).reshape(-1) for grad in grads]).double()
    largest = optimizer.clip_grad_norm_(math.inf, math.inf)  # clips nothing
    return {
        "ours": optimizer.clip_grad_norm_(MAX_NORM),
        "in order": norm.norm([each.item() for each in both]),
        "at once": flat.norm().item(),
        "largest": largest.item(),
        "largest at once": flat.abs().max().item(),
    }


@scenario
def replicated() -> Any:
    """Two replicas of everything: each gradient counts once."""
    model = sharded(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s")))
    optimizer = optimize(model, TWO)
    backward(model, 0)
    flat = torch.cat([whole(p.grad).reshape(-1) for p in model.parameters()]).double()
    return {"ours": optimizer.clip_grad_norm_(MAX_NORM).item(), "at once": flat.norm().item()}


@scenario
def a_process_without_elements() -> Any:
    found = {}
    for name, plan in [("torch", None), *PLANS.items()]:
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(7, 1), mesh=mesh())
        optimizer = optimize(model, plan)
        train(model, optimizer, range(3))
        found[name] = weights(model)
    return found


@scenario
def accumulated() -> Any:
    """Three backwards a step, of which the last one reduces."""
    found = {}
    for name in ("cpu", "host"):
        model = sharded()
        optimizer = optimize(model, PLANS[name])
        for step in range(4):
            for part in range(3):
                model.set_requires_gradient_sync(part == 2)  # type: ignore[operator]
                backward(model, 3 * step + part)
            optimizer.step()
            optimizer.zero_grad()
        sent = {} if name == "cpu" else grad_bytes(optimizer)
        found[name] = {"weights": weights(model), "bytes": sent}
    return found


@scenario
def more_backwards_than_learned() -> Any:
    """Gradients are on their way when a further backward, which no hook announces, adds to them."""
    late = {**PLANS["host"], "device": dos.VirtualDevice(poison=True, jitter_seed=3)}
    found = {}
    for name, plan in [("cpu", PLANS["cpu"]), ("late", late)]:
        model = sharded()
        optimizer = optimize(model, plan)
        for step, backwards in enumerate([1, 3, 2, 1, 2, 1]):
            for part in range(backwards):
                backward(model, 3 * step + part)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        found[name] = weights(model)
    return found


@scenario
def changed_weights() -> Any:
    """16-bit weights that others write to between steps, by every kind of operation."""
    found = {}
    for name in ("cpu", "two"):
        model = sharded(torch.bfloat16)
        optimizer = optimize(model, PLANS[name])
        for step in range(4):
            train(model, optimizer, range(step, step + 1))
            with torch.no_grad():
                if step == 0:
                    model.first.weight.mul_(0.5)
                elif step == 1:
                    model.first.weight.to_local().mul_(3.0)
                elif step == 2:
                    torch._foreach_mul_(list(model.parameters()), 0.25)
        masters = [whole(optimizer.state[p]["master"]) for p in model.parameters()]
        found[name] = {"weights": weights(model), "masters": masters}
    return found


@scenario
def loss_scaled() -> Any:
    """The third step overflows in one process only; both are to skip it."""
    found = {}
    for name, plan in [("torch", None), ("cpu", PLANS["cpu"]), ("two", TWO)]:
        model = sharded()
        optimizer = optimize(model, plan)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(5):
            backward(model, step, scaler)
            if step == 2 and distributed.get_rank() == 1:
                next(model.first.parameters()).grad._local_tensor[0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found[name] = {"weights": weights(model), "scale": scaler.get_scale()}
    return found
