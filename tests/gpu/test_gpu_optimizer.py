"""On a real accelerator, the training is that of plain host updates, bit for bit."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.gpu.training import ALL, differing, trained

pytestmark = pytest.mark.gpu

DTYPES = {
    "fp32": (torch.float32,),
    "bf16": (torch.bfloat16,),
    "mixed": (torch.bfloat16, torch.float32, torch.float16),
}


@cache
def on_the_host(dtypes: str) -> dict[str, torch.Tensor]:
    return trained(torch.device("cpu"), DTYPES[dtypes], device="cpu", subgroup_size=3000)


def accelerator() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("resident_ratio", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("stride", ["host", 1, 1.25, 1.5, 2, 3, 7, "auto"])
def test_an_accelerator_trains_the_same_bits(
    dtypes: str, stride: float | str, resident_ratio: float
) -> None:
    got = trained(
        accelerator(),
        DTYPES[dtypes],
        stride=stride,
        resident_ratio=resident_ratio,
        subgroup_size=3000,
    )
    assert differing(got, on_the_host(dtypes)) == []


@pytest.mark.parametrize("subgroup_size", [997, 5000, ALL])
@pytest.mark.parametrize("device_slots", [1, 2, 3])
@pytest.mark.parametrize("stride", ["host", 1, 1.5])
def test_slots_and_subgroups_do_not_change_the_bits(
    stride: float | str, device_slots: int, subgroup_size: int
) -> None:
    got = trained(
        accelerator(),
        DTYPES["mixed"],
        stride=stride,
        device_slots=device_slots,
        subgroup_size=subgroup_size,
    )
    assert differing(got, on_the_host("mixed")) == []
