"""Capture beside training: what is held is written where it lies, the rest is copied at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dos
import dos.checkpoint
from dos.checkpoint.buffers import address_of, aligned_buffer
from dos.checkpoint.capture_ring import CaptureRing
from dos.checkpoint.format import CHUNK_BYTES
from dos.checkpoint.posix import PosixFile, PosixQueue, PosixStorage
from dos.checkpoint.saving import begin_save
from dos.checkpoint.storage import make_storage
from tests.gated_disk import WAIT_S, Gated


class Part(NamedTuple):
    place: str
    begin: int
    end: int
    index: int


class Owner:
    """Holds tensors, each a part; tells what was released, and changes it then."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, change: bool = True) -> None:
        self.tensors, self._change = list(tensors), change
        self.holds = [
            Part("cpu", t.data_ptr(), t.data_ptr() + t.nbytes, index)
            for index, t in enumerate(tensors)
        ]
        self.released: list[int] = []
        self.abandoned = False

    def ready(self, index: int | None = None) -> None: ...

    def release(self, index: int) -> None:
        if self._change:
            self.tensors[index].fill_(-1)
        self.released.append(index)

    def abandon(self) -> None:
        self.abandoned = True


def lease(n_bytes: int) -> torch.Tensor:
    """Memory from a page on, as a pool's."""
    return torch.frombuffer(aligned_buffer(n_bytes), dtype=torch.uint8).random_(0, 255)


def test_what_is_held_comes_back_as_it_was_though_it_changes_when_it_is_released(
    tmp_path: Path,
) -> None:
    owner = Owner([lease(9 << 20), lease(5 << 20)])
    copies = [tensor.clone() for tensor in owner.tensors]
    begin_save(owner.tensors, tmp_path / "a", held=[owner]).result(WAIT_S)
    assert all(map(torch.equal, dos.checkpoint.load(tmp_path / "a"), copies))


def test_every_part_is_released(tmp_path: Path) -> None:
    owner = Owner([lease(9 << 20), lease(5 << 20), lease(100)])
    begin_save({"some": owner.tensors[:2]}, tmp_path / "a", held=[owner]).result(WAIT_S)
    assert sorted(owner.released) == [0, 1, 2]


def test_what_is_not_held_may_change_when_the_save_returns(tmp_path: Path) -> None:
    owner, loose = Owner([lease(9 << 20)]), torch.randn(3 << 20)
    disk, copy = Gated(), loose.clone()
    handle = begin_save(
        {"held": owner.tensors[0], "loose": loose},
        tmp_path / "a",
        held=[owner],
        ring=CaptureRing(64 << 20),
        storage=disk,
    )
    loose.zero_()
    assert not handle.captured.done()
    disk.open_now.set()
    handle.result(WAIT_S)
    assert torch.equal(dos.checkpoint.load(tmp_path / "a")["loose"], copy)


def test_small_tensors_that_nobody_holds_wait_for_no_part_that_is_held(tmp_path: Path) -> None:
    over = threading.Event()

    class Late(Owner):
        def ready(self, index: int | None = None) -> None:
            assert over.wait(WAIT_S)

    owner, loose = Late([lease(5 << 20)]), torch.randn(10, 10).t()
    copy = loose.clone()
    state = {"held": owner.tensors[0], "loose": loose}
    handle = begin_save(state, tmp_path / "a", held=[owner])
    loose.zero_()
    over.set()
    handle.result(WAIT_S)
    assert torch.equal(dos.checkpoint.load(tmp_path / "a")["loose"], copy)


def test_a_ring_of_one_chunk_takes_more_than_it_holds(tmp_path: Path) -> None:
    loose = torch.randn(11 << 20)
    copy = loose.clone()
    handle = begin_save([loose], tmp_path / "a", held=[], ring=CaptureRing(CHUNK_BYTES))
    loose.zero_()
    handle.result(WAIT_S)
    assert torch.equal(dos.checkpoint.load(tmp_path / "a")[0], copy)


