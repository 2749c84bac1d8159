"""ZeRO-3 over several nodes: shards shrink, collectives over the network grow."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path

from dos.errors import ConfigError

WEIGHT_BYTES = 2
"""Of a gathered weight and of a reduced gradient, per parameter."""


@dataclass(frozen=True, slots=True)
class Network:
    """What connects the GPUs.

    Attributes:
        gpu_bytes_per_s: of one GPU to others of its node, one way.
        node_bytes_per_s: of all of a node's network ports together, one way.
        latency_s: of one hop.
        bucket_params: parameters that one collective carries.
    """

    gpu_bytes_per_s: float
    node_bytes_per_s: float
    latency_s: float = 5e-6
    bucket_params: float = 5e8

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not (0 < value < math.inf):
                raise ConfigError(
                    f"{value!r} cannot be",
                    where=f"Network.{each.name}",
                    fix="give a finite positive number",
                )

    @classmethod
    def load(cls, path: str | Path) -> Network:
        """Read a JSON object with the fields above.

        Raises:
            ConfigError: unreadable, or a field unknown, missing or impossible.
        """
        try:
            return cls(**json.loads(Path(path).read_text(encoding="utf-8")))
        except ConfigError as error:
            raise ConfigError(error.what, where=f"{path}: {error.where}", fix=error.fix) from None
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"no link profile: {error}",
                where=str(path),
                fix='give {"gpu_bytes_per_s": ..., "node_bytes_per_s": ...}, a JSON object',
            ) from None


@dataclass(frozen=True, slots=True)
class Collectives:
    """Seconds per iteration: both gathers of the weights, and the reduction of the gradients."""

    gather_s: float
    reduce_s: float


def collectives(network: Network, params: int, nodes: int, gpus_per_node: int) -> Collectives:
    """What ZeRO-3 sends in an iteration with one micro-batch.

    Each of R ranks gathers the 16-bit weights for forward and again for backward, and reduces and
    scatters the gradients: three times the weights (Rajbhandari et al., ZeRO, SC'20, section 7.2).
    A ring moves (R-1)/R of the bytes past every rank in R-1 hops (Patarasuk and Yuan, Journal of
    Parallel and Distributed Computing 69, 2009); parallel rings share a node's ports, so that the
    slower of a GPU's link and a node's ports sets the pace.

    Raises:
        ConfigError: no node or no GPU.
    """
    if min(nodes, gpus_per_node) < 1:
        raise ConfigError(
            f"{nodes} nodes of {gpus_per_node} GPUs", where="nodes", fix="give at least 1 of each"
        )
    ranks = nodes * gpus_per_node
    pace = network.gpu_bytes_per_s
    if nodes > 1:
        pace = min(pace, network.node_bytes_per_s)
    buckets = math.ceil(params / network.bucket_params)
    sent_s = WEIGHT_BYTES * params * (ranks - 1) / ranks / pace
    one_s = sent_s + buckets * (ranks - 1) * network.latency_s
    return Collectives(gather_s=2 * one_s, reduce_s=one_s)
