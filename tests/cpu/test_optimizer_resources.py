"""Threads, files and memory: all given back, and none of them carried into forked children."""

from __future__ import annotations

import ctypes
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dos
from tests.cpu.forked import in_child

MIB = 1 << 20
NUMEL = 4 * MIB
"""Of the large parameter: its state is 12 bytes each on a device, 8 with the weights in fp32."""


def make_parameter(numel: int = 1000) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(numel))
    parameter.grad = torch.ones(numel)
    return parameter


def stepped(numel: int = 1000, **options: Any) -> dos.DOSOptimizer:
    wrapped = torch.optim.AdamW([make_parameter(numel)])
    optimizer = dos.DOSOptimizer(wrapped, subgroup_size=max(1, numel // 4), **options)
    optimizer.step()
    return optimizer


def threads() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    """Resident memory that no file backs, without what the C library keeps for reuse."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = (line.split()[0].split("-") for line in lines)
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


def new_threads(before: set[str]) -> set[str]:
    """Threads since `before`; one that is ending is given a moment to leave /proc."""
    deadline_s = time.monotonic() + 5.0
    while (new := threads() - before) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return new


def end_by_close(optimizers: list[dos.DOSOptimizer]) -> None:
    optimizers[0].close()


def end_by_collection(optimizers: list[dos.DOSOptimizer]) -> None:
    optimizers.clear()
    gc.collect()


@pytest.fixture(params=["cpu", "virtual"])
def device(request: pytest.FixtureRequest) -> str:
    stepped(device=request.param).close()  # what torch starts once, it has started
    gc.collect()
    return str(request.param)


@pytest.fixture(params=[end_by_close, end_by_collection], ids=["close", "collection"])
def end(request: pytest.FixtureRequest) -> Callable[[list[dos.DOSOptimizer]], None]:
    ending: Callable[[list[dos.DOSOptimizer]], None] = request.param
    return ending


End = Callable[[list[dos.DOSOptimizer]], None]


def test_end_stops_every_thread(device: str, end: End) -> None:
    before = threads()
    made = [stepped(device=device, threads=2)]
    end(made)
    assert new_threads(before) == set()


def test_end_closes_every_file(device: str, end: End) -> None:
    before = open_files()
    made = [stepped(device=device)]
    end(made)
    assert open_files() == before


def test_end_unmaps_the_pool(device: str, end: End) -> None:
    made = [stepped(NUMEL, device=device)]
    address = made[0]._engine._pools[0].slab.address
    end(made)
    gc.collect()
    assert not is_mapped(address + NUMEL // 2)


def test_end_gives_the_memory_back(device: str, end: End) -> None:
    before = resident_bytes()
    made = [stepped(NUMEL, device=device)]
    made[0]._trained.tensors[0].grad = None
    end(made)
    # The weights stay with an optimizer that was closed but not dropped: 16 MiB.
    assert resident_bytes() - before < 4 * NUMEL + 8 * MIB


@pytest.mark.parametrize("what", [open_files, lambda: len(threads())], ids=["files", "threads"])
def test_five_lives_leave_nothing(device: str, end: End, what: Callable[[], int]) -> None:
    before, running = what(), threads()
    for _ in range(5):
        end([stepped(device=device, threads=2)])
    new_threads(running)
    assert what() == before


def test_five_lives_do_not_grow(device: str, end: End) -> None:
    end([stepped(NUMEL, device=device)])
    before = resident_bytes()
    for _ in range(5):
        end([stepped(NUMEL, device=device)])
    assert resident_bytes() - before < 8 * MIB


def test_optimizer_is_collected_without_close(device: str) -> None:
    optimizer = stepped(device=device)
    gone = weakref.ref(optimizer._engine)
    del optimizer
    gc.collect()
    assert gone() is None


def test_close_is_idempotent(device: str) -> None:
    optimizer = stepped(device=device)
    optimizer.close()
    assert optimizer.close() is None  # type: ignore[func-returns-value]


def test_state_is_gone_after_close(device: str) -> None:
    optimizer = stepped(device=device)
    optimizer.close()
    assert len(optimizer.state) == 0


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Without the collector: what only it would free stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_gradient_is_freed_as_soon_as_its_parameter_lets_go(device: str) -> None:
    parameter, memory = make_parameter(), np.ones(1000, np.float32)
    held = weakref.ref(memory)
    parameter.grad = torch.from_numpy(memory)
    optimizer = dos.DOSOptimizer(torch.optim.AdamW([parameter]), device=device)
    optimizer.step()
    parameter.grad = memory = None
    still = held()
    optimizer.close()
    assert still is None


@pytest.mark.usefixtures("no_collection")
def test_close_unmaps_the_pool_at_once(device: str) -> None:
    optimizer = stepped(NUMEL, device=device)
    address = optimizer._engine._pools[0].slab.address
    optimizer.close()
    assert not is_mapped(address + NUMEL // 2)


# ---------------------------------------------------------------- forked children


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_step_in_a_forked_child_is_refused(device: str) -> None:
    optimizer = stepped(device=device)
    text = in_child(optimizer.step)
    optimizer.close()
    assert text.startswith(f"PoolError: pool: the pool was made in process {os.getpid()}")


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_parent_steps_on_after_a_fork(device: str) -> None:
    optimizer = stepped(device=device)
    in_child(lambda: None)
    optimizer.step()
    count = next(iter(optimizer.state.values()))["step"]
    optimizer.close()
    assert count == 2


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_forked_child_ends_without_hanging(device: str) -> None:
    optimizer = stepped(device=device)
    text = in_child(lambda: (optimizer.close(), "ended")[1])
    optimizer.close()
    assert text == "ended"


class WorkerMemory(torch.utils.data.Dataset[int]):
    """Items are the resident bytes of the worker that reads them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return resident_bytes()


def read_all() -> list[int]:
    loader = torch.utils.data.DataLoader(
        WorkerMemory(), num_workers=2, batch_size=None, multiprocessing_context="fork"
    )
    return list(loader)


@pytest.fixture(scope="module")
def worker_memory() -> Iterator[dict[str, list[int]]]:
    """What workers hold that were forked before there is a pool, before and after a step."""
    numel = 16 * MIB  # 8 bytes of state each: a pool of 128 MiB
    parameter = make_parameter(numel)
    held = {"no pool": read_all()}
    optimizer = dos.DOSOptimizer(torch.optim.AdamW([parameter]), device="cpu")
    held["before"] = read_all()
    optimizer.step()
    held["after"] = read_all()
    yield held
    optimizer.close()


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("when", ["before", "after"])
def test_data_loader_workers_forked_around_the_first_step_work(
    worker_memory: dict[str, list[int]], when: str
) -> None:
    assert len(worker_memory[when]) == 8


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("when", ["before", "after"])
def test_data_loader_workers_do_not_hold_the_pool(
    worker_memory: dict[str, list[int]], when: str
) -> None:
    assert max(worker_memory[when]) - max(worker_memory["no pool"]) < 32 * MIB
