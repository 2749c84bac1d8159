"""Masters against weights: which saved ones count, and what is noticed of outside changes."""

from __future__ import annotations

import copy
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import dos
from dos.masters import SAMPLED, MasterPart, Masters, _sampled
from dos.memory import Gates
from tests.cpu.state_cases import (
    PLANS,
    adamw,
    after_three,
    assert_same,
    copied,
    each_plan,
    make_parameters,
    take_steps,
    words,
)

BF16 = torch.bfloat16
ON_DEVICE = [plan for plan in PLANS if plan["device"] == "virtual"]


def resumed(
    saved: dict[str, Any], weights: list[torch.nn.Parameter], plan: dict[str, Any], *, first: str
) -> tuple[list[torch.nn.Parameter], dos.DOSOptimizer]:
    """Model and optimizer, made afresh and then loaded, one of them first."""
    parameters = make_parameters(BF16)
    optimizer = dos.DOSOptimizer(adamw(parameters), **plan)

    def load_model() -> None:
        with torch.no_grad():
            for parameter, weight in zip(parameters, weights, strict=True):
                parameter.copy_(weight)

    for what in (first, "model" if first == "optimizer" else "optimizer"):
        load_model() if what == "model" else optimizer.load_state_dict(saved)
    return parameters, optimizer


# ---------------------------------------------------------------- loaded


