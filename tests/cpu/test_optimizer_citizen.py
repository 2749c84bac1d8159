"""The optimizer behaves as torch's optimizers do."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dos
from dos.plan import parse_plan
from tests.cpu.tolerances import AFTER_100_STEPS

Wrap = Callable[..., dos.DOSOptimizer]


@pytest.fixture
def wrap() -> Iterator[Wrap]:
    """Makes optimizers and closes them after the test."""
    made: list[dos.DOSOptimizer] = []

    def make(wrapped: torch.optim.Optimizer, **options: Any) -> dos.DOSOptimizer:
        defaults: dict[str, Any] = {"device": "virtual", "stride": 2, "subgroup_size": 5}
        made.append(dos.DOSOptimizer(wrapped, **{**defaults, **options}))
        return made[-1]

    yield make
    for optimizer in made:
        optimizer.close()


def make_parameters(count: int = 2) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(1 + 0.1 * torch.randn(4, 3, generator=generator)) for _ in range(count)
    ]


def set_gradients(parameters: list[torch.nn.Parameter], seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def take_steps(
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.nn.Parameter],
    seeds: range = range(5),
) -> None:
    for seed in seeds:
        set_gradients(parameters, seed)
        optimizer.step()


def after_steps(
    kind: Callable[..., torch.optim.Optimizer], wrap: Wrap | None, **options: Any
) -> torch.Tensor:
    """A weight after five steps of `kind` with `options`, wrapped if `wrap` is given."""
    parameters = make_parameters()
    optimizer = kind(parameters, lr=1e-2, **options)
    take_steps(wrap(optimizer) if wrap else optimizer, parameters)
    return parameters[0].detach()


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, what: str = "p") -> None:
    bound = AFTER_100_STEPS[what]
    torch.testing.assert_close(
        ours, theirs, rtol=bound.relative, atol=bound.absolute, equal_nan=True
    )


# ---------------------------------------------------------------- torch's interface


def test_is_a_torch_optimizer(wrap: Wrap) -> None:
    assert isinstance(wrap(torch.optim.AdamW(make_parameters())), torch.optim.Optimizer)


def test_shares_the_param_groups(wrap: Wrap) -> None:
    wrapped = torch.optim.AdamW(make_parameters())
    assert wrap(wrapped).param_groups is wrapped.param_groups


def train_under_scheduler(wrap: Wrap, on_wrapped: bool) -> float:
    """The last lr of two steps, with every warning an error."""
    parameters = make_parameters()
    wrapped = torch.optim.AdamW(parameters, lr=1e-2)
    optimizer = wrap(wrapped)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.StepLR(
            wrapped if on_wrapped else optimizer, step_size=1, gamma=0.5
        )
        for seed in range(2):
            set_gradients(parameters, seed)
            optimizer.step()
            scheduler.step()
    return float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("on_wrapped", [True, False], ids=["wrapped", "ours"])
def test_scheduler_sets_the_lr_without_a_warning(wrap: Wrap, on_wrapped: bool) -> None:
    assert train_under_scheduler(wrap, on_wrapped) == 0.25e-2


def test_lr_of_zero_set_between_steps_stops_the_weights(wrap: Wrap) -> None:
    parameters = make_parameters()
    optimizer = wrap(torch.optim.AdamW(parameters))
    take_steps(optimizer, parameters)
    before = parameters[0].detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    take_steps(optimizer, parameters)
    assert torch.equal(parameters[0], before)


def test_tensor_lr_gives_the_bits_of_the_number(wrap: Wrap) -> None:
    lr, results = 2**-7, []
    for value in (lr, torch.tensor(lr)):
        parameters = make_parameters()
        take_steps(wrap(torch.optim.AdamW(parameters, lr=value, foreach=False)), parameters)
        results.append(parameters[0].detach())
    assert torch.equal(*results)


def test_step_returns_the_loss_of_its_closure(wrap: Wrap) -> None:
    parameters = make_parameters()

    def closure() -> torch.Tensor:
        loss = (parameters[0] ** 2).sum()
        loss.backward()
        return loss

    expected = (parameters[0].detach() ** 2).sum()
    assert torch.equal(wrap(torch.optim.AdamW(parameters)).step(closure), expected)


def test_step_uses_the_gradients_of_its_closure(wrap: Wrap) -> None:
    parameters = make_parameters()
    before = parameters[0].detach().clone()
    wrap(torch.optim.AdamW(parameters)).step(lambda: parameters[0].sum().backward())
    assert not torch.equal(parameters[0], before)


def test_step_without_a_closure_returns_none(wrap: Wrap) -> None:
    assert wrap(torch.optim.AdamW(make_parameters())).step() is None


def test_zero_grad_removes_the_gradients(wrap: Wrap) -> None:
    parameters = make_parameters()
    set_gradients(parameters)
    wrap(torch.optim.AdamW(parameters)).zero_grad()
    assert [parameter.grad for parameter in parameters] == [None, None]


@pytest.mark.parametrize("which", ["pre", "post"])
def test_step_hook_is_called_once_a_step(wrap: Wrap, which: str) -> None:
    optimizer = wrap(torch.optim.AdamW(make_parameters()))
    calls: list[object] = []
    getattr(optimizer, f"register_step_{which}_hook")(lambda stepped, *_: calls.append(stepped))
    optimizer.step()
    assert calls == [optimizer]


@pytest.mark.parametrize("flags", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_flag_of_the_implementation_does_not_change_the_bits(
    wrap: Wrap, flags: dict[str, bool]
) -> None:
    with_flags = after_steps(torch.optim.AdamW, wrap, **flags)
    assert torch.equal(with_flags, after_steps(torch.optim.AdamW, wrap))


# ---------------------------------------------------------------- the update that is meant


@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_options_mean_what_they_mean_to_torch(
    wrap: Wrap, kind: type[torch.optim.Adam], weight_decay: float, maximize: bool
) -> None:
    options = {"weight_decay": weight_decay, "maximize": maximize}
    assert_near(after_steps(kind, wrap, **options), after_steps(kind, None, **options))


def test_weight_decay_of_adam_is_not_that_of_adamw(wrap: Wrap) -> None:
    adam, adamw = (
        after_steps(kind, wrap, weight_decay=0.1) for kind in (torch.optim.Adam, torch.optim.AdamW)
    )
    assert not torch.equal(adam, adamw)


def test_adam_with_decoupled_weight_decay_gives_the_bits_of_adamw(wrap: Wrap) -> None:
    if "decoupled_weight_decay" not in torch.optim.Adam(make_parameters()).defaults:
        pytest.skip("this torch's Adam has no decoupled_weight_decay")
    adam = after_steps(torch.optim.Adam, wrap, weight_decay=0.1, decoupled_weight_decay=True)
    assert torch.equal(adam, after_steps(torch.optim.AdamW, wrap, weight_decay=0.1))


def test_nan_gradient_spoils_what_it_spoils_in_torch(wrap: Wrap) -> None:
    weights = []
    for ours in (True, False):
        parameters = make_parameters()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters)
        optimizer = wrap(optimizer) if ours else optimizer
        set_gradients(parameters)
        assert parameters[0].grad is not None
        parameters[0].grad[1, 2] = float("nan")
        optimizer.step()
        weights.append(parameters[0].detach())
    assert_near(*weights)


def test_weight_changed_between_forward_and_backward_is_an_error(wrap: Wrap) -> None:
    parameters = make_parameters()
    optimizer = wrap(torch.optim.AdamW(parameters))
    set_gradients(parameters)
    loss = (parameters[0] ** 2).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---------------------------------------------------------------- state


def wrap_after_five_steps(wrap: Wrap) -> tuple[list[torch.nn.Parameter], Any, dos.DOSOptimizer]:
    parameters = make_parameters()
    wrapped = torch.optim.AdamW(parameters, lr=1e-2)
    take_steps(wrapped, parameters, range(5))
    return parameters, wrapped, wrap(wrapped)


def test_wrapping_after_five_steps_goes_on_as_if_wrapped_before(wrap: Wrap) -> None:
    parameters, _, optimizer = wrap_after_five_steps(wrap)
    take_steps(optimizer, parameters, range(5, 10))
    others = make_parameters()
    take_steps(wrap(torch.optim.AdamW(others, lr=1e-2)), others, range(10))
    assert_near(parameters[0].detach(), others[0].detach())


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_adopted_state_has_its_bits(wrap: Wrap, name: str) -> None:
    parameters = make_parameters()
    wrapped = torch.optim.AdamW(parameters)
    take_steps(wrapped, parameters)
    before = wrapped.state[parameters[1]][name]
    assert torch.equal(wrap(wrapped).state[parameters[1]][name], before)


def test_adoption_empties_the_wrapped_state(wrap: Wrap) -> None:
    assert len(wrap_after_five_steps(wrap)[1].state) == 0


def test_step_count_goes_on_after_adoption(wrap: Wrap) -> None:
    parameters, _, optimizer = wrap_after_five_steps(wrap)
    take_steps(optimizer, parameters, range(5, 7))
    assert optimizer.state[parameters[0]]["step"] == 7


def test_state_is_empty_before_the_first_step(wrap: Wrap) -> None:
    assert len(wrap(torch.optim.AdamW(make_parameters())).state) == 0


def test_state_has_the_names_of_torch_after_a_step(wrap: Wrap) -> None:
    parameters = make_parameters()
    optimizer = wrap(torch.optim.AdamW(parameters))
    take_steps(optimizer, parameters)
    assert list(optimizer.state[parameters[0]]) == ["step", "exp_avg", "exp_avg_sq"]


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_state_is_that_of_torch(wrap: Wrap, name: str) -> None:
    states = []
    for ours in (True, False):
        parameters = make_parameters()
        wrapped = torch.optim.AdamW(parameters)
        optimizer = wrap(wrapped) if ours else wrapped
        take_steps(optimizer, parameters)
        states.append(optimizer.state[parameters[1]][name])
    assert_near(*states, what=name)


@pytest.mark.parametrize("subgroup_size", [1000, 10_000])
def test_saved_state_of_one_parameter_is_about_its_own_bytes(
    wrap: Wrap, subgroup_size: int
) -> None:
    parameters = [torch.nn.Parameter(torch.ones(3000)) for _ in range(20)]
    optimizer = wrap(torch.optim.AdamW(parameters), subgroup_size=subgroup_size)
    take_steps(optimizer, parameters, range(1))
    file = io.BytesIO()
    torch.save(optimizer.state[parameters[3]], file)
    assert file.tell() < 2 * 4 * 3000 + 4096


# ---------------------------------------------------------------- reports


def test_printed_plan_parses_back(wrap: Wrap) -> None:
    plan = wrap(torch.optim.AdamW(make_parameters())).plan
    assert parse_plan(str(plan)) == plan


def test_there_is_no_last_step_before_the_first(wrap: Wrap) -> None:
    assert wrap(torch.optim.AdamW(make_parameters())).last_step is None


@pytest.mark.parametrize("name", ["wall_s", "busy_s", "h2d_bytes", "d2h_bytes"])
def test_last_step_measures(wrap: Wrap, name: str) -> None:
    parameters = make_parameters()
    optimizer = wrap(torch.optim.AdamW(parameters))
    take_steps(optimizer, parameters, range(1))
    measured = getattr(optimizer.last_step, name)
    assert (sum(measured.values()) if isinstance(measured, dict) else measured) > 0


def test_last_step_names_its_stride(wrap: Wrap) -> None:
    optimizer = wrap(torch.optim.AdamW(make_parameters()), stride=1.5)
    optimizer.step()
    assert optimizer.last_step is not None
    assert optimizer.last_step.stride == "1.5"
