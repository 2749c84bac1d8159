"""A step in closed form: the host's time against the link's. Quick, and only nearly right."""

from __future__ import annotations

from typing import Literal

from perfmodel.profile import NodeProfile
from perfmodel.timeline import capacities

STATE_BYTES = 12
"""Bytes of fp32 master, exp_avg and exp_avg_sq per parameter, each way, for a streamed one."""


def closed_form_s(
    profile: NodeProfile, params: int, stride: float | Literal["host"], *, weight_bytes: int = 2
) -> float:
    """Seconds of a step without residents: the busiest of its lanes and resources at full speed.

    With a share x = 1/stride of the parameters streamed (0 without a device), per parameter: host
    time (1 - x) / host_rate; link time (12 x + weight_bytes (1 - x)) / link_rate to the device and
    12 x / link_rate back; device time x / device_rate; and where their rates are known, the bytes
    of both ways through the link they share, and through host memory those bytes and
    host_bytes_per_param (1 - x).

    Assumes that nothing waits (no first fetch, last flush or tail), that ops cost nothing but
    their work and that subgroups are many: the simulation is above it, save for whole subgroups.
    """
    share = 1 / stride if profile.has_device and stride != "host" else 0.0
    rest = 1 - share
    lanes_s = [rest / profile.host_params_per_s]
    copied_bytes = 0.0
    if profile.has_device:
        back_bytes = STATE_BYTES * share
        to_device_bytes = back_bytes + weight_bytes * rest
        copied_bytes = to_device_bytes + back_bytes
        lanes_s += [
            to_device_bytes / profile.rate("h2d_bytes_per_s"),
            back_bytes / profile.rate("d2h_bytes_per_s"),
            share / profile.rate("device_params_per_s"),
        ]
    needs_bytes = {
        "link": copied_bytes,
        "host_memory": copied_bytes + profile.host_bytes_per_param * rest,
    }
    shared = capacities(profile)
    lanes_s += [n_bytes / shared[name] for name, n_bytes in needs_bytes.items() if name in shared]
    return params * max(lanes_s)
