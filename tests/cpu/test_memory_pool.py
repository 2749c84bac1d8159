"""The pool: its three kinds of lease, its budget and its end."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dos.errors import PoolError
from dos.memory import Pool, Requirement, available, available_host_bytes, tensor_across
from dos.memory import pool as pool_module

KIB = 1 << 10
MIB = 1 << 20


def small_pool() -> Pool:
    return Pool(state_bytes=64 * KIB, gradient_bytes=8 * KIB, ring_bytes=32 * KIB)


def test_state_leases_are_aligned_to_pages() -> None:
    pool = small_pool()
    addresses = [pool.state(100, "a").address, pool.state(100, "b").address]
    assert [address % 4096 for address in addresses] == [0, 0]


def test_state_leases_do_not_overlap() -> None:
    pool = small_pool()
    first, second = pool.state(5000, "a"), pool.state(5000, "b")
    assert second.address >= first.address + 5000


def test_padding_of_state_stays_zero() -> None:
    pool = small_pool()
    pool.state(1001 * 4, "a").tensor(torch.float32).fill_(1.0)
    pool.state(4096, "b").tensor(torch.float32).fill_(1.0)
    assert not pool.slab.tensor(1001 * 4, 4096 - 1001 * 4, torch.uint8).any()


def test_gradient_leases_are_aligned_to_cache_lines() -> None:
    pool = small_pool()
    pool.gradient(10, "a")
    assert pool.gradient(10, "b").address % 64 == 0


def test_kinds_lie_in_places_of_their_own() -> None:
    pool = small_pool()
    starts = [pool.state(1, "s"), pool.gradient(1, "g"), pool.ring.acquire(1, "r")]
    offsets = [lease.address - pool.slab.address for lease in starts]
    assert offsets == [0, 64 * KIB, 72 * KIB]


def across(pool: Pool, gap: bool = False) -> torch.Tensor | None:
    """Over the end of one lease and the start of the next, 1536 elements of 1, then of 2."""
    first, second = pool.state(8 * KIB - 4 * gap, "a"), pool.state(8 * KIB, "b")
    first.tensor(torch.float32).fill_(1.0)
    second.tensor(torch.float32).fill_(2.0)
    parts = [(first, 2 * KIB - 4 * gap, 6 * KIB), (second, 0, 6 * KIB)]
    return tensor_across(parts, torch.float32, (2, 1536), (1536, 1))


def test_a_tensor_across_adjacent_leases_holds_the_parts_of_both() -> None:
    tensor = across(small_pool())
    assert tensor is not None
    assert tensor[:, 0].tolist() == tensor[:, -1].tolist() == [1.0, 2.0]


def test_a_tensor_across_leases_has_a_storage_of_exactly_its_bytes() -> None:
    tensor = across(small_pool())
    assert tensor is not None
    assert tensor.untyped_storage().nbytes() == 12 * KIB


def test_a_tensor_across_leases_keeps_their_memory() -> None:
    pool = small_pool()
    tensor = across(pool)
    pool.close()
    del pool
    gc.collect()
    assert tensor is not None
    assert tensor[1, -1] == 2.0


def test_there_is_no_tensor_across_leases_with_a_gap_between() -> None:
    assert across(small_pool(), gap=True) is None


def test_there_is_no_tensor_across_leases_of_two_pools() -> None:
    leases = [small_pool().state(4096, name) for name in "ab"]
    assert tensor_across([(lease, 0, 4096) for lease in leases], torch.float32) is None


def test_lease_tensor_has_its_own_storage_of_its_bytes() -> None:
    tensor = small_pool().state(1000, "a").tensor(torch.float32, numel=10, offset_bytes=40)
    assert tensor.untyped_storage().nbytes() == 40


def test_lease_tensor_takes_the_whole_lease_by_default() -> None:
    assert small_pool().state(1000, "a").tensor(torch.float32).numel() == 250


def test_lease_refuses_a_tensor_beyond_its_end() -> None:
    with pytest.raises(PoolError, match="bytes 0 to 1004 were asked of a lease of 1000"):
        small_pool().state(1000, "a").tensor(torch.float32, numel=251)


@pytest.mark.parametrize("kind", ["state", "gradient"])
def test_more_than_reserved_is_refused(kind: str) -> None:
    take: Callable[[int, str], object] = getattr(small_pool(), kind)
    with pytest.raises(PoolError, match=f"pool, {kind}"):
        take(65 * KIB, "too much")


def test_requirement_of_leases_is_what_they_take() -> None:
    sizes = [1, 4096, 5000, 0]
    need = Requirement.of_leases(state=sizes, gradient=sizes, ring_bytes=1)
    pool = Pool(
        state_bytes=need.state_bytes,
        gradient_bytes=need.gradient_bytes,
        ring_bytes=need.ring_bytes,
    )
    for size in sizes:
        pool.state(size, "s")
        pool.gradient(size, "g")
    stats = pool.stats()
    assert (stats.state_used_bytes, stats.gradient_used_bytes) == (16384, 9216)


def test_pool_takes_what_its_requirement_says() -> None:
    pool = Pool(state_bytes=1, gradient_bytes=1, ring_bytes=1)
    assert pool.slab.n_bytes == pool.requirement.total_bytes == 3 * 4096


def budget_error() -> str:
    with pytest.raises(PoolError) as caught:
        Pool(state_bytes=8 * MIB, gradient_bytes=4 * MIB, ring_bytes=MIB, budget_bytes=5 * MIB)
    return str(caught.value)


@pytest.mark.parametrize(
    "part",
    [
        "state 8,388,608 bytes (8.0 MiB)",
        "gradients 4,194,304 bytes (4.0 MiB)",
        "ring 1,048,576 bytes (1.0 MiB)",
        "raise host_memory_bytes to 13631488",
    ],
)
def test_too_small_budget_names(part: str) -> None:
    assert part in budget_error()


def test_budget_error_and_printed_estimate_agree() -> None:
    assert str(Requirement(8 * MIB, 4 * MIB, MIB)) in budget_error()


def test_budget_of_the_whole_need_is_enough() -> None:
    pool = Pool(state_bytes=4096, gradient_bytes=4096, ring_bytes=4096, budget_bytes=3 * 4096)
    assert pool.requirement.total_bytes == 3 * 4096


def test_more_than_the_machine_has_is_refused() -> None:
    have_bytes = available_host_bytes()
    assert have_bytes is not None
    with pytest.raises(PoolError, match="are available here; the pool needs"):
        Pool(state_bytes=2 * have_bytes, gradient_bytes=0, ring_bytes=0)


def test_unknown_amount_of_available_memory_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "available_host_bytes", lambda: None)
    assert small_pool().stats().state_used_bytes == 0


@pytest.mark.parametrize(
    ("controllers", "group", "names"),
    [
        ("", "", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:cpu,memory",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_limit_of_an_enclosing_control_group_counts(
    monkeypatch: pytest.MonkeyPatch,
    controllers: str,
    group: str,
    names: tuple[str, str, str],
) -> None:
    mount = f"/sys/fs/cgroup/{group}".rstrip("/")
    limit, use, cached = names
    files = {
        "/proc/self/cgroup": f"{controllers or '0:'}:/job/task\n",
        "/proc/meminfo": "MemAvailable:  1000000 kB\n",
        f"{mount}/job/{limit}": "5000\n",
        f"{mount}/job/{use}": "3000\n",
        f"{mount}/job/memory.stat": f"anon 2\n{cached} 700\n",
        f"{mount}/job/task/{limit}": "max\n",
        f"{mount}/job/task/{use}": "10\n",
    }
    monkeypatch.setattr(available, "_text", lambda path: files.get(str(path), ""))
    assert available_host_bytes() == 5000 - 3000 + 700


@pytest.mark.parametrize(
    "use",
    [
        lambda pool: pool.state(1, "x"),
        lambda pool: pool.gradient(1, "x"),
        lambda pool: pool.ring.acquire(1, "x"),
    ],
    ids=["state", "gradient", "ring"],
)
def test_closed_pool_refuses(use: Callable[[Pool], object]) -> None:
    pool = small_pool()
    pool.close()
    pool.close()
    with pytest.raises(PoolError, match="closed"):
        use(pool)


def test_tensor_outlives_the_pool() -> None:
    pool = small_pool()
    tensor = pool.state(4000, "a").tensor(torch.float32).fill_(5.0)
    pool.close()
    del pool
    gc.collect()
    assert torch.equal(tensor, torch.full((1000,), 5.0))


def test_memory_of_a_closed_pool_returns() -> None:
    pool = Pool(state_bytes=64 * MIB, gradient_bytes=0, ring_bytes=MIB)
    pool.state(64 * MIB, "a").tensor(torch.uint8).fill_(1)
    span = f"{pool.slab.address:x}"
    pool.close()
    gc.collect()
    starts = [line.split("-")[0] for line in Path("/proc/self/maps").read_text().splitlines()]
    assert span not in starts


def test_stats_count_each_kind() -> None:
    pool = small_pool()
    pool.state(5000, "a")
    pool.gradient(65, "b")
    pool.ring.acquire(4097, "c")
    stats = pool.stats()
    assert (stats.state_used_bytes, stats.gradient_used_bytes, stats.ring_used_bytes) == (
        8192,
        128,
        8192,
    )
