"""The benchmark of ZeRO-3, on a size that says nothing about speed: is all there?"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.integration.worlds import ROOT

pytest.importorskip("deepspeed")

TINY = ("--params", "40000", "--virtual-params", "40000", "--width", "64", "--rounds", "2")


@pytest.mark.slow
def test_standard_output_is_one_json_object_with_the_named_figures() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "experiments.bench_zero3", "--json", "--no-cpu-adam", *TINY],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    settings = json.loads(line)["settings"]
    assert settings["host"]["step_vs_zero_offload"] > 0
    assert settings["host"]["iteration_vs_zero_offload"] > 0
    assert settings["virtual"]["virtual"] is True
    assert settings["virtual"]["label"].startswith("virtual device")
