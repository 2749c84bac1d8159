"""Parameters, plans and steps for the tests of state: saved, loaded, added to, changed outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dos

PLANS: list[dict[str, Any]] = [
    {"device": "cpu"},
    {"device": "cpu", "subgroup_size": 1500},
    {"device": "virtual", "stride": "host", "subgroup_size": 700},
    {"device": "virtual", "stride": 1, "subgroup_size": 2048},
    {"device": "virtual", "stride": 2, "resident_ratio": 0.5, "subgroup_size": 1024},
]
each_plan = pytest.mark.parametrize("plan", PLANS, ids=str)


def make_parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """One that lies in several subgroups, small ones, one in another memory order."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(50, 60), (11,), (), (0, 3)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    last = torch.randn(2, 3, 4, 5, generator=generator)
    values.append(last.to(memory_format=torch.channels_last))
    return [torch.nn.Parameter(value.to(dtype)) for value in values]


def take_steps(
    optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], seeds: range
) -> None:
    """A step per seed, with gradients drawn from it."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


def adamw(parameters: list[torch.nn.Parameter], lr: float = 1e-2) -> torch.optim.AdamW:
    """In two groups."""
    return torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=lr)


def copied(parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Others with the same weights."""
    return [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The raw bits, as integers."""
    return tensor.detach().view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


def assert_same(left: list[torch.nn.Parameter], right: list[torch.nn.Parameter]) -> None:
    """The same bits in every weight."""
    for one, other in zip(left, right, strict=True):
        assert torch.equal(words(one), words(other))


def after_three(plan: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """Parameters and their optimizer after three steps."""
    parameters = make_parameters(dtype)
    optimizer = dos.DOSOptimizer(adamw(parameters), **plan)
    take_steps(optimizer, parameters, range(3))
    return parameters, optimizer
