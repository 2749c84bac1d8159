"""Which implementation of the file system is chosen, and what is said of it."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from dos.checkpoint import native
from dos.checkpoint.storage import make_storage
from dos.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def _io_uring() -> None:
    if why := native.refusal("io_uring"):
        pytest.skip(f"no io_uring here: {why}")


def test_an_unknown_engine_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'libaio' cannot be had.*'io_uring', 'threads'"):
        make_storage("libaio")


def test_what_auto_does_without_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_warned", set())
    monkeypatch.setattr(native, "_native", None)
    monkeypatch.setattr(native, "_why_missing", "no compiled extension")
    with pytest.warns(RuntimeWarning, match="'io_uring' cannot be had: no compiled"):
        assert make_storage().name == "posix"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_storage()


@pytest.mark.usefixtures("_io_uring")
def test_without_room_for_a_ring_threads_write_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_storage("io_uring")
    monkeypatch.setattr(native, "_warned", set())
    file = engine.open(str(tmp_path / "file"), write=True, create=True)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        with pytest.warns(RuntimeWarning, match="'threads': io_uring: Too many open files"):
            queue = engine.queue()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    queue.write(file, 0, memoryview(mmap.mmap(-1, 4096)), 0)
    assert queue.drain() == [(0, None)]
    queue.close()
    engine.close(file)


def run_python(code: str, tmp_path: Path, **options: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


# What a container's filter does: io_uring_setup, 425 on every machine, fails with EPERM.
REFUSE_IO_URING = """
import ctypes, struct
program = struct.pack("=" + "HBBI" * 4,
    0x20, 0, 0, 0,            # load the number of the call
    0x15, 0, 1, 425,          # is it io_uring_setup?
    0x06, 0, 0, 0x00050001,   # fail with EPERM
    0x06, 0, 0, 0x7fff0000)   # else allow
code = ctypes.create_string_buffer(program)
header = struct.pack("@HP", 4, ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
assert libc.prctl(22, 2, ctypes.c_char_p(header), 0, 0) == 0, ctypes.get_errno()
"""

ROUND_TRIP = """
import mmap, resource
from dos.checkpoint.storage import make_storage
def round_trip(storage, n_bytes):
    memory = memoryview(mmap.mmap(-1, n_bytes))
    memory[:] = b"x" * n_bytes
    file = storage.open("file", write=True, create=True)
    queue = storage.queue(depth=4, registered=[memory[: 1 << 20], memory[1 << 20 :]])
    for at in range(0, n_bytes, 1 << 20):
        queue.write(file, at, memory[at : at + (1 << 20)], at)
    assert all(error is None for _, error in queue.drain())
    print(storage.name, getattr(queue, "registered_bytes", 0))
    queue.close()
    storage.close(file)
    assert open("file", "rb").read() == memory
"""


@pytest.mark.usefixtures("_io_uring")
def test_where_io_uring_is_refused_threads_write_and_it_is_said(tmp_path: Path) -> None:
    code = REFUSE_IO_URING + ROUND_TRIP + "round_trip(make_storage(), 8 << 20)\n"
    said = run_python(code, tmp_path)
    assert "threads 0" in said
    assert said.count("'io_uring' cannot be had: Operation not permitted") == 1


@pytest.mark.usefixtures("_io_uring")
def test_what_may_not_be_locked_is_written_all_the_same(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user without the right to lock memory")

    def unprivileged() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))

    # Not by setpriv: the interpreter may lie in a folder that others cannot read.
    drop = "import os; os.setgid(65534); os.setuid(65534)\n"
    tmp_path.chmod(0o777)
    code = ROUND_TRIP + drop + "round_trip(make_storage('io_uring'), 32 << 20)\n"
    said = run_python(code, tmp_path, preexec_fn=unprivileged)
    assert "io_uring 1048576" in said  # the first megabyte; the other 31 are refused
