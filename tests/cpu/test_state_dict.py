"""State dicts: torch's layout, out of and into any plan and torch's own optimizers."""

from __future__ import annotations

import copy
import io
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dos
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
from tests.cpu.tolerances import AFTER_100_STEPS

PAIRS = [*pairwise(PLANS), *pairwise(reversed(PLANS))]


def round_trip(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file)
    return loaded


# ---------------------------------------------------------------- layout


@each_plan
def test_state_dict_is_empty_before_the_first_step(plan: dict[str, Any]) -> None:
    assert dos.DOSOptimizer(adamw(make_parameters()), **plan).state_dict()["state"] == {}


def test_state_dict_has_the_keys_of_torch() -> None:
    parameters, optimizer = after_three({"device": "cpu"})
    torchs = adamw(parameters)
    take_steps(torchs, parameters, range(1))
    ours, theirs = optimizer.state_dict(), torchs.state_dict()
    assert ours["state"].keys() == theirs["state"].keys()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"][0].keys() == theirs["state"][0].keys()


@each_plan
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saving_writes_the_bytes_of_the_state(plan: dict[str, Any], dtype: torch.dtype) -> None:
    parameters, optimizer = after_three(plan, dtype)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    kinds = 2 if dtype is torch.float32 else 3
    state_bytes = 4 * kinds * sum(parameter.numel() for parameter in parameters)
    assert file.tell() < state_bytes + 12_000


def test_state_of_a_parameter_over_several_subgroups_is_a_view() -> None:
    parameters, optimizer = after_three({"device": "virtual", "stride": 2, "subgroup_size": 1024})
    optimizer.state[parameters[0]]["exp_avg"].fill_(3.0)
    assert (optimizer.state[parameters[0]]["exp_avg"] == 3.0).all()


@each_plan
@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq", "master"])
def test_state_has_the_same_bits_under_any_plan(plan: dict[str, Any], kind: str) -> None:
    parameters, optimizer = after_three(plan, torch.bfloat16)
    others, reference = after_three({"device": "cpu"}, torch.bfloat16)
    for ours, theirs in zip(parameters, others, strict=True):
        state, expected = optimizer.state[ours][kind], reference.state[theirs][kind]
        assert torch.equal(words(state), words(expected))
        assert state.stride() == ours.stride()


# ---------------------------------------------------------------- resuming


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_loading_into_another_plan_goes_on_with_the_same_bits(
    source: dict[str, Any], target: dict[str, Any], dtype: torch.dtype
) -> None:
    parameters, optimizer = after_three(source, dtype)
    saved, others = round_trip(optimizer.state_dict()), copied(parameters)
    take_steps(optimizer, parameters, range(3, 6))
    resumed = dos.DOSOptimizer(adamw(others, lr=1.0), **target)
    resumed.load_state_dict(saved)
    take_steps(resumed, others, range(3, 6))
    assert_same(parameters, others)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=5),
    st.tuples(st.integers(90, 4000), st.integers(90, 4000)),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_cut_loads_into_any_other(
    numels: list[int], sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    ends = []
    for resumes in (True, False):
        parameters = [torch.nn.Parameter(torch.ones(n, dtype=dtype)) for n in numels]
        optimizer = dos.DOSOptimizer(torch.optim.AdamW(parameters), subgroup_size=sizes[0])
        take_steps(optimizer, parameters, range(2))
        if resumes:
            saved, parameters = optimizer.state_dict(), copied(parameters)
            optimizer = dos.DOSOptimizer(
                torch.optim.AdamW(parameters), subgroup_size=sizes[1], device="virtual", stride=2
            )
            optimizer.load_state_dict(saved)
        take_steps(optimizer, parameters, range(2, 4))
        ends.append(parameters)
    assert_same(*ends)


def near(ours: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> None:
    bound = AFTER_100_STEPS["p"]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=bound.relative, atol=bound.absolute)


@each_plan
def test_from_ours_through_adamw_and_back_is_as_in_adamw(plan: dict[str, Any]) -> None:
    parameters, optimizer = after_three(plan)
    torchs = adamw(parameters)
    torchs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take_steps(torchs, parameters, range(3, 6))
    optimizer.load_state_dict(torchs.state_dict())
    take_steps(optimizer, parameters, range(6, 9))
    others = make_parameters()
    take_steps(adamw(others), others, range(9))
    near(parameters, others)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@each_plan
def test_state_of_torchs_optimizers_loads_with_its_bits(
    plan: dict[str, Any], kind: type[torch.optim.Adam]
) -> None:
    parameters = make_parameters()
    torchs = kind(parameters)
    take_steps(torchs, parameters, range(3))
    optimizer = dos.DOSOptimizer(kind(parameters), **plan)
    optimizer.load_state_dict(torchs.state_dict())
    for parameter in parameters:
        for name, value in torchs.state[parameter].items():
            assert torch.equal(optimizer.state[parameter][name], value)


def test_amsgrads_extra_state_is_ignored() -> None:
    parameters = make_parameters()
    torchs = torch.optim.Adam(parameters, amsgrad=True)
    take_steps(torchs, parameters, range(1))
    saved = torchs.state_dict()
    saved["param_groups"][0]["amsgrad"] = False
    optimizer = dos.DOSOptimizer(torch.optim.Adam(parameters), device="cpu")
    optimizer.load_state_dict(saved)
    assert "max_exp_avg_sq" not in optimizer.state[parameters[0]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32], ids=str)
@each_plan
def test_state_of_any_dtype_and_order_is_taken_in(plan: dict[str, Any], dtype: torch.dtype) -> None:
    parameters, optimizer = after_three(plan)
    saved = copy.deepcopy(optimizer.state_dict())
    expected = saved["state"][0]["exp_avg"].to(dtype)
    saved["state"][0]["exp_avg"] = expected.t().contiguous().t()
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[parameters[0]]["exp_avg"], expected.float())


@each_plan
def test_a_parameter_without_an_entry_was_never_stepped(plan: dict[str, Any]) -> None:
    parameters, optimizer = after_three(plan)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0]
    others = copied(parameters)
    optimizer.load_state_dict(saved)
    assert parameters[0] not in optimizer.state
    fresh = dos.DOSOptimizer(adamw(others), **plan)
    take_steps(optimizer, parameters, range(3, 5))
    take_steps(fresh, others, range(3, 5))
    assert_same(parameters[:1], others[:1])


def test_loading_its_own_views_changes_nothing() -> None:
    parameters, optimizer = after_three(PLANS[3], torch.bfloat16)
    others, same = after_three(PLANS[3], torch.bfloat16)
    same.load_state_dict(same.state_dict())
    take_steps(optimizer, parameters, range(3, 6))
    take_steps(same, others, range(3, 6))
    assert_same(parameters, others)


@each_plan
def test_state_of_torch_that_was_never_stepped_is_none(plan: dict[str, Any]) -> None:
    parameters, optimizer = after_three(plan)
    saved = copy.deepcopy(optimizer.state_dict())
    for value in saved["state"][0].values():
        value.zero_()
    optimizer.load_state_dict(saved)
    assert parameters[0] not in optimizer.state
