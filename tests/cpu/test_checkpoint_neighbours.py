"""Saves beside other saves, processes, readers and files: each leaves the others alone."""

from __future__ import annotations

import errno
import json
import os
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import dos
import dos.checkpoint
from dos.checkpoint.manifest import MANIFEST
from dos.checkpoint.owner import Owner
from dos.checkpoint.posix import PosixFile, PosixStorage
from tests.cpu.forked import in_child


def state_of(number: int) -> dict[str, Any]:
    return {"number": number, "w": torch.full((1000 + number,), float(number))}


class Paused(PosixStorage):
    """Makes nothing durable until it is told to go on; all is captured by then."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def fsync(self, file: PosixFile) -> None:
        assert self.go.wait(60)
        super().fsync(file)


def test_saves_beside_each_other_become_durable_in_their_order(tmp_path: Path) -> None:
    paused = Paused()
    first = dos.checkpoint.save(state_of(1), tmp_path / "1", latest=True, storage=paused)
    second = dos.checkpoint.save(state_of(2), tmp_path / "2", latest=True)
    with pytest.raises(TimeoutError):
        second.result(0.1)
    paused.go.set()
    second.result()
    assert first.durable.done()
    assert (tmp_path / "latest").read_text() == "2"


def test_a_save_that_failed_holds_up_no_later_one(tmp_path: Path) -> None:
    class Broken(PosixStorage):
        def preallocate(self, file: PosixFile, n_bytes: int) -> None:
            raise OSError(errno.EIO, "broken")

    first = dos.checkpoint.save(state_of(1), tmp_path / "1", latest=True, storage=Broken())
    dos.checkpoint.save(state_of(2), tmp_path / "2", latest=True).result()
    assert isinstance(first.durable.exception(), dos.CheckpointError)
    assert dos.checkpoint.load(tmp_path)["number"] == 2


def test_many_may_make_the_directories_above_at_once(tmp_path: Path) -> None:
    ready = threading.Barrier(4)
    failed = []

    class Late(PosixStorage):
        """Each of all threads has seen that the directory is missing before one makes it."""

        def mkdir(self, path: str) -> None:
            if not os.path.basename(path).startswith("."):
                ready.wait(60)
            super().mkdir(path)

    def save(name: str) -> None:
        try:
            dos.checkpoint.save({}, tmp_path / "a" / "b" / name, storage=Late()).result()
        except dos.CheckpointError as error:
            failed.append(error)
            ready.abort()

    # Of different directories, so that none waits for another.
    threads = [threading.Thread(target=save, args=(f"{n}/saved",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_child_neither_waits_for_what_its_parent_saves_nor_tells_of_it(tmp_path: Path) -> None:
    paused = Paused()
    handle = dos.checkpoint.save(state_of(1), tmp_path / "saved", storage=paused)

    def child() -> None:
        assert isinstance(handle.durable.exception(60), dos.CheckpointError)
        with pytest.raises(dos.CheckpointError, match=f"process {os.getppid()} of host"):
            dos.checkpoint.save(state_of(2), tmp_path / "saved")
        dos.checkpoint.save(state_of(2), tmp_path / "other").result()

    assert in_child(child) == "None"
    paused.go.set()
    assert dos.checkpoint.load(handle.result())["number"] == 1
    assert dos.checkpoint.load(tmp_path / "other")["number"] == 2


@pytest.mark.parametrize("times", [1, 3])
def test_a_reader_follows_a_save_that_replaces_what_it_opens(times: int, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    dos.checkpoint.save(state_of(0), saved).result()

    class Overtaken(PosixStorage):
        """After each of the first looks at the manifest another checkpoint takes its place."""

        saves = 0

        def read_bytes(self, path: str) -> bytes:
            data = super().read_bytes(path)
            if os.path.basename(path) == MANIFEST and self.saves < times:
                self.saves += 1
                dos.checkpoint.save(state_of(self.saves), saved).result()
            return data

    for look in (dos.checkpoint.load, dos.checkpoint.inspect, dos.checkpoint.verify):
        look(saved, storage=Overtaken())  # type: ignore[operator]
    assert dos.checkpoint.load(saved, storage=Overtaken())["number"] == times


def test_a_name_that_is_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    dos.checkpoint.save(state_of(1), tmp_path / "real").result()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    dos.checkpoint.save(state_of(2), tmp_path / "link").result()
    assert not (tmp_path / "link").is_symlink()
    assert dos.checkpoint.load(tmp_path / "link")["number"] == 2
    assert dos.checkpoint.load(tmp_path / "real")["number"] == 1


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_has_the_name_of_a_remainder_is_removed_but_not_followed(
    kind: str, tmp_path: Path
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis").touch()
    left = tmp_path / ".saved.x.partial"
    left.symlink_to(tmp_path / "work") if kind == "link" else left.touch()
    dos.checkpoint.save(state_of(1), tmp_path / "saved").result()
    assert (tmp_path / "work" / "thesis").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"saved", "work"}


@pytest.mark.parametrize("other", ["notes.txt", "folder/", "rank-1.safetensors", ".hidden"])
def test_a_checkpoint_that_holds_other_files_is_not_replaced(other: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    dos.checkpoint.save(state_of(1), saved).result()
    (saved / other).mkdir() if other.endswith("/") else (saved / other).touch()
    with pytest.raises(dos.CheckpointError, match="in it is no part of one"):
        dos.checkpoint.save(state_of(2), saved)
    assert (saved / other).exists()
    assert dos.checkpoint.load(saved)["number"] == 1


def test_a_manifest_of_something_else_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"name": "a page"}')
    with pytest.raises(dos.CheckpointError, match="no checkpoint"):
        dos.checkpoint.save(state_of(2), tmp_path)


def test_an_old_checkpoint_that_cannot_be_removed_fails_no_save(tmp_path: Path) -> None:
    saved = tmp_path / "saved"

    class Keeping(PosixStorage):
        def unlink(self, path: str) -> None:
            if path.endswith(".safetensors"):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)
            super().unlink(path)

    for number in range(3):
        dos.checkpoint.save(state_of(number), saved, storage=Keeping()).result()
        assert dos.checkpoint.load(saved)["number"] == number
    dos.checkpoint.save(state_of(3), saved).result()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_where_no_thread_can_be_had_a_save_is_written_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    big = {"w": torch.ones(4 << 20)}
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        handle = dos.checkpoint.save(big, tmp_path / "saved")
    assert handle.durable.done()
    assert torch.equal(dos.checkpoint.load(handle.result())["w"], big["w"])


def test_a_save_that_is_interrupted_leaves_its_name_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            dos.checkpoint.save(state_of(1), tmp_path / "saved")
    assert not list(tmp_path.iterdir())
    dos.checkpoint.save(state_of(2), tmp_path / "saved").result()


def test_a_process_that_has_died_and_was_not_waited_for_writes_no_more(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, json.dumps(asdict(Owner.here())).encode())
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    (tmp_path / ".saved.x.partial").mkdir()
    (tmp_path / ".saved.x.partial.owner").write_bytes(os.read(reader, 4096))
    dos.checkpoint.save(state_of(1), tmp_path / "saved").result()
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_no_checkpoint_is_called_as_the_file_that_names_the_newest(tmp_path: Path) -> None:
    with pytest.raises(dos.ConfigError, match="names no checkpoint"):
        dos.checkpoint.save(state_of(1), tmp_path / "latest", latest=True)


def test_a_save_that_is_interrupted_while_it_waits_forgets_no_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = Paused()
    first = dos.checkpoint.save(state_of(1), tmp_path / "saved", storage=paused)

    def interrupted(timeout_s: float | None = None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(first.durable, "exception", interrupted)
        with pytest.raises(KeyboardInterrupt):
            dos.checkpoint.save(state_of(2), tmp_path / "saved")
    threading.Timer(0.1, paused.go.set).start()
    dos.checkpoint.save(state_of(3), tmp_path / "saved").result()  # after the first, not beside
    assert first.durable.done()


def test_a_save_cannot_be_cancelled(tmp_path: Path) -> None:
    paused = Paused()
    handle = dos.checkpoint.save(state_of(1), tmp_path / "saved", storage=paused)
    assert not handle.durable.cancel()
    assert not handle.captured.cancel()
    paused.go.set()
    assert dos.checkpoint.load(handle.result())["number"] == 1
