"""The benchmark of the update, on a size that says nothing about speed: is all there?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.figures import median_and_quartiles

ROOT = Path(__file__).parents[2]
TINY = ("--params", "100000", "--rounds", "2", "--no-deepspeed")


def run(*code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("dos.kernels._native", reason="needs the compiled extension")
    return run("-m", "experiments.bench_update", *TINY, *options)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a tiny run prints, and the file it writes."""
    output = tmp_path_factory.mktemp("bench") / "figures.json"
    done = bench("--json", "--isa", "scalar", "--threads", "2", "--output", str(output))
    return {"stdout": done.stdout, "stderr": done.stderr, "file": output}


def test_standard_output_is_one_json_object(shown: dict[str, Any]) -> None:
    (line,) = shown["stdout"].splitlines()
    assert isinstance(json.loads(line), dict), shown["stderr"]


def test_the_named_figures_are_there(shown: dict[str, Any]) -> None:
    figures = json.loads(shown["stdout"])
    assert figures["vs_torch_fused"] > 0
    assert figures["of_bandwidth"] > 0
    assert figures["gparams_per_s"] > 0
    assert (figures["params"], figures["isa"], figures["threads"]) == (100000, "scalar", 2)
    assert set(figures["environment"]) >= {"cpu", "cores", "isas", "versions", "date"}


def test_a_rival_that_did_not_run_has_no_figure(shown: dict[str, Any]) -> None:
    assert json.loads(shown["stdout"])["vs_deepspeed"] is None


def test_the_file_holds_the_same_figures(shown: dict[str, Any]) -> None:
    assert json.loads(shown["file"].read_text()) == json.loads(shown["stdout"])


def test_without_json_standard_output_is_empty() -> None:
    done = bench()
    assert (done.returncode, done.stdout) == (0, "")


def test_an_unknown_instruction_set_is_answered_in_words() -> None:
    done = bench("--isa", "mmx")
    assert done.returncode == 2
    assert "mmx" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_library_prints_goes_to_standard_error() -> None:
    code = """if True:
        import os
        from dos.stdout import own_stdout
        with own_stdout() as stdout:
            os.write(1, b"from C")
            print("from Python")
            print("figures", file=stdout)
        print("afterwards")
    """
    done = run("-c", code)
    assert done.stdout.split() == ["figures", "afterwards"]


def test_half_of_the_values_lie_between_the_quartiles() -> None:
    assert median_and_quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == (3.0, (2.0, 4.0))
    assert median_and_quartiles([7.0]) == (7.0, (7.0, 7.0))
