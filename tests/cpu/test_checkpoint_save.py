"""Saving: names, owners, what stays when it fails, when the state may change."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dos
import dos.checkpoint
from dos.checkpoint.owner import Owner, _start
from dos.checkpoint.posix import PosixFile, PosixQueue, PosixStorage

ROOT = Path(__file__).parents[2]


class Failing(PosixStorage):
    """Fails at the n-th call of one kind."""

    def __init__(self, call: str, at: int = 1, number: int = errno.ENOSPC) -> None:
        self._left = {call: at}
        self._number = number

    def _count(self, call: str) -> None:
        self._left[call] = self._left.get(call, 0) - 1
        if self._left[call] == 0:
            raise OSError(self._number, os.strerror(self._number))

    def preallocate(self, file: PosixFile, n_bytes: int) -> None:
        self._count("preallocate")
        super().preallocate(file, n_bytes)

    def fsync(self, file: PosixFile) -> None:
        self._count("fsync")
        super().fsync(file)

    def fsync_directory(self, path: str) -> None:
        self._count("fsync_directory")
        super().fsync_directory(path)

    def rename(self, old: str, new: str) -> None:
        self._count("rename")
        super().rename(old, new)

    def exchange(self, a: str, b: str) -> None:
        self._count("exchange")
        super().exchange(a, b)

    def write_bytes(self, path: str, data: bytes) -> None:
        self._count("write_bytes")
        super().write_bytes(path, data)

    def queue(self, *, depth: int = 32, registered: Any = ()) -> PosixQueue:
        return FailingQueue(self)


class FailingQueue(PosixQueue):
    def __init__(self, storage: Failing) -> None:
        super().__init__()
        self._storage = storage

    def write(self, file: PosixFile, offset_bytes: int, buffer: memoryview, token: int) -> None:
        try:
            self._storage._count("write")
        except OSError as error:
            self._done.append((token, error))
            return
        super().write(file, offset_bytes, buffer, token)


def state_of(number: int) -> dict[str, Any]:
    return {"w": torch.full((3 << 20,), number), "number": number}


def test_a_new_checkpoint_replaces_the_old_one(tmp_path: Path) -> None:
    for number in range(3):
        dos.checkpoint.save(state_of(number), tmp_path / "a" / "saved").result()
    assert dos.checkpoint.load(tmp_path / "a" / "saved")["number"] == 2
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["saved"]


@pytest.mark.parametrize(
    ("call", "at"),
    [
        ("write_bytes", 1),
        ("preallocate", 1),
        ("write", 1),
        ("write", 3),
        ("write", 8),
        ("fsync", 1),
        ("write_bytes", 2),
        ("fsync", 2),
        ("fsync_directory", 1),
        ("exchange", 1),
    ],
)
def test_a_save_that_fails_leaves_the_old_one_and_nothing_else(
    call: str, at: int, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    dos.checkpoint.save(state_of(1), saved).result()
    with pytest.raises(dos.CheckpointError, match=r"(?s)saved: .*No space left.*free space"):
        dos.checkpoint.save(state_of(2), saved, storage=Failing(call, at)).result()
    assert dos.checkpoint.load(saved)["number"] == 1
    assert {path.name for path in tmp_path.iterdir()} == {"saved"}
    assert len(list(saved.iterdir())) == 2


def test_both_futures_tell_of_a_failure(tmp_path: Path) -> None:
    handle = dos.checkpoint.save(state_of(1), tmp_path / "saved", storage=Failing("write"))
    assert isinstance(handle.captured.exception(), dos.CheckpointError)
    assert isinstance(handle.durable.exception(), dos.CheckpointError)


def test_replacing_is_refused_where_names_cannot_be_exchanged(tmp_path: Path) -> None:
    dos.checkpoint.save(state_of(1), tmp_path / "saved").result()
    storage = Failing("exchange", number=errno.EINVAL)
    with pytest.raises(dos.CheckpointError, match="in one step"):
        dos.checkpoint.save(state_of(2), tmp_path / "saved", storage=storage).result()
    assert dos.checkpoint.load(tmp_path / "saved")["number"] == 1


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("more work")
    for name in ("folder", "file"):
        with pytest.raises(dos.CheckpointError, match="no checkpoint"):
            dos.checkpoint.save(state_of(1), tmp_path / name)
    assert (tmp_path / "folder" / "thesis.txt").exists()


class Slow(PosixStorage):
    """Writes nothing until it is told to go on."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.reached = threading.Event()

    def preallocate(self, file: PosixFile, n_bytes: int) -> None:
        self.reached.set()
        assert self.go.wait(60)
        super().preallocate(file, n_bytes)


def test_saves_of_one_name_become_durable_in_their_order(tmp_path: Path) -> None:
    slow = Slow()
    first = dos.checkpoint.save(state_of(1), tmp_path / "saved", storage=slow)
    threads = [
        threading.Thread(target=lambda: dos.checkpoint.save(state_of(2), tmp_path / "saved"))
    ]
    threads[0].start()
    assert slow.reached.wait(60)
    assert not first.durable.done()
    slow.go.set()
    threads[0].join()
    first.result()
    dos.checkpoint.save(state_of(3), tmp_path / "saved").result()
    assert dos.checkpoint.load(tmp_path / "saved")["number"] == 3


