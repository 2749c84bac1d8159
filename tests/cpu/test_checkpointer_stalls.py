"""A disk that stands still, and whoever waits for it: given up in time, and nothing lost by it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dos
from dos.checkpoint import Checkpointer, saving
from tests.cpu.checkpoint_cases import in_memory
from tests.gated_disk import Gated, join_saves


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with in_memory() as folder:
        yield Path(folder)


@pytest.fixture
def disk() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.open_now.set()


def test_a_save_behind_one_that_stands_still_is_given_up(
    disk: Gated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "STALL_S", 0.1)
    checkpointer = Checkpointer(tmp_path, storage=disk, ring_bytes=4 << 20)
    extra = {"tensor": torch.zeros(3 << 20)}
    with pytest.raises(dos.CheckpointError, match=r"step-00000001: it has not got on for 0.1 s"):
        checkpointer.save(1, extra=extra)
    with pytest.raises(dos.CheckpointError, match=r"step-00000001: it has not got on for 0.1 s"):
        checkpointer.save(2, extra=extra)
    disk.open_now.set()
    join_saves()
    monkeypatch.setattr(saving, "STALL_S", 60.0)
    checkpointer.save(3, extra=extra)
    checkpointer.close()
    assert [saved.step for saved in checkpointer.list()] == [3]
