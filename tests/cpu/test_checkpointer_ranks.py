"""A Checkpointer of several processes: each writes its share, and all go on from the same."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dos
from dos.checkpoint import Checkpointer
from dos.checkpoint.ranks import Ranks
from dos.errors import RefusedError
from tests.cpu.checkpoint_cases import in_memory
from tests.cpu.rank_processes import run_ranks

RING = {"ring_bytes": 16 << 20}


@dataclass
class Mesh:
    size: int


@pytest.fixture
def folder() -> Iterator[Path]:
    with in_memory() as path:
        (Path(path) / "shared").mkdir()
        yield Path(path)


def trained(steps: int) -> tuple[torch.nn.Module, dos.DOSOptimizer]:
    """The same on all ranks."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(60, 50)
    optimizer = dos.DOSOptimizer(torch.optim.AdamW(model.parameters()), device="cpu")
    for _ in range(steps):
        model(torch.ones(60)).sum().backward()
        optimizer.step()
    return model, optimizer


def saved(ranks: Ranks, checkpointer: Checkpointer, steps: int) -> list[float]:
    """Save so many steps; what the generators would give then."""
    model, optimizer = trained(steps)
    random.seed(ranks.rank)
    handle = checkpointer.save(
        steps, model=model, optimizer=optimizer, extra={"rank": ranks.rank, "steps": steps}
    )
    assert handle is not None
    handle.result()
    return [random.random()]


def restored(checkpointer: Checkpointer) -> tuple[dict[str, int], list[float], bool]:
    """What was in extra; what the generators give; is the training that of its step?"""
    model, optimizer = trained(0)
    found = checkpointer.restore(model=model, optimizer=optimizer)
    assert found is not None
    noise = [random.random()]
    other, same = trained(found.step)
    is_same = torch.equal(model.weight, other.weight)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        for kind in ("exp_avg", "exp_avg_sq"):
            is_same &= torch.equal(optimizer.state[mine][kind], same.state[its][kind])
    return dict(found.extra), noise, is_same


def test_each_rank_writes_a_share_and_restores_its_own(folder: Path) -> None:
    def work(ranks: Ranks) -> object:
        with Checkpointer(folder / "run", **RING) as checkpointer:
            noise = saved(ranks, checkpointer, 2)
            extra, again, is_same = restored(checkpointer)
        return extra["rank"] == ranks.rank, again == noise, is_same

    assert run_ranks(work, 2, folder / "shared") == ["(True, True, True)"] * 2
    sizes = [path.stat().st_size for path in (folder / "run" / "step-00000002").glob("rank*")]
    assert len(sizes) == 2
    assert max(sizes) < 2 * min(sizes)


def test_all_fall_back_together_from_what_one_cannot_read(folder: Path) -> None:
    def work(ranks: Ranks) -> object:
        with Checkpointer(folder / "run", **RING) as checkpointer:
            for steps in (1, 2):
                saved(ranks, checkpointer, steps)
            if ranks.rank == 0:
                path = folder / "run" / "step-00000002" / "rank-00001.safetensors"
                os.truncate(path, 4096)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                extra, _, is_same = restored(checkpointer)
        return extra["steps"], is_same

    assert run_ranks(work, 2, folder / "shared") == ["(1, True)"] * 2


def test_ranks_whose_models_differ_are_told_and_nothing_is_saved(folder: Path) -> None:
    def work(ranks: Ranks) -> object:
        model = torch.nn.Linear(60, 50 + ranks.rank)
        checkpointer = Checkpointer(folder / "run", **RING)
        checkpointer.save(1, model=model)
        with pytest.raises(dos.CheckpointError) as failed:
            checkpointer.close()
        return failed.value, checkpointer.list()

    for text in run_ranks(work, 2, folder / "shared"):
        assert "the ranks differ in 'model': 2 tensors" in text
        assert text.endswith(", [])")


def test_what_one_rank_does_not_allow_is_raised_by_all(folder: Path) -> None:
    def work(ranks: Ranks) -> object:
        with Checkpointer(folder / "run", **RING) as checkpointer:
            checkpointer.save(1, extra={})
            checkpointer.save(2, extra={"mesh": Mesh(2)})
            try:
                checkpointer.restore(allow=[Mesh] if ranks.rank == 0 else [])
            except RefusedError:
                found = checkpointer.restore(allow=[Mesh])
                return found is not None and found.step

    assert run_ranks(work, 2, folder / "shared") == ["2", "2"]


def test_more_ranks_than_have_saved_take_the_extra_of_the_first(folder: Path) -> None:
    with Checkpointer(folder / "run", **RING) as checkpointer:
        saved(Ranks.alone(), checkpointer, 2)

    def work(ranks: Ranks) -> object:
        with Checkpointer(folder / "run", **RING) as checkpointer:
            extra, _, is_same = restored(checkpointer)
        return extra, is_same

    expected = "({'rank': 0, 'steps': 2}, True)"
    assert run_ranks(work, 2, folder / "shared") == [expected] * 2


