"""State dicts among others: groups, schedulers, hooks, torch's DCP, accelerate; and refusals."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import dos
from tests.cpu.state_cases import (
    PLANS,
    adamw,
    after_three,
    assert_same,
    each_plan,
    make_parameters,
    take_steps,
)

# ---------------------------------------------------------------- groups and hooks


def test_loading_keeps_the_groups_and_their_lists() -> None:
    parameters = make_parameters()
    wrapped = adamw(parameters)
    optimizer = dos.DOSOptimizer(wrapped, device="cpu")
    before = [(id(g), id(g["params"])) for g in wrapped.param_groups]
    optimizer.load_state_dict(optimizer.state_dict())
    assert [(id(g), id(g["params"])) for g in optimizer.param_groups] == before


def test_a_scheduler_made_before_loading_sets_the_lr() -> None:
    parameters = make_parameters()
    optimizer = dos.DOSOptimizer(adamw(parameters), device="cpu")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.load_state_dict(optimizer.state_dict())
    take_steps(optimizer, parameters, range(1))
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5e-2


def test_loading_sets_the_hyperparameters() -> None:
    saved = dos.DOSOptimizer(adamw(make_parameters(), lr=0.125), device="cpu").state_dict()
    optimizer = dos.DOSOptimizer(adamw(make_parameters()), device="cpu")
    optimizer.load_state_dict(saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


def test_options_that_an_old_dict_lacks_are_those_of_torch() -> None:
    optimizer = dos.DOSOptimizer(adamw(make_parameters()), device="cpu")
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["maximize"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["maximize"] is False


@pytest.mark.parametrize("before_wrapping", [True, False])
def test_hooks_around_saving_and_loading_are_called(before_wrapping: bool) -> None:
    wrapped, calls = adamw(make_parameters()), []
    optimizer: Any = wrapped if before_wrapping else dos.DOSOptimizer(wrapped, device="cpu")
    for name in (
        "state_dict_pre",
        "state_dict_post",
        "load_state_dict_pre",
        "load_state_dict_post",
    ):
        register = getattr(optimizer, f"register_{name}_hook")
        register(lambda *_, name=name: calls.append(name))
    if before_wrapping:
        optimizer = dos.DOSOptimizer(wrapped, device="cpu")
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == [
        "state_dict_pre",
        "state_dict_post",
        "load_state_dict_pre",
        "load_state_dict_post",
    ]


def test_a_hook_may_replace_what_is_loaded() -> None:
    optimizer = dos.DOSOptimizer(adamw(make_parameters()), device="cpu")
    replacement = copy.deepcopy(optimizer.state_dict())
    replacement["param_groups"][0]["lr"] = 0.5
    optimizer.register_load_state_dict_pre_hook(lambda *_: replacement)
    optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert optimizer.param_groups[0]["lr"] == 0.5


# ---------------------------------------------------------------- refused


REFUSED: dict[str, Callable[[dict[str, Any]], object]] = {
    "layout": lambda d: d.pop("state"),
    "not the layout": lambda d: d.update(state=[]),
    "param groups": lambda d: d["param_groups"].pop(),
    "parameters": lambda d: d["param_groups"][1]["params"].pop(),
    "shape": lambda d: d["state"][0].update(exp_avg=torch.zeros(3)),
    "missing": lambda d: d["state"][0].pop("exp_avg_sq"),
    "step": lambda d: d["state"][1].update(step=torch.tensor(1.5)),
    "whole number": lambda d: d["state"][1].update(step=-1),
    "step is 0": lambda d: d["state"][1].update(step=0),
    "lr is inf": lambda d: d["param_groups"][1].update(lr=float("inf")),
    "hyperparameter": lambda d: d["param_groups"][1].pop("betas"),
    "amsgrad": lambda d: d["param_groups"][0].update(amsgrad=True),
    "floating-point": lambda d: d["state"][0].update(exp_avg=torch.zeros(50, 60).int()),
    "no tensor": lambda d: d["state"][0].update(exp_avg=[1.0]),
    "not a mapping": lambda d: d["state"].update({0: [1.0]}),
}


def contents(optimizer: torch.optim.Optimizer) -> tuple[object, object]:
    saved = optimizer.state_dict()
    state = {
        key: {kind: value.tolist() for kind, value in its.items()}
        for key, its in saved["state"].items()
    }
    return state, copy.deepcopy(saved["param_groups"])


@pytest.mark.parametrize("message", REFUSED)
def test_a_dict_that_does_not_fit_is_refused_and_changes_nothing(message: str) -> None:
    _, optimizer = after_three(PLANS[4])
    before = contents(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg_sq"].fill_(1.0)
    saved["param_groups"][0]["lr"] = 0.5
    REFUSED[message](saved)
    with pytest.raises(dos.ConfigError, match=message):
        optimizer.load_state_dict(saved)
    assert contents(optimizer) == before


def test_after_a_group_was_removed_loading_is_refused() -> None:
    _, optimizer = after_three({"device": "cpu"})
    del optimizer.param_groups[1]
    with pytest.raises(dos.ConfigError, match="replaced in its param group"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})


@pytest.mark.parametrize("call", ["state_dict", "load_state_dict", "refresh_master_weights"])
def test_after_closing_it_is_refused(call: str) -> None:
    optimizer = dos.DOSOptimizer(adamw(make_parameters()), device="cpu")
    optimizer.close()
    with pytest.raises(dos.ConfigError, match=f"^{call}: the optimizer was closed"):
        getattr(optimizer, call)(*([{}] if call == "load_state_dict" else []))


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_and_pickling_are_refused_with_the_way_to_go(act: Callable[[Any], object]) -> None:
    optimizer = dos.DOSOptimizer(adamw(make_parameters()), device="cpu")
    with pytest.raises(dos.ConfigError, match="state_dict"):
        act(optimizer)


# ---------------------------------------------------------------- torch's DCP and accelerate


def trained_model(wrap: bool, **plan: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 3))
    wrapped = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, dos.DOSOptimizer(wrapped, **plan) if wrap else wrapped


@each_plan
def test_dcps_step_on_empty_state_does_what_it_does_to_adamw(plan: dict[str, Any]) -> None:
    ends = []
    for wrap in (True, False):
        model, optimizer = trained_model(wrap, **plan)
        state = get_optimizer_state_dict(model, optimizer)["state"]
        ends.append((model.state_dict(), {name: its["step"] for name, its in state.items()}))
    (weights, counts), (torchs_weights, torchs_counts) = ends
    assert counts == torchs_counts
    assert all(torch.equal(weights[name], torchs_weights[name]) for name in weights)


@each_plan
@pytest.mark.parametrize(("flat", "full"), [(True, False), (False, True), (False, False)])
def test_a_dict_of_dcp_loads_and_goes_on_with_the_same_bits(
    plan: dict[str, Any], flat: bool, full: bool
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=full)
    model, optimizer = trained_model(True, **plan)
    take_steps(optimizer, list(model.parameters()), range(3))
    other, resumed = trained_model(True, **PLANS[2])
    other.load_state_dict(model.state_dict())
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    set_optimizer_state_dict(other, resumed, saved, options=options)
    take_steps(optimizer, list(model.parameters()), range(3, 5))
    take_steps(resumed, list(other.parameters()), range(3, 5))
    assert_same(list(model.parameters()), list(other.parameters()))


@pytest.mark.parametrize("steps", [0, 2])
def test_accelerate_prepares_it_without_changing_the_training(steps: int) -> None:
    accelerate = pytest.importorskip("accelerate")
    ends = []
    for prepare in (True, False):
        model, optimizer = trained_model(True, device="cpu")
        take_steps(optimizer, list(model.parameters()), range(steps))
        if prepare:
            accelerator = accelerate.Accelerator(cpu=True)
            model, optimizer = accelerator.prepare(model, optimizer)
        take_steps(optimizer, list(model.parameters()), range(steps, 4))
        ends.append(list(model.parameters()))
    assert_same(*ends)
