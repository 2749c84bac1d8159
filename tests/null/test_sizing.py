"""Beyond one node and one step: networks, and how often to save."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dos.errors import ConfigError
from perfmodel.at_scale import Network, collectives
from perfmodel.checkpoint_interval import checkpoint_interval, wasted

NETWORK = Network(gpu_bytes_per_s=200e9, node_bytes_per_s=50e9)


def test_one_gpu_sends_nothing() -> None:
    found = collectives(NETWORK, 10**9, 1, 1)
    assert (found.gather_s, found.reduce_s) == (0.0, 0.0)


def test_two_gathers_and_a_reduction_pass_every_rank() -> None:
    found = collectives(NETWORK, 10**9, 1, 2)
    assert found.gather_s == pytest.approx(2 * found.reduce_s)
    assert found.reduce_s == pytest.approx(2e9 / 2 / 200e9, rel=0.01)


def test_between_nodes_their_ports_set_the_pace() -> None:
    within, between = (collectives(NETWORK, 10**9, n, 8 // n).gather_s for n in (1, 2))
    assert between == pytest.approx(4 * within, rel=0.05)


def test_more_nodes_never_send_faster() -> None:
    times = [collectives(NETWORK, 10**9, n, 8).gather_s for n in (1, 2, 4, 8)]
    assert times == sorted(times)


def test_an_impossible_network_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"Network\.node_bytes_per_s"):
        Network(gpu_bytes_per_s=1.0, node_bytes_per_s=0.0)


@pytest.mark.parametrize("text", ["", "[]", '{"gpu_bytes_per_s": 1}', '{"x": 1}'])
def test_a_damaged_link_profile_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"net\.json"):
        Network.load(path)


def test_young_is_the_root_of_twice_stall_times_mtbf() -> None:
    assert checkpoint_interval(50 * 3600, 60).young_s == pytest.approx(math.sqrt(2 * 60 * 180_000))


def test_daly_is_young_less_the_stall_where_failures_are_rare() -> None:
    found = checkpoint_interval(1e9, 10)
    assert found.daly_s == pytest.approx(found.young_s - 10, rel=1e-3)


def test_daly_is_the_mtbf_where_saving_takes_longer_than_that() -> None:
    assert checkpoint_interval(100, 200).daly_s == 100


def test_an_interval_is_no_shorter_than_a_save_writes() -> None:
    assert checkpoint_interval(3600, 0.01, write_s=60).interval_s == 60


def test_the_interval_wastes_less_than_half_or_twice_of_it() -> None:
    best = checkpoint_interval(86_400, 5)
    others = [wasted(best.interval_s * factor, 86_400, 5) for factor in (0.5, 2)]
    assert best.waste < min(others)


def test_what_is_wasted_is_the_saves_and_half_an_interval_per_failure() -> None:
    lost = wasted(95, 1000, 5, write_s=10, restart_s=40)
    assert lost == pytest.approx(5 / 100 + (50 + 10 + 40) / 1000)


def test_no_more_than_all_the_time_is_wasted() -> None:
    assert wasted(1e6, 10, 5) == 1


@pytest.mark.parametrize(("mtbf_s", "stall_s"), [(0, 1), (1, 0), (-1, 1), (math.inf, 1)])
def test_impossible_times_are_refused(mtbf_s: float, stall_s: float) -> None:
    with pytest.raises(ConfigError, match="cannot be"):
        checkpoint_interval(mtbf_s, stall_s)
