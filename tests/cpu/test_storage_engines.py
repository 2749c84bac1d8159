"""What every implementation of the file system keeps to."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dos.checkpoint import native, storage
from dos.checkpoint.storage import BLOCK_BYTES, ENGINES, Storage, make_storage
from dos.errors import ConfigError

ROOT = Path(__file__).parents[2]
BLOCKS = 64


def made(name: str) -> Storage:
    """The engine of a name, or a skipped test."""
    try:
        return make_storage(name)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Storage:
    return made(request.param)


@pytest.fixture
def memory() -> memoryview:
    """Of whole pages, no two blocks of them alike."""
    pages = mmap.mmap(-1, BLOCKS * BLOCK_BYTES)
    np.frombuffer(pages, np.int64)[:] = np.arange(len(pages) // 8)
    return memoryview(pages)


def put(engine: Storage, path: Path, memory: memoryview, *, direct: bool = True) -> None:
    """Write memory block by block, the last one first."""
    file = engine.open(str(path), write=True, create=True, direct=direct)
    engine.preallocate(file, len(memory))
    queue = engine.queue(depth=3, registered=[memory])
    for at in reversed(range(0, len(memory), BLOCK_BYTES)):
        queue.write(file, at, memory[at : at + BLOCK_BYTES], at)
    errors = [error for _, error in queue.drain() if error]
    assert not errors
    queue.close()
    engine.fsync(file)
    engine.close(file)


@pytest.mark.parametrize("direct", [True, False])
def test_blocks_written_in_any_order_make_the_file(
    engine: Storage, tmp_path: Path, memory: memoryview, direct: bool
) -> None:
    put(engine, tmp_path / "file", memory, direct=direct)
    assert (tmp_path / "file").read_bytes() == bytes(memory)


def test_every_token_is_told_once(engine: Storage, tmp_path: Path, memory: memoryview) -> None:
    put(engine, tmp_path / "file", memory)
    file = engine.open(str(tmp_path / "file"), write=False)
    target = memoryview(mmap.mmap(-1, len(memory)))
    queue = engine.queue(depth=4)
    told = []
    for token in range(BLOCKS):
        at = token * BLOCK_BYTES
        queue.read(file, at, target[at : at + BLOCK_BYTES], token)
        told += queue.completed(wait=False)
    told += queue.drain()
    assert queue.completed(wait=True) == []
    assert sorted(told) == [(token, None) for token in range(BLOCKS)]
    assert target == memory
    queue.close()
    engine.close(file)


def test_a_failure_names_the_file_and_its_reason(
    engine: Storage, tmp_path: Path, memory: memoryview
) -> None:
    put(engine, tmp_path / "file", memory)
    file = engine.open(str(tmp_path / "file"), write=False)
    queue = engine.queue()
    queue.read(file, len(memory), memory[:BLOCK_BYTES], 7)
    ((token, error),) = queue.drain()
    assert error is not None
    assert (token, error.errno, error.filename) == (7, errno.ENODATA, str(tmp_path / "file"))
    queue.close()
    engine.close(file)


def test_the_rest_of_the_last_block_may_lie_behind_the_end(
    engine: Storage, tmp_path: Path, memory: memoryview
) -> None:
    (tmp_path / "file").write_bytes(bytes(memory[:5000]))
    file = engine.open(str(tmp_path / "file"), write=False)
    target = memoryview(mmap.mmap(-1, 2 * BLOCK_BYTES))
    queue = engine.queue()
    queue.read(file, 0, target, 1)
    assert queue.drain() == [(1, None)]
    assert target[:5000] == memory[:5000]
    queue.close()
    engine.close(file)


def test_a_closed_queue_refuses(engine: Storage, tmp_path: Path, memory: memoryview) -> None:
    file = engine.open(str(tmp_path / "file"), write=True, create=True)
    queue = engine.queue()
    queue.close()
    queue.close()
    with pytest.raises(ValueError, match="closed"):
        queue.write(file, 0, memory, 0)
    engine.close(file)


def test_a_full_disk_is_told(engine: Storage, memory: memoryview) -> None:
    file = engine.open("/dev/full", write=True, direct=False)
    queue = engine.queue()
    queue.write(file, 0, memory, 0)
    ((_, error),) = queue.drain()
    assert error is not None
    assert error.errno == errno.ENOSPC
    queue.close()
    engine.close(file)


class ShortCalls:
    """`os.pwritev` or `os.preadv`, moving less than asked for, or nothing for now."""

    def __init__(self, call: Callable[[int, list[memoryview], int], int], most: int) -> None:
        self.call, self.most, self.calls = call, most, 0

    def __call__(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        self.calls += 1
        if self.calls % 3 == 1:
            raise (InterruptedError if self.calls % 2 else BlockingIOError)(errno.EAGAIN, "")
        return self.call(fd, [buffers[0][: self.most]], offset)


@pytest.mark.parametrize("most", [1, 100, BLOCK_BYTES, 3 * BLOCK_BYTES])
def test_what_short_calls_leave_is_done_at_the_right_place(
    most: int, tmp_path: Path, memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memory[: 7 * BLOCK_BYTES + 5] if most > 1 else memory[:300]
    monkeypatch.setattr("time.sleep", lambda pause_s: None)
    for name in ("pwritev", "preadv"):
        monkeypatch.setattr(os, name, ShortCalls(getattr(os, name), most))
    engine = made("posix")
    file = engine.open(str(tmp_path / "file"), write=True, create=True, direct=False)
    target = bytearray(len(memory))
    queue = engine.queue()
    queue.write(file, BLOCK_BYTES, memory, 0)
    queue.read(file, BLOCK_BYTES, memoryview(target), 1)
    assert queue.drain() == [(0, None), (1, None)]
    assert (tmp_path / "file").read_bytes() == bytes(BLOCK_BYTES) + memory
    assert target == memory
    engine.close(file)


def test_a_direct_write_that_stops_in_a_block_goes_on_at_its_start(
    tmp_path: Path, memory: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = made("posix")
    file = engine.open(str(tmp_path / "file"), write=True, create=True)
    if not file.direct:
        pytest.skip("no direct I/O here")
    real, lengths = os.pwritev, []

    def torn(fd: int, buffers: list[memoryview], offset: int) -> int:
        lengths.append(offset % file.offset_align_bytes)
        return min(real(fd, buffers, offset), 3 * BLOCK_BYTES + 100)

    monkeypatch.setattr(os, "pwritev", torn)
    queue = engine.queue()
    queue.write(file, 0, memory, 0)
    assert queue.drain() == [(0, None)]
    assert set(lengths) == {0}
    assert (tmp_path / "file").read_bytes() == memory
    engine.close(file)


def test_a_token_in_flight_is_refused(tmp_path: Path, memory: memoryview) -> None:
    engine = made("threads")
    file = engine.open(str(tmp_path / "file"), write=True, create=True, direct=False)
    queue = engine.queue()
    queue.write(file, 0, memory, 3)
    with pytest.raises(ValueError, match="token 3"):
        queue.write(file, 0, memory, 3)
    queue.drain()
    queue.write(file, 0, memory, 3)
    queue.close()
    engine.close(file)


def test_a_request_above_the_limit_is_refused(tmp_path: Path) -> None:
    engine = made("threads")
    file = engine.open(str(tmp_path / "file"), write=True, create=True, direct=False)
    queue = engine.queue()
    too_much = memoryview(mmap.mmap(-1, storage.REQUEST_LIMIT_BYTES + 1))
    with pytest.raises(ValueError, match="64 MiB"):
        queue.write(file, 0, too_much, 0)
    queue.close()
    engine.close(file)


@pytest.fixture(params=["compiled", "plain"])
def _mover(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        monkeypatch.setattr(native, "_native", None)


def pieces_of(memory: np.ndarray) -> list[native.Piece]:
    address = memory.ctypes.data
    return [(2, address, 3), (5, address + 10, 0), (7, address + 20, 1000)]


@pytest.mark.usefixtures("_mover")
def test_pieces_are_gathered_with_zeros_between() -> None:
    memory = np.random.default_rng(0).integers(1, 255, 2000, np.uint8)
    target = np.full(1010, 9, np.uint8)
    native.gather(memoryview(target), pieces_of(memory))
    expected = np.zeros(1010, np.uint8)
    expected[2:5], expected[7:1007] = memory[:3], memory[20:1020]
    assert (target == expected).all()


@pytest.mark.usefixtures("_mover")
def test_pieces_are_scattered_and_nothing_else_is_touched() -> None:
    source = np.random.default_rng(0).integers(1, 255, 1010, np.uint8)
    memory = np.zeros(2000, np.uint8)
    native.scatter(memoryview(source), pieces_of(memory))
    expected = np.zeros(2000, np.uint8)
    expected[:3], expected[20:1020] = source[2:5], source[7:1007]
    assert (memory == expected).all()


@pytest.mark.usefixtures("_mover")
@given(n_bytes=st.integers(241, 5000), seed=st.integers(0, (1 << 64) - 1), own=st.integers(0, 100))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_chunks_are_filled_and_have_the_checksums_of_xxhash(
    n_bytes: int, seed: int, own: int
) -> None:
    random = Random(seed).randbytes(n_bytes)
    memory, target = np.array(bytearray(random)), np.full(n_bytes, 9, np.uint8)
    pieces = [(0, target.ctypes.data, own), (own + 1, memory.ctypes.data, n_bytes - own - 1)]
    digests = native.fill([(memoryview(target), pieces, seed), (memoryview(memory), [], 1)])
    expected = bytes([9] * own + [0]) + random[: n_bytes - own - 1]
    assert target.tobytes() == expected
    assert digests[0] == xxhash.xxh3_128_digest(expected, seed)
    assert digests[1] == xxhash.xxh3_128_digest(bytes(n_bytes), 1)


@pytest.mark.parametrize("pieces", [[(0, 0, 9)], [(9, 0, 0)], [(4, 0, 2), (0, 0, 2)]])
def test_pieces_that_do_not_fit_are_refused(pieces: list[native.Piece]) -> None:
    made("threads")
    for move in (native.gather, native.scatter):
        with pytest.raises(ValueError, match="pieces"):
            move(memoryview(bytearray(8)), pieces)
