"""A calibration of a real accelerator, and `stride="auto"` that goes by one."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

import pytest
import torch

import dos
from dos.kernels import adam
from perfmodel.bench import Effort
from perfmodel.calibrate import QUICK, calibrate, quick_profile
from perfmodel.profile import NodeProfile

pytestmark = pytest.mark.gpu

SMALL = Effort(window_s=0.02, params=3_000_000, copy_bytes=16 << 20, disk_bytes=64 << 20)


@pytest.fixture(scope="module")
def accelerator() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


def test_nothing_of_the_device_is_left_out(accelerator: torch.device) -> None:
    left_out = calibrate(accelerator, effort=SMALL).left_out
    assert set(left_out) <= {"disk_write_bytes_per_s", "disk_read_bytes_per_s"}


def test_both_ways_at_once_carry_no_less_than_one(accelerator: torch.device) -> None:
    profile = calibrate(accelerator, effort=QUICK, quick=True).profile
    slower = min(profile.rate("h2d_bytes_per_s"), profile.rate("d2h_bytes_per_s"))
    assert profile.rate("link_bytes_per_s") > 0.8 * slower


def test_the_first_step_measures_and_the_next_optimizer_reads(
    accelerator: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.INFO, "dos"):
        for _ in range(2):
            parameter = torch.nn.Parameter(torch.ones(10_000, device=accelerator))
            optimizer = dos.DOSOptimizer(torch.optim.AdamW([parameter]), subgroup_size=1024)
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.close()
    assert caplog.text.count("the machine was measured") == 1
    assert NodeProfile.load(tmp_path / "dos" / "node.json").has_device


def test_memory_of_the_device_is_given_back(accelerator: torch.device) -> None:
    before = torch.cuda.memory_allocated(accelerator)
    with closing(adam.make_pool(2)) as pool:
        quick_profile(accelerator, pool, SMALL)
    assert torch.cuda.memory_allocated(accelerator) == before
