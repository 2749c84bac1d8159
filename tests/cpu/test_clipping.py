"""Clipping by the one norm, folded into the update."""

from __future__ import annotations

import math

import pytest
import torch

import dos
from dos.errors import ConfigError, NonFiniteError
from tests.cpu.tolerances import AFTER_100_STEPS

DEVICES = {
    "cpu": {"device": "cpu"},
    "virtual": {"device": "virtual", "stride": 2, "subgroup_size": 1000},
    "fp32 wire": {"device": "virtual", "stride": 3, "subgroup_size": 700, "wire": "fp32"},
    "released": {"device": "virtual", "stride": 2, "subgroup_size": 999, "release_grads": True},
}
every_device = pytest.mark.parametrize("options", DEVICES.values(), ids=DEVICES)
SHAPES = [(300, 250), (70_001,), (3,), (40, 11)]  # more than one block, odd ends
Parameters = list[torch.nn.Parameter]


def make_parameters(dtype: torch.dtype = torch.float32) -> Parameters:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES
    ]


def backward(parameters: Parameters, step: int, factor: float = 1.0) -> None:
    """Random gradients, by a real backward pass, so that hooks see them."""
    generator = torch.Generator().manual_seed(step)
    loss = torch.zeros(())
    for parameter in parameters:
        gradient = factor * torch.randn(parameter.shape, generator=generator)
        loss = loss + (parameter * gradient.to(parameter.dtype)).sum()
    loss.backward()


def exact_norm(parameters: Parameters) -> float:
    grads = [p.grad for p in parameters if p.grad is not None]
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))


def trained(options: dict[str, object], dtype: torch.dtype, max_norm: float) -> list[bytes]:
    parameters = make_parameters(dtype)
    optimizer = dos.DOSOptimizer(torch.optim.AdamW(parameters, lr=1e-2), **options)
    for step in range(4):
        backward(parameters, step)
        optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return [p.detach().view(torch.uint8).numpy().tobytes() for p in parameters]


@every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_clipping_gives_the_same_bits_on_every_device(
    options: dict[str, object], dtype: torch.dtype
) -> None:
    assert trained(options, dtype, 1.0) == trained({"device": "cpu"}, dtype, 1.0)


@every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_is_that_of_the_gradients(options: dict[str, object], dtype: torch.dtype) -> None:
    parameters = make_parameters(dtype)
    with_gradients = {**options, "release_grads": False}
    optimizer = dos.DOSOptimizer(torch.optim.AdamW(parameters), **with_gradients)
    backward(parameters, 0)
    assert float(optimizer.clip_grad_norm_(1.0)) == pytest.approx(exact_norm(parameters), rel=1e-6)


@every_device
def test_the_infinity_norm_is_the_largest_magnitude(options: dict[str, object]) -> None:
    parameters = make_parameters()
    with_gradients = {**options, "release_grads": False}
    optimizer = dos.DOSOptimizer(torch.optim.AdamW(parameters), **with_gradients)
    backward(parameters, 0)
    largest = max(float(p.grad.abs().max()) for p in parameters if p.grad is not None)
    assert float(optimizer.clip_grad_norm_(1.0, math.inf)) == largest


@every_device
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("max_norm", [1e-3, 1e6])
def test_clipped_training_is_that_of_torch(
    options: dict[str, object], norm_type: float, max_norm: float
) -> None:
    mine, its = make_parameters(), make_parameters()
    optimizer = dos.DOSOptimizer(torch.optim.AdamW(mine, lr=1e-2), **options)
    reference = torch.optim.AdamW(its, lr=1e-2)
    for step in range(4):
        backward(mine, step)
        backward(its, step)
        optimizer.clip_grad_norm_(max_norm, norm_type)
        torch.nn.utils.clip_grad_norm_(its, max_norm, norm_type)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    allowed = AFTER_100_STEPS["p"]
    for ours, theirs in zip(mine, its, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=allowed.relative, atol=allowed.absolute)


