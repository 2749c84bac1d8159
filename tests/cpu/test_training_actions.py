"""Random sequences of what training scripts do, beside `torch.optim.AdamW` step for step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import dos
from tests.cpu.tolerances import AFTER_ACTIONS

pytestmark = pytest.mark.filterwarnings("ignore:gradients were changed after")

SHAPES = [(5, 3), (11,), (2, 2), (7,)]
BRANCHES = [(0,), (0, 1), (2, 3), (3,)]
"""Which parameters each branch of the model uses."""

branches = st.sets(st.sampled_from(range(len(BRANCHES))), min_size=1)
batches = st.integers(0, 3)  # few, so that the same gradient comes again
Wrap = Callable[[torch.optim.Optimizer], torch.optim.Optimizer]


class Model(torch.nn.Module):
    """A loss that is linear in the weights: equal gradients whatever the weights' last bits are."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
            for shape in SHAPES
        )

    def forward(self, which: set[int], batch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(batch)
        coefficients = [torch.randn(shape, generator=generator) for shape in SHAPES]
        return sum(
            (
                (self.weights[index] * coefficients[index].to(self.weights[index].dtype)).sum()
                for branch in sorted(which)
                for index in BRANCHES[branch]
            ),
            torch.zeros(()),
        )


class Training:
    """A model and the optimizer that `wrap` makes of an AdamW with two groups."""

    def __init__(self, dtype: torch.dtype, wrap: Wrap) -> None:
        self.model = Model(dtype)
        self.parameters = list(self.model.parameters())
        groups = [
            {"params": self.parameters[:2], "lr": 1e-2, "weight_decay": 0.1},
            {"params": self.parameters[2:], "lr": 3e-3, "weight_decay": 0.0},
        ]
        self.optimizer = wrap(torch.optim.AdamW(groups))

    def counts(self) -> list[int | None]:
        state = self.optimizer.state
        return [int(state[p]["step"]) if p in state else None for p in self.parameters]

    def numbers(self, what: str) -> list[torch.Tensor]:
        """Weights, or a state of every parameter that has been updated."""
        if what == "p":
            return [parameter.detach() for parameter in self.parameters]
        state = self.optimizer.state
        return [state[p][what] for p in self.parameters if p in state]


# ---------------------------------------------------------------- changes of one gradient

Edit = Callable[[torch.nn.Parameter, torch.Tensor], None]


def write_data(parameter: torch.nn.Parameter, grad: torch.Tensor) -> None:
    grad.data.mul_(0.5)


def write_by_numpy(parameter: torch.nn.Parameter, grad: torch.Tensor) -> None:
    grad.view(torch.uint8).numpy()[...] = 0


def add_in_place(parameter: torch.nn.Parameter, grad: torch.Tensor) -> None:
    grad.add_(1.0)


def replace(parameter: torch.nn.Parameter, grad: torch.Tensor) -> None:
    parameter.grad = grad * 0.5


def remove(parameter: torch.nn.Parameter, grad: torch.Tensor) -> None:
    parameter.grad = None


def multiply_by_one(parameter: torch.nn.Parameter, grad: torch.Tensor) -> None:
    grad.mul_(1.0)


EDITS = [write_data, write_by_numpy, add_in_place, replace, remove, multiply_by_one]


def clip_norm(parameters: list[torch.nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 0.5)


def clip_value(parameters: list[torch.nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_value_(parameters, 0.5)


# ---------------------------------------------------------------- the machine


class Actions(RuleBasedStateMachine):
    """Three trainings side by side: on a virtual device, on the host, and torch's own.

    16-bit weights are compared between ours alone: torch keeps no fp32 master of them.
    """

    @initialize(
        dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
        stride=st.sampled_from([1, 1.5, 2, 3, "host"]),
        subgroup_size=st.sampled_from([1, 3, 8, 1000]),
        wire=st.sampled_from(["native", "fp32"]),
        jitter_seed=st.sampled_from([None, 0, 1]),
        poison=st.booleans(),
    )
    def start(
        self, dtype: torch.dtype, jitter_seed: int | None, poison: bool, **options: Any
    ) -> None:
        device = dos.VirtualDevice(jitter_seed=jitter_seed, poison=poison)
        self.virtual = Training(dtype, lambda its: dos.DOSOptimizer(its, device=device, **options))
        self.host = Training(dtype, lambda its: dos.DOSOptimizer(its, device="cpu"))
        self.torch = Training(dtype, lambda its: its)
        self.all = [self.virtual, self.host, self.torch]
        self.largest_grad = 1.0

    def teardown(self) -> None:
        if hasattr(self, "all"):
            self.virtual.optimizer.close()
            self.host.optimizer.close()

    @rule(which=branches, batch=batches, twice=st.booleans())
    def backward(self, which: set[int], batch: int, twice: bool) -> None:
        """Backward, or two through one graph."""
        for each in self.all:
            loss = each.model(which, batch)
            if twice:
                loss.backward(retain_graph=True)
            loss.backward()

    @rule()
    def step(self) -> None:
        for parameter in self.torch.parameters:
            if parameter.grad is not None:
                largest = float(parameter.grad.abs().max())
                self.largest_grad = max(self.largest_grad, largest)
        for each in self.all:
            each.optimizer.step()

    @rule(max_norm=st.sampled_from([1e-2, 1.0, 1e6]), norm_type=st.sampled_from([2.0, torch.inf]))
    def clip_and_step(self, max_norm: float, norm_type: float) -> None:
        """Ours leaves `p.grad` as it is, so torch's is put back."""
        for each in (self.virtual, self.host):
            each.optimizer.clip_grad_norm_(max_norm, norm_type)
        kept = [None if p.grad is None else p.grad.clone() for p in self.torch.parameters]
        torch.nn.utils.clip_grad_norm_(self.torch.parameters, max_norm, norm_type)
        self.step()
        for parameter, grad in zip(self.torch.parameters, kept, strict=True):
            parameter.grad = grad

    @rule(which=branches, batch=batches, steps=st.integers(1, 3))
    def train(self, which: set[int], batch: int, steps: int) -> None:
        """Ordinary steps, so that gradients are sent early afterwards."""
        for number in range(steps):
            self.zero("optimizer", True)
            self.backward(which, batch + number, False)
            self.step()

    @rule(which=branches, batch=batches)
    def start_over(self, which: set[int], batch: int) -> None:
        """The gradient of before, in the same memory, zeroed meanwhile."""
        self.train(which, batch, 1)
        self.zero("optimizer", True)
        self.backward(which, batch, False)
        self.zero("model", False)
        self.backward(which, batch, False)
        self.step()

    @rule(by=st.sampled_from(["optimizer", "model"]), set_to_none=st.booleans())
    def zero(self, by: str, set_to_none: bool) -> None:
        for each in self.all:
            getattr(each, by).zero_grad(set_to_none=set_to_none)

    @rule(edit=st.sampled_from(EDITS), index=st.sampled_from(range(len(SHAPES))))
    def edit(self, edit: Edit, index: int) -> None:
        for each in self.all:
            grad = each.parameters[index].grad
            if grad is not None:
                edit(each.parameters[index], grad)

    @rule(clip=st.sampled_from([clip_norm, clip_value]))
    def clip_by_torch(self, clip: Callable[[list[torch.nn.Parameter]], None]) -> None:
        if all(parameter.grad is None for parameter in self.torch.parameters):
            return  # torch's clip_grad_value_ fails then
        for each in self.all:
            clip(each.parameters)

    @rule(group=st.sampled_from([0, 1]), lr=st.sampled_from([0.0, 1e-3, 1e-2]))
    def set_lr(self, group: int, lr: float) -> None:
        for each in self.all:
            each.optimizer.param_groups[group]["lr"] = lr

    @invariant()
    def gradients_are_equal(self) -> None:
        for ours in (self.virtual, self.host):
            for mine, its in zip(ours.parameters, self.torch.parameters, strict=True):
                assert (mine.grad is None) == (its.grad is None)
                if mine.grad is not None and its.grad is not None:
                    assert torch.equal(mine.grad, its.grad)

    @invariant()
    def step_counts_are_equal(self) -> None:
        assert self.virtual.counts() == self.host.counts() == self.torch.counts()

    @invariant()
    def the_device_has_the_bits_of_the_host(self) -> None:
        masters = [] if self.virtual.parameters[0].dtype is torch.float32 else ["master"]
        for what in ["p", "exp_avg", "exp_avg_sq", *masters]:
            both = zip(self.virtual.numbers(what), self.host.numbers(what), strict=True)
            for on_device, on_host in both:
                assert torch.equal(on_device, on_host), what

    @invariant()
    def the_numbers_are_those_of_torch(self) -> None:
        if self.virtual.parameters[0].dtype is not torch.float32:
            return
        for what, allowed in AFTER_ACTIONS.items():
            absolute = allowed.absolute * (self.largest_grad if what == "exp_avg" else 1.0)
            both = zip(self.virtual.numbers(what), self.torch.numbers(what), strict=True)
            for ours, theirs in both:
                torch.testing.assert_close(ours, theirs, rtol=allowed.relative, atol=absolute)


Actions.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=14,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestActions = Actions.TestCase


# ---------------------------------------------------------------- there and back while it is sent


def trained(device: object, between: Callable[[Training], None]) -> torch.Tensor:
    """A weight after three steps; `between` comes after the backward of the third."""
    options = {} if device == "cpu" else {"stride": "host", "subgroup_size": 2}
    its = Training(torch.float32, lambda adam: dos.DOSOptimizer(adam, device=device, **options))
    for step in range(3):
        its.optimizer.zero_grad()
        its.model({0}, 0).backward()
        if step == 2:
            between(its)
        its.optimizer.step()
    its.optimizer.close()
    return its.parameters[0].detach()


def zero_and_go_back_again(its: Training) -> None:
    its.model.zero_grad(set_to_none=False)
    time.sleep(0.05)  # the gradient is sent meanwhile
    its.model({0}, 0).backward()


def negate_twice(its: Training) -> None:
    grad = its.parameters[0].grad
    assert grad is not None
    grad.neg_()
    time.sleep(0.05)
    grad.neg_()


@pytest.mark.parametrize("between", [zero_and_go_back_again, negate_twice])
def test_a_gradient_that_changed_and_changed_back_while_it_was_sent_is_noticed(
    between: Callable[[Training], None],
) -> None:
    device = dos.VirtualDevice(jitter_seed=0)
    assert torch.equal(trained(device, between), trained("cpu", between))
