"""From our checkpoints to DeepSpeed's files and back."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dos.cli import app
from tests.integration.worlds import Outcome
from tests.integration.zero3.scenario import scenarios

both = scenarios(("scenarios_converted.zero_2", 1), ("scenarios_converted.ours", 2))


@both
def test_deepspeeds_own_loader_reads_what_was_converted(outcome: Outcome) -> None:
    assert all(its["theirs"] == [] for its in outcome.ranks)


@both
def test_deepspeeds_files_load_as_they_are_where_we_save(outcome: Outcome) -> None:
    assert all(its["theirs by us"] == [] for its in outcome.ranks)


@both
def test_what_was_converted_back_loads(outcome: Outcome) -> None:
    assert all(its["back"] == [] for its in outcome.ranks)


@both
def test_zero_to_fp32_finds_the_masters_in_what_was_converted(outcome: Outcome) -> None:
    assert outcome.first["fp32"] == []


@both
def test_the_files_are_those_of_deepspeed_and_no_larger(outcome: Outcome) -> None:
    ours, theirs = outcome.first["bytes"]
    assert ours.keys() == theirs.keys()
    assert all(n_bytes < 1.01 * theirs[name] + 4096 for name, n_bytes in ours.items())


def test_a_part_of_a_tag_is_not_converted(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    asked = ["convert", str(tmp_path), str(tmp_path / "b"), "--to", "deepspeed", "--part", "x"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code != 0
    assert not (tmp_path / "b").exists()


def test_the_command_converts_both_ways(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("deepspeed")
    tag = tmp_path / "tag"
    tag.mkdir()
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": {"x": torch.arange(3)}}, tag / name)
    for source, to in (("tag", "dos"), ("dos", "deepspeed")):
        asked = ["convert", str(tmp_path / source), str(tmp_path / to), "--to", to]
        assert CliRunner().invoke(app, asked).exit_code == 0
    back = torch.load(tmp_path / "deepspeed" / name)["optimizer_state_dict"]["x"]
    assert back.tolist() == [0, 1, 2]
