"""How two processes hold and restore state of DTensors; `test_held.py` says what comes of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dos
from dos.memory.pieces import Pieces
from tests.cpu.held_cases import SlowCapture
from tests.integration.processes.fsdp_model import PLANS, mesh, optimize, sharded, train, whole
from tests.integration.processes.pair import scenario

KINDS = ("master", "exp_avg", "exp_avg_sq")
HALF = torch.bfloat16


def pieces_of(tree: dict[str, Any]) -> dict[str, Any]:
    """Per kind and name: the shape of the whole, and copies of what lies here by first element."""
    return {
        f"{kind} {name}": (
            (leaf.shape, {start: part.clone() for start, part in leaf.parts.items()})
            if isinstance(leaf, Pieces)
            else (tuple(leaf.shape), {0: leaf.clone().reshape(-1)})
        )
        for kind in KINDS
        for name, leaf in tree[kind].items()
    }


def wholes_of(optimizer: dos.DOSOptimizer) -> dict[str, torch.Tensor]:
    """The same by the documented `state`, whole."""
    found = {}
    for index, parameter in enumerate(optimizer.param_groups[0]["params"]):
        state = optimizer.state[parameter]
        for kind in KINDS:
            if kind in state:
                found[f"{kind} 0.{index}"] = whole(state[kind])
    return found


def fill(target: dict[str, Any], wholes: dict[str, torch.Tensor]) -> None:
    """Read into the pieces what belongs there."""
    for kind, leaves in target.items():
        for name, leaf in leaves.items():
            source = wholes[f"{kind} {name}"].reshape(-1)
            parts = leaf.parts if isinstance(leaf, Pieces) else {0: leaf.view(-1)}
            for start, part in parts.items():
                part.copy_(source[start : start + part.numel()])


@scenario
def held_by_plan() -> Any:
    """A slow capture while training goes on, beside what the state was."""
    found = {}
    for name, plan in PLANS.items():
        model = sharded(HALF)
        optimizer = optimize(model, plan)
        train(model, optimizer, range(2))
        expected, weights = wholes_of(optimizer), [whole(p) for p in model.parameters()]
        held = optimizer.hold_state()
        capture = SlowCapture(held, distributed.get_rank())
        train(model, optimizer, range(2, 4))
        capture.join()
        captured = [capture.of(p.to_local().detach()) for p in model.parameters()]
        other = sharded(HALF)
        follower = optimize(other, PLANS["two"])
        train(other, follower, range(9, 10))
        fill(follower.restore_target(held.tree), expected)
        follower.restored()
        found[name] = {
            "expected": expected,
            "captured": pieces_of(capture.state_tree()),
            "weights": weights,
            "captured weights": captured,
            "restored": wholes_of(follower),
        }
    return found


def placed(generator: torch.Generator) -> list[nn.Parameter]:
    """Parameters placed in every way, one of them in another memory order than row-major."""
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    places: list[Any] = [
        (mesh(), [Shard(0)]),
        (mesh(), [Shard(1)]),
        (mesh(), [Shard(2)]),
        (grid, [Replicate(), Shard(1)]),
        (grid, [Shard(1), Shard(1)]),
        (grid, [Shard(2), Shard(0)]),
        (mesh(), [Replicate()]),
    ]
    values = [torch.randn(5, 3, 7, generator=generator).to(HALF) for _ in places]
    parameters = [distribute_tensor(v, *place) for v, place in zip(values, places, strict=True)]
    turned = torch.randn(4, 5, generator=generator).to(HALF).t()
    parameters.append(DTensor.from_local(turned, mesh(), [Shard(1)]))
    return [nn.Parameter(parameter) for parameter in parameters]


def some_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    for index, parameter in enumerate(parameters):
        local = parameter.to_local()
        generator = torch.Generator().manual_seed(seed + index)
        grad = torch.randn(local.shape, generator=generator).to(HALF)
        parameter.grad = DTensor.from_local(
            torch.empty_like(local).copy_(grad),
            parameter.device_mesh,
            parameter.placements,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


@scenario
def held_by_placement() -> Any:
    found = {}
    for name, plan in PLANS.items():
        parameters = placed(torch.Generator().manual_seed(0))
        optimizer = optimize(nn.ParameterList(parameters), plan)
        some_gradients(parameters, 1)
        optimizer.step()
        expected = wholes_of(optimizer)
        held = optimizer.hold_state()
        pieces = pieces_of(held.tree)
        held.abandon()
        some_gradients(parameters, 50)
        optimizer.step()
        target = optimizer.restore_target(held.tree)
        fill(target, expected)
        optimizer.restored()
        found[name] = {
            "expected": expected,
            "captured": pieces,
            "restored": wholes_of(optimizer),
        }
    return found
