"""What others do to weights, gradients, groups and modes around the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dos

DEVICES: list[dict[str, Any]] = [
    {"device": "cpu"},
    {"device": "virtual", "stride": "host"},
    {"device": "virtual", "stride": 1},
    {"device": "virtual", "stride": 2, "resident_ratio": 0.5, "subgroup_size": 3},
]
DTYPES = [torch.float32, torch.bfloat16]


def parameter_of(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.linspace(-1, 1, 12).to(dtype))


def adam(*parameters: torch.nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def step(
    parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer, grad: float = 1.0
) -> None:
    parameter.grad = torch.full_like(parameter, grad)
    optimizer.step()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", DEVICES)
def test_weights_changed_in_place_between_steps_are_taken_up(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    parameter = parameter_of(dtype)
    optimizer = dos.DOSOptimizer(adam(parameter), **options)
    step(parameter, optimizer)
    with torch.no_grad():
        parameter.fill_(5.0)
    step(parameter, optimizer)
    assert (parameter - 5.0).abs().max() < 0.1


@pytest.mark.parametrize("options", DEVICES)
def test_weights_in_another_memory_are_taken_up(options: dict[str, Any]) -> None:
    parameter = parameter_of()
    optimizer = dos.DOSOptimizer(adam(parameter), **options)
    step(parameter, optimizer)
    parameter.data = torch.full((12,), 5.0)
    step(parameter, optimizer)
    assert (parameter - 5.0).abs().max() < 0.1


@pytest.mark.parametrize("options", DEVICES[1:])
def test_reloading_the_same_weights_changes_no_bit(options: dict[str, Any]) -> None:
    ends = []
    for reload in (False, True):
        parameter = parameter_of(torch.bfloat16)
        optimizer = dos.DOSOptimizer(adam(parameter), **options)
        for _ in range(3):
            step(parameter, optimizer)
            if reload:
                with torch.no_grad():
                    parameter.copy_(parameter.clone())
        ends.append(optimizer.state[parameter]["master"].clone())
    assert torch.equal(*ends)


@pytest.mark.parametrize("options", DEVICES)
def test_a_negated_view_as_gradient_keeps_its_sign(options: dict[str, Any]) -> None:
    parameter = parameter_of()
    before = parameter.detach().clone()
    optimizer = dos.DOSOptimizer(adam(parameter), **options)
    parameter.grad = torch._neg_view(torch.ones(12))
    optimizer.step()
    assert (parameter > before).all()


@pytest.mark.parametrize("options", DEVICES)
def test_made_under_inference_mode_it_trains_outside(options: dict[str, Any]) -> None:
    parameter = parameter_of()
    before = parameter.detach().clone()
    with torch.inference_mode():
        optimizer = dos.DOSOptimizer(adam(parameter), **options)
    step(parameter, optimizer)
    assert (parameter < before).all()


def test_a_default_dtype_does_not_reach_the_state() -> None:
    parameter = parameter_of()
    optimizer = dos.DOSOptimizer(adam(parameter), device="virtual", subgroup_size=5)
    step(parameter, optimizer)
    torch.set_default_dtype(torch.float64)
    try:
        assert optimizer.state[parameter]["exp_avg"].dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_frozen_parameter_may_have_any_dtype() -> None:
    quantized = torch.nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    parameter = parameter_of()
    step(parameter, dos.DOSOptimizer(adam(parameter, quantized), device="cpu"))
    assert (quantized == 0).all()


def test_hooks_registered_before_wrapping_are_called() -> None:
    parameter, calls = parameter_of(), []
    wrapped = adam(parameter)
    wrapped.register_step_post_hook(lambda *_: calls.append("post"))
    step(parameter, dos.DOSOptimizer(wrapped, device="cpu"))
    assert calls == ["post"]


def overlapping() -> torch.optim.Optimizer:
    whole = torch.randn(20)
    return adam(torch.nn.Parameter(whole[:12]), torch.nn.Parameter(whole[8:]))


def made_under_inference() -> torch.optim.Optimizer:
    with torch.inference_mode():
        parameter = torch.nn.Parameter(torch.ones(3))
    return adam(parameter)


def with_state_of_another_shape() -> torch.optim.Optimizer:
    parameter = parameter_of()
    optimizer = adam(parameter)
    step(parameter, optimizer)
    optimizer.state[parameter]["exp_avg"] = torch.zeros(40)
    return optimizer


REFUSED = {
    "share": overlapping,
    "inference": made_under_inference,
    "does not fit": with_state_of_another_shape,
    "negated": lambda: adam(torch.nn.Parameter(torch._neg_view(torch.ones(3)))),
    "meta": lambda: adam(torch.nn.Parameter(torch.ones(3, device="meta"))),
}


@pytest.mark.parametrize("message", REFUSED)
def test_is_refused(message: str) -> None:
    with pytest.raises(dos.ConfigError, match=message):
        dos.DOSOptimizer(REFUSED[message]())


@pytest.mark.parametrize("change", [{"lr": None}, {"betas": (0.9,)}, {"eps": "small"}])
def test_an_unreadable_hyperparameter_is_named(change: dict[str, Any]) -> None:
    parameter = parameter_of()
    optimizer = dos.DOSOptimizer(adam(parameter), device="cpu")
    optimizer.param_groups[0].update(change)
    with pytest.raises(dos.ConfigError, match="param group 0"):
        step(parameter, optimizer)


def test_a_removed_group_is_refused() -> None:
    parameter = parameter_of()
    optimizer = dos.DOSOptimizer(adam(parameter), device="cpu")
    optimizer.param_groups.clear()
    with pytest.raises(dos.ConfigError, match="replaced in its param group"):
        step(parameter, optimizer)


def test_a_closure_that_closes_the_optimizer_gets_a_clear_error() -> None:
    optimizer = dos.DOSOptimizer(adam(parameter_of()), device="cpu")
    with pytest.raises(dos.ConfigError, match="closed"):
        optimizer.step(optimizer.close)
