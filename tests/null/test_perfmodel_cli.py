"""The command `python -m perfmodel`: one JSON object each, and errors that help."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROFILES = ROOT / "experiments" / "profiles"
FIT = ("--rows", str(ROOT / "experiments" / "data" / "paper_runs.json"), "--machine", "a100")
FAILURES = ("--mtbf-hours", "24", "--stall-s", "0.5")
H100 = ("--profile", str(PROFILES / "h100.json"), "--params-per-rank", "1000000000")


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perfmodel", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def figures(*arguments: str) -> Any:
    done = ran(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "schedule",
    [
        ("dos", "--stride", "1.5"),
        ("dos", "--resident-ratio", "0.2"),
        ("dos-paper", "--stride", "3", "--device-slots", "1", "--resident-ratio", "0.2"),
        ("zero-offload",),
        ("twin-flow", "--resident-ratio", "0.2"),
    ],
    ids=" ".join,
)
def test_a_step_of_every_schedule_is_predicted(schedule: tuple[str, ...]) -> None:
    assert 0.1 < figures("predict", *H100, "--schedule", *schedule)["step_s"] < 1


def test_a_stride_that_a_schedule_does_not_have_is_said_to_be_ignored() -> None:
    done = ran("predict", *H100, "--schedule", "zero-offload", "--stride", "2", "--json")
    assert "zero-offload has no stride" in done.stderr


def test_subgroups_are_taken_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "sizes.json"
    path.write_text(json.dumps([250_000_000] * 4))
    assert figures("predict", *H100, "--subgroups-file", str(path))["subgroups"] == 4


def test_several_nodes_send_to_each_other(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    path.write_text('{"gpu_bytes_per_s": 2e11, "node_bytes_per_s": 1e11}')
    network = ("--nodes", "4", "--params", "70000000000", "--link-profile", str(path))
    found = figures("predict", *H100[:2], *network)
    assert found["params_per_rank"] == -(-70_000_000_000 // 32)
    assert found["gather_s"] > 0


def test_solve_says_what_bounds_and_what_fits() -> None:
    memory = ("--host-memory", "32", "--device-memory", "4", "--subgroup-size", "100000000")
    found = figures("solve", *H100, *memory)
    assert found["best"]["fits"]
    assert {"bound", "gains", "busy", "choices"} <= set(found)


def test_a_simulated_step_leaves_a_trace_and_a_picture(tmp_path: Path) -> None:
    trace, plot = tmp_path / "t.json", tmp_path / "t.png"
    found = figures("simulate", *H100, "--trace", str(trace), "--plot", str(plot))
    spans = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == len(found["ops"])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_simulated_step_is_what_compare_predicts(tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    figures("simulate", *H100, "--trace", str(trace))
    found = figures("compare", *H100[:2], "--trace", str(trace))
    assert found["measured_s"] == pytest.approx(found["predicted_s"])


def test_the_sweep_over_strides_is_drawn(tmp_path: Path) -> None:
    found = figures("plot", *H100, "-o", str(tmp_path / "p.png"))
    assert set(found["step_s"]) == {"dos", "dos-paper"}
    assert (tmp_path / "p.png").exists()


def test_an_interval_between_checkpoints_is_found() -> None:
    found = figures("checkpoint-interval", "--mtbf-hours", "24", "--stall-s", "0.5")
    assert found["interval_s"] == pytest.approx(found["daly_s"])


def test_what_is_no_text_is_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b"\x89PNG" * 1000)
    assert len(ran("compare", *H100[:2], "--trace", str(path)).stderr) < 500


def test_a_budget_without_end_is_refused() -> None:
    done = ran("solve", *H100, "--host-memory", "inf", "--device-memory", "1")
    assert (done.returncode, "--host-memory" in done.stderr) == (2, True)


def test_a_table_says_where_its_rates_are_from() -> None:
    assert "rates: fitted to" in ran("predict", *H100).stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("predict", *H100, "--schedule", "best"), "--schedule"),
        (("predict", *H100, "--stride", "0.5"), "--stride"),
        (("predict", *H100, "--schedule", "dos-paper", "--stride", "1.5"), "whole number"),
        (("predict", *H100, "--schedule", "dos-paper"), "stride"),
        (("predict", *H100, "--schedule", "twin-flow", "--device-slots", "2"), "--device-slots"),
        (("predict", "--profile", "none.json", "--params-per-rank", "1"), "none.json"),
        (("predict", *H100[:2]), "--params-per-rank"),
        (("predict", *H100[:3], "10" + "0" * 27), "--subgroup-size"),
        (("predict", *H100, "--stride", "inf"), "--stride"),
        (("predict", *H100, "--params", "5"), "--params"),
        (("predict", *H100, "--nodes", "2", "--params", "5"), "--nodes"),
        (("simulate", *H100, "--trace", "none/t.json"), "none/t.json"),
        (("simulate", *H100, "--plot", "none/t.png"), "none/t.png"),
        (("plot", *H100, "-o", "none/p.png"), "none/p.png"),
        (("fit", *FIT, "-o", "none/node.json"), "none/node.json"),
        (("checkpoint-interval", *FAILURES, *H100[:2]), "--params-per-rank"),
        (("checkpoint-interval", *FAILURES, *H100[2:]), "--profile"),
        (("predict", *H100, "--nodes", "2"), "--link-profile"),
        (("predict", *H100, "--subgroups-file", "none.json"), "none.json"),
        (("solve", *H100, "--host-memory", "64", "--device-memory", "0.1"), "one subgroup"),
        (("solve", *H100, "--host-memory", "1", "--device-memory", "1"), "host memory budget"),
        (("compare", *H100[:2], "--trace", "none.json"), "none.json"),
    ],
)
def test_bad_input_says_where_and_how_to_fix_it(arguments: tuple[str, ...], says: str) -> None:
    done = ran(*arguments, "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert (says in done.stderr, "fix:" in done.stderr) == (True, True)
