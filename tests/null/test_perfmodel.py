"""Node profiles and the balanced stride."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dos.errors import ConfigError
from perfmodel.closed_form import STATE_BYTES, balanced_stride
from perfmodel.profile import H100_NODE, NodeProfile

rates = st.floats(1e6, 1e13)


@st.composite
def profiles(draw: st.DrawFn) -> NodeProfile:
    return NodeProfile(
        name="drawn",
        h2d_bytes_per_s=draw(rates),
        d2h_bytes_per_s=draw(rates),
        host_params_per_s=draw(rates),
        device_params_per_s=draw(rates),
        launch_s=0.0,
        source="test",
    )


def step_s(profile: NodeProfile, share: float) -> float:
    """Per parameter, of the formula in balanced_stride's docstring."""
    link = min(profile.rate("h2d_bytes_per_s"), profile.rate("d2h_bytes_per_s"))
    return max(
        (1 - share) / profile.host_params_per_s,
        (STATE_BYTES * share + 2 * (1 - share)) / link,
        share / profile.rate("device_params_per_s"),
    )


@given(profiles(), st.floats(0, 1))
def test_no_other_share_is_faster_than_the_balanced_one(profile: NodeProfile, other: float) -> None:
    stride = balanced_stride(profile)
    share = 0.0 if stride == "host" else 1 / float(stride)
    # The stride is rounded to two decimals, and "host" stands for shares below 0.001.
    assert step_s(profile, share) <= step_s(profile, other) * 1.02


def test_published_h100_rates_balance_below_two() -> None:
    assert balanced_stride(H100_NODE) == 1.39


def test_a_link_that_is_too_slow_leaves_all_to_the_host() -> None:
    slow = replace(H100_NODE, h2d_bytes_per_s=1e6)
    assert balanced_stride(slow) == "host"


@pytest.mark.parametrize("lane", ["h2d", "d2h", "device", "host"])
def test_an_op_without_work_costs_its_launch(lane: str) -> None:
    assert H100_NODE.op_s(lane, numel=0, link_bytes=0) == H100_NODE.launch_s


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_rate_is_refused_by_name(value: float) -> None:
    with pytest.raises(ConfigError, match=r"NodeProfile\.h2d_bytes_per_s"):
        replace(H100_NODE, h2d_bytes_per_s=value)
