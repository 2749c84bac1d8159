"""A small training with everything that has to be restored, to be saved and resumed."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

import dos

WIDE: dict[str, Any] = {"plan": {"device": "cpu", "subgroup_size": 500_000}, "width": 1400}
"""Of a training whose state is of several chunks, and several subgroups."""


class Training:
    """A model with dropout and batch norm, an optimizer, a scheduler, and noise of every source.

    Args:
        plan: options of `DOSOptimizer`; None: torch's AdamW.
        dtype: of the model.
        seed: of the initial weights and all generators.
        width: of two more layers, if any.
    """

    def __init__(
        self,
        plan: dict[str, Any] | None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        width: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(40, 50),
            torch.nn.BatchNorm1d(50),
            torch.nn.Dropout(0.2),
            *_layers(width),
            torch.nn.Linear(width or 50, 3),
        ).to(dtype)
        inner = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.optimizer = inner if plan is None else dos.DOSOptimizer(inner, **plan)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.position = Position()
        self.step = 0

    @property
    def parts(self) -> dict[str, Any]:
        """The arguments of save and restore."""
        extra = {"scheduler": self.scheduler, "position": self.position, "note": (1, "a")}
        return {"model": self.model, "optimizer": self.optimizer, "extra": extra}

    def run(self, until: int) -> Training:
        """Steps, whose data come from the generators of torch, numpy and Python."""
        while self.step < until:
            self.step += 1
            self.position.at += 1
            dtype = self.model[0].weight.dtype
            batch = torch.randn(8, 40).to(dtype) * random.random() + float(np.random.rand())
            self.optimizer.zero_grad()
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
        return self

    def bits(self) -> list[Any]:
        """Everything that a resumed run must have in common with one that never stopped."""
        optimizer = self.optimizer.state_dict()
        tensors = [*self.model.state_dict().values()]
        for entry in optimizer["state"].values():
            tensors += [torch.as_tensor(entry[kind]) for kind in sorted(entry)]
        flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
        raw = [hashlib.sha256(t.numpy()).hexdigest() for t in flat]
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return [raw, self.scheduler.get_last_lr(), self.position.at, noise]


def _layers(width: int) -> list[torch.nn.Module]:
    return [torch.nn.Linear(50, width), torch.nn.Linear(width, width)] if width else []


class Position:
    """Where a loader stands."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]
