"""Models, optimizers and a gate for the tests of `overlap_forward`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

import dos

WIDTH, LAYERS = 32, 4
TIMEOUT_S = 60.0
DEVICES: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu"},
    "virtual": {"device": "virtual", "stride": 2},
}


class Gate:
    """An update that can be held up, around the real one, until somebody waits for the step."""

    def __init__(self, update: Callable[..., None]) -> None:
        self._update = update
        self._opened = threading.Event()
        self._free = 0
        self.opens_for_waiters = True
        self.error: Exception | None = None
        self.open()

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._free > 0:
            self._free -= 1
        else:
            assert self._opened.wait(TIMEOUT_S), "nobody waited for the step"
            if self.error is not None:
                raise self.error
        self._update(*args, **kwargs)

    def close(self, after: int = 0) -> None:
        """Hold up updates, but for the next `after` ones."""
        self._free = after
        self._opened.clear()

    def open(self) -> None:
        self._opened.set()

    def opened_by(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """`wait`, a method of a running step, that opens this first."""

        @wraps(wait)
        def opening(*args: Any) -> Any:
            if self.opens_for_waiters:
                self.open()
            return wait(*args)

        return opening


def make_model(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(dtype)


def make_optimizer(model: torch.nn.Module, **options: Any) -> dos.DOSOptimizer:
    """A subgroup per layer, nearly."""
    options = {"subgroup_size": WIDTH * WIDTH + WIDTH, "overlap_forward": True, **options}
    return dos.DOSOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), **options)


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))


def backward(model: torch.nn.Module, step: int) -> None:
    x = batch(step).to(next(model.parameters()).dtype)
    model(x).square().mean().backward()


def trained(
    steps: int,
    plan: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    micro_steps: int = 1,
    zero: bool = True,
    **options: Any,
) -> tuple[torch.nn.Sequential, dos.DOSOptimizer]:
    """A model and its optimizer after some steps; the last of them may still be running."""
    model = make_model(dtype)
    optimizer = make_optimizer(model, **plan, **options)
    for step in range(steps):
        for micro in range(micro_steps):
            backward(model, step + 100 * micro)
        optimizer.step()
        if zero:
            optimizer.zero_grad()
    return model, optimizer


def pending(optimizer: dos.DOSOptimizer) -> bool:
    """Whether a step is running on."""
    return optimizer._engine._tail._running is not None


def bits(model: torch.nn.Module) -> list[bytes]:
    return [p.detach().view(torch.uint8).numpy().tobytes() for p in model.parameters()]
