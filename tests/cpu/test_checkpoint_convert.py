"""Checkpoints from and to the files of others, and the commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import dos
import dos.checkpoint
from dos.checkpoint.convert import convert
from dos.cli import main
from tests.cpu.checkpoint_cases import assert_same, data_file

ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


RunDos = Callable[..., Ended]


@pytest.fixture
def run_dos(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunDos:
    """The command, in this process, which has torch already."""

    def run(*arguments: object) -> Ended:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["dos", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, *capfd.readouterr())

    return run


@pytest.fixture
def state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2, bias=False))
    return {"model": dict(model.state_dict()), "step": 3, "lr": [0.1, 0.2]}


@pytest.fixture
def saved(state: dict[str, Any], tmp_path: Path) -> Path:
    return Path(dos.checkpoint.save(state, tmp_path / "saved").result())


def test_a_torch_file_and_back(saved: Path, state: dict[str, Any], tmp_path: Path) -> None:
    convert(saved, tmp_path / "state.pt", "pt")
    assert_same(state, torch.load(tmp_path / "state.pt"))
    convert(tmp_path / "state.pt", tmp_path / "again", "dos")
    assert_same(state, dos.checkpoint.load(tmp_path / "again"))


@pytest.mark.filterwarnings("ignore")
def test_dcp_and_back(saved: Path, state: dict[str, Any], tmp_path: Path) -> None:
    convert(saved, tmp_path / "dcp", "dcp")
    with pytest.raises(dos.FormatError, match="pickle"):
        convert(tmp_path / "dcp", tmp_path / "again", "dos")
    convert(tmp_path / "dcp", tmp_path / "again", "dos", trusted=True)
    assert_same(state, dos.checkpoint.load(tmp_path / "again"))


def test_safetensors_and_back(saved: Path, state: dict[str, Any], tmp_path: Path) -> None:
    convert(saved, tmp_path / "clean", "safetensors", part="model")
    assert [path.name for path in (tmp_path / "clean").iterdir()] == ["model.safetensors"]
    convert(tmp_path / "clean", tmp_path / "again", "dos")
    again = dos.checkpoint.load(tmp_path / "again")
    assert_same(dict(sorted(state["model"].items())), dict(sorted(again.items())))


def test_safetensors_are_cut_into_shards_with_an_index(saved: Path, tmp_path: Path) -> None:
    convert(saved, tmp_path / "clean", "safetensors", part="model", shard_bytes=100)
    index = json.loads((tmp_path / "clean" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"0.weight", "0.bias", "1.weight"}
    assert {*index["weight_map"].values()} == {
        path.name for path in (tmp_path / "clean").glob("*.safetensors")
    }


def test_from_pretrained_takes_the_shards(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    saved = dos.checkpoint.save({"model": model.state_dict()}, tmp_path / "saved").result()
    convert(saved, tmp_path / "clean", "safetensors", part="model", shard_bytes=20_000)
    config.save_pretrained(tmp_path / "clean")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "clean")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_what_a_form_cannot_hold_is_named(tmp_path: Path) -> None:
    state = {"a": {"c": torch.zeros(2, dtype=torch.complex128)}}
    saved = dos.checkpoint.save(state, tmp_path / "saved").result()
    with pytest.raises(dos.FormatError, match=r"a\.c.*complex128"):
        convert(saved, tmp_path / "clean", "safetensors")
    assert not (tmp_path / "clean").exists()


def test_names_that_would_be_the_same_are_told(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    saved = dos.checkpoint.save(state, tmp_path / "saved").result()
    with pytest.raises(dos.FormatError, match=r"two tensors would be called 'a\.b'"):
        convert(saved, tmp_path / "clean", "safetensors")
    assert not (tmp_path / "clean").exists()


def test_arrays_are_written_too(tmp_path: Path) -> None:
    saved = dos.checkpoint.save({"a": np.arange(3), "n": 1}, tmp_path / "saved").result()
    convert(saved, tmp_path / "clean", "safetensors")
    convert(tmp_path / "clean", tmp_path / "again", "dos")
    assert torch.equal(dos.checkpoint.load(tmp_path / "again")["a"], torch.arange(3))
    saved = dos.checkpoint.save({"a": np.zeros(3, ">f4")}, tmp_path / "other").result()
    with pytest.raises(dos.FormatError, match="byte order"):
        convert(saved, tmp_path / "none", "safetensors")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("data", [b"", b"garbage" * 9], ids=["empty", "garbage"])
@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "x/.metadata"])
def test_a_damaged_file_of_another_form_is_told(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(data)
    source = tmp_path / name.removesuffix("/.metadata")
    with pytest.raises(dos.FormatError, match="cannot"):
        convert(source, tmp_path / "again", "dos", trusted=True)
    assert not (tmp_path / "again").exists()


def test_a_target_that_cannot_be_written_is_told(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(dos.CheckpointError, match="cannot be written"):
        convert(saved, tmp_path / "file" / "x.pt", "pt")


def test_a_target_that_exists_stays(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "state.pt").write_text("mine")
    with pytest.raises(dos.ConfigError, match="exists"):
        convert(saved, tmp_path / "state.pt", "pt")
    assert (tmp_path / "state.pt").read_text() == "mine"


def test_a_torch_file_with_code_needs_trust(tmp_path: Path) -> None:
    torch.save({"path": Path("x"), "f": subprocess.run}, tmp_path / "state.pt")
    with pytest.raises(dos.FormatError, match="trust"):
        convert(tmp_path / "state.pt", tmp_path / "again", "dos")


def test_inspect_lists_tensors_and_objects(saved: Path, run_dos: RunDos) -> None:
    found = json.loads(run_dos("inspect", saved, "--json").stdout)
    assert {one["name"] for one in found["tensors"]} == {
        "model/0.weight",
        "model/0.bias",
        "model/1.weight",
    }
    assert {"name": "step", "file": "rank-00000.safetensors", "type": "int", "value": 3} in found[
        "objects"
    ]


def test_inspect_prints_a_table(saved: Path, run_dos: RunDos) -> None:
    assert "model/0.weight" in run_dos("inspect", saved).stdout


def test_a_table_shows_nothing_that_a_terminal_obeys(tmp_path: Path, run_dos: RunDos) -> None:
    state = {"red\x1b[31m": torch.ones(1), "half": "\ud800", "back": "\x08"}
    ended = run_dos("inspect", dos.checkpoint.save(state, tmp_path / "saved").result())
    assert ended.returncode == 0, ended.stderr
    assert "\x1b" not in ended.stdout
    assert all(text in ended.stdout for text in ("red\\x1b[31m", "\\ud800", "\\x08"))


def test_inspect_follows_a_save_that_replaces(saved: Path, state: dict[str, Any]) -> None:
    """A reader that has opened the files goes on with the old ones."""
    from dos.checkpoint.opened import Opened
    from dos.checkpoint.posix import PosixStorage

    with Opened(str(saved), PosixStorage()) as opened:
        dos.checkpoint.save({**state, "step": 4}, saved).result()
        assert opened.files[0].index.said["tree"]["step"] == 3
    assert any(one.get("value") == 4 for one in dos.checkpoint.inspect(saved)["objects"])


def test_verify_exits_with_1_for_damage(saved: Path, tmp_path: Path, run_dos: RunDos) -> None:
    whole = run_dos("verify", saved, "--json")
    assert (whole.returncode, json.loads(whole.stdout)["whole"]) == (0, True)
    raw = bytearray(data_file(tmp_path).read_bytes())
    raw[8 + int.from_bytes(raw[:8], "little") + 9] ^= 1
    data_file(tmp_path).write_bytes(raw)
    damaged = run_dos("verify", saved, "--json")
    said = json.loads(damaged.stdout)
    assert (damaged.returncode, said["whole"]) == (1, False)
    assert "model/" in said["damages"][0]["what"]


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_no_checkpoint_exits_with_2(command: str, tmp_path: Path, run_dos: RunDos) -> None:
    ended = run_dos(command, tmp_path)
    assert ended.returncode == 2
    assert "no checkpoint" in ended.stderr
    assert not ended.stdout


def test_convert_writes_and_says_so(saved: Path, tmp_path: Path) -> None:
    arguments = ("convert", saved, tmp_path / "x.pt", "--to", "pt", "--json")
    ended = subprocess.run(
        [sys.executable, "-c", "from dos.cli import main; main()", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ended.stdout)["to"] == "pt"
    assert torch.load(tmp_path / "x.pt")["step"] == 3
