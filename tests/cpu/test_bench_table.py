"""`make bench`: its rows say what the benchmarks' numbers say, and a failure stops nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import bench
from experiments.bench_rows import ROWS, Row
from experiments.evidence import MEASUREMENTS, RESULTS, Measurement


def rows_of(name: str) -> list[Row]:
    """Of the numbers that are kept."""
    return list(ROWS[name](json.loads((RESULTS / f"{name}.json").read_text())))


@pytest.mark.parametrize(
    "name", ["bench_update", "bench_zero3", "bench_overlap", "bench_model", "bench_ckpt"]
)
def test_a_ratio_is_ours_against_the_other(name: str) -> None:
    for row in (row for row in rows_of(name) if row.ours and row.other):
        faster = row.ours / row.other if "/s" in row.unit else row.other / row.ours
        assert row.ratio is not None
        assert row.ratio == pytest.approx(faster, rel=0.3)  # of medians, and a median of ratios


def test_the_bound_is_among_the_rows() -> None:
    for name in ("bench_update", "bench_model", "bench_ckpt"):
        assert any(row.beside.startswith("bound: ") for row in rows_of(name))


def test_what_is_of_a_virtual_device_is_marked() -> None:
    assert all("EMULATION" in row.note for row in rows_of("bench_overlap"))
    assert sum("EMULATION" in row.note for row in rows_of("bench_zero3")) == 1


def test_the_rows_of_io_turn_the_ratio_round() -> None:
    other = {"save": 1.0, "load": 4.0, "save_of_first": 0.5, "load_of_first": 2.0}
    other |= {f"{kind}_of_first_quartiles": [0.5, 2.0] for kind in ("save", "load")}
    found = list(
        ROWS["bench_io"]({"strategies": {"a, b": {"save": 2.0, "load": 2.0}, "a, c": other}})
    )
    assert {row.beside for row in found} == {"c"}
    assert [(row.ratio, row.spread) for row in found] == [(2.0, [0.5, 2.0]), (0.5, [0.5, 2.0])]


def test_a_stall_that_cannot_be_measured_has_no_ratio() -> None:
    figures = {
        "added_s": {"ours": [-0.1], "another": [2.0]},
        "slowdown": 1.0,
        "slowdown_quartiles": (1.0, 1.0),
        "emulated": "a wait",
    }
    assert next(ROWS["bench_capture"](figures)).ratio is None


def test_every_row_has_a_reduced_measurement() -> None:
    assert set(ROWS) == {name for name, its in MEASUREMENTS.items() if its.reduced is not None}


@pytest.fixture
def _two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two benchmarks: one that fails, and one behind it."""
    figures: dict[str, Any] = {"off": 0.25}
    its = ("-c", f"print({json.dumps(json.dumps(figures))})")
    monkeypatch.setattr(
        bench,
        "ROWS",
        {
            "broken": lambda figures: iter(()),
            "whole": lambda figures: iter([Row("it", "s", 1.0, "another", 2.0, 2.0)]),
        },
    )
    monkeypatch.setitem(MEASUREMENTS, "broken", Measurement(("-c", "exit(3)"), 1, reduced=()))
    monkeypatch.setitem(MEASUREMENTS, "whole", Measurement(its, 1, reduced=()))


@pytest.mark.usefixtures("_two")
def test_a_benchmark_that_fails_is_told_and_stops_nothing(tmp_path: Path) -> None:
    found = bench.measure(tmp_path, 60)["benchmarks"]
    assert "ended with 3" in found["broken"]["failed"]
    assert [row["ratio"] for row in found["whole"]["rows"]] == [2.0]
    assert bench.table_of({"benchmarks": found}).row_count == 2


@pytest.mark.usefixtures("_two")
def test_what_there_is_no_time_for_is_told(tmp_path: Path) -> None:
    found = bench.measure(tmp_path, 0)["benchmarks"]
    assert all("were over" in its["failed"] for its in found.values())
