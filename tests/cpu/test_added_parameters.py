"""Parameters that come later: `add_param_group` and unfreezing, between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dos
from tests.cpu.state_cases import assert_same, each_plan, make_parameters, take_steps
from tests.cpu.tolerances import AFTER_100_STEPS

Make = Callable[[torch.optim.Optimizer], torch.optim.Optimizer]
BF16 = torch.bfloat16


def more(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Larger in sum than those of `make_parameters`."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(9,), (2000, 3), (5, 5)]
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def grown(make: Make, dtype: torch.dtype = torch.float32) -> Any:
    """All parameters and the optimizer after 3 steps, a new group, 3 steps, another, 3 steps."""
    parameters = make_parameters(dtype)
    optimizer = make(torch.optim.AdamW(parameters, lr=1e-2))
    take_steps(optimizer, parameters, range(3))
    for seed, added in ((3, more(dtype)), (6, make_parameters(dtype))):
        optimizer.add_param_group({"params": added, "lr": 1e-3 * seed})
        parameters += added
        take_steps(optimizer, parameters, range(seed, seed + 3))
    return parameters, optimizer


def wrapping(plan: dict[str, Any]) -> Make:
    return lambda wrapped: dos.DOSOptimizer(wrapped, **plan)


# ---------------------------------------------------------------- the training


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@each_plan
def test_groups_added_between_steps_train_to_the_same_bits_under_any_plan(
    plan: dict[str, Any], dtype: torch.dtype
) -> None:
    parameters, _ = grown(wrapping(plan), dtype)
    assert_same(parameters, grown(wrapping({"device": "cpu"}), dtype)[0])


@each_plan
def test_groups_added_between_steps_train_as_in_torch(plan: dict[str, Any]) -> None:
    bound = AFTER_100_STEPS["p"]
    pairs = zip(grown(wrapping(plan))[0], grown(lambda torchs: torchs)[0], strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=bound.relative, atol=bound.absolute)


@settings(max_examples=30, deadline=None)
@given(
    numels=st.lists(st.lists(st.integers(0, 60), max_size=3), min_size=2, max_size=4),
    stride=st.sampled_from(["host", 1, 1.5, 2, 3]),
    ratio=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    slots=st.integers(1, 2),
    subgroup_size=st.integers(5, 80),
)
def test_any_groups_added_under_any_plan_train_to_the_same_bits(
    numels: list[list[int]], stride: Any, ratio: float, slots: int, subgroup_size: int
) -> None:
    ends = []
    plan = {"stride": stride, "resident_ratio": ratio, "device_slots": slots}
    device = dos.VirtualDevice(poison=True)
    for options in ({"device": "cpu"}, {"device": device, **plan}):
        parameters = [torch.nn.Parameter(torch.ones(7))]
        optimizer = dos.DOSOptimizer(
            torch.optim.AdamW(parameters), subgroup_size=subgroup_size, **options
        )
        for seed, its in enumerate(numels):
            dtype = (torch.float32, BF16)[seed % 2]
            added = [torch.nn.Parameter(torch.ones(n, dtype=dtype)) for n in its]
            optimizer.add_param_group({"params": added})
            parameters += added
            take_steps(optimizer, parameters, range(seed, seed + 1))
        optimizer.close()
        ends.append(parameters)
    assert_same(*ends)


def test_a_saved_state_with_added_groups_loads_where_they_are_there_from_the_start() -> None:
    parameters, optimizer = grown(wrapping({"device": "virtual", "stride": 2}), BF16)
    saved = copy.deepcopy(optimizer.state_dict())
    others = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    groups = [{"params": others[a:b]} for a, b in ((0, 5), (5, 8), (8, 13))]
    other = dos.DOSOptimizer(torch.optim.AdamW(groups), device="cpu")
    other.load_state_dict(saved)
    take_steps(optimizer, parameters, range(9, 12))
    take_steps(other, others, range(9, 12))
    assert_same(parameters, others)


@each_plan
def test_step_counts_of_an_added_group_start_at_zero(plan: dict[str, Any]) -> None:
    parameters, optimizer = grown(wrapping(plan))
    assert [int(optimizer.state[parameters[i]]["step"]) for i in (0, 5, 8)] == [9, 6, 3]


def test_the_wrapped_optimizer_has_the_added_group() -> None:
    wrapped = torch.optim.AdamW(make_parameters())
    group = {"params": more()}
    dos.DOSOptimizer(wrapped, device="cpu").add_param_group(group)
    assert wrapped.param_groups[1] is group


def test_an_added_group_of_frozen_parameters_takes_no_memory() -> None:
    optimizer = dos.DOSOptimizer(torch.optim.AdamW(make_parameters()), device="cpu")
    frozen = torch.nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    optimizer.add_param_group({"params": [frozen]})
    assert len(optimizer._engine._pools) == 1


# ---------------------------------------------------------------- unfreezing


def unfrozen(make: Make) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    """Trained for 2 steps with the first parameter frozen, 2 with it, 2 with it frozen again."""
    parameters = make_parameters()
    parameters[0].requires_grad_(False)
    optimizer = make(torch.optim.AdamW(parameters))
    take_steps(optimizer, parameters[1:], range(2))
    parameters[0].requires_grad_(True)
    take_steps(optimizer, parameters, range(2, 4))
    parameters[0].requires_grad_(False)
    parameters[0].grad = None
    take_steps(optimizer, parameters[1:], range(4, 6))
    return parameters, optimizer


@each_plan
def test_a_parameter_unfrozen_between_steps_trains_as_in_torch(plan: dict[str, Any]) -> None:
    bound = AFTER_100_STEPS["p"]
    pairs = zip(unfrozen(wrapping(plan))[0], unfrozen(lambda torchs: torchs)[0], strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=bound.relative, atol=bound.absolute)


@each_plan
def test_state_of_a_parameter_that_is_frozen_now_is_loaded(plan: dict[str, Any]) -> None:
    parameters, optimizer = unfrozen(wrapping(plan))
    others = make_parameters()
    others[0].requires_grad_(False)
    other = dos.DOSOptimizer(torch.optim.AdamW(others), **plan)
    other.load_state_dict(optimizer.state_dict())
    ours, theirs = optimizer.state[parameters[0]], other.state[others[0]]
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def given_by_hand(make: Make) -> list[torch.nn.Parameter]:
    """Trained for 4 steps, the first parameter frozen but with a gradient."""
    parameters = make_parameters()
    parameters[0].requires_grad_(False)
    take_steps(make(torch.optim.AdamW(parameters)), parameters, range(4))
    return parameters


@each_plan
def test_a_frozen_parameter_given_a_gradient_trains_as_in_torch(plan: dict[str, Any]) -> None:
    bound = AFTER_100_STEPS["p"]
    pairs = zip(given_by_hand(wrapping(plan)), given_by_hand(lambda torchs: torchs), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=bound.relative, atol=bound.absolute)


@each_plan
def test_a_frozen_parameter_stays_frozen_when_it_is_taken_in(plan: dict[str, Any]) -> None:
    assert not given_by_hand(wrapping(plan))[0].requires_grad


def test_gradients_of_a_parameter_taken_in_frozen_are_sent_early_once_it_is_not() -> None:
    parameter, frozen = (torch.nn.Parameter(torch.ones(2048)) for _ in range(2))
    frozen.requires_grad_(False)
    optimizer = dos.DOSOptimizer(
        torch.optim.AdamW([parameter, frozen]), device="virtual", stride="host"
    )
    take_steps(optimizer, [parameter, frozen], range(1))
    frozen.requires_grad_(True)
    for _ in range(3):
        optimizer.zero_grad()
        (parameter * frozen).sum().backward()
        optimizer.step()
    assert optimizer.metrics()["early_grad_bytes"] == parameter.nbytes + frozen.nbytes


# ---------------------------------------------------------------- refused


def overlapping(parameters: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(parameters[0].detach().view(-1)[5:])]


REFUSED: dict[str, Callable[[list[torch.nn.Parameter]], dict[str, Any]]] = {
    "float64": lambda _: {"params": [torch.nn.Parameter(torch.ones(3, dtype=torch.float64))]},
    "more than one parameter group": lambda parameters: {"params": more() + parameters[:1]},
    "shares memory": lambda parameters: {"params": overlapping(parameters)},
    "lr is nan": lambda _: {"params": more(), "lr": float("nan")},
    "amsgrad": lambda _: {"params": more(), "amsgrad": True},
    "host_memory_bytes": lambda _: {"params": [torch.nn.Parameter(torch.ones(1 << 20))]},
}


def refused(message: str) -> tuple[list[torch.nn.Parameter], dos.DOSOptimizer, dict[str, Any]]:
    parameters = make_parameters()
    optimizer = dos.DOSOptimizer(
        torch.optim.AdamW(parameters), device="virtual", stride=2, host_memory_bytes=1 << 20
    )
    take_steps(optimizer, parameters, range(2))
    group = REFUSED[message](parameters)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(group)
    return parameters, optimizer, group


@pytest.mark.parametrize("message", REFUSED)
def test_a_refused_group_is_left_as_it_was(message: str) -> None:
    assert set(refused(message)[2]) <= {"params", "lr", "amsgrad"}


@pytest.mark.parametrize("message", REFUSED)
def test_a_refused_group_leaves_plan_and_groups_alone(message: str) -> None:
    _, optimizer, _ = refused(message)
    assert (len(optimizer.param_groups), len(optimizer.plan.sizes)) == (1, 1)


@pytest.mark.parametrize("message", REFUSED)
def test_training_goes_on_after_a_refused_group(message: str) -> None:
    parameters, optimizer, _ = refused(message)
    take_steps(optimizer, parameters, range(2, 4))
    others = make_parameters()
    other = dos.DOSOptimizer(torch.optim.AdamW(others), device="cpu")
    take_steps(other, others, range(4))
    assert_same(parameters, others)


def test_a_budget_counts_what_is_held_and_names_what_is_needed() -> None:
    optimizer = dos.DOSOptimizer(
        torch.optim.AdamW(make_parameters()), device="cpu", host_memory_bytes=1 << 20
    )
    held_bytes = optimizer._engine._pools[0].requirement.total_bytes
    group = {"params": [torch.nn.Parameter(torch.ones(1 << 20))]}
    with pytest.raises(dos.PoolError, match=f"raise host_memory_bytes to {held_bytes + (8 << 20)}"):
        optimizer.add_param_group(group)


def test_closing_frees_the_memory_of_added_groups() -> None:
    _, optimizer = grown(wrapping({"device": "virtual", "stride": 2}))
    optimizer.close()
    with pytest.raises(dos.PoolError, match="closed"):
        optimizer._engine._pools[-1].slab.view(0, 1)