def test_a_save_that_one_rank_cannot_begin_fails_and_the_next_succeeds(
    folder: Path,
) -> None:
    def work(ranks: Ranks) -> object:
        failed, limits = [], {"commit_timeout_s": 100.0, **RING}
        with Checkpointer(folder / "run", **limits) as checkpointer:  # type: ignore[arg-type]
            model, optimizer = trained(1)
            for step in (1, 2, 3):
                if (step, ranks.rank) == (1, 1):
                    torch.nn.Module.register_parameter(model, "bias", None)  # has no name then
                try:
                    handle = checkpointer.save(step, model=model, optimizer=optimizer)
                    assert handle is not None
                    handle.result()
                except dos.DOSError as error:
                    failed.append((step, type(error).__name__))
                    model, optimizer = trained(1)
        return failed, [one.step for one in checkpointer.list()]

    assert run_ranks(work, 2, folder / "shared") == [
        "([(1, 'CheckpointError'), (2, 'CheckpointError')], [2, 3])",  # at 2 what was at 1 is told
        "([(1, 'ConfigError')], [2, 3])",
    ]


def sharded(world: int, steps: int) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    """Over all ranks, stepped by torch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 10)
    mesh = init_device_mesh("cpu", (world,))
    for name, its in list(model.named_parameters()):
        its = torch.nn.Parameter(distribute_tensor(its.data, mesh, [Shard(0)]))
        model.register_parameter(name, its)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        stepped(model, optimizer)
    return model, optimizer


def stepped(model: torch.nn.Module, optimizer: torch.optim.AdamW) -> None:
    """A step with gradients that tell the elements apart."""
    for its in model.parameters():
        gradient = torch.arange(float(its.numel())).view(its.shape) - 3
        its.grad = distribute_tensor(gradient, its.device_mesh, its.placements)  # type: ignore[attr-defined]
    optimizer.step()


def test_sharded_state_of_torchs_optimizer_is_resumed_by_other_ranks(folder: Path) -> None:
    def save(ranks: Ranks) -> object:
        model, optimizer = sharded(2, 2)
        with Checkpointer(folder / "run", **RING) as checkpointer:
            checkpointer.save(2, model=model, optimizer=optimizer)

    def resume(ranks: Ranks) -> object:
        (model, optimizer), (other, _) = sharded(3, 0), sharded(3, 3)
        with Checkpointer(folder / "run", **RING) as checkpointer:
            checkpointer.restore(model=model, optimizer=optimizer)
        stepped(model, optimizer)
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        return [torch.equal(mine.to_local(), its.to_local()) for mine, its in pairs]  # type: ignore[attr-defined]

    run_ranks(save, 2, folder / "shared")
    (folder / "again").mkdir()
    assert run_ranks(resume, 3, folder / "again") == ["[True, True]"] * 3


def test_buffers_are_those_of_the_first_rank(folder: Path) -> None:
    """DistributedDataParallel takes these at the next forward, wherever it was saved."""

    def work(ranks: Ranks) -> object:
        model = torch.nn.Sequential(torch.nn.Linear(800, 8), torch.nn.BatchNorm1d(4000))
        for buffer in model.buffers():
            buffer.fill_(ranks.rank)
        with Checkpointer(folder / "run", **RING) as checkpointer:
            handle = checkpointer.save(1, model=model)
            assert handle is not None
            handle.result()
            checkpointer.restore(model=model)
        return [buffer.count_nonzero().item() for buffer in model.buffers()]

    assert run_ranks(work, 2, folder / "shared") == ["[0, 0, 0]"] * 2


def test_sigterm_of_one_rank_ends_all_at_the_same_step(folder: Path) -> None:
    def work(ranks: Ranks) -> object:
        how = {"every": 10**6, "sigterm_grace_s": 60.0}
        with Checkpointer(folder / "run", **how, **RING) as checkpointer:  # type: ignore[arg-type]
            for step in range(1, 10_000):
                if ranks.rank == 1 and step == 5:
                    os.kill(os.getpid(), signal.SIGTERM)
                torch.distributed.all_reduce(torch.ones(1))  # so that no rank is a step ahead
                time.sleep(0.01)
                try:
                    checkpointer.save(step, extra={"step": step})
                except SystemExit as leaving:
                    return step, leaving.code
        return "never told"

    first, second = run_ranks(work, 2, folder / "shared")
    assert first == second
    assert first.endswith(f", {128 + signal.SIGTERM})")
    (one,) = Checkpointer(folder / "run").list()
    assert first.startswith(f"({one.step},")
