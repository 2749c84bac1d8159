"""The search for the fastest step that fits."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dos.errors import ConfigError
from perfmodel.planned import planner_for
from perfmodel.profile import H100_NODE, NodeProfile
from perfmodel.solve import Limits, Option, Solution, Space, best_stride, judge, solve

PROFILES = Path(__file__).parents[2] / "experiments" / "profiles"
GIB = 2**30
SHARED = replace(H100_NODE, host_memory_bytes_per_s=90e9)
HOST_ONLY = replace(H100_NODE, h2d_bytes_per_s=None, d2h_bytes_per_s=None, device_params_per_s=None)
SMALL = 60_000_000  # parameters
SIZES = (10_000_000, 20_000_000)


def solved(
    node: NodeProfile = SHARED, device_bytes: int | None = GIB, host_bytes: int | None = None
) -> Solution:
    planner = planner_for(SMALL, host_parameters=not node.has_device)
    return solve(node, SMALL, planner, Limits(host_bytes, device_bytes), Space(SIZES))


@pytest.mark.parametrize("node", [H100_NODE, SHARED], ids=["alone", "shared memory"])
@pytest.mark.parametrize("device_bytes", [GIB // 4, GIB])
def test_no_exhaustive_search_finds_a_faster_step(node: NodeProfile, device_bytes: int) -> None:
    limits = Limits(None, device_bytes)
    planner = planner_for(SMALL)
    tried = []
    for size, slots, wire in itertools.product(SIZES, (1, 2, 3), (2, 4)):
        count = len(planner(Option(size, "host", "0", slots, wire)).plan.sizes)
        for residents in range(count + 1):
            rest = count - residents
            # A hair off, so that a decimal text picks just that many.
            ratio = f"{residents / count + (1e-6 if 0 < residents < count else 0):.7f}"
            strides = [f"{max(1.0, rest / j - 1e-6):.7f}" for j in range(1, rest + 1)]
            for stride in ("host", *strides):
                option = Option(size, stride, ratio, slots, wire)
                tried.append(judge(node, planner, limits, option))
    best_s = min(choice.step_s for choice in tried if choice.fits)
    assert solved(node, device_bytes).best.step_s == pytest.approx(best_s, rel=1e-6)


def test_climbing_finds_nearly_the_best_of_many_subgroups() -> None:
    params = 40 * 10_000_000
    planner, shape = planner_for(params), Option(10_000_000, "host", "0", 2, 2)
    every = [
        judge(SHARED, planner, Limits(), shape._replace(stride=f"{40 / j - 1e-6:.7f}")).step_s
        for j in range(1, 40)
    ]
    assert best_stride(SHARED, planner, Limits(), shape).step_s <= 1.01 * min(every)


rates = st.floats(2e9, 2e11)


@settings(max_examples=25, deadline=None)
@given(rates, rates, st.floats(1.0, 4.0))
def test_a_faster_link_never_gives_a_slower_optimum(h2d: float, d2h: float, factor: float) -> None:
    planner, shape = planner_for(SMALL), Option(10_000_000, "host", "0", 2, 2)
    slow = replace(H100_NODE, h2d_bytes_per_s=h2d, d2h_bytes_per_s=d2h)
    fast = replace(slow, h2d_bytes_per_s=factor * h2d, d2h_bytes_per_s=factor * d2h)
    best = [best_stride(node, planner, Limits(), shape).step_s for node in (slow, fast)]
    assert best[1] <= best[0] * (1 + 1e-9)


@pytest.mark.parametrize("rate", ["host_memory_bytes_per_s", "h2d_bytes_per_s"])
def test_a_faster_resource_never_gives_a_slower_optimum_where_memory_is_shared(rate: str) -> None:
    planner, shape = planner_for(SMALL), Option(10_000_000, "host", "0", 2, 2)
    nodes = [
        replace(SHARED, **{rate: getattr(SHARED, rate) * factor}) for factor in (0.5, 0.7, 1, 1.5)
    ]
    times = [best_stride(node, planner, Limits(), shape).step_s for node in nodes]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("count", [6, 14])
def test_a_faster_link_costs_little_where_its_copies_slow_the_host(count: int) -> None:
    """Copies that run faster take memory from the host's update beside them: 1.4% was seen."""
    node = NodeProfile.load(PROFILES / "h100.json")
    planner, shape = planner_for(count * 10_000_000), Option(10_000_000, "host", "0", 2, 2)
    ways = ("h2d_bytes_per_s", "d2h_bytes_per_s")
    times = []
    for factor in (1.07**i for i in range(-8, 16)):
        faster = replace(node, **{way: factor * getattr(node, way) for way in ways})
        times.append(best_stride(faster, planner, Limits(), shape).step_s)
    assert all(after <= 1.02 * before for before, after in itertools.pairwise(times))


def test_more_device_memory_never_gives_a_slower_step() -> None:
    times = [solved(device_bytes=n * GIB // 4).best.step_s for n in (1, 2, 4)]
    assert times == sorted(times, reverse=True)


def test_the_best_fits() -> None:
    best = solved(device_bytes=GIB // 2).best
    assert (best.fits, best.device_bytes <= GIB // 2) == (True, True)


def test_choices_that_do_not_fit_are_listed_as_such() -> None:
    choices = solved(device_bytes=240_000_000).choices
    assert {choice.fits for choice in choices} == {True, False}


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({"host_memory_bytes_per_s": 20e9}, "host memory"),
        ({"device_params_per_s": 0.05e9, "host_params_per_s": 0.01e9}, "device"),
        ({"host_params_per_s": 0.05e9, "h2d_bytes_per_s": 1e9, "d2h_bytes_per_s": 1e9}, "link"),
    ],
)
def test_what_bounds_a_step_is_named(changes: dict[str, float], bound: str) -> None:
    node = replace(H100_NODE, **changes)  # type: ignore[arg-type]
    params = 400_000_000
    found = solve(node, params, planner_for(params), Limits(None, GIB // 4), Space([10_000_000]))
    assert found.bound == bound


def test_the_remedy_is_more_of_what_bounds() -> None:
    gains = solved(replace(SHARED, host_memory_bytes_per_s=20e9), GIB // 4).gains
    assert max(gains, key=lambda remedy: gains[remedy]) == "10% more host memory bandwidth"


def test_without_a_device_all_is_updated_on_the_host() -> None:
    assert solved(HOST_ONLY).best.option.stride == "host"


def test_a_device_budget_of_nothing_leaves_all_to_the_host() -> None:
    assert solved(device_bytes=0).best.option.stride == "host"


def test_a_device_budget_below_one_subgroup_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot hold one subgroup(.|\n)*fix: raise it"):
        solved(device_bytes=1000)


def test_a_host_budget_below_every_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match="host memory budget"):
        solved(device_bytes=GIB // 4, host_bytes=1000)


def test_a_refusal_says_how_much_host_memory_would_do() -> None:
    with pytest.raises(ConfigError) as caught:
        solved(device_bytes=GIB // 4, host_bytes=1000)
    named = re.search(r"needs ([\d,]+) bytes on the host", str(caught.value))
    assert named is not None
    enough_bytes = int(named[1].replace(",", ""))
    assert solved(device_bytes=GIB // 4, host_bytes=enough_bytes).best.fits
    with pytest.raises(ConfigError):
        solved(device_bytes=GIB // 4, host_bytes=enough_bytes - 1)
