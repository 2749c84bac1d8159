"""One norm over all ranks: the same bits whatever sub_group_size, subgroups and stride are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator

from dos.kernels import norm


@dataclass(frozen=True, slots=True)
class TotalNorm:
    """The 2-norm of all gradients, times the loss scale, and whether all of them are finite."""

    total: float
    finite: bool


def norm_over_ranks(
    square_sums: Sequence[float], *, finite: bool, groups: Sequence[Any]
) -> TotalNorm:
    """The norm over this rank's shards and those of the other ranks.

    Args:
        square_sums: of this rank's shards that count, in the order of their parameters.
        finite: whether all its gradients are, also of those that do not count.
        groups: process groups, added up one after the other: data parallel, model parallel.
            Within one, ranks are added in rank order.
    """
    total, bad = norm.square_sum(square_sums), 0.0 if finite else 1.0
    for group in groups:
        size = comm.get_world_size(group=group)
        if size > 1:
            # On the accelerator: its collectives take no tensor of the host.
            device = get_accelerator().current_device_name()
            mine = torch.tensor([total, bad], dtype=torch.float64, device=device)
            ranks = [torch.empty_like(mine) for _ in range(size)]
            comm.all_gather(ranks, mine, group=group)
            found = torch.stack(ranks).tolist()
            total = norm.square_sum([square_sum for square_sum, _ in found])
            bad = max(flag for _, flag in found)
    return TotalNorm(math.sqrt(total) if total >= 0.0 else math.nan, bad == 0.0)
