"""The directory in which ranks build a checkpoint: who sees it go, and what is left of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from dos.checkpoint import save
from dos.checkpoint.posix import PosixStorage
from tests.cpu.rank_processes import fork, join


def test_what_a_killed_writer_left_is_removed_by_a_save_beside_it(tmp_path: Path) -> None:
    class Deadly(PosixStorage):
        def fsync(self, file: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    join([fork(lambda: save({"a": 1}, tmp_path / "step-1", storage=Deadly()).result(60))])
    assert len(os.listdir(tmp_path)) == 2
    save({"a": 1}, tmp_path / "step-2").result()
    assert os.listdir(tmp_path) == ["step-2"]
