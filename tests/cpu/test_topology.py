"""Where threads may run and sit: nodes and quotas out of made-up trees, seats by property."""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

native = pytest.importorskip("dos.kernels._native", reason="needs the compiled extension")

Tree = dict[str, str]


def written(root: Path, files: Tree) -> str:
    """The files of a made-up tree, under ``root``."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return str(root)


def node_tree(lists: dict[int, str]) -> Tree:
    """What the system says of nodes that have these CPUs."""
    tree = {f"node/node{node}/cpulist": cpus for node, cpus in lists.items()}
    return {**tree, "node/online": ",".join(str(node) for node in lists)}


def test_cpus_are_found_by_their_node(tmp_path: Path) -> None:
    root = written(tmp_path, node_tree({0: "0-2", 1: "3-5"}))
    assert native.numa_nodes(range(6), root) == [[0, 1, 2], [3, 4, 5]]


def test_a_list_may_have_gaps(tmp_path: Path) -> None:
    root = written(tmp_path, node_tree({0: "0-1,8,10-11", 3: "2-7,9"}))
    assert native.numa_nodes(range(12), root) == [[0, 1, 8, 10, 11], [2, 3, 4, 5, 6, 7, 9]]


def test_only_cpus_in_the_mask_count(tmp_path: Path) -> None:
    root = written(tmp_path, node_tree({0: "0-3", 1: "4-7", 2: "8-11"}))
    assert native.numa_nodes([2, 9, 8], root) == [[2], [8, 9]]


def test_a_node_of_memory_only_is_left_out(tmp_path: Path) -> None:
    root = written(tmp_path, node_tree({0: "0-1", 1: ""}))
    assert native.numa_nodes([0, 1], root) == [[0, 1]]


@pytest.mark.parametrize("lists", [{}, {0: "0-1"}, {0: "none"}, {0: "0-"}], ids=str)
def test_a_system_that_does_not_tell_has_one_node(tmp_path: Path, lists: dict[int, str]) -> None:
    assert native.numa_nodes([0, 1, 2], written(tmp_path, node_tree(lists))) == [[0, 1, 2]]


def test_one_thread_of_each_core_comes_first(tmp_path: Path) -> None:
    siblings = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 4: "4,9", 9: "4,9"}
    files = {f"cpu/cpu{c}/topology/thread_siblings_list": s for c, s in siblings.items()}
    root = written(tmp_path, files | node_tree({0: "0-3", 1: "4,9"}))
    assert native.numa_nodes([0, 1, 2, 3, 4, 9], root) == [[0, 2, 1, 3], [4, 9]]


def test_a_core_of_which_one_thread_is_allowed_is_a_core(tmp_path: Path) -> None:
    siblings = {0: "0-1", 2: "2-3", 3: "2-3"}
    files = {f"cpu/cpu{c}/topology/thread_siblings_list": s for c, s in siblings.items()}
    root = written(tmp_path, files | node_tree({0: "0-3"}))
    assert native.numa_nodes([1, 2, 3], root) == [[1, 2, 3]]


def test_the_nodes_here_hold_the_affinity_mask() -> None:
    cpus = [cpu for node in native.numa_nodes() for cpu in node]
    assert sorted(cpus) == sorted(os.sched_getaffinity(0))


nodes_and_threads = st.tuples(
    st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 60)
).map(lambda drawn: (split(drawn[0]), drawn[1]))


def split(sizes: list[int]) -> list[list[int]]:
    """Nodes of these sizes, with CPUs numbered through them in turn, as some machines do."""
    nodes: list[list[int]] = [[] for _ in sizes]
    for cpu in range(sum(sizes)):
        room = [i for i, size in enumerate(sizes) if len(nodes[i]) < size]
        nodes[room[cpu % len(room)]].append(cpu)
    return nodes


def node_of(cpus: list[int], nodes: list[list[int]]) -> int:
    return next(i for i, node in enumerate(nodes) if set(cpus) <= set(node))


@given(nodes_and_threads)
def test_pinned_seats_share_a_cpu_only_when_all_are_taken(
    case: tuple[list[list[int]], int],
) -> None:
    nodes, threads = case
    seats = native.seat_cpus(threads, nodes, True)
    uses = Counter(cpu for (cpu,) in seats)
    assert len(seats) == threads
    assert max(uses.values(), default=0) <= math.ceil(threads / sum(map(len, nodes)))


@given(nodes_and_threads, st.booleans())
def test_the_seats_of_a_node_are_a_run(case: tuple[list[list[int]], int], pin: bool) -> None:
    nodes, threads = case
    seats = native.seat_cpus(threads, nodes, pin)
    if pin or len(nodes) > 1:
        order = [node_of(cpus, nodes) for cpus in seats]
        assert order == sorted(order)


@given(nodes_and_threads, st.booleans())
def test_a_node_has_seats_in_proportion(case: tuple[list[list[int]], int], pin: bool) -> None:
    nodes, threads = case
    seats = native.seat_cpus(threads, nodes, pin)
    if pin or len(nodes) > 1:
        counts = Counter(node_of(cpus, nodes) for cpus in seats)
        total = sum(map(len, nodes))
        wrong = [i for i, n in enumerate(nodes) if abs(counts[i] - threads * len(n) / total) >= 1]
        assert wrong == []


@given(nodes_and_threads)
def test_unpinned_seats_have_all_cpus_of_their_node(case: tuple[list[list[int]], int]) -> None:
    nodes, threads = case
    seats = native.seat_cpus(threads, nodes, False)
    assert all(cpus in (nodes if len(nodes) > 1 else [[]]) for cpus in seats)


def test_seats_follow_the_order_of_cores() -> None:
    assert native.seat_cpus(4, [[0, 2, 1, 3], [4, 6, 5, 7]], True) == [[0], [2], [4], [6]]


V2_CASES = {
    "a quota in the group": ({"job/cpu.max": "150000 100000"}, "/job", 1.5),
    "no limit": ({"job/cpu.max": "max 100000"}, "/job", math.inf),
    "no files": ({}, "/job", math.inf),
    "the tightest of all ancestors": (
        {
            "a/cpu.max": "300000 100000",
            "a/b/cpu.max": "max 100000",
            "a/b/c/cpu.max": "400000 100000",
        },
        "/a/b/c",
        3.0,
    ),
    "a container that does not see its path": ({"cpu.max": "200000 100000"}, "/host/path", 2.0),
    "the root group": ({"cpu.max": "50000 100000"}, "/", 0.5),
    "nonsense": ({"job/cpu.max": "much"}, "/job", math.inf),
}


@pytest.mark.parametrize(("files", "group", "quota"), V2_CASES.values(), ids=V2_CASES.keys())
def test_quota_of_version_2(tmp_path: Path, files: Tree, group: str, quota: float) -> None:
    root = written(tmp_path / "mount", files)
    (tmp_path / "groups").write_text(f"0::{group}\n")
    assert native.cpu_quota(str(tmp_path / "groups"), root) == quota


def v1_files(group: str, quota_us: int) -> Tree:
    place = f"cpu{group}"
    return {f"{place}/cpu.cfs_quota_us": str(quota_us), f"{place}/cpu.cfs_period_us": "100000"}


V1_CASES = {
    "a quota in the group": (v1_files("/job", 250000), "/job", 2.5),
    "no limit": (v1_files("/job", -1), "/job", math.inf),
    "an ancestor's": (v1_files("/a", 100000) | v1_files("/a/b", -1), "/a/b", 1.0),
    "a container that does not see its path": (v1_files("", 400000), "/host/path", 4.0),
}


@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct", "cpuacct,cpu"])
@pytest.mark.parametrize(("files", "group", "quota"), V1_CASES.values(), ids=V1_CASES.keys())
def test_quota_of_version_1(
    tmp_path: Path, files: Tree, group: str, quota: float, controllers: str
) -> None:
    root = written(tmp_path / "mount", files)
    groups = f"3:cpuset:/other\n2:{controllers}:{group}\n1:name=systemd:/x\n0::/\n"
    (tmp_path / "groups").write_text(groups)
    assert native.cpu_quota(str(tmp_path / "groups"), root) == quota


def test_a_path_with_colons_is_one_path(tmp_path: Path) -> None:
    root = written(tmp_path / "mount", {"cri:a:b/cpu.max": "100000 100000"})
    (tmp_path / "groups").write_text("0::/cri:a:b\n")
    assert native.cpu_quota(str(tmp_path / "groups"), root) == 1.0


def test_a_system_without_control_groups_has_no_quota(tmp_path: Path) -> None:
    assert native.cpu_quota(str(tmp_path / "none"), str(tmp_path)) == math.inf


def test_the_default_count_is_the_smaller_of_mask_and_quota() -> None:
    limit = min(len(os.sched_getaffinity(0)), native.cpu_quota())
    assert native.default_thread_count() == math.ceil(limit)
