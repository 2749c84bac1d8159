"""Saving, loading and the step after it take no second copy of the state: peaks, measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

RUN = """
import json
import sys
import torch
import dos

MIB = 1 << 20


def status_bytes(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def growth_bytes(act):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak counts from here
    before = status_bytes("VmRSS")
    act()
    return status_bytes("VmHWM") - before


dtype, device = getattr(torch, sys.argv[1]), sys.argv[2]
# Each lies in several subgroups.
parameters = [torch.nn.Parameter(torch.ones(n, dtype=dtype)) for n in (9 * MIB, 7 * MIB, 8 * MIB)]
for parameter in parameters:
    parameter.grad = torch.ones_like(parameter)
options = {"stride": 2} if device == "virtual" else {}
optimizer = dos.DOSOptimizer(
    torch.optim.AdamW(parameters), device=device, subgroup_size=2_500_000, **options
)
optimizer.step()
for parameter in parameters:
    parameter.grad = None
state_bytes = sum(
    value.nbytes for its in optimizer.state.values() for value in its.values()
)
saving = growth_bytes(lambda: torch.save(optimizer.state_dict(), sys.argv[3]))
saved = torch.load(sys.argv[3])
loading = growth_bytes(lambda: optimizer.load_state_dict(saved))
for parameter in parameters:
    parameter.grad = torch.ones_like(parameter)
stepping = growth_bytes(optimizer.step)
figures = {"state": state_bytes, "saving": saving, "loading": loading, "stepping": stepping}
print(json.dumps(figures))
"""


@cache
def measured(dtype: str, device: str, file: Path) -> dict[str, int]:
    """Bytes of the state, and by how much each act raises the process's peak."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, dtype, device, str(file)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
        timeout=250,
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("peak") / "state.pt"


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset"
)
@pytest.mark.parametrize("act", ["saving", "loading", "stepping"])
@pytest.mark.parametrize(
    ("dtype", "device"),
    [("float32", "cpu"), ("bfloat16", "cpu"), ("float32", "virtual"), ("bfloat16", "virtual")],
)
def test_the_peak_grows_by_much_less_than_the_state(
    dtype: str, device: str, act: str, file: Path
) -> None:
    figures = measured(dtype, device, file)
    assert figures[act] < figures["state"] / 4
