"""The stride that balances the host's update against the link."""

from __future__ import annotations

from typing import Literal

from perfmodel.profile import NodeProfile

STATE_BYTES = 12
"""Bytes of fp32 master, exp_avg and exp_avg_sq per parameter, each way, for a streamed one."""


def balanced_stride(profile: NodeProfile, *, weight_bytes: int = 2) -> float | Literal["host"]:
    """The stride k at which the host and the busier way of the link finish together.

    With a share x = 1/k of the parameters streamed, per parameter:
    host time (1 - x) / host_rate, link time (12 x + weight_bytes (1 - x)) / link_rate,
    device time x / device_rate. The first falls and the others rise with x, so the step is
    shortest where the host's time equals the larger of the others. Assumes that the lanes
    do not slow each other and that there are many subgroups. Rounded to two decimals (a
    stride is kept as decimal text); "host" where streaming cannot help (k above 1000).
    """
    host_s = 1 / profile.host_params_per_s
    link_rate = min(profile.h2d_bytes_per_s, profile.d2h_bytes_per_s)
    streamed_s, published_s = STATE_BYTES / link_rate, weight_bytes / link_rate
    # (1 - x) host = streamed x + published (1 - x), and (1 - x) host = x / device.
    spare_s = max(host_s - published_s, 0.0)
    share_by_link = spare_s / (spare_s + streamed_s)
    share_by_device = host_s / (host_s + 1 / profile.device_params_per_s)
    share = min(share_by_link, share_by_device)
    return "host" if share < 1e-3 else max(1.0, round(1 / share, 2))
