"""How two processes save and load state of DTensors, and what such tensors may be."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import dos
from dos.errors import ConfigError
from tests.integration.processes.fsdp_model import (
    PLANS,
    TWO,
    Model,
    mesh,
    optimize,
    sharded,
    train,
    weights,
    whole,
)
from tests.integration.processes.pair import scenario

ROUND_TRIPS = {
    "sharded": {},
    "flattened": {"flatten_optimizer_state_dict": True},
    "whole": {"full_state_dict": True},
    "broadcast": {"full_state_dict": True, "cpu_offload": True, "broadcast_from_rank0": True},
}


@scenario
def round_trips() -> Any:
    """Three steps, saved, loaded into another optimizer, three more; beside six at once."""
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = sharded(dtype)
        train(model, optimize(model, TWO), range(6))
        found[f"{dtype}, at once"] = weights(model)
        for name, options in ROUND_TRIPS.items():
            choice = StateDictOptions(**options)
            model = sharded(dtype)
            optimizer = optimize(model, TWO)
            train(model, optimizer, range(3))
            saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=choice))
            other = sharded(dtype)
            set_model_state_dict(other, get_model_state_dict(model))
            follower = optimize(other, PLANS["host"])
            set_optimizer_state_dict(other, follower, saved, options=choice)
            train(other, follower, range(3, 6))
            found[f"{dtype}, {name}"] = weights(other)
    return found


@scenario
def saved_for_one_process() -> Any:
    """Saved by DCP in pieces; returns the whole of it."""
    model = sharded(torch.bfloat16)
    optimizer = optimize(model, TWO)
    train(model, optimizer, range(3))
    state = get_optimizer_state_dict(model, optimizer)
    path = os.path.join(os.environ["CHECKPOINTS"], "dcp")
    dcp.save({"model": get_model_state_dict(model), "optimizer": state}, checkpoint_id=path)
    return {
        "weights": weights(model),
        "state": {
            name: {kind: whole(tensor) for kind, tensor in entry.items()}
            for name, entry in state["state"].items()
        },
    }


@scenario
def states() -> Any:
    """Where state lies, and what asking for it before the first step changes."""
    model = sharded()
    optimizer = optimize(model, TWO)
    before = weights(model)
    get_optimizer_state_dict(model, optimizer)
    after = weights(model)
    train(model, optimizer, range(2))
    kinds = ("exp_avg", "exp_avg_sq")
    return {
        "unchanged": all(torch.equal(*both) for both in zip(before, after, strict=True)),
        "placed as the parameters": all(
            state[kind].placements == parameter.placements
            and state[kind].device_mesh == parameter.device_mesh
            and state[kind].shape == parameter.shape
            and state[kind].to_local().shape == parameter.to_local().shape
            for parameter, state in optimizer.state.items()
            for kind in kinds
        ),
    }


@scenario
def from_one_process() -> Any:
    """The state dict of a plain AdamW on a whole model, loaded by every process."""
    alone = Model()
    theirs = optimize(alone, None)
    for parameter in alone.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    theirs.step()
    model = sharded()
    optimizer = optimize(model, TWO)
    optimizer.load_state_dict(theirs.state_dict())
    pairs = zip(alone.parameters(), model.parameters(), strict=True)
    return [
        torch.equal(theirs.state[one]["exp_avg"], whole(optimizer.state[part]["exp_avg"]))
        for one, part in pairs
    ]


def versions(parameters: list[nn.Parameter]) -> list[int]:
    """Of each parameter and of its shard."""
    return [t._version for p in parameters for t in (p, getattr(p, "_local_tensor", p))]


@scenario
def many_placements() -> Any:
    """Parameters on two meshes, placed in every way, beside a plain one; gradients are given."""
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    places: list[Any] = [
        (mesh(), [Shard(0)]),
        (grid, [Replicate(), Shard(1)]),
        (mesh(), [Replicate()]),
        (grid, [Shard(1), Replicate()]),
        None,
    ]
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(5, 7, generator=generator) for _ in places]
    grads = [torch.randn(5, 7, generator=generator) for _ in places]

    def placed(whole: torch.Tensor, place: Any) -> torch.Tensor:
        copied = whole.clone()  # a replica would be the very tensor
        return copied if place is None else distribute_tensor(copied, *place)

    found: dict[str, Any] = {"norm": torch.cat(grads).double().norm().item()}
    for name, plan in [("torch", None), *PLANS.items()]:
        parameters = [nn.Parameter(placed(*both)) for both in zip(values, places, strict=True)]
        for parameter, grad, place in zip(parameters, grads, places, strict=True):
            parameter.grad = placed(grad, place)
        if plan is None:
            for parameter in parameters:  # torch mixes no meshes in one call
                torch.optim.AdamW([parameter], lr=1e-2).step()
        else:
            optimizer = optimize(nn.ParameterList(parameters), plan)
            found[f"{name}, norm"] = optimizer.clip_grad_norm_(1e9).item()
            before = versions(parameters)
            optimizer.step()
            pairs = zip(before, versions(parameters), strict=True)
            found[f"{name}, counted"] = all(then < now for then, now in pairs)
        found[f"{name}, weights"] = [whole(parameter) for parameter in parameters]
    return found


@scenario
def gradients_to_be_summed() -> Any:
    """A gradient whose terms are still in both processes, as tensor parallelism leaves it."""
    found = {}
    for name in ("cpu", "two"):
        start = torch.arange(10.0)
        parameter = nn.Parameter(distribute_tensor(start, mesh(), [Replicate()]))
        optimizer = dos.DOSOptimizer(torch.optim.AdamW([parameter], lr=1e-2), **PLANS[name])
        here = torch.full((10,), float(1 + distributed.get_rank()))
        parameter.grad = DTensor.from_local(here, mesh(), [Partial()])
        total = optimizer.clip_grad_norm_(1e9).item()
        optimizer.step()
        found[name] = {"norm": total, "exp_avg": whole(optimizer.state[parameter]["exp_avg"])}
    return found


@scenario
def refused() -> Any:
    """What the errors say."""
    found = {}
    summed = nn.Parameter(DTensor.from_local(torch.ones(4), mesh(), [Partial()]))
    with _error(found, "partial parameter"):
        optimize(nn.ParameterList([summed]), TWO)
    parameter = nn.Parameter(distribute_tensor(torch.ones(4), mesh(), [Shard(0)]))
    optimizer = optimize(nn.ParameterList([parameter]), TWO)
    other = nn.Parameter(torch.ones(4))
    mixed = optimize(nn.ParameterList([other]), TWO)
    other.grad = distribute_tensor(torch.ones(4), mesh(), [Replicate()])
    with _error(found, "gradient of a plain parameter"):
        mixed.step()
    parameter.grad = distribute_tensor(torch.ones(4), mesh(), [Shard(0)])
    optimizer.step()
    state = optimizer.state_dict()
    placed = distribute_tensor(torch.ones(4), mesh(), [Replicate()])
    state["state"][0]["exp_avg"] = placed
    with _error(found, "state placed otherwise"):
        optimizer.load_state_dict(state)
    return found


class _error:
    def __init__(self, found: dict[str, str], name: str) -> None:
        self._found, self._name = found, name

    def __enter__(self) -> None:
        self._found[self._name] = "no error"

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, ConfigError):
            self._found[self._name] = str(error)
            return True
        return False
