"""States to save, made of ordinary torch tensors, with bytes that no disk can compress."""

from __future__ import annotations

from typing import Any

import torch

SMALL_TENSORS, OBJECTS = 20_000, 2_000
TINY_BYTES = 64
BLOCKS = 64


def blocks(n_bytes: int) -> dict[str, torch.Tensor]:
    """Equal tensors of fp32."""
    return {f"layer{i}": random_tensor(n_bytes // BLOCKS) for i in range(BLOCKS)}


def one(n_bytes: int) -> dict[str, torch.Tensor]:
    """A single tensor."""
    return {"all": random_tensor(n_bytes)}


def many(n_bytes: int) -> dict[str, Any]:
    """20,000 tensors and 2,000 objects."""
    tensors = {f"part{i}": random_tensor(n_bytes // SMALL_TENSORS) for i in range(SMALL_TENSORS)}
    objects = {f"object{i}": {"step": i, "name": f"object {i}"} for i in range(OBJECTS)}
    return {"tensors": tensors, "objects": objects}


def tiny() -> dict[str, torch.Tensor]:
    """20,000 tensors of 64 bytes."""
    return {f"part{i}": random_tensor(TINY_BYTES) for i in range(SMALL_TENSORS)}


def random_tensor(n_bytes: int) -> torch.Tensor:
    """A tensor of fp32 of this size, 1-D."""
    words = torch.empty(-(-n_bytes // 8), dtype=torch.int64).random_()
    return words.view(torch.float32)[: n_bytes // 4].nan_to_num_()
