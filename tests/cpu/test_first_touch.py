"""First touch: new memory is present, and zero, before anybody pins or uses it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import dos
from dos.kernels import adam
from dos.kernels.thread_pool import PythonPool
from dos.memory import Requirement, Slab, pinned

if TYPE_CHECKING:
    from dos.kernels._native import ThreadPool

native = pytest.importorskip("dos.kernels._native", reason="needs the compiled extension")

MIB = 1 << 20
PAGE = mmap.PAGESIZE


def present_pages(address: int, n_bytes: int) -> list[bool]:
    """Whether each page from ``address`` on, a multiple of the page size, has memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = (ctypes.c_ubyte * -(-n_bytes // PAGE))()
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert libc.mincore(address, n_bytes, flags) == 0, ctypes.get_errno()
    return [bool(flag & 1) for flag in flags]


def new_pages() -> tuple[mmap.mmap, int]:
    """64 new pages and their address; of the usual size, so that each is touched by itself."""
    mapping = mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return mapping, ctypes.addressof(ctypes.c_char.from_buffer(mapping))


@pytest.fixture
def memory() -> tuple[mmap.mmap, int]:
    return new_pages()


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_page_of_the_blocks_is_present(memory: tuple[mmap.mmap, int], threads: int) -> None:
    _, address = memory
    sizes = [10 * PAGE, 3, 0, 5 * PAGE - 3, 17 * PAGE + 1]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    blocks = [(address + start, size) for start, size in zip(starts, sizes, strict=True)]
    adam.first_touch(blocks, adam.make_pool(threads))
    assert present_pages(address, 64 * PAGE) == [True] * 33 + [False] * 31


def test_memory_is_zero_afterwards(memory: tuple[mmap.mmap, int]) -> None:
    mapping, address = memory
    adam.first_touch([(address, 64 * PAGE)], adam.make_pool(3))
    assert mapping[:] == bytes(64 * PAGE)


def test_python_threads_touch_nothing(memory: tuple[mmap.mmap, int]) -> None:
    _, address = memory
    adam.first_touch([(address, 64 * PAGE)], PythonPool(1))
    assert not any(present_pages(address, 64 * PAGE))


def faults(thread: int) -> int:
    """How often a thread of this process has been given a page of memory."""
    stat = Path(f"/proc/self/task/{thread}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[7])


def worker_of(pool: ThreadPool) -> int:
    """The system's number of the one worker of a pool of two."""
    barrier = threading.Barrier(2, timeout=60)
    threads: set[int] = set()

    def look(i: int) -> None:
        barrier.wait()
        threads.add(threading.get_native_id())

    pool.run(2, look)
    (worker,) = threads - {threading.get_native_id()}
    return worker


@pytest.mark.parametrize(("absent", "taken"), [(0, 0), (1, 16)], ids=["first", "second"])
def test_the_worker_of_two_threads_touches_the_second_half_of_each_block(
    absent: int, taken: int
) -> None:
    pool = native.ThreadPool(2)
    worker = worker_of(pool)

    def taken_by_the_worker() -> int:
        mapping, address = new_pages()
        for page in range(32):
            if page // 8 % 2 != absent:  # the other half of both blocks is there already
                mapping[page * PAGE] = 0
        before = faults(worker)
        adam.first_touch([(address, 16 * PAGE), (address + 16 * PAGE, 16 * PAGE)], pool)
        return faults(worker) - before

    # A worker that does not wake within a second is helped; not three times in a row.
    assert taken in [taken_by_the_worker() for _ in range(3)]


def test_a_closed_pool_touches_all_the_same(memory: tuple[mmap.mmap, int]) -> None:
    _, address = memory
    pool = native.ThreadPool(3)
    pool.close()
    adam.first_touch([(address, 64 * PAGE)], pool)
    assert present_pages(address, 64 * PAGE) == [True] * 64


def test_a_slab_is_touched_before_it_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(pinned, "_pin", lambda memory, device: seen.append("pinned") or "")
    slab = Slab(MIB, device=torch.device("cpu"), touch=lambda address: seen.append(hex(address)))
    assert seen == [hex(slab.address), "pinned"]


def test_the_blocks_of_a_requirement_are_its_leases_and_the_rest() -> None:
    need = Requirement.of_leases(state=[5000, 4096], gradient=[100, 10], ring_bytes=8192)
    sizes = [8192, 4096, 128, 64, 4096 - 192 + 8192]
    starts = [MIB + sum(sizes[:i]) for i in range(5)]
    assert need.blocks(MIB) == list(zip(starts, sizes, strict=True))


@pytest.mark.parametrize("device", ["cpu", "virtual"])
def test_an_optimizer_has_all_its_memory_from_the_start(device: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(MIB))
    optimizer = dos.DOSOptimizer(torch.optim.AdamW([parameter]), device=device, stride="host")
    slab = optimizer._engine._pools[0].slab
    assert all(present_pages(slab.address, slab.n_bytes))