@every_device
def test_clipping_sends_no_gradient_twice(options: dict[str, object]) -> None:
    parameters = make_parameters()
    optimizer = dos.DOSOptimizer(torch.optim.AdamW(parameters), **options)
    sent = []
    for step in range(4):
        backward(parameters, step)
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.last_step is not None
        sent.append(optimizer.last_step.grad_bytes)
    assert max(sent[1:]) <= sent[0]


def test_the_gradients_themselves_stay_as_they_are() -> None:
    parameters = make_parameters()
    optimizer = dos.DOSOptimizer(torch.optim.AdamW(parameters), device="cpu")
    backward(parameters, 0)
    before = exact_norm(parameters)
    optimizer.clip_grad_norm_(1e-3)
    assert exact_norm(parameters) == before


def test_clipping_twice_sees_what_the_first_left() -> None:
    parameters = make_parameters()
    optimizer = dos.DOSOptimizer(torch.optim.AdamW(parameters), device="cpu")
    backward(parameters, 0)
    optimizer.clip_grad_norm_(1.0)
    assert float(optimizer.clip_grad_norm_(1.0)) == pytest.approx(1.0, rel=1e-5)


@every_device
@pytest.mark.parametrize("factor", [1.0, math.nan, math.inf], ids=str)
def test_a_clipping_goes_with_its_gradients_where_a_step_is_left_out(
    options: dict[str, object], factor: float
) -> None:
    outs = []
    for left_out in (False, True):
        parameters = make_parameters()
        model = torch.nn.ParameterList(parameters)
        optimizer = dos.DOSOptimizer(torch.optim.AdamW(parameters), **options)
        for step in range(4):
            if left_out and step == 2:
                backward(parameters, 100, factor)
                optimizer.clip_grad_norm_(0.01)
                model.zero_grad()
            backward(parameters, step)
            optimizer.step()
            model.zero_grad()
        optimizer.close()
        outs.append(parameters)
    assert all(torch.equal(one, other) for one, other in zip(*outs, strict=True))


def test_zero_grad_drops_the_clipping() -> None:
    parameters = make_parameters()
    optimizer = dos.DOSOptimizer(torch.optim.AdamW(parameters), device="cpu")
    backward(parameters, 0)
    optimizer.clip_grad_norm_(1e-3)
    optimizer.zero_grad()
    backward(parameters, 0)
    assert float(optimizer.clip_grad_norm_(math.inf)) == pytest.approx(exact_norm(parameters))


@every_device
def test_a_norm_that_is_not_finite_is_an_error_where_asked_for(
    options: dict[str, object],
) -> None:
    parameters = make_parameters()
    optimizer = dos.DOSOptimizer(torch.optim.AdamW(parameters), **options)
    backward(parameters, 0, factor=math.inf)
    with pytest.raises(NonFiniteError, match=r"nan|inf"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("norm_type", [1.0, 0.0, -math.inf, 3])
def test_other_norms_are_refused(norm_type: float) -> None:
    optimizer = dos.DOSOptimizer(torch.optim.AdamW(make_parameters()), device="cpu")
    with pytest.raises(ConfigError, match="norm of type"):
        optimizer.clip_grad_norm_(1.0, norm_type)


def test_torch_refuses_to_clip_released_gradients_and_is_told_the_remedy() -> None:
    parameters = make_parameters()
    optimizer = dos.DOSOptimizer(torch.optim.AdamW(parameters), **DEVICES["released"])
    for step in range(2):
        optimizer.zero_grad()
        backward(parameters, step)
        if step == 0:
            optimizer.step()
    with pytest.raises(ConfigError, match=r"optimizer\.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)


def test_a_second_step_on_released_gradients_is_refused() -> None:
    parameters = make_parameters()
    optimizer = dos.DOSOptimizer(torch.optim.AdamW(parameters), **DEVICES["released"])
    for step in range(2):
        optimizer.zero_grad()
        backward(parameters, step)
        optimizer.step()
    with pytest.raises(ConfigError, match="zero_grad"):
        optimizer.step()
