"""A disk that stands still, and whoever waits for it: given up in time, and nothing lost by it."""

from __future__ import annotations

import signal
import threading
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


def optimizer_of(weight: torch.nn.Parameter) -> dos.DOSOptimizer:
    optimizer = dos.DOSOptimizer(torch.optim.AdamW([weight]), device="cpu")
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return optimizer


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


def test_after_a_save_was_given_up_training_goes_on(disk: Gated, tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3 << 20))
    optimizer = optimizer_of(weight)
    checkpointer = Checkpointer(tmp_path, storage=disk, close_timeout_s=0.1)
    checkpointer.save(1, optimizer=optimizer)
    with pytest.raises(dos.CheckpointError, match="given up"):
        checkpointer.close()
    optimizer.step()  # though its disk still stands still
    assert checkpointer.list() == []


def test_what_was_given_up_is_no_checkpoint(disk: Gated, tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3 << 20))
    optimizer = optimizer_of(weight)
    checkpointer = Checkpointer(tmp_path, storage=disk, close_timeout_s=0.1)
    handle = checkpointer.save(1, optimizer=optimizer)
    with pytest.raises(dos.CheckpointError, match="given up"):
        checkpointer.close()
    optimizer.step()
    disk.open_now.set()
    assert handle is not None
    assert isinstance(handle.durable.exception(60), dos.CheckpointError)


def test_who_interrupts_close_may_close_again(disk: Gated, tmp_path: Path) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    checkpointer = Checkpointer(tmp_path, storage=disk)
    handle = checkpointer.save(1, extra={"value": 1})
    before = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.get_ident()
    killer = threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGUSR1))
    killer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            checkpointer.close()
    finally:
        killer.join()
        signal.signal(signal.SIGUSR1, before)
    disk.open_now.set()
    checkpointer.close()
    assert handle is not None
    assert handle.durable.done()
