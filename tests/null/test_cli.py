"""The command `dos`, as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dos.plan import parse_plan

ROOT = Path(__file__).parents[2]


def run_dos(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from dos.cli import main; main()", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_plan_prints_a_plan_that_parses_back() -> None:
    shown = run_dos("plan", "1000", "--subgroup-size", "100", "--stride", "1.5").stdout
    text = shown[: shown.rindex("host memory")]
    assert len(parse_plan(text).sizes) == 10


def test_json_is_one_object_and_nothing_else() -> None:
    figures = json.loads(run_dos("plan", "1000", "--subgroup-size", "100", "--json").stdout)
    assert figures["subgroups"] == 10


@pytest.mark.parametrize("stride", ["0.5", "fast"])
def test_a_wrong_stride_exits_with_2(stride: str) -> None:
    assert run_dos("plan", "1000", "--stride", stride).returncode == 2


def test_a_wrong_stride_says_how_to_fix_it() -> None:
    assert "fix:" in run_dos("plan", "1000", "--stride", "0.5").stderr
