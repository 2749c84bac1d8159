"""Every learning rate scheduler of torch, on this optimizer as on torch's own."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import dos
from tests.cpu.tolerances import AFTER_STEPS_OF_A_MODEL

STEPS = 12
DEVICES: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu"},
    "virtual": {"device": "virtual", "stride": 2, "subgroup_size": 5},
}
every_device = pytest.mark.parametrize("options", DEVICES.values(), ids=DEVICES)

Make = Callable[[torch.optim.Optimizer], Any]
MAKERS: dict[str, Make] = {
    "LambdaLR": lambda its: schedulers.LambdaLR(its, [lambda step: 0.9**step, lambda step: 0.5]),
    "MultiplicativeLR": lambda its: schedulers.MultiplicativeLR(its, lambda step: 0.9),
    "StepLR": lambda its: schedulers.StepLR(its, step_size=3, gamma=0.5),
    "MultiStepLR": lambda its: schedulers.MultiStepLR(its, [2, 5], gamma=0.5),
    "ConstantLR": lambda its: schedulers.ConstantLR(its, factor=0.5, total_iters=4),
    "LinearLR": lambda its: schedulers.LinearLR(its, total_iters=6),
    # Rounding takes the lr below 0 in its last step.
    "LinearLR to 0": lambda its: schedulers.LinearLR(its, 1 / 3, 0.0, total_iters=5),
    "ExponentialLR": lambda its: schedulers.ExponentialLR(its, gamma=0.9),
    "PolynomialLR": lambda its: schedulers.PolynomialLR(its, total_iters=8, power=2.0),
    "CosineAnnealingLR": lambda its: schedulers.CosineAnnealingLR(its, T_max=5),
    "CosineAnnealingWarmRestarts": lambda its: schedulers.CosineAnnealingWarmRestarts(its, T_0=3),
    "CyclicLR": lambda its: schedulers.CyclicLR(its, 1e-3, 1e-2, step_size_up=3),
    "OneCycleLR": lambda its: schedulers.OneCycleLR(its, max_lr=1e-2, total_steps=STEPS),
    "ReduceLROnPlateau": lambda its: schedulers.ReduceLROnPlateau(its, factor=0.5, patience=1),
    "SequentialLR": lambda its: schedulers.SequentialLR(
        its,
        [schedulers.LinearLR(its, total_iters=4), schedulers.ExponentialLR(its, gamma=0.9)],
        milestones=[4],
    ),
    "ChainedScheduler": lambda its: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(its, total_iters=3), schedulers.StepLR(its, 2, gamma=0.7)], its
    ),
    "SWALR": lambda its: SWALR(its, swa_lr=1e-3, anneal_epochs=4),
}
BASES = {"LRScheduler", "_LRScheduler"}

Trace = list[list[tuple[float, Any]]]
"""After each step, every group's lr and betas."""


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))


def make_adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """Two groups that differ in lr."""
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 1e-2}, {"params": others, "lr": 3e-3}]
    return torch.optim.AdamW(groups, weight_decay=0.05)