@pytest.mark.parametrize("first", ["model", "optimizer"])
@each_plan
def test_model_and_optimizer_load_in_either_order(plan: dict[str, Any], first: str) -> None:
    parameters, optimizer = after_three(PLANS[0], BF16)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copied(parameters)
    take_steps(optimizer, parameters, range(3, 6))
    others, other = resumed(saved, weights, plan, first=first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take_steps(other, others, range(3, 6))
    assert_same(parameters, others)


def master_where_one_weight_differs(plan: dict[str, Any], first: str) -> Any:
    parameters, optimizer = after_three(PLANS[0], BF16)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = copied(parameters)
    with torch.no_grad():
        weights[0][49, 59] = 5.0
    for group in saved["param_groups"]:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    others, other = resumed(saved, weights, plan, first=first)
    expected = saved["state"][0]["master"].clone()
    expected[49, 59] = 5.0
    return others, other, expected


@pytest.mark.parametrize("first", ["model", "optimizer"])
@each_plan
def test_where_a_master_does_not_round_to_its_weight_the_weight_wins(
    plan: dict[str, Any], first: str
) -> None:
    parameters, optimizer, expected = master_where_one_weight_differs(plan, first)
    with pytest.warns(UserWarning, match="^1 elements of the loaded fp32 masters"):
        take_steps(optimizer, parameters, range(1))
    assert torch.equal(optimizer.state[parameters[0]]["master"], expected)


def test_that_the_weight_wins_is_said_once() -> None:
    parameters, optimizer, _ = master_where_one_weight_differs(PLANS[3], "model")
    with pytest.warns(UserWarning, match="masters"):
        take_steps(optimizer, parameters, range(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        take_steps(optimizer, parameters, range(1, 3))


@each_plan
def test_without_a_saved_master_the_weight_is_the_master(plan: dict[str, Any]) -> None:
    parameters, optimizer = after_three(plan, BF16)
    saved = copy.deepcopy(optimizer.state_dict())
    for its in saved["state"].values():
        del its["master"]
    others = copied(parameters)
    fresh = dos.DOSOptimizer(adamw(others), **plan)
    for one in (fresh, optimizer):
        one.load_state_dict(saved)
    take_steps(fresh, others, range(3, 6))
    take_steps(optimizer, parameters, range(3, 6))
    assert_same(parameters, others)


@each_plan
def test_state_that_torch_cast_to_16_bits_loads(plan: dict[str, Any]) -> None:
    parameters, optimizer = after_three(plan, BF16)
    torchs = adamw(parameters)
    torchs.load_state_dict(optimizer.state_dict())
    take_steps(torchs, parameters, range(3, 5))
    optimizer.load_state_dict(torchs.state_dict())
    with pytest.warns(UserWarning, match="masters"):
        take_steps(optimizer, parameters, range(5, 6))
    assert torch.equal(parameters[0], optimizer.state[parameters[0]]["master"].to(BF16))


# ---------------------------------------------------------------- changed outside


@pytest.mark.parametrize("element", [0, -1])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@each_plan
def test_a_write_through_data_to_the_first_or_last_element_is_noticed(
    plan: dict[str, Any], dtype: torch.dtype, element: int
) -> None:
    parameters, optimizer = after_three(plan, dtype)
    for parameter in parameters[:2]:
        parameter.data.view(-1)[element] = 5.0
    optimizer.param_groups[0]["lr"] = 0.0
    take_steps(optimizer, parameters, range(3, 4))
    assert [float(p.detach().view(-1)[element]) for p in parameters[:2]] == [5.0, 5.0]


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("plan", ON_DEVICE, ids=str)
def test_a_parameter_of_which_a_sample_changed_is_taken_up_whole(
    plan: dict[str, Any], dtype: torch.dtype
) -> None:
    parameters, optimizer = after_three(plan, dtype)
    parameters[0].data.fill_(5.0)
    optimizer.param_groups[0]["lr"] = 0.0
    take_steps(optimizer, parameters, range(3, 4))
    assert (parameters[0] == 5.0).all()


@pytest.mark.parametrize("refresh", [True, False])
@pytest.mark.parametrize("plan", ON_DEVICE, ids=str)
def test_a_write_beside_the_sample_is_taken_up_by_refresh_only(
    plan: dict[str, Any], refresh: bool
) -> None:
    parameters, optimizer = after_three(plan, BF16)
    parameters[0].data.view(-1)[1] = 5.0
    if refresh:
        optimizer.refresh_master_weights()
    optimizer.param_groups[0]["lr"] = 0.0
    take_steps(optimizer, parameters, range(3, 4))
    assert (float(parameters[0].detach().view(-1)[1]) == 5.0) is refresh


@each_plan
def test_refresh_of_unchanged_weights_changes_no_bit(plan: dict[str, Any]) -> None:
    parameters, optimizer = after_three(plan, BF16)
    others, other = after_three(plan, BF16)
    other.refresh_master_weights()
    take_steps(optimizer, parameters, range(3, 6))
    take_steps(other, others, range(3, 6))
    assert_same(parameters, others)


def test_nan_in_a_weight_counts_as_its_rounding() -> None:
    masters, weight = Masters(Gates()), torch.tensor([float("nan"), 1.0], dtype=BF16)
    # Another NaN, in sign and payload, than a conversion would give.
    master = torch.tensor([-4194303, 1065353216], dtype=torch.int32).view(torch.float32)
    before = master.clone()
    masters.add(weight, [MasterPart(master, 0, 0)])
    masters.expect(0, loaded=True)
    masters.fill()
    assert torch.equal(words(master), words(before))


@given(st.integers(1, 5000), st.lists(st.integers(0, 5000), max_size=4))
@example(64, [])
@example(SAMPLED * 1000, [1])
def test_the_sample_is_the_same_however_a_parameter_is_cut(numel: int, cuts: list[int]) -> None:
    borders = [0, *sorted({cut for cut in cuts if 0 < cut < numel}), numel]
    memory = torch.empty(numel)
    elements: list[int] = []
    for start, stop in pairwise(borders):
        for first, count, step in _sampled(numel, MasterPart(memory[start:stop], start, 0)):
            elements += range(first, first + count * step, step)
            assert start <= first <= elements[-1] < stop
    whole = [
        (first, count, step) for first, count, step in _sampled(numel, MasterPart(memory, 0, 0))
    ]
    assert elements == [e for first, n, step in whole for e in range(first, first + n * step, step)]
    assert elements[0] == 0
    assert elements[-1] == numel - 1
    assert len(set(elements)) == len(elements) <= SAMPLED
