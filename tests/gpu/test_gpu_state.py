"""State on a real accelerator: saved, loaded from anywhere, checked against weights, added to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from dos import DOSOptimizer

pytestmark = pytest.mark.gpu

NUMELS = (5000, 333, 20_000)
PLANS: list[dict[str, Any]] = [
    {"stride": "host"},
    {"stride": 1, "subgroup_size": 2048},
    {"stride": 1.5, "resident_ratio": 0.4, "subgroup_size": 3000},
]
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def accelerator() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


def make_parameters(home: torch.device, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(numel, generator=generator) for numel in NUMELS)
    return [torch.nn.Parameter(value.to(dtype).to(home)) for value in values]


def take_steps(optimizer: DOSOptimizer, parameters: list[torch.nn.Parameter], seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in parameters:
            grad = torch.randn(parameter.shape, generator=generator)
            parameter.grad = grad.to(parameter.dtype).to(parameter.device)
        optimizer.step()


def bits(parameters: list[torch.nn.Parameter]) -> list[list[int]]:
    return [p.detach().cpu().view(INTEGERS[p.dtype]).tolist() for p in parameters]


def after_three(dtype: torch.dtype, **plan: Any) -> tuple[list[torch.nn.Parameter], DOSOptimizer]:
    parameters = make_parameters(accelerator(), dtype)
    optimizer = DOSOptimizer(torch.optim.AdamW(parameters, lr=1e-2), **plan)
    take_steps(optimizer, parameters, range(3))
    return parameters, optimizer


@pytest.mark.parametrize("source", ["cpu", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_state_loads_from_either_memory_with_the_same_bits_from_there_on(
    plan: dict[str, Any], dtype: torch.dtype, source: str
) -> None:
    parameters, optimizer = after_three(dtype, **PLANS[1])
    saved = copy.deepcopy(optimizer.state_dict())
    others = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    other = DOSOptimizer(torch.optim.AdamW(others), **plan)
    if source == "device":
        for its in saved["state"].values():
            its.update({name: value.to(accelerator()) for name, value in its.items()})
    other.load_state_dict(saved)
    take_steps(optimizer, parameters, range(3, 6))
    take_steps(other, others, range(3, 6))
    assert bits(parameters) == bits(others)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_tensor_of_a_state_dict_is_in_host_memory(plan: dict[str, Any]) -> None:
    _, optimizer = after_three(torch.bfloat16, **plan)
    state = optimizer.state_dict()["state"]
    assert {value.device.type for its in state.values() for value in its.values()} == {"cpu"}


def test_loading_keeps_nothing_on_the_device() -> None:
    _, optimizer = after_three(torch.bfloat16, stride=2)
    saved = copy.deepcopy(optimizer.state_dict())
    before = torch.cuda.memory_allocated()
    for its in saved["state"].values():
        its.update({name: value.to(accelerator()) for name, value in its.items()})
    optimizer.load_state_dict(saved)
    del saved, its
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_write_through_data_to_the_last_element_is_noticed(
    plan: dict[str, Any], dtype: torch.dtype
) -> None:
    parameters, optimizer = after_three(dtype, **plan)
    for parameter in parameters:
        parameter.data[-1] = 5.0
    optimizer.param_groups[0]["lr"] = 0.0
    take_steps(optimizer, parameters, range(3, 4))
    assert [float(parameter.detach()[-1]) for parameter in parameters] == [5.0] * len(parameters)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_an_added_group_trains_to_the_bits_of_the_host(plan: dict[str, Any]) -> None:
    ends = []
    for home, options in ((accelerator(), plan), (torch.device("cpu"), {})):
        parameters = make_parameters(home, torch.bfloat16)
        optimizer = DOSOptimizer(torch.optim.AdamW(parameters), **options)
        take_steps(optimizer, parameters, range(2))
        added = make_parameters(home, torch.float32)
        optimizer.add_param_group({"params": added})
        take_steps(optimizer, [*parameters, *added], range(2, 5))
        ends.append(bits([*parameters, *added]))
    assert ends[0] == ends[1]
