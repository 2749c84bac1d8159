"""Saves of a Checkpointer that fail, hang, or find no room: said, counted, and raised in time."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dos
from dos.checkpoint import Checkpointer
from dos.checkpoint.owner import Owner, _start
from dos.checkpoint.posix import PosixFile, PosixStorage
from tests.cpu.checkpoint_cases import in_memory
from tests.cpu.forked import in_child
from tests.gated_disk import Gated


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with in_memory() as folder:
        yield Path(folder)


class Disk(PosixStorage):
    """A disk that is full for a while, has little room, or keeps a sync waiting."""

    def __init__(self) -> None:
        self.full, self.free = False, 1 << 40
        self.may_sync = threading.Event()
        self.may_sync.set()

    def preallocate(self, file: PosixFile, n_bytes: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().preallocate(file, n_bytes)

    def fsync(self, file: PosixFile) -> None:
        self.may_sync.wait()
        super().fsync(file)

    def free_bytes(self, path: str) -> int:
        return self.free


def fail(checkpointer: Checkpointer, disk: Disk, step: int) -> None:
    """A save that fails in the background."""
    disk.full = True
    handle = checkpointer.save(step, extra={"step": step})
    assert handle is not None
    assert isinstance(handle.durable.exception(), dos.CheckpointError)
    disk.full = False


def test_a_failed_save_is_raised_by_the_next_which_is_started(tmp_path: Path) -> None:
    disk = Disk()
    with Checkpointer(tmp_path, storage=disk) as checkpointer:
        checkpointer.save(1, extra={})
        checkpointer._background.wait()
        fail(checkpointer, disk, 2)
        with pytest.raises(dos.CheckpointError, match=r"earlier save failed.*No space left"):
            checkpointer.save(3, extra={})
        checkpointer.save(4, extra={})
    assert [one.step for one in checkpointer.list()] == [1, 3, 4]


def test_a_failed_save_is_raised_later_where_the_next_is_not_started(tmp_path: Path) -> None:
    disk = Disk()
    with Checkpointer(tmp_path, storage=disk) as checkpointer:
        fail(checkpointer, disk, 1)
        with pytest.raises(dos.FormatError):
            checkpointer.save(2, extra={"tensor": torch.empty(2, device="meta")})
        with pytest.raises(dos.CheckpointError, match="earlier save failed"):
            checkpointer.save(3, extra={})
    assert [one.step for one in checkpointer.list()] == [3]


def test_what_save_raises_is_not_counted(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, max_failures=1) as checkpointer:
        with pytest.raises(dos.FormatError):
            checkpointer.save(1, extra={"tensor": torch.empty(2, device="meta")})
        checkpointer.save(2, extra={})
        assert checkpointer.metrics["failures"] == 0


def test_a_failed_save_is_logged_once_with_cause_and_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk()
    checkpointer = Checkpointer(tmp_path, storage=disk)
    fail(checkpointer, disk, 1)
    with pytest.raises(dos.CheckpointError):
        checkpointer.close()
    (record,) = caplog.records
    assert "No space left" in record.getMessage()
    assert "free space" in record.getMessage()


def test_failures_are_counted_and_passed_on(tmp_path: Path) -> None:
    disk, errors = Disk(), []
    checkpointer = Checkpointer(tmp_path, storage=disk, on_error=errors.append)
    fail(checkpointer, disk, 1)
    with pytest.raises(dos.CheckpointError):
        checkpointer.close()
    assert checkpointer.metrics["failures"] == 1
    assert [type(error) for error in errors] == [dos.CheckpointError]


def test_an_error_of_on_error_hurts_nobody(tmp_path: Path) -> None:
    def on_error(error: BaseException) -> None:
        raise RuntimeError("on_error")

    disk = Disk()
    checkpointer = Checkpointer(tmp_path, storage=disk, on_error=on_error)
    fail(checkpointer, disk, 1)
    with pytest.raises(dos.CheckpointError, match="No space left"):
        checkpointer.close()


def test_after_so_many_failures_in_a_row_no_save_is_started(tmp_path: Path) -> None:
    disk = Disk()
    with Checkpointer(tmp_path, storage=disk, max_failures=2) as checkpointer:
        fail(checkpointer, disk, 1)
        disk.full = True
        with pytest.raises(dos.CheckpointError, match="earlier save failed"):
            checkpointer.save(2, extra={})
        checkpointer._background.wait()
        disk.full = False
        with pytest.raises(dos.CheckpointError, match="2 saves in a row failed"):
            checkpointer.save(3, extra={})
        assert checkpointer.list() == []
        checkpointer.save(4, extra={})


def test_what_failed_last_is_raised_by_close(tmp_path: Path) -> None:
    disk = Disk()
    checkpointer = Checkpointer(tmp_path, storage=disk)
    fail(checkpointer, disk, 1)
    with pytest.raises(dos.CheckpointError, match="No space left"):
        checkpointer.close()


def test_an_error_of_the_training_is_not_covered_by_one_of_a_save(tmp_path: Path) -> None:
    def train() -> None:
        disk = Disk()
        with Checkpointer(tmp_path, storage=disk) as checkpointer:
            fail(checkpointer, disk, 1)
            raise KeyError

    with pytest.raises(KeyError):
        train()


def test_close_waits_for_what_is_written(tmp_path: Path) -> None:
    disk = Disk()
    disk.may_sync.clear()
    checkpointer = Checkpointer(tmp_path, storage=disk)
    handle = checkpointer.save(1, extra={})
    assert handle is not None
    threading.Timer(0.1, disk.may_sync.set).start()
    checkpointer.close()
    assert handle.durable.done()


def test_close_gives_up_and_says_so(tmp_path: Path) -> None:
    disk = Disk()
    disk.may_sync.clear()
    checkpointer = Checkpointer(tmp_path, storage=disk, close_timeout_s=0.1)
    handle = checkpointer.save(1, extra={})
    with pytest.raises(dos.CheckpointError, match=r"step-00000001: it is not durable after 0.1 s"):
        checkpointer.close()
    disk.may_sync.set()
    assert handle is not None
    assert isinstance(handle.durable.exception(), dos.CheckpointError)
    assert os.listdir(tmp_path) == []


def test_a_first_save_without_room_is_refused_at_once(tmp_path: Path) -> None:
    disk = Disk()
    disk.free = 1000
    with Checkpointer(tmp_path, storage=disk) as checkpointer:
        with pytest.raises(dos.CheckpointError, match=r"takes 13,056 bytes .* 1000 bytes are free"):
            checkpointer.save(1, model={"m": torch.nn.Linear(2000, 1, bias=False)})
        assert checkpointer.list() == []


def test_the_partial_of_a_dead_writer_goes_and_that_of_a_live_one_stays(tmp_path: Path) -> None:
    partials = {}
    for step, pid in ((1, 1), (2, 2**22 + 1)):
        partials[step] = tmp_path / f".step-0000000{step}.id.partial"
        partials[step].mkdir()
        (partials[step] / "rank-00000.safetensors").touch()
        owner = replace(Owner.here(), pid=pid, start=_start(pid) or 0)
        (tmp_path / f"{partials[step].name}.owner").write_text(json.dumps(asdict(owner)))
    with Checkpointer(tmp_path):
        assert partials[1].exists()
        assert not partials[2].exists()


def test_on_error_may_close(tmp_path: Path) -> None:
    disk, closed = Disk(), threading.Event()

    def close(error: BaseException) -> None:
        with pytest.raises(dos.CheckpointError, match="an earlier save failed"):
            checkpointer.close()
        closed.set()

    checkpointer = Checkpointer(tmp_path, on_error=close, storage=disk)
    fail(checkpointer, disk, 1)
    assert closed.wait(60)


def test_what_is_held_is_free_when_on_error_is_called(tmp_path: Path) -> None:
    disk, stepped = Disk(), threading.Event()

    def step(error: BaseException | None = None) -> None:
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        stepped.set()

    weight = torch.nn.Parameter(torch.ones(3000))
    optimizer = dos.DOSOptimizer(torch.optim.AdamW([weight]), device="cpu")
    step()
    stepped.clear()
    checkpointer = Checkpointer(tmp_path, on_error=step, storage=disk)
    disk.full = True
    checkpointer.save(1, optimizer=optimizer)
    assert stepped.wait(60)
    with pytest.raises(dos.CheckpointError, match="an earlier save failed"):
        checkpointer.close()


def test_an_interrupted_save_is_none(tmp_path: Path) -> None:
    """Whoever interrupts `save` goes on, and changes what was not captured yet."""
    disk = Gated()
    tensor = torch.zeros(8 << 20)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.get_ident()
    killer = threading.Timer(1.0, lambda: signal.pthread_kill(main, signal.SIGUSR1))
    checkpointer = Checkpointer(tmp_path, ring_bytes=4 << 20, storage=disk)
    killer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(1, extra={"tensor": tensor})
    finally:
        killer.join()
        signal.signal(signal.SIGUSR1, before)
    tensor.fill_(7)
    disk.open_now.set()
    with checkpointer:
        checkpointer.save(2, extra={"tensor": tensor})  # written after the first has ended
    assert [saved.step for saved in checkpointer.list()] == [2]


_STALLED = """
import sys
import torch
from dos.checkpoint import Checkpointer
from tests.gated_disk import Gated

