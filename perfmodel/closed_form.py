"""A step in closed form: the host's time against the link's. Quick, and only nearly right."""

from __future__ import annotations

from typing import Literal

from perfmodel.profile import NodeProfile

STATE_BYTES = 12
"""Bytes of fp32 master, exp_avg and exp_avg_sq per parameter, each way, for a streamed one."""


def closed_form_s(
    profile: NodeProfile, params: int, stride: float | Literal["host"], *, weight_bytes: int = 2
) -> float:
    """Seconds of a step without residents: the busiest of its lanes and resources at full speed.

    With a share x = 1/stride of the parameters streamed, per parameter: host time
    (1 - x) / host_rate; link time (12 x + weight_bytes (1 - x)) / link_rate to the device and
    12 x / link_rate back; device time x / device_rate; host memory time
    (24 x + (host_bytes_per_param + weight_bytes) (1 - x)) / host_memory_rate, where that is known.

    Assumes that nothing waits (no first fetch, last flush or tail), that ops cost nothing but
    their work and that subgroups are many: the simulation is above it, save for whole subgroups.
    """
    share = 0.0 if stride == "host" else 1 / stride
    rest = 1 - share
    lanes_s = [rest / profile.host_params_per_s]
    memory_bytes = profile.host_bytes_per_param * rest
    if profile.has_device:
        memory_bytes += 2 * STATE_BYTES * share + weight_bytes * rest
        to_device_bytes = STATE_BYTES * share + weight_bytes * rest
        lanes_s += [
            to_device_bytes / profile.rate("h2d_bytes_per_s"),
            STATE_BYTES * share / profile.rate("d2h_bytes_per_s"),
            share / profile.rate("device_params_per_s"),
        ]
    if profile.host_memory_bytes_per_s is not None:
        lanes_s.append(memory_bytes / profile.host_memory_bytes_per_s)
    return params * max(lanes_s)
