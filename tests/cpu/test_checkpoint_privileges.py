"""Checkpoints where the system refuses: rings, locked memory, directories of others."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.cpu.test_storage_choice import REFUSE_IO_URING, run_python

SAVE_AND_LOAD = """
import os, shutil, torch, dos, dos.checkpoint
state = {"big": torch.arange(9 << 20), "small": [torch.ones(n) for n in range(50)], "n": 3}
dos.checkpoint.load(dos.checkpoint.save({"w": torch.ones(1)}, "warm").result())
shutil.rmtree("warm")
{drop}
for number in range(2):  # the second one replaces the first
    dos.checkpoint.save(state, "runs/saved", latest=True).result()
found = dos.checkpoint.load("runs", verify="before")
assert torch.equal(found["big"], state["big"]) and found["n"] == 3
assert all(torch.equal(*pair) for pair in zip(found["small"], state["small"]))
assert sorted(os.listdir("runs")) == ["latest", "saved"], os.listdir("runs")
"""

# Not by setpriv, and once all is imported: it may lie in a folder that others cannot read.
BECOME_NOBODY = "os.setgid(65534); os.setuid(65534)"


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where every user may write; pytest's own is closed to others."""
    with TemporaryDirectory() as made:
        Path(made).chmod(0o777)
        yield Path(made)


def lock_little() -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))


def save_and_load(folder: Path, *, before: str = "", drop: str = "", more: str = "") -> str:
    code = before + SAVE_AND_LOAD.replace("{drop}", drop) + more
    return run_python(code, folder, preexec_fn=lock_little)


def test_without_io_uring_states_are_saved_and_loaded_and_it_is_said_once(folder: Path) -> None:
    said = save_and_load(folder, before=REFUSE_IO_URING)
    assert said.count("'threads'") == 1


REFUSED = """
os.mkdir("closed")
os.chmod("closed", 0o500)
try:
    dos.checkpoint.save(state, "closed/saved").result()
except dos.CheckpointError as error:
    print(error)
"""


def test_a_user_who_may_lock_little_saves_and_loads(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user without the right to lock memory")
    said = save_and_load(folder, drop=BECOME_NOBODY, more=REFUSED)
    assert "Permission denied" in said
    assert "save where this user may write" in said


def test_a_user_who_may_lock_little_and_has_no_ring_saves_and_loads(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user without the right to lock memory")
    save_and_load(folder, before=REFUSE_IO_URING, drop=BECOME_NOBODY)
