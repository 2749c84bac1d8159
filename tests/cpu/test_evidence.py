"""The evidence: every picture is drawn from its numbers, and the table of it tells what is there.

Numbers are of runs so small that they say nothing about speed.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dos.checkpoint.native import refusal
from experiments import all as everything
from experiments import bench_ablation, bench_io, bench_phases, bench_ranks, bench_sweep, draw
from experiments.evidence import MEASUREMENTS, RESULTS, Measurement, MeasurementError, measured

pytest.importorskip("matplotlib")
if refusal("io_uring"):
    pytest.skip(refusal("io_uring"), allow_module_level=True)

EXPERIMENTS = RESULTS.parent
README = (EXPERIMENTS / "README.md").read_text()


def texts(figure: Any) -> list[str]:
    """The titles of a figure's panels."""
    return [axes.get_title(loc="left") for axes in figure.axes]


def command(main: Any) -> typer.Typer:
    app = typer.Typer()
    app.command()(main)
    return app


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the numbers of every picture."""
    folder, disk = tmp_path_factory.mktemp("results"), tmp_path_factory.mktemp("disk")
    shutil.copy(RESULTS / "predictions.json", folder)
    with pytest.MonkeyPatch.context() as patch:
        for module in (bench_ablation, bench_io, bench_ranks):
            patch.setattr(module, "REST_S", 0)
        patch.setattr("os.sync", lambda: None)  # of what others write, too
        patch.setattr(bench_io, "LAYERS", 1)
        patch.setattr("dos.bench.states.SMALL_TENSORS", 50)
        patch.setattr(bench_sweep, "STRIDES", ("host",))
        patch.setattr(bench_sweep, "INTERLEAVED", ("host",))
        patch.setattr(bench_sweep, "RATIOS", (0.0, 0.5))
        found = {
            "bench_io": bench_io.measure(str(disk), 0.001, 1, False, lambda text: None),
            "bench_ablation": bench_ablation.measure(str(disk), 1 << 20, 1),
            "bench_ranks": bench_ranks.measure(str(disk), 16 << 20, [2], 1),
        }
        small = ["--output", str(folder / "bench_sweep.json"), "--subgroups", "2", "--stretch", "1"]
        assert CliRunner().invoke(command(bench_sweep.main), small).exit_code == 0
        small = ["--output", str(folder / "bench_phases.json"), "--layers", "2", "--steps", "1"]
        small += ["--stretch", "1"]
        assert CliRunner().invoke(command(bench_phases.main), small).exit_code == 0
    found["bench_capture"] = {
        "added_s": {"ours": [0.01, 0.02], "another": [2.0, 3.0]},
        "state_bytes": 1 << 30,
        "environment": found["bench_io"]["environment"],
    }
    assert list(disk.iterdir()) == []
    for name, figures in found.items():
        (folder / f"{name}.json").write_text(json.dumps(figures))
    return folder


@pytest.mark.parametrize("name", draw.ALL)
def test_the_same_numbers_give_the_same_bytes(name: str, results: Path) -> None:
    one, other = (draw.png(draw.drawn(draw.ALL[name], results)) for _ in range(2))
    assert one == other


def test_pictures_are_named_for_what_they_show(results: Path, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    shutil.copy(results / "bench_ranks.json", tmp_path / "results")
    draw.main(tmp_path / "results", tmp_path / "pictures")
    assert "ranks.png" in {path.name for path in (tmp_path / "pictures").iterdir()}
    assert "io.png" not in {path.name for path in (tmp_path / "pictures").iterdir()}


@pytest.mark.parametrize(("name", "panel"), [("strides", 4), ("residents", 1), ("phases", 2)])
def test_a_panel_of_the_virtual_device_says_so(name: str, panel: int, results: Path) -> None:
    titles = texts(draw.drawn(draw.ALL[name], results))
    assert [n for n, title in enumerate(titles) if "EMULATION" in title] == [panel]
    assert "virtual device" in titles[panel]


def test_where_no_gpu_was_measured_the_picture_says_so(results: Path) -> None:
    assert "a GPU: not measured" in texts(draw.drawn(draw.ALL["strides"], results))


def test_numbers_of_a_gpu_played_on_the_processor_are_not_drawn(
    results: Path, tmp_path: Path
) -> None:
    shutil.copytree(results, tmp_path / "results")
    played = {"device": "CPU and a virtual device: the times mean nothing"}
    (tmp_path / "results" / "bench_gpu_update.json").write_text(json.dumps(played))
    figure = draw.drawn(draw.ALL["strides"], tmp_path / "results")
    assert "a GPU: not measured" in texts(figure)


def test_a_picture_without_its_numbers_is_left_out(tmp_path: Path) -> None:
    assert draw.drawn(draw.ALL["io"], tmp_path) is None


def test_every_way_to_save_tells_its_parts(results: Path) -> None:
    ways = json.loads((results / "bench_ablation.json").read_text())["ways"]
    assert all({f"{part}_s" for part in bench_ablation.PARTS} <= set(way) for way in ways.values())


def test_ranks_are_told_beside_every_rival(results: Path) -> None:
    world = json.loads((results / "bench_ranks.json").read_text())["worlds"]["2"]
    assert {"dos", "torch.save", "DCP"} <= set(world)
    assert world["dos"]["ours_over"] == 1


def test_every_picture_has_a_row_in_the_table() -> None:
    rows = re.findall(r"\]\(pictures/(\w+)\.png\) \|", README)
    assert set(rows) == {path.stem for path in draw.PICTURES.iterdir()}


def test_every_figure_without_a_picture_is_said_to_be_unmeasured() -> None:
    drawn = {path.stem for path in draw.PICTURES.iterdir()}
    assert README.count("(not measured yet)") == len(draw.ALL.keys() - drawn)


def test_every_picture_whose_numbers_are_kept_is_drawn() -> None:
    shown = {name for name, its in draw.ALL.items() if draw.drawn(its, RESULTS) is not None}
    assert shown == {path.stem for path in draw.PICTURES.iterdir()}


def test_every_command_of_the_table_is_there() -> None:
    named = set(re.findall(r"experiments\.(\w+)", README))
    there = {path.stem for path in EXPERIMENTS.glob("*.py")}
    assert named <= there | set(MEASUREMENTS)


def test_every_result_tells_the_machine_it_is_of() -> None:
    silent = {path.stem for path in RESULTS.glob("*.json")}
    silent -= {
        path.stem
        for path in RESULTS.glob("*.json")
        if "environment" in json.loads(path.read_text())
    }
    # Fits are computed, the same on every machine.
    assert {name for name in silent if not name.startswith("fit_")} <= {"bench_ckpt"}


def test_what_is_measured_is_kept_with_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    its = Measurement(("-c", "print('{\"figure\": 1}')"), 1, on_disk=True)
    monkeypatch.setitem(MEASUREMENTS, "it", its)
    everything.keep("it", tmp_path, tmp_path)
    kept = json.loads((tmp_path / "it.json").read_text())
    assert kept["figure"] == 1
    assert kept["environment"]["disk"]["file_system"]


def test_a_measurement_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(command(everything.main), ["bench_nothing", "--dir", str(tmp_path)])
    assert (done.exit_code, "bench_nothing" in done.output) == (2, True)


@pytest.mark.parametrize("code", ["print('no object')", "print('{}'); exit(1)", "print(1)"])
def test_a_measurement_without_numbers_is_an_error(code: str) -> None:
    with pytest.raises(MeasurementError):
        measured(["-c", code], 60)


def test_what_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = """
import os, sys, time
if not os.fork():
    open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(600)
"""
    with pytest.raises(MeasurementError, match="more than"):
        measured(["-c", code, str(started)], 5)
    process = Path(f"/proc/{started.read_text()}/stat")
    for _ in range(200):  # a killed process stays until its new parent has seen it
        if not process.exists() or process.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("it runs on")
