"""Which checkpoint several ranks take: an error of one is that of all, and none waits for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import dos
from dos.checkpoint import save
from dos.checkpoint.directory import CheckpointDirectory
from dos.checkpoint.fallback import newest_whole
from dos.checkpoint.posix import PosixStorage
from dos.checkpoint.ranks import Ranks
from dos.checkpoint.replicas import outline_of
from dos.errors import RefusedError
from tests.cpu.test_checkpoint_ranks import on_all, ranks_of

Read = Callable[[Ranks, int], int]

READS: dict[str, tuple[Exception, Exception, str, str]] = {
    # What ranks 0 and 1 find in the newest, and what they raise.
    "no fit beside damage": (
        dos.IntegrityError("torn"),
        dos.ConfigError("no fit"),
        "CheckpointError",
        "ConfigError",
    ),
    "not allowed beside damage": (
        dos.IntegrityError("torn"),
        RefusedError("not allowed"),
        "RefusedError",
        "RefusedError",
    ),
    "no memory beside no fit": (
        MemoryError(),
        dos.ConfigError("no fit"),
        "MemoryError",
        "ConfigError",
    ),
}


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    """Of the checkpoints of steps 1 and 2."""
    for step in (1, 2):
        path = tmp_path / f"step-{step:08d}"
        save({"step": step}, path, checkpoint_id=f"{step}-id", latest=True).result()
    return CheckpointDirectory(str(tmp_path), None, None, PosixStorage())


def taken(ranks: Ranks, directory: CheckpointDirectory, read: Read, **how: Any) -> object:
    """The step that is taken, or the name of the error; and whether the ranks are in step after."""
    try:
        found: object = newest_whole(directory, ranks, lambda saved: read(ranks, saved.step), **how)
    except Exception as error:
        found = type(error).__name__
    return found, ranks.exchange("after", ranks.rank)


@pytest.mark.parametrize("name", READS)
def test_an_error_that_is_no_damage_is_raised_by_all(
    name: str, directory: CheckpointDirectory
) -> None:
    *found, first, second = READS[name]

    def read(ranks: Ranks, step: int) -> int:
        raise found[ranks.rank]  # type: ignore[misc]

    ranks = ranks_of(distributed.HashStore(), 2)
    ends = on_all(ranks, lambda rank: taken(rank, directory, read))
    assert ends == [(first, [0, 1]), (second, [0, 1])]


def test_an_error_before_all_reading_is_raised_by_all(directory: CheckpointDirectory) -> None:
    def work(rank: Ranks) -> object:
        def ready() -> None:
            if rank.rank == 1:
                raise dos.CheckpointError("not durable")

        return taken(rank, directory, lambda _, step: step, ready=ready)

    ends = on_all(ranks_of(distributed.HashStore(), 2), work)
    assert ends == [("CheckpointError", [0, 1])] * 2


@pytest.mark.filterwarnings("ignore:.*not whole")
@pytest.mark.parametrize("damaged", [0, 1])
def test_damage_that_one_rank_finds_has_all_take_another(
    damaged: int, directory: CheckpointDirectory
) -> None:
    def read(ranks: Ranks, step: int) -> int:
        if (step, ranks.rank) == (2, damaged):
            raise dos.IntegrityError("torn")
        return step

    ends = on_all(ranks_of(distributed.HashStore(), 2), lambda rank: taken(rank, directory, read))
    assert ends == [(1, [0, 1])] * 2


@pytest.mark.parametrize(
    "other",
    [
        {"model": {"b": torch.zeros(2, 3)}},
        {"model": {"a": torch.zeros(3, 2)}},
        {"model": {"a": torch.zeros(2, 3, dtype=torch.float16)}},
        {"model": {"a": torch.zeros(2, 3), "b": torch.zeros(0)}},
        {"optimizer": {"a": torch.zeros(2, 3)}},
    ],
    ids=["name", "shape", "dtype", "more", "key"],
)
def test_an_outline_tells_states_of_other_form_apart(other: dict[str, Any]) -> None:
    assert outline_of({"model": {"a": torch.zeros(2, 3)}}) != outline_of(other)


def test_an_outline_tells_nothing_of_values() -> None:
    mine, its = ({"model": {"a": make(2)}, "step": make(1)} for make in (torch.zeros, torch.ones))
    assert outline_of(mine) == outline_of(its)