def test_a_second_process_is_refused_and_the_first_named(tmp_path: Path) -> None:
    slow = Slow()
    handle = dos.checkpoint.save(state_of(1), tmp_path / "saved", storage=slow)
    assert slow.reached.wait(60)
    code = (
        "import dos.checkpoint, sys\n"
        "try: dos.checkpoint.save({'a': 1}, sys.argv[1])\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "saved")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, capture_output=True, text=True, env=env, check=True).stdout
    slow.go.set()
    handle.result()
    assert said.startswith("CheckpointError")
    assert f"process {os.getpid()} of host" in said


def test_what_a_dead_process_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".saved.dead.partial"
    left.mkdir()
    (left / "rank-00000.safetensors").write_bytes(b"half")
    here = Owner.here()
    owner = {"host": here.host, "boot": here.boot, "pid": here.pid, "start": here.start - 1}
    (tmp_path / ".saved.dead.partial.owner").write_text(json.dumps(owner))
    (tmp_path / ".saved.gone.partial.owner").write_text("{")
    (tmp_path / ".saved.other.name.partial").mkdir()
    dos.checkpoint.save(state_of(1), tmp_path / "saved").result()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"saved", ".saved.other.name.partial"}


def test_of_other_names_only_what_is_known_to_be_dead_is_removed(tmp_path: Path) -> None:
    here = Owner.here()
    owners = {".dead.id.partial": replace(here, start=here.start - 1)}
    owners[".live.id.partial"] = replace(here, pid=1, start=_start(1) or 0)
    for name, owner in owners.items():
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.owner").write_text(json.dumps(asdict(owner)))
    dos.checkpoint.save(state_of(1), tmp_path / "saved").result()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"saved", ".live.id.partial", ".live.id.partial.owner"}


class Late(Failing):
    """Another rank, which has not yet heard of the failure, makes its file."""

    def rmdir(self, path: str) -> None:
        if self._left.pop("late", None):
            Path(path, "rank-00001.safetensors").touch()
        super().rmdir(path)


def test_a_file_that_comes_late_is_removed_too(tmp_path: Path) -> None:
    storage = Late("write")
    storage._left["late"] = 1
    with pytest.raises(dos.CheckpointError):
        dos.checkpoint.save(state_of(1), tmp_path / "saved", storage=storage).result()
    assert list(tmp_path.iterdir()) == []


def test_a_writer_of_another_host_counts_as_alive(tmp_path: Path) -> None:
    (tmp_path / ".saved.far.partial").mkdir()
    owner = {"host": "elsewhere", "boot": "", "pid": 1, "start": 1}
    (tmp_path / ".saved.far.partial.owner").write_text(json.dumps(owner))
    with pytest.raises(dos.CheckpointError, match="process 1 of host elsewhere"):
        dos.checkpoint.save(state_of(1), tmp_path / "saved")


def test_the_state_may_change_once_it_is_captured(tmp_path: Path) -> None:
    state = {"a": torch.zeros(9 << 20, dtype=torch.uint8), "b": [1]}
    handle = dos.checkpoint.save(state, tmp_path / "saved")
    state["b"].append(2)
    handle.captured.result()
    state["a"].fill_(1)
    back = dos.checkpoint.load(handle.result())
    assert not back["a"].any()
    assert back["b"] == [1]


def test_progress_ends_with_all_bytes(tmp_path: Path) -> None:
    handle = dos.checkpoint.save(state_of(1), tmp_path / "saved")
    path = Path(handle.result())
    done, total = handle.progress
    assert done == total == (path / "rank-00000.safetensors").stat().st_size


def test_latest_leads_to_the_newest(tmp_path: Path) -> None:
    for number in range(2):
        dos.checkpoint.save(state_of(number), tmp_path / str(number), latest=True).result()
    assert (tmp_path / "latest").read_text() == "1"
    assert dos.checkpoint.load(tmp_path)["number"] == 1


@pytest.mark.parametrize("checkpoint_id", ["", "../x", "a b", "é", "x" * 65])
def test_a_wrong_id_is_refused(checkpoint_id: str, tmp_path: Path) -> None:
    if not checkpoint_id:
        checkpoint_id = "."
    with pytest.raises(dos.FormatError, match="checkpoint id"):
        dos.checkpoint.save({}, tmp_path / "saved", checkpoint_id=checkpoint_id)


MEMORY = """
import resource, sys, torch, dos.checkpoint
state = {"big": torch.ones(48 << 20), **{str(n): torch.ones(20_000) for n in range(1000)}}
dos.checkpoint.save({"a": 1}, sys.argv[1] + "/warm").result()
before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
dos.checkpoint.save(state, sys.argv[1] + "/saved").result()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib)
"""


def test_a_save_takes_no_more_memory_than_its_ring_and_a_little(tmp_path: Path) -> None:
    ring_bytes, other_bytes, per_tensor_bytes = 64 << 20, 32 << 20, 2048
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, capture_output=True, text=True, env=env, check=True).stdout
    assert int(said) << 10 <= ring_bytes + other_bytes + 1001 * per_tensor_bytes


def test_no_descriptor_and_no_thread_stays(tmp_path: Path) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    dos.checkpoint.load(dos.checkpoint.save(state_of(0), tmp_path / "saved").result())
    before = count()
    for number in range(5):
        saved = dos.checkpoint.save(state_of(number), tmp_path / "saved").result()
        dos.checkpoint.load(saved)
    for thread in threading.enumerate():
        if thread.name.startswith("save"):
            thread.join()
    assert count() <= before


def test_a_header_that_would_be_too_long_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dos.checkpoint.format.HEADER_LIMIT_BYTES", 4096)
    state = {str(n): torch.zeros(1) for n in range(100)}
    with pytest.raises(dos.FormatError, match=r"(?s)header of.*stack small tensors"):
        dos.checkpoint.save(state, tmp_path / "saved")
    assert not list(tmp_path.iterdir())