def backward(model: torch.nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = (model(x) - 1.0).square().mean()
    loss.backward()
    return loss


def advance(scheduler: Any, step: int) -> None:
    if isinstance(scheduler, schedulers.ReduceLROnPlateau):
        scheduler.step(float(step))  # ever worse
    else:
        scheduler.step()


def hyper(optimizer: torch.optim.Optimizer) -> list[tuple[float, Any]]:
    return [(float(group["lr"]), group["betas"]) for group in optimizer.param_groups]


def train(
    make: Make,
    options: dict[str, Any] | None,
    *,
    on: str = "ours",
    each_step: Callable[[torch.nn.Module], None] = lambda model: None,
) -> tuple[torch.nn.Module, Trace]:
    """Trains with every warning an error; `options` None is torch alone.

    The scheduler is made on our optimizer, or on the wrapped one before or after wrapping.
    """
    model = make_model()
    optimizer: torch.optim.Optimizer = make_adamw(model)
    wrapped = optimizer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = make(wrapped) if on == "wrapped, before" else None
        if options is not None:
            optimizer = dos.DOSOptimizer(wrapped, **options)
        if scheduler is None:
            scheduler = make(optimizer if on == "ours" else wrapped)
        trace = [hyper(optimizer)]
        for step in range(STEPS - 1):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            each_step(model)
            advance(scheduler, step)
            trace.append(hyper(optimizer))
    if isinstance(optimizer, dos.DOSOptimizer):
        optimizer.close()
    return model, trace


def assert_near(mine: torch.nn.Module, its: torch.nn.Module) -> None:
    allowed = AFTER_STEPS_OF_A_MODEL
    for one, other in zip(mine.parameters(), its.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=allowed.relative, atol=allowed.absolute)


def test_every_scheduler_of_torch_is_here() -> None:
    known = set(MAKERS) | BASES
    found = {
        name
        for name, kind in vars(schedulers).items()
        if inspect.isclass(kind)
        and kind.__module__ == schedulers.__name__
        and issubclass(kind, schedulers.LRScheduler)
    }
    assert found | set(schedulers.__all__) <= known


@every_device
@pytest.mark.parametrize("on", ["ours", "wrapped, before", "wrapped, after"])
@pytest.mark.parametrize("name", MAKERS)
def test_lr_and_betas_are_those_on_torch(name: str, on: str, options: dict[str, Any]) -> None:
    _, mine = train(MAKERS[name], options, on=on)
    _, its = train(MAKERS[name], None)
    assert mine == its


@every_device
@pytest.mark.parametrize("on", ["ours", "wrapped, before", "wrapped, after"])
@pytest.mark.parametrize("name", MAKERS)
def test_weights_are_those_under_torch(name: str, on: str, options: dict[str, Any]) -> None:
    mine, _ = train(MAKERS[name], options, on=on)
    its, _ = train(MAKERS[name], None)
    assert_near(mine, its)


@pytest.mark.parametrize("name", ["CyclicLR", "OneCycleLR"])
def test_betas_are_cycled(name: str) -> None:
    _, trace = train(MAKERS[name], DEVICES["virtual"])
    assert len({groups[0][1] for groups in trace}) > 2


@pytest.mark.parametrize("name", MAKERS)
def test_the_lr_changes(name: str) -> None:
    """Otherwise the tests above would see nothing."""
    _, trace = train(MAKERS[name], DEVICES["cpu"])
    assert len({groups[0][0] for groups in trace}) > 1


@every_device
@pytest.mark.parametrize("multi_avg_fn", [None, get_ema_multi_avg_fn(0.9)], ids=["swa", "ema"])
def test_averaged_weights_are_those_under_torch(
    multi_avg_fn: Callable[..., None] | None, options: dict[str, Any]
) -> None:
    averages = []
    for its in (options, None):
        average = AveragedModel(make_model(), multi_avg_fn=multi_avg_fn)
        train(MAKERS["SWALR"], its, each_step=average.update_parameters)
        averages.append(average)
    assert_near(*averages)


@every_device
def test_a_scheduler_that_comes_first_is_warned_of_as_with_torch(options: dict[str, Any]) -> None:
    optimizer = dos.DOSOptimizer(make_adamw(make_model()), **options)
    scheduler = schedulers.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match=r"lr_scheduler\.step\(\)` before `optimizer\.step"):
        scheduler.step()


@every_device
def test_a_schedule_goes_on_from_its_saved_state(options: dict[str, Any]) -> None:
    optimizer = dos.DOSOptimizer(make_adamw(make_model()), **options)
    scheduler = schedulers.CosineAnnealingLR(optimizer, T_max=5)
    optimizer.step()
    scheduler.step()
    again = schedulers.CosineAnnealingLR(optimizer, T_max=5)
    again.load_state_dict(scheduler.state_dict())
    assert again.get_last_lr() == scheduler.get_last_lr()
