"""The directory in which ranks build a checkpoint: who sees it go, and what is left of it."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest
from torch import distributed

import dos
from dos.checkpoint import save
from dos.checkpoint.posix import PosixStorage
from dos.checkpoint.ranks import Ranks
from dos.checkpoint.rounds import Round
from tests.cpu.rank_processes import fork, join, run_ranks
from tests.cpu.test_checkpoint_ranks import part, ranks_of
from tests.cpu.test_checkpoint_save import Failing


def test_a_rank_that_sees_no_directory_hears_why(tmp_path: Path) -> None:
    class Blind(PosixStorage):
        def exists(self, path: str) -> bool:
            first.fail(dos.CheckpointError("no space"))  # while the other waits for the directory
            return False

    ranks, path = ranks_of(distributed.HashStore(), 2), str(tmp_path / "step")
    first = Round(ranks[0], PosixStorage(), path)
    first.claim()
    first.begin()
    with pytest.raises(dos.CheckpointError, match="rank 0: no space"):
        Round(ranks[1], Blind(), path).begin()


def test_what_follows_from_a_full_disk_is_told_as_that(tmp_path: Path) -> None:
    class Late(PosixStorage):
        def fsync_directory(self, path: str) -> None:
            while os.path.exists(path):  # until rank 0 has removed it
                time.sleep(0.01)
            super().fsync_directory(path)

    def work(ranks: Ranks) -> str:
        storage = (PosixStorage(), Late(), Failing("preallocate"))[ranks.rank]
        failed = save(part(ranks), tmp_path / "step", storage=storage, ranks=ranks)
        return str(failed.durable.exception(60))

    for text in run_ranks(work, 3, tmp_path):
        assert os.strerror(errno.ENOSPC) in text


def test_what_a_killed_writer_left_is_removed_by_a_save_beside_it(tmp_path: Path) -> None:
    class Deadly(PosixStorage):
        def fsync(self, file: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    join([fork(lambda: save({"a": 1}, tmp_path / "step-1", storage=Deadly()).result(60))])
    assert len(os.listdir(tmp_path)) == 2
    save({"a": 1}, tmp_path / "step-2").result()
    assert os.listdir(tmp_path) == ["step-2"]
