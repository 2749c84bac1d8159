"""Training that is saved, ends, and goes on in a fresh process has the bits of an unbroken one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu.state_cases import assert_same

pytestmark = pytest.mark.slow  # a process per run

ROOT = Path(__file__).parents[2]
OLD = {"device": "virtual", "stride": 2, "subgroup_size": 1024}
OTHERS: list[dict[str, Any]] = [
    {"device": "cpu"},
    {"device": "virtual", "stride": "host", "subgroup_size": 100},
    {"device": "virtual", "stride": 1.5, "subgroup_size": 1024, "resident_ratio": 0.5},
    {"device": "virtual", "stride": 1, "subgroup_size": 5000, "device_slots": 1},
]

RUN = """
import sys
import torch
import dos
from tests.cpu.state_cases import adamw, make_parameters, take_steps

source, target, start, stop, dtype, options = sys.argv[1:]
parameters = make_parameters(getattr(torch, dtype))
model = torch.nn.ParameterList(parameters)
optimizer = dos.DOSOptimizer(adamw(parameters), **eval(options))
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
if source:
    saved = torch.load(source)
    optimizer.load_state_dict(saved["optimizer"])
    model.load_state_dict(saved["model"])
    scheduler.load_state_dict(saved["scheduler"])
for step in range(int(start), int(stop)):
    take_steps(optimizer, parameters, range(step, step + 1))
    scheduler.step()
parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
torch.save({name: part.state_dict() for name, part in parts.items()}, target)
"""


def run(source: Path | str, target: Path, steps: range, dtype: str, plan: dict[str, Any]) -> Any:
    """What a process of its own saved after these steps."""
    arguments = [str(source), str(target), str(steps.start), str(steps.stop), dtype, repr(plan)]
    subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", RUN, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=200,
    )
    return torch.load(target)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def unbroken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The dtype, what 20 steps end with, and the file saved half-way by another process."""
    folder = tmp_path_factory.mktemp("resume")
    run("", folder / "half.pt", range(10), request.param, OLD)
    whole = run("", folder / "whole.pt", range(20), request.param, OLD)
    return request.param, whole, folder / "half.pt"


@pytest.mark.parametrize("plan", OTHERS, ids=str)
def test_ten_steps_and_ten_in_a_fresh_process_are_twenty(
    unbroken: Any, plan: dict[str, Any], tmp_path: Path
) -> None:
    dtype, whole, half = unbroken
    resumed = run(half, tmp_path / "end.pt", range(10, 20), dtype, plan)
    assert resumed["scheduler"] == whole["scheduler"]
    assert resumed["optimizer"]["param_groups"] == whole["optimizer"]["param_groups"]
    assert_same(list(resumed["model"].values()), list(whole["model"].values()))
    for index, state in whole["optimizer"]["state"].items():
        for kind, value in state.items():
            assert torch.equal(resumed["optimizer"]["state"][index][kind], value)
