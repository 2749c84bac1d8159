"""Forked children: no pages, no use, no growth."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dos.errors import PoolError
from dos.memory import Pool
from tests.cpu.forked import in_child

MIB = 1 << 20
POOL_BYTES = 256 * MIB


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(state_bytes=POOL_BYTES, gradient_bytes=0, ring_bytes=MIB)
    pool.state(POOL_BYTES, "touched").tensor(torch.uint8).fill_(1)
    yield pool
    pool.close()


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def mapping_rights(address: int) -> str:
    """Access rights of the mapping that covers ``address``; empty where there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights = line.split()[:2]
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return rights
    return ""


def test_child_has_none_of_the_pages(pool: Pool) -> None:
    child_bytes = int(in_child(lambda: str(resident_bytes())))
    assert resident_bytes() - child_bytes > POOL_BYTES - 16 * MIB


def test_child_holds_the_addresses_without_access(pool: Pool) -> None:
    assert in_child(lambda: mapping_rights(pool.slab.address)) == "---p"


def test_allocations_of_a_child_survive_the_end_of_its_pool_object() -> None:
    mine = Pool(state_bytes=64 * MIB, gradient_bytes=0, ring_bytes=0)
    first, last = mine.slab.address, mine.slab.address + 64 * MIB

    def report() -> str:
        nonlocal mine
        own = [mmap.mmap(-1, MIB) for _ in range(200)]
        del mine
        for mapping in own:
            mapping.write(b"x" * MIB)  # a fault here would kill the child without a report
        return mapping_rights(first) + mapping_rights(last - 1)

    assert in_child(report) == "---p---p"


@pytest.mark.parametrize(
    "use",
    [
        lambda pool: pool.state(1, "x"),
        lambda pool: pool.gradient(1, "x"),
        lambda pool: pool.ring.acquire(1, "x"),
        lambda pool: pool.slab.tensor(0, 1, torch.uint8),
        lambda pool: pool.check_process(),
    ],
    ids=["state", "gradient", "ring", "tensor", "check_process"],
)
def test_child_that_uses_the_pool_gets_an_error(pool: Pool, use: Callable[[Pool], object]) -> None:
    assert f"PoolError: pool: the pool was made in process {os.getpid()}" in in_child(
        lambda: str(use(pool))
    )


def test_child_that_uses_a_lease_gets_an_error(pool: Pool) -> None:
    with pool.ring.acquire(4096, "lease") as lease:
        text = in_child(lambda: str(lease.tensor(torch.uint8)))
    assert "parent only" in text


def test_child_of_a_busy_ring_gets_an_error_instead_of_a_deadlock(pool: Pool) -> None:
    locked, done = threading.Event(), threading.Event()

    def hold() -> None:
        with pool.ring._changed:
            locked.set()
            done.wait(60.0)

    threading.Thread(target=hold, daemon=True).start()
    locked.wait(60.0)
    try:
        text = in_child(lambda: str(pool.ring.acquire(1, "x")))
    finally:
        done.set()
    assert text.startswith("PoolError")


def test_maker_passes_the_process_check(pool: Pool) -> None:
    try:
        pool.check_process()
    except PoolError as error:
        pytest.fail(str(error))


class WorkerMemory(torch.utils.data.Dataset[int]):
    """Items are the resident bytes of the worker that reads them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return resident_bytes()


def test_forked_data_loader_workers_do_not_carry_the_pool(pool: Pool) -> None:
    loader = torch.utils.data.DataLoader(
        WorkerMemory(), num_workers=2, batch_size=None, multiprocessing_context="fork"
    )
    assert resident_bytes() - max(loader) > POOL_BYTES - 64 * MIB