checkpointer = Checkpointer(sys.argv[1], close_timeout_s=0.1, storage=Gated())
checkpointer.save(1, extra={"tensor": torch.zeros(10)})
"""


def test_a_process_ends_though_its_disk_has_stalled(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    script = tmp_path / "stalled.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(root)!r})\n{_STALLED}")
    made = subprocess.run(
        [sys.executable, script, tmp_path / "run"], capture_output=True, text=True, timeout=50
    )
    assert made.returncode == 0, made.stderr
    assert "was given up" in made.stderr


def test_a_closed_one_saves_no_more(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.close()
    with pytest.raises(dos.ConfigError, match="closed"):
        checkpointer.save(1, extra={})


@pytest.mark.parametrize("options", [{"every": 0}, {"keep": 0}, {"max_failures": -1}], ids=str)
def test_options_out_of_range_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(dos.ConfigError, match=next(iter(options))):
        Checkpointer(tmp_path, **options)


def test_a_forked_child_does_not_wait_for_the_saves_of_its_parent(tmp_path: Path) -> None:
    disk = Disk()
    disk.may_sync.clear()
    with Checkpointer(tmp_path, storage=disk) as checkpointer:
        checkpointer.save(1, extra={})
        assert in_child(checkpointer.close) == "None"
        disk.may_sync.set()
