"""The GPU's benchmark, played on the CPU: is all there, and is the arithmetic right?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import bench_gpu_update, gpu_steps
from experiments.update_rivals import Update

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TINY = ("--params", "5000", "--step-params", "5000", "--rounds", "2", "--step-rounds", "2")


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "experiments.bench_gpu_update", *TINY, *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    done = bench("--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return dict(json.loads(line))


def test_the_figures_of_a_cpu_say_that_they_mean_nothing(figures: dict[str, Any]) -> None:
    assert "mean nothing" in figures["device"]


def test_every_contestant_has_a_rate(figures: dict[str, Any]) -> None:
    assert set(figures["update"]) == {"torch_operations", "torch_fused", "copy"}
    assert set(figures["examine"]) == {"torch_operations"}
    assert set(figures["link"]) == {"h2d", "d2h", "both"}
    found = [one for part in ("update", "examine", "link") for one in figures[part].values()]
    assert all(one["gbytes_per_s"] > 0 for one in found)


def test_every_stride_has_a_step_beside_its_busiest_lane(figures: dict[str, Any]) -> None:
    strides = figures["steps"]["strides"]
    assert list(strides) == ["host", "3", "2", "1.5", "1"]
    assert all(found["busy_s"][found["busiest_lane"]] > 0 for found in strides.values())
    assert all(found["step_s"] > 0 for found in strides.values())


def test_the_device_lane_works_where_subgroups_are_streamed(figures: dict[str, Any]) -> None:
    lanes = {name: set(one["busy_s"]) for name, one in figures["steps"]["strides"].items()}
    assert "device" not in lanes["host"]
    assert "device" in lanes["2"]


def test_without_a_gpu_it_says_so() -> None:
    done = bench()
    assert (done.returncode, done.stdout) == (2, "")
    assert "no CUDA device" in done.stderr


def test_a_rate_follows_from_the_median() -> None:
    update = Update(lambda: None, 28, times_s=[0.5, 0.25, 1.0])
    found = bench_gpu_update.rates({"it": update}, 1_000_000_000)["it"]
    assert (found["time_s"], found["gparams_per_s"], found["gbytes_per_s"]) == (0.5, 2.0, 56.0)


def test_a_ratio_is_of_times_within_a_round() -> None:
    ours = Update(lambda: None, 28, times_s=[1.0, 2.0, 3.0])
    theirs = Update(lambda: None, 40, times_s=[2.0, 4.0, 6.0])
    assert bench_gpu_update.ratio(theirs, ours) == {"median": 2.0, "quartiles": (2.0, 2.0)}


def test_a_round_gives_each_one_time() -> None:
    runs = {name: Update(lambda: None, 1) for name in "abc"}
    bench_gpu_update.take_turns(runs, CPU, 4)
    assert [len(run.times_s) for run in runs.values()] == [4, 4, 4]


@pytest.mark.parametrize(
    ("host", "device", "params"),
    [(None, None, 1000), (16_000, None, 500), (1 << 40, 4_000, 500), (0, 0, gpu_steps.SUBGROUPS)],
)
def test_steps_are_of_as_many_parameters_as_fit(
    host: int | None, device: int | None, params: int
) -> None:
    assert gpu_steps.params_that_fit(1000, 1, host, device) == params


def test_optimizers_share_the_memory() -> None:
    assert gpu_steps.params_that_fit(1000, 5, 80_000, None) == 500
