"""`dos bench ckpt`: small runs of it, for what they print, not for how fast they are."""

from __future__ import annotations

import json
import mmap
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dos.bench import cli, peers, raw
from dos.cli import app

pytest.importorskip("dos.checkpoint.saving")

from dos.bench import ckpt


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ckpt, "REST_S", 0)


@pytest.fixture
def _no_fio(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: str, n_bytes: int, shape: raw.Shape) -> float:
        Path(path).write_bytes(bytes(n_bytes))
        return 2.0

    monkeypatch.setattr(raw, "write_gib_per_s", write)
    monkeypatch.setattr(raw, "read_gib_per_s", lambda *arguments: 1.0)


@pytest.mark.usefixtures("_no_fio")
def test_a_run_tells_ratios_rates_and_spreads_and_leaves_nothing(tmp_path: Path) -> None:
    bench = ckpt.Bench(str(tmp_path), 8 << 20, lambda text: None)
    figures = bench.run(rounds=2, peer_rounds=1)
    assert {"save_of_raw", "load_of_raw", "save_vs_torchsnapshot", "spreads"} <= set(figures)
    assert {"dos", "raw", "torch.save", "DCP"} <= set(bench.saves)
    assert len(bench.saves["dos"]) == len(bench.loads["raw"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_the_shapes_tell_of_many_and_of_tiny_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dos.bench.states.SMALL_TENSORS", 100)
    figures = ckpt.Bench(str(tmp_path), 1 << 20, lambda text: None).shapes(rounds=1)
    assert set(figures["many_vs_one"]) == {"save", "load"}
    assert {"tiny_s", "tiny_overhead_bytes"} <= set(figures)


@pytest.mark.parametrize("name", peers.available_peers())
def test_a_peer_loads_what_it_saved(name: str, tmp_path: Path) -> None:
    peer, path = peers.available_peers()[name], str(tmp_path / "saved")
    state = {"a": torch.arange(100.0), "b": torch.ones(3, 4)}
    peer.save(state, path)
    peers.make_durable(path)
    peers.drop_from_cache(path)
    loaded = peer.load(path, state)
    assert all(torch.equal(loaded[key], state[key]) for key in state)


def test_the_memory_of_a_call_is_its_peak() -> None:
    n_bytes = 64 << 20

    def touch() -> None:
        memory = mmap.mmap(-1, n_bytes)  # not of a heap that may have had as much before
        for at in range(0, n_bytes, mmap.PAGESIZE):
            memory[at] = 1

    # The system counts pages in batches.
    assert 0.9 * n_bytes < ckpt.peak_bytes(touch) < 2 * n_bytes


@pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio: apt-get install fio")
def test_the_bare_disk_is_measured(tmp_path: Path) -> None:
    path, shape = str(tmp_path / "file"), raw.Shape("1M", 8)
    assert raw.write_gib_per_s(path, 8 << 20, shape) > 0
    assert raw.read_gib_per_s(path, 8 << 20, shape) > 0


def test_tuning_prints_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cli, "TUNE_BYTES", 1 << 20)
    monkeypatch.setattr(cli, "TUNE_ROUNDS", 1)
    CliRunner().invoke(app, ["bench", "ckpt", "--json", "--tune", str(tmp_path)])
    figures = json.loads(capfd.readouterr().out)
    assert figures["chosen"]["depth"] > 0
    assert Path(figures["kept_in"]).exists()


@pytest.mark.parametrize("arguments", [[], ["--dir", "a", "--tune", "b"], ["--tune", "/not/there"]])
def test_what_cannot_be_measured_is_refused(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["bench", "ckpt", *arguments])
    assert "fix" in str(done.exception)
