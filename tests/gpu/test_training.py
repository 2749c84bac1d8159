"""The training that the tests of accelerators compare, where there is none."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.training import differing, trained

CPU, MIXED = torch.device("cpu"), (torch.bfloat16, torch.float32, torch.float16)


@pytest.mark.parametrize("release_grads", [False, True])
def test_a_virtual_device_trains_the_bits_of_the_host(release_grads: bool) -> None:
    got = trained(
        CPU, MIXED, device="virtual", stride=2, subgroup_size=3000, release_grads=release_grads
    )
    assert differing(got, trained(CPU, MIXED, device="cpu", subgroup_size=3000)) == []
