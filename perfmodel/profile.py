"""What a node can do: constant rates per lane."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from dos.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """Rates of one node as one rank sees it.

    `h2d_bytes_per_s`, `d2h_bytes_per_s`: the link, each way, both ways busy at once.
    `host_params_per_s`, `device_params_per_s`: fused Adam updates, parameters per second.
    `op_s`'s fixed cost per op is `launch_s`, in seconds. `source` says where the numbers
    come from; every report repeats it.
    """

    name: str
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    host_params_per_s: float
    device_params_per_s: float
    launch_s: float
    source: str

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            lowest_ok = 0.0 if field.name == "launch_s" else math.ulp(0.0)
            if isinstance(value, (int, float)) and not (lowest_ok <= value < math.inf):
                raise ConfigError(
                    f"{value!r} is not a rate",
                    where=f"NodeProfile.{field.name}",
                    fix="give a finite positive number",
                )

    def op_s(self, lane: str, *, numel: int, link_bytes: int) -> float:
        """Seconds that an op on `lane` takes when nothing else slows it.

        `lane` is "h2d", "d2h", "device" or "host"; `numel` counts parameters updated,
        `link_bytes` what crosses the link.
        """
        work_s = {
            "h2d": link_bytes / self.h2d_bytes_per_s,
            "d2h": link_bytes / self.d2h_bytes_per_s,
            "device": numel / self.device_params_per_s,
            "host": numel / self.host_params_per_s,
        }
        return self.launch_s + work_s[lane]


H100_NODE = NodeProfile(
    name="H100, PCIe 5",
    h2d_bytes_per_s=55.2e9,
    d2h_bytes_per_s=55.2e9,
    host_params_per_s=1.69e9,
    device_params_per_s=80e9,
    launch_s=10e-6,
    source="link peak and host-only step time per rank of a 4x H100 node as published with "
    "Deep Optimizer States (Middleware'24): 3.83e9 parameters in 2.27 s; device rate from "
    "30 bytes per parameter at 2.4 TB/s; launch cost assumed",
)
"""One rank of a 4x H100 node. The built-in estimate where nothing was measured."""
