"""Fitting a node to published step times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dos.errors import ConfigError
from perfmodel.fit import Fitter, fit
from perfmodel.published_runs import MACHINES, Row, predict_row, profile_from, read_rows

DATA = Path(__file__).parents[2] / "experiments" / "data" / "paper_runs.json"

TRUE = {
    "host_params_per_s": 1.2e9,
    "host_bytes_per_param": 33.0,
    "cast_s_per_param": 0.2e-9,
    "launch_s": 5e-4,
    "link_bytes_per_s": 24e9,
    "host_memory_bytes_per_s": 34e9,
}


def made_up() -> list[Row]:
    node = profile_from(MACHINES["a100"], TRUE, 1, source="made up")
    blank = [
        Row(
            "a100", model, (100_000_000,) * count, "dos-paper" if k else "zero-offload", k, "0", 1.0
        )
        for model, count in (("small", 5), ("large", 9))
        for k in (None, 2, 3, 4)
    ]
    return [row._replace(step_s=predict_row(node, row)) for row in blank]


def test_a_fit_predicts_the_rows_that_a_known_node_made() -> None:
    rows = made_up()
    fitter = Fitter("a100", rows, 1)
    assert max(map(abs, fitter.errors(fitter.best(rows, 3)[0].figures, rows))) < 0.01


def test_figures_stay_within_what_is_possible() -> None:
    fitter = Fitter("a100", made_up(), 1)
    found = fitter.best(fitter.rows, 1)[0].figures
    for name, parameter in fitter.machine.parameters.items():
        assert parameter.low * 0.999 <= found[name] <= parameter.high * 1.001


def test_a_fit_says_how_well_each_figure_is_pinned_down() -> None:
    found = fit("a100", made_up(), starts=2, points=1)
    assert set(found.pinned) == set(TRUE)
    assert all(low <= high for low, high in found.pinned.values())
    assert set(found.left_out) == {"small", "large", "stride 2", "stride 3", "stride 4"}


def test_rows_that_are_not_for_fitting_are_left_out() -> None:
    marked = [each for each in json.loads(DATA.read_text())["rows"] if each.get("fit") is False]
    kept = {(row.machine, row.step_s) for row in read_rows(DATA)}
    assert marked
    assert not kept & {(each["machine"], each["step_ms"] / 1e3) for each in marked}


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="a100, h100"):
        fit("b200", made_up())


def test_rows_of_other_machines_alone_are_refused() -> None:
    with pytest.raises(ConfigError, match="h100"):
        fit("h100", made_up())


@pytest.mark.parametrize("text", ["", "{}", '{"rows": [{}]}'])
def test_a_file_without_rows_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"rows\.json"):
        read_rows(path)