def test_a_failed_save_lets_everything_go(tmp_path: Path) -> None:
    class Full(PosixStorage):
        def preallocate(self, file: PosixFile, n_bytes: int) -> None:
            raise OSError(28, "No space left on device")

    owner = Owner([lease(9 << 20)])
    handle = begin_save(
        [*owner.tensors, torch.ones(5)], tmp_path / "a", held=[owner], storage=Full()
    )
    with pytest.raises(dos.CheckpointError):
        handle.result(WAIT_S)
    assert owner.abandoned


def test_a_state_that_cannot_be_saved_lets_everything_go(tmp_path: Path) -> None:
    owner = Owner([lease(100)])
    with pytest.raises(dos.FormatError):
        begin_save([torch.empty(2, device="meta")], tmp_path / "a", held=[owner])
    assert owner.abandoned


def test_a_state_whose_step_fails_is_not_saved(tmp_path: Path) -> None:
    class Failing(Owner):
        def ready(self, index: int | None = None) -> None:
            raise RuntimeError("the step failed")

    owner = Failing([lease(100)])
    handle = begin_save(owner.tensors, tmp_path / "a", held=[owner])
    with pytest.raises(RuntimeError, match="the step failed"):
        handle.result(WAIT_S)
    assert not (tmp_path / "a").exists()


def test_held_memory_is_written_where_it_lies(tmp_path: Path) -> None:
    """Of three tensors that fill a lease no byte goes through the ring but at its ends."""
    memory = lease(40 << 20)
    parts = list(memory.split([11 << 20, (8 << 20) + 4, (21 << 20) - 4]))
    seen: list[int] = []
    low, high = memory.data_ptr(), memory.data_ptr() + memory.nbytes

    class Watched(PosixStorage):
        def queue(self, *, depth: int = 32, registered: Sequence[memoryview] = ()) -> PosixQueue:
            class Watching(PosixQueue):
                def write(
                    self, file: PosixFile, offset_bytes: int, buffer: memoryview, token: int
                ) -> None:
                    if low <= address_of(buffer) < high:
                        seen.append(len(buffer))
                    super().write(file, offset_bytes, buffer, token)

            return Watching()

    owner = Owner(parts, change=False)
    begin_save(parts, tmp_path / "a", held=[owner], storage=Watched()).result(WAIT_S)
    assert sum(seen) >= memory.nbytes - CHUNK_BYTES


def test_parts_are_captured_in_their_order(tmp_path: Path) -> None:
    """As the next step will want them: of both moments the first part before the second."""
    moments = [lease(16 << 20) for _ in range(2)]
    tensors = [moment[begin : begin + (8 << 20)] for begin in (0, 8 << 20) for moment in moments]

    class Two(Owner):
        def __init__(self) -> None:
            super().__init__(tensors, change=False)
            self.holds = [hold._replace(index=hold.index // 2) for hold in self.holds]

    owner, state = Two(), {"exp_avg": tensors[::2], "exp_avg_sq": tensors[1::2]}
    one_thread = CaptureRing(CHUNK_BYTES)
    begin_save(state, tmp_path / "a", held=[owner], ring=one_thread).result(WAIT_S)
    assert owner.released == [0, 1]


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3 << 20), min_size=1, max_size=6),
    held=st.sets(st.integers(0, 5)),
    chunks=st.integers(1, 5),
    engine=st.sampled_from(["io_uring", "threads", "posix"]),
)
def test_whatever_is_held_the_file_holds_the_state_at_the_call(
    sizes: list[int],
    held: set[int],
    chunks: int,
    engine: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    memory = lease(sum(sizes))
    tensors = list(memory.split(sizes))
    copies = [tensor.clone() for tensor in tensors]
    owner = Owner([tensor for index, tensor in enumerate(tensors) if index in held])
    path = tmp_path_factory.mktemp("any") / "a"
    handle = begin_save(
        tensors,
        path,
        held=[owner],
        ring=CaptureRing(chunks * CHUNK_BYTES),
        storage=make_storage(engine),
    )
    for index, tensor in enumerate(tensors):
        if index not in held:
            tensor.fill_(7)
    handle.result(WAIT_S)
    assert all(map(torch.equal, dos.checkpoint.load(path), copies))
