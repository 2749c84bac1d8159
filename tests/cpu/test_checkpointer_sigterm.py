"""SIGTERM ends in a last checkpoint, of the step that was under way."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dos
from dos.checkpoint import Checkpointer
from dos.checkpoint.posix import PosixFile, PosixStorage
from tests.cpu.checkpoint_cases import in_memory
from tests.cpu.forked import in_child


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with in_memory() as folder:
        yield Path(folder)


def status_of(child_does: Callable[[], Any]) -> int:
    """How a child ends that does this."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        status = 99
        try:
            child_does()
        except SystemExit as leaving:
            status = int(leaving.code or 0)
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def train(checkpointer: Checkpointer, signalled_in: int, steps: int = 9) -> None:
    for step in range(1, steps):
        if step == signalled_in:
            os.kill(os.getpid(), signal.SIGTERM)
            heard(checkpointer)
        checkpointer.save(step, extra={"step": step})


def heard(checkpointer: Checkpointer) -> None:
    assert checkpointer._stopping is not None
    assert checkpointer._stopping._told.wait(10)


def test_the_step_under_way_is_saved_and_the_process_leaves(tmp_path: Path) -> None:
    def child() -> None:
        with Checkpointer(tmp_path, every=100, sigterm_grace_s=25) as checkpointer:
            train(checkpointer, signalled_in=4)

    assert status_of(child) == 128 + signal.SIGTERM
    assert [one.step for one in Checkpointer(tmp_path).list()] == [4]


def test_a_save_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    class Slow(PosixStorage):
        def fsync(self, file: PosixFile) -> None:
            time.sleep(15)

    def child() -> None:
        how: dict[str, Any] = {"sigterm_grace_s": 0.5, "storage": Slow()}
        with Checkpointer(tmp_path, every=100, **how) as checkpointer:
            train(checkpointer, signalled_in=4)

    assert status_of(child) == 128 + signal.SIGTERM
    assert os.listdir(tmp_path) != []
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.list() == []
    assert os.listdir(tmp_path) == []


def test_a_process_that_reaches_no_step_is_ended(tmp_path: Path) -> None:
    def child() -> None:
        with Checkpointer(tmp_path, sigterm_grace_s=0.2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(15)

    assert status_of(child) == 128 + signal.SIGTERM


def test_a_handler_that_was_there_is_called_and_comes_back(tmp_path: Path) -> None:
    def report() -> object:
        calls: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
        before = signal.getsignal(signal.SIGTERM)
        with Checkpointer(tmp_path, sigterm_grace_s=25) as checkpointer:
            os.kill(os.getpid(), signal.SIGTERM)
            heard(checkpointer)
        return calls, signal.getsignal(signal.SIGTERM) is before

    assert in_child(report) == "([15], True)"


def test_a_wakeup_descriptor_that_was_there_is_woken_and_comes_back(tmp_path: Path) -> None:
    def report() -> object:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        with Checkpointer(tmp_path, sigterm_grace_s=25) as checkpointer:
            os.kill(os.getpid(), signal.SIGTERM)
            heard(checkpointer)
        return os.read(reader, 1), signal.set_wakeup_fd(-1) == writer

    assert in_child(report) == r"(b'\x0f', True)"


def test_a_wakeup_descriptor_that_came_later_stays(tmp_path: Path) -> None:
    def report() -> object:
        _, writer = os.pipe()
        os.set_blocking(writer, False)
        with Checkpointer(tmp_path, sigterm_grace_s=25):
            signal.set_wakeup_fd(writer)
        return signal.set_wakeup_fd(-1) == writer

    assert in_child(report) == "True"


def test_under_a_later_handler_the_wakeup_descriptor_comes_back_too(tmp_path: Path) -> None:
    def report() -> object:
        with Checkpointer(tmp_path, sigterm_grace_s=25):
            ours = signal.getsignal(signal.SIGTERM)
            assert callable(ours)
            signal.signal(signal.SIGTERM, lambda number, frame: ours(number, frame))
        os.kill(os.getpid(), signal.SIGTERM)  # a handler that is called, and does nothing
        return signal.set_wakeup_fd(-1)

    assert in_child(report) == "-1"


def closed_on_a_thread(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, sigterm_grace_s=25)
    thread = threading.Thread(target=checkpointer.close)
    thread.start()
    thread.join()


def test_closed_on_another_thread_sigterm_ends_the_process_as_before(tmp_path: Path) -> None:
    def child() -> None:
        closed_on_a_thread(tmp_path)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(15)

    assert status_of(child) == -signal.SIGTERM


def test_closed_on_another_thread_signals_are_written_into_no_file(tmp_path: Path) -> None:
    def report() -> object:
        closed_on_a_thread(tmp_path)
        time.sleep(0.2)  # in which its thread could close what is still written to
        return stat.S_ISSOCK(os.fstat(signal.set_wakeup_fd(-1)).st_mode)

    assert in_child(report) == "True"


def test_two_that_are_closed_in_the_order_they_were_made_leave_sigterm_as_it_was(
    tmp_path: Path,
) -> None:
    def child() -> None:
        made = [Checkpointer(tmp_path / name, sigterm_grace_s=25) for name in ("a", "b")]
        for checkpointer in made:
            checkpointer.close()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(15)

    assert status_of(child) == -signal.SIGTERM


def test_a_worker_that_is_ended_does_not_end_the_training(tmp_path: Path) -> None:
    def report() -> object:
        with Checkpointer(tmp_path, sigterm_grace_s=25) as checkpointer:
            worker = os.fork()
            if worker == 0:
                time.sleep(15)
                os._exit(0)
            os.kill(worker, signal.SIGTERM)
            _, status = os.waitpid(worker, 0)
            assert checkpointer._stopping is not None
            told = checkpointer._stopping._told.wait(0.2)
        return os.waitstatus_to_exitcode(status), told

    assert in_child(report) == "(-15, False)"


def test_without_the_option_sigterm_is_left_alone(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Checkpointer(tmp_path):
        assert signal.getsignal(signal.SIGTERM) is before


def test_signals_can_be_handled_on_the_main_thread_only(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor() as pool:
        error = pool.submit(Checkpointer, tmp_path, sigterm_grace_s=1).exception()
    assert isinstance(error, dos.ConfigError)
    assert "main thread" in str(error)
