"""Optimizers that step in two threads at once do not influence each other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any

import pytest
import torch

import dos

STEPS = 5
SHAPES = [(300, 200), (1000,), (7, 11)]  # the first is more than one thread's chunk
TOGETHER_S = 60.0  # the longest that one training waits for the other


@dataclass(frozen=True)
class Training:
    """A training that shares nothing with another one but the process."""

    kind: type[torch.optim.Adam]
    lr: float
    dtype: torch.dtype
    max_norm: float
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, meet: Callable[[], object] = lambda: None) -> list[torch.Tensor]:
        """Weights and states after `STEPS` steps; calls ``meet`` before each backward and step."""
        generator = torch.Generator().manual_seed(int(1e6 * self.lr))
        parameters = [
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(self.dtype))
            for shape in SHAPES
        ]
        optimizer = dos.DOSOptimizer(self.kind(parameters, lr=self.lr), threads=2, **self.options)
        for _ in range(STEPS):
            # A gradient is its factor, whatever threads torch works with.
            factors = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in parameters]
            meet()
            torch.autograd.backward(
                [(p * f).sum() for p, f in zip(parameters, factors, strict=True)]
            )
            optimizer.clip_grad_norm_(self.max_norm)
            meet()
            optimizer.step()
            optimizer.zero_grad()
        kept = [parameter.detach().clone() for parameter in parameters]
        kept += [t.clone() for p in parameters for t in optimizer.state[p].values()]
        optimizer.close()
        return kept


def schedule(seed: int, **options: object) -> dict[str, Any]:
    device = dos.VirtualDevice(poison=True, jitter_seed=seed)
    return {"device": device, "subgroup_size": 2048, **options}


ADAMW, ADAM = torch.optim.AdamW, torch.optim.Adam
ON_THE_HOST = Training(ADAMW, 1e-2, torch.float32, 1.0, {"device": "cpu"})
ALSO_THERE = Training(ADAM, 3e-3, torch.bfloat16, 0.1, {"device": "cpu", "subgroup_size": 5000})
STREAMED = Training(ADAMW, 2e-2, torch.bfloat16, 2.0, schedule(1, stride=1.5))
WITH_RESIDENTS = Training(ADAM, 5e-3, torch.float32, 0.5, schedule(2, stride=3, resident_ratio=0.3))


@pytest.mark.parametrize(
    "both",
    [(ON_THE_HOST, ALSO_THERE), (STREAMED, WITH_RESIDENTS), (ON_THE_HOST, STREAMED)],
    ids=["host", "virtual", "host and virtual"],
)
def test_two_optimizers_in_two_threads_give_the_bits_of_each_alone(
    both: tuple[Training, Training],
) -> None:
    alone = [training.run() for training in both]
    barrier = Barrier(2, timeout=TOGETHER_S)
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(training.run, barrier.wait) for training in both]
        at_once = [each.result() for each in running]
    for one, other in zip(alone, at_once, strict=True):
        assert [words(tensor) for tensor in one] == [words(tensor) for tensor in other]


def words(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
