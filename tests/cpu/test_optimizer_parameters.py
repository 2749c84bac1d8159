"""Parameters of every kind: frozen, unused, tied, without elements, in any memory order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dos
from tests.cpu.tolerances import AFTER_100_STEPS

Wrap = Callable[..., dos.DOSOptimizer]


@pytest.fixture
def wrap() -> Iterator[Wrap]:
    """Makes optimizers and closes them after the test."""
    made: list[dos.DOSOptimizer] = []

    def make(parameters: list[torch.nn.Parameter], **options: Any) -> dos.DOSOptimizer:
        defaults: dict[str, Any] = {"device": "virtual", "stride": 2, "subgroup_size": 5}
        wrapped = torch.optim.AdamW(parameters, lr=1e-2)
        made.append(dos.DOSOptimizer(wrapped, **{**defaults, **options}))
        return made[-1]

    yield make
    for optimizer in made:
        optimizer.close()


def parameter_of(*shape: int, seed: int = 0) -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(1 + 0.1 * torch.randn(shape, generator=generator))


def with_gradients(parameter: torch.nn.Parameter, present: str) -> Iterator[None]:
    """Per letter of `present`, the next gradient where it is "x", none where it is "."."""
    generator = torch.Generator().manual_seed(1)
    for letter in present:
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient if letter == "x" else None
        yield


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    bound = AFTER_100_STEPS["p"]
    torch.testing.assert_close(ours, theirs, rtol=bound.relative, atol=bound.absolute)


def in_torch(parameter: torch.nn.Parameter, present: str) -> torch.Tensor:
    """A copy of `parameter` after torch's own steps."""
    copy = torch.nn.Parameter(parameter.detach().clone())
    optimizer = torch.optim.AdamW([copy], lr=1e-2)
    for _ in with_gradients(copy, present):
        optimizer.step()
    return copy.detach()


def pool_bytes(optimizer: dos.DOSOptimizer) -> int:
    return optimizer._engine._pools[0].requirement.total_bytes


# ---------------------------------------------------------------- without a gradient


def one_without_gradient(
    wrap: Wrap, frozen: bool
) -> tuple[torch.nn.Parameter, torch.Tensor, dos.DOSOptimizer]:
    used, idle = parameter_of(4, 3), parameter_of(4, 3, seed=1)
    idle.requires_grad_(not frozen)
    before = idle.detach().clone()
    optimizer = wrap([used, idle])
    for _ in with_gradients(used, "xxx"):
        optimizer.step()
    return idle, before, optimizer


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "unused"])
def test_parameter_without_gradient_is_untouched(wrap: Wrap, frozen: bool) -> None:
    idle, before, _ = one_without_gradient(wrap, frozen)
    assert torch.equal(idle, before)


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "unused"])
def test_parameter_without_gradient_has_no_state(wrap: Wrap, frozen: bool) -> None:
    idle, _, optimizer = one_without_gradient(wrap, frozen)
    assert idle not in optimizer.state


def test_frozen_parameter_takes_no_pool_memory(wrap: Wrap) -> None:
    frozen = torch.nn.Parameter(torch.ones(100_000), requires_grad=False)
    without = wrap([parameter_of(4, 3)])
    assert pool_bytes(wrap([parameter_of(4, 3), frozen])) == pool_bytes(without)


PRESENT = "x.xx..xxx.x"


@pytest.mark.parametrize("subgroup_size", [5, 1000], ids=["subgroups", "one subgroup"])
def test_parameter_with_a_gradient_sometimes_trains_as_in_torch(
    wrap: Wrap, subgroup_size: int
) -> None:
    other, parameter = parameter_of(4, 3, seed=1), parameter_of(4, 3)
    expected = in_torch(parameter, PRESENT)
    optimizer = wrap([other, parameter], subgroup_size=subgroup_size)
    for _ in with_gradients(parameter, PRESENT):
        other.grad = torch.ones_like(other)
        optimizer.step()
    assert_near(parameter.detach(), expected)


