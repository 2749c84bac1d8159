"""The invariant: every option gives the same training, bit for bit; torch's within tolerance."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import dos
from tests.cpu.tolerances import AFTER_100_STEPS

STEPS = 20
STRIDES = [1, 1.25, 2, 3, 7, "host"]
RATIOS = [0.0, 0.4]
SLOTS = [1, 2]
ALL = 1000

Trained = list[torch.Tensor]
"""Per parameter its weight, step count, exp_avg, exp_avg_sq, and the master of a 16-bit one."""


def make_parameters() -> list[torch.nn.Parameter]:
    """48 elements in fp32 and bf16, in sizes that no subgroup size above 1 divides."""
    generator = torch.Generator().manual_seed(0)
    shapes = [((5, 3), torch.float32), ((11,), torch.bfloat16), ((1,), torch.float32)]
    shapes += [((7, 2), torch.float32), ((7,), torch.bfloat16)]
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape, dtype in shapes
    ]


def set_gradients(parameters: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to(parameter.dtype)


def make_adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.AdamW:
    """Two groups that differ in lr and weight decay."""
    groups = [
        {"params": parameters[:2], "lr": 1e-2, "weight_decay": 0.1},
        {"params": parameters[2:], "lr": 3e-3, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups)


@contextmanager
def open_optimizer(
    parameters: list[torch.nn.Parameter], **options: Any
) -> Iterator[dos.DOSOptimizer]:
    optimizer = dos.DOSOptimizer(make_adamw(parameters), **options)
    try:
        yield optimizer
    finally:
        optimizer.close()


def trained(**options: Any) -> Trained:
    """Weights and states after `STEPS` steps under a scheduler, all in one list."""
    parameters = make_parameters()
    with open_optimizer(parameters, **options) as optimizer:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        for step in range(STEPS):
            set_gradients(parameters, step)
            optimizer.step()
            scheduler.step()
        kept: Trained = []
        for parameter in parameters:
            kept.append(parameter.detach().clone())
            kept += [tensor.clone() for tensor in optimizer.state[parameter].values()]
        return kept


def bits(tensors: Trained) -> list[tuple[torch.dtype, bytes]]:
    return [(t.dtype, t.reshape(-1).view(torch.uint8).numpy().tobytes()) for t in tensors]


@pytest.fixture(scope="module")
def on_the_host() -> list[tuple[torch.dtype, bytes]]:
    return bits(trained(device="cpu"))


@pytest.mark.parametrize(
    ("stride", "ratio", "slots"), list(itertools.product(STRIDES, RATIOS, SLOTS))
)
@pytest.mark.parametrize("subgroup_size", [1, 4, 13, ALL])
def test_schedule_gives_the_bits_of_the_host(
    on_the_host: list[tuple[torch.dtype, bytes]],
    stride: float | str,
    ratio: float,
    slots: int,
    subgroup_size: int,
) -> None:
    after = trained(
        device=dos.VirtualDevice(poison=True),
        stride=stride,
        resident_ratio=ratio,
        device_slots=slots,
        subgroup_size=subgroup_size,
    )
    assert bits(after) == on_the_host


@pytest.mark.parametrize(
    ("stride", "ratio", "slots"), list(itertools.product(STRIDES, RATIOS, SLOTS))
)
@pytest.mark.parametrize("subgroup_size", [5, ALL])
def test_schedule_with_random_delays_gives_the_bits_of_the_host(
    on_the_host: list[tuple[torch.dtype, bytes]],
    stride: float | str,
    ratio: float,
    slots: int,
    subgroup_size: int,
) -> None:
    after = trained(
        device=dos.VirtualDevice(poison=True, jitter_seed=slots),
        stride=stride,
        resident_ratio=ratio,
        device_slots=slots,
        subgroup_size=subgroup_size,
    )
    assert bits(after) == on_the_host


@pytest.mark.parametrize("stride", STRIDES)
def test_single_elements_with_random_delays_give_the_bits_of_the_host(
    on_the_host: list[tuple[torch.dtype, bytes]], stride: float | str
) -> None:
    device = dos.VirtualDevice(poison=True, jitter_seed=3)
    after = trained(device=device, stride=stride, resident_ratio=0.4, subgroup_size=1)
    assert bits(after) == on_the_host


@pytest.mark.parametrize("subgroup_size", [1, 13])
def test_subgroups_on_the_host_do_not_change_the_bits(
    on_the_host: list[tuple[torch.dtype, bytes]], subgroup_size: int
) -> None:
    assert bits(trained(device="cpu", subgroup_size=subgroup_size)) == on_the_host


@pytest.mark.parametrize("threads", [1, 2])
def test_thread_count_does_not_change_the_bits(
    on_the_host: list[tuple[torch.dtype, bytes]], threads: int
) -> None:
    assert bits(trained(device="cpu", threads=threads)) == on_the_host


@pytest.mark.parametrize("ratio", [0.4, 1.0])
def test_choosing_the_stride_does_not_change_the_bits(
    on_the_host: list[tuple[torch.dtype, bytes]], ratio: float
) -> None:
    after = trained(device="virtual", stride="auto", resident_ratio=ratio, subgroup_size=4)
    assert bits(after) == on_the_host


# ---------------------------------------------------------------- against torch


def after_100_steps(
    wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer], kind: type[torch.optim.Adam]
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    start = 1 + 0.1 * torch.randn(1000, generator=generator)
    parameter = torch.nn.Parameter(start)
    optimizer = wrap(kind([parameter], lr=1e-2, weight_decay=0.05))
    for _ in range(100):
        parameter.grad = torch.randn(1000, generator=generator)
        optimizer.step()
    state = optimizer.state[parameter]
    after = {
        "p": parameter.detach().clone(),
        "exp_avg": state["exp_avg"].clone(),
        "exp_avg_sq": state["exp_avg_sq"].clone(),
    }
    if isinstance(optimizer, dos.DOSOptimizer):
        optimizer.close()
    return after


def wrap_virtual(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return dos.DOSOptimizer(optimizer, device="virtual", stride=2, subgroup_size=300)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("what", list(AFTER_100_STEPS))
def test_hundred_steps_agree_with_torch(what: str, kind: type[torch.optim.Adam]) -> None:
    ours = after_100_steps(wrap_virtual, kind)[what]
    theirs = after_100_steps(lambda optimizer: optimizer, kind)[what]
    tolerance = AFTER_100_STEPS[what]
    torch.testing.assert_close(ours, theirs, rtol=tolerance.relative, atol=tolerance.absolute)
