"""Whatever the schedule, the training is that of plain host updates, bit for bit."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dos import DOSOptimizer, VirtualDevice

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((), (0,), (1,), (17,), (5, 7), (64,), (2, 3, 4, 5), (129,))
STRIDES = (1, 1.25, 1.5, 2, 3, 7, "host")
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@dataclass(frozen=True)
class Parameter:
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int
    transposed: bool


@dataclass(frozen=True)
class Case:
    """A model, the steps without a gradient of some parameters, and a schedule."""

    parameters: tuple[Parameter, ...]
    missing: tuple[frozenset[int], ...]
    seed: int
    adamw: bool
    subgroup_size: int
    stride: float | str
    resident_ratio: float
    device_slots: int
    jitter_seed: int | None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    parameter = st.builds(
        Parameter,
        shape=st.sampled_from(SHAPES),
        dtype=st.sampled_from(DTYPES),
        group=st.integers(0, 1),
        transposed=st.booleans(),
    )
    parameters = tuple(draw(st.lists(parameter, min_size=1, max_size=7)))
    numel = sum(math.prod(p.shape) for p in parameters)
    absent = st.frozensets(st.integers(0, len(parameters) - 1), max_size=len(parameters))
    return Case(
        parameters=parameters,
        missing=tuple(draw(st.lists(absent, min_size=2, max_size=3))),
        seed=draw(st.integers(0, 2**31)),
        adamw=draw(st.booleans()),
        # Below a tenth of all, a step has so many ops that it takes long and shows no more.
        subgroup_size=draw(st.integers(max(1, numel // 12), max(1, numel))),
        stride=draw(st.sampled_from(STRIDES)),
        resident_ratio=draw(st.sampled_from((0.0, 0.4, 1.0))),
        device_slots=draw(st.integers(1, 3)),
        # A third of the cases with delays: each delay costs up to half a millisecond.
        jitter_seed=draw(st.none() | st.none() | st.integers(0, 1000)),
    )


def model_of(case: Case) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(case.seed)
    made = []
    for its in case.parameters:
        value = torch.randn(its.shape, generator=generator).to(its.dtype)
        if its.transposed and value.dim() > 1:
            value = value.transpose(0, -1).contiguous().transpose(0, -1)
        made.append(torch.nn.Parameter(value))
    return made


def wrapped_of(case: Case, model: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {
            "params": [p for p, its in zip(model, case.parameters, strict=True) if its.group == g],
            "lr": (1e-2, 3e-3)[g],
            "betas": ((0.9, 0.999), (0.8, 0.95))[g],
            "weight_decay": (0.1, 0.0)[g],
        }
        for g in range(2)
    ]
    kind = torch.optim.AdamW if case.adamw else torch.optim.Adam
    return kind(groups)


def trained(case: Case, **options: object) -> dict[str, torch.Tensor]:
    """All weights and state after the case's steps, as the integers of their bits."""
    model = model_of(case)
    generator = torch.Generator().manual_seed(case.seed + 1)
    optimizer = DOSOptimizer(
        wrapped_of(case, model), subgroup_size=case.subgroup_size, threads=1, **options
    )
    with closing(optimizer):
        for missing in case.missing:
            for index, parameter in enumerate(model):
                grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.grad = None if index in missing else grad
            optimizer.step()
        found = {}
        for index, parameter in enumerate(model):
            found[f"{index} weight"] = parameter.detach()
            for name, value in optimizer.state.get(parameter, {}).items():
                found[f"{index} {name}"] = value
        return {name: value.clone().view(INTEGERS[value.dtype]) for name, value in found.items()}


def differing(case: Case) -> list[str]:
    """What of weights and state the virtual device trains otherwise than the host."""
    expected = trained(case, device="cpu")
    got = trained(
        case,
        device=VirtualDevice(jitter_seed=case.jitter_seed, poison=True),
        stride=case.stride,
        resident_ratio=case.resident_ratio,
        device_slots=case.device_slots,
    )
    assert got.keys() == expected.keys()
    return [name for name, bits in expected.items() if not torch.equal(bits, got[name])]


@settings(max_examples=200)
@given(case=cases())
def test_every_schedule_trains_the_same_bits(case: Case) -> None:
    assert differing(case) == []


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("resident_ratio", [0.0, 0.4])
def test_random_delays_change_no_bit(stride: float | str, resident_ratio: float) -> None:
    parameters = tuple(Parameter((97,), DTYPES[i % 3], i % 2, False) for i in range(6))
    case = Case(
        parameters=parameters,
        missing=(frozenset(), frozenset({1}), frozenset({0, 1, 2})),
        seed=7,
        adamw=True,
        subgroup_size=40,
        stride=stride,
        resident_ratio=resident_ratio,
        device_slots=2,
        jitter_seed=11,
    )
    assert differing(case) == []


def test_the_comparison_sees_one_missing_gradient() -> None:
    """Guards the tests above: two trainings that differ are found to differ."""
    one = Case((Parameter((17,), torch.float32, 0, False),), (), 3, True, 5, 1, 0.0, 2, None)
    with_grad = trained(Case(**{**vars(one), "missing": (frozenset(),)}), device="cpu")
    without = trained(Case(**{**vars(one), "missing": (frozenset({0}),)}), device="cpu")
    assert not torch.equal(with_grad["0 weight"], without["0 weight"])