def test_steps_without_a_gradient_are_not_counted(wrap: Wrap) -> None:
    other, parameter = parameter_of(4, 3, seed=1), parameter_of(4, 3)
    optimizer = wrap([other, parameter])
    for _ in with_gradients(parameter, PRESENT):
        other.grad = torch.ones_like(other)
        optimizer.step()
    assert optimizer.state[parameter]["step"] == PRESENT.count("x")


def test_steps_without_any_gradient_change_nothing(wrap: Wrap) -> None:
    parameter = parameter_of(4, 3)
    before = parameter.detach().clone()
    wrap([parameter]).step()
    assert torch.equal(parameter, before)


# ---------------------------------------------------------------- tied


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.outward.weight = self.inward.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.outward(self.inward(x))
        return result


def tied_weight(wrap: Wrap | None) -> torch.Tensor:
    torch.manual_seed(0)
    model = Tied()
    parameters = list(model.parameters())
    optimizer: Any = wrap(parameters) if wrap else torch.optim.AdamW(parameters, lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    return model.outward.weight.detach()


def test_tied_weight_trains_as_in_torch(wrap: Wrap) -> None:
    # The gradients come from the trained weights, so the distance to torch feeds back.
    torch.testing.assert_close(tied_weight(wrap), tied_weight(None), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 3), (2, 0), (1, 5, 1)], ids=str)
def test_shape_trains_as_in_torch(wrap: Wrap, shape: tuple[int, ...]) -> None:
    parameter, other = parameter_of(*shape), parameter_of(7)
    expected = in_torch(parameter, "xxxxx")
    optimizer = wrap([parameter, other])
    for _ in with_gradients(parameter, "xxxxx"):
        other.grad = torch.ones_like(other)
        optimizer.step()
    assert_near(parameter.detach(), expected)


@pytest.mark.parametrize("shape", [(), (0, 3)], ids=str)
def test_state_has_the_shape_of_its_parameter(wrap: Wrap, shape: tuple[int, ...]) -> None:
    parameter, other = parameter_of(*shape), parameter_of(7)
    optimizer = wrap([parameter, other])
    for _ in with_gradients(parameter, "x"):
        optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].shape == shape


# ---------------------------------------------------------------- memory order

CHANNELS_LAST = torch.channels_last


def channels_last_parameter() -> torch.nn.Parameter:
    values = parameter_of(2, 3, 4, 5).detach()
    return torch.nn.Parameter(values.to(memory_format=CHANNELS_LAST))


@pytest.mark.parametrize("device", ["cpu", "virtual"])
@pytest.mark.parametrize("order", [CHANNELS_LAST, torch.contiguous_format], ids=str)
def test_channels_last_trains_as_in_torch(
    wrap: Wrap, order: torch.memory_format, device: str
) -> None:
    parameter = channels_last_parameter()
    expected = in_torch(parameter, "xxx")
    optimizer = wrap([parameter], device=device, stride="auto")
    for _ in with_gradients(parameter, "xxx"):
        assert parameter.grad is not None
        parameter.grad = parameter.grad.to(memory_format=order)
        optimizer.step()
    assert_near(parameter.detach(), expected)


def test_state_has_the_memory_order_of_its_parameter(wrap: Wrap) -> None:
    parameter = channels_last_parameter()
    optimizer = wrap([parameter])
    for _ in with_gradients(parameter, "x"):
        optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].stride() == parameter.stride()


# ---------------------------------------------------------------- 16 bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("device", ["cpu", "virtual"])
def test_sixteen_bit_weight_is_its_rounded_master(
    wrap: Wrap, device: str, dtype: torch.dtype
) -> None:
    parameter = torch.nn.Parameter(parameter_of(4, 3).detach().to(dtype))
    optimizer = wrap([parameter], device=device, stride="auto")
    for _ in range(3):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert torch.equal(parameter, optimizer.state[parameter]["master"].to(dtype))


@pytest.mark.parametrize("device", ["cpu", "virtual"])
def test_weights_loaded_before_the_first_step_are_trained(wrap: Wrap, device: str) -> None:
    late, early = parameter_of(4, 3), parameter_of(4, 3, seed=1)
    optimizer = wrap([late], device=device, stride="auto")
    late.data.copy_(early.detach())
    for _ in with_gradients(late, "xx"):
        optimizer.step()
    assert_near(late.detach(), in_torch(early, "xx"))
