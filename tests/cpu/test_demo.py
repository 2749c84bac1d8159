"""The demo, shortened to six steps a run: too few to learn, enough to see that all is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The demo's exit code, last line of output, and folder of files."""
    out = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [sys.executable, "-m", "experiments.demo", "--steps", "6", "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    last = json.loads(done.stdout.splitlines()[-1])
    return {"rc": done.returncode, "figures": last, "out": out}


def test_all_runs_end_with_the_same_bits(shown: dict[str, Any]) -> None:
    assert shown["figures"]["same_bits"]


def test_a_run_that_was_killed_goes_on_as_one_that_was_not(shown: dict[str, Any]) -> None:
    assert shown["figures"]["resumed_same"]


def test_a_loss_that_did_not_fall_fails_the_demo(shown: dict[str, Any]) -> None:
    assert shown["rc"] == 1


def test_the_timeline_is_a_picture(shown: dict[str, Any]) -> None:
    assert (shown["out"] / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_the_trace_is_labelled_with_its_device(shown: dict[str, Any]) -> None:
    trace = json.loads((shown["out"] / "trace.json").read_text())
    assert shown["figures"]["device"] in trace["traceEvents"][0]["args"]["name"]
