"""The other ways to write tensors: each brings back what it wrote, laid out as its name says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from dos.checkpoint.native import refusal
from dos.checkpoint.storage import BLOCK_BYTES
from experiments import bench_io
from experiments.io_strategies import REQUEST_BYTES, Strategy, load, plan_requests, save

MOST = 3 * REQUEST_BYTES // 4
TENSORS = [
    [torch.arange(n, dtype=torch.uint8) + rank for n in (5, MOST, 1000, MOST)] for rank in range(2)
]

app = typer.Typer()
app.command()(bench_io.main)


@pytest.mark.parametrize("strategy", bench_io.strategies(), ids=lambda one: one.name)
def test_what_was_saved_is_loaded(strategy: Strategy, tmp_path: Path) -> None:
    if strategy.engine != "posix" and refusal(strategy.engine):
        pytest.skip(refusal(strategy.engine))
    save(strategy, TENSORS, str(tmp_path / "saved"))
    loaded = load(strategy, TENSORS, str(tmp_path / "saved"))
    for of_rank, loaded_of_rank in zip(TENSORS, loaded, strict=True):
        assert all(map(torch.equal, of_rank, loaded_of_rank))


@pytest.mark.parametrize(("files", "count"), [("tensor", 8), ("rank", 2), ("all", 1)])
def test_there_are_as_many_files_as_the_strategy_says(files: str, count: int) -> None:
    plan = plan_requests(Strategy(files, coalesced=False), TENSORS)  # type: ignore[arg-type]
    assert len(plan.file_bytes) == count


@pytest.mark.parametrize(("coalesced", "count"), [(True, 2), (False, 4)])
def test_coalesced_tensors_share_requests(coalesced: bool, count: int) -> None:
    plan = plan_requests(Strategy(coalesced=coalesced), TENSORS)
    assert [len(requests) for requests in plan.requests] == [count, count]


@pytest.mark.parametrize("strategy", bench_io.strategies(), ids=lambda one: one.name)
def test_requests_are_whole_blocks_that_do_not_overlap(strategy: Strategy) -> None:
    plan = plan_requests(strategy, TENSORS)
    ends = [0] * len(plan.file_bytes)
    for request in (one for requests in plan.requests for one in requests):
        assert request.offset == ends[request.file]
        assert request.n_bytes % BLOCK_BYTES == 0
        ends[request.file] += request.n_bytes
    assert ends == plan.file_bytes


@pytest.mark.skipif(bool(refusal("io_uring")), reason=refusal("io_uring"))
def test_the_command_prints_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_io, "REST_S", 0)
    CliRunner().invoke(app, ["--dir", str(tmp_path), "--gib", "0.002", "--rounds", "1", "--json"])
    figures = json.loads(capfd.readouterr().out)
    assert figures["strategies"][Strategy().name]["save_of_first"] == 1
    assert list(tmp_path.iterdir()) == []
