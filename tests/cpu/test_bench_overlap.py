"""The benchmark of `overlap_forward`, on a size that says nothing about time: is all there?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TINY = ("--layers", "3", "--tokens", "64", "--steps", "1")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a tiny run prints, and its trace."""
    trace = tmp_path_factory.mktemp("bench") / "trace.json"
    command = ["-m", "experiments.bench_overlap", *TINY, "--json", "--trace", str(trace)]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return {"stdout": done.stdout, "stderr": done.stderr, "trace": trace}


def test_standard_output_is_one_json_object(shown: dict[str, Any]) -> None:
    (line,) = shown["stdout"].splitlines()
    assert isinstance(json.loads(line), dict), shown["stderr"]


def test_both_runs_end_with_the_same_bits(shown: dict[str, Any]) -> None:
    assert json.loads(shown["stdout"])["same_bits"]


def test_the_figures_say_that_they_are_of_an_emulation(shown: dict[str, Any]) -> None:
    figures = json.loads(shown["stdout"])
    assert figures["emulation"]
    assert "virtual" in figures["label"]


def test_the_trace_shows_what_the_caller_waited_for(shown: dict[str, Any]) -> None:
    events = json.loads(shown["trace"].read_text())["traceEvents"]
    assert {"step", "wait for step"} <= {event["name"] for event in events}
