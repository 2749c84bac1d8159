"""Models under `torch.compile` and activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dos
from dos.execute.record import StepRecord
from dos.plan import Placement
from tests.cpu.tolerances import AFTER_STEPS_OF_A_MODEL

WIDTH = 32  # so that every piece is a whole number of cache lines, without padding
STEPS = 4
DEVICES: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu"},
    "virtual": {
        "device": dos.VirtualDevice(poison=True, jitter_seed=0),
        "stride": 2,
        "subgroup_size": 256,
    },
    "released": {
        "device": "virtual",
        "stride": 2,
        "subgroup_size": 256,
        "release_grads": True,
    },
}
every_device = pytest.mark.parametrize("device", DEVICES)
every_backend = pytest.mark.parametrize(
    "backend",
    [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)],
    ids=["eager", "aot_eager", "inductor"],
)
every_checkpoint = pytest.mark.parametrize(
    "reentrant", [None, False, True], ids=["no checkpoints", "checkpoints", "reentrant"]
)
pytestmark = [
    pytest.mark.filterwarnings("error:gradients were changed after"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Model(torch.nn.Module):
    """Three layers, the second used twice; each under a checkpoint unless `reentrant` is None."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.reentrant = reentrant

    def run(self, index: int, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layers[index](x).tanh()
        return hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 1, 2):
            if self.reentrant is None:
                x = self.run(index, x)
            else:
                x = checkpoint(self.run, index, x, use_reentrant=self.reentrant)
        return x


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Compiled code of one test is not found by another, nor counted against its limits."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@cache
def train(
    device: str, backend: str | None, reentrant: bool | None
) -> tuple[Model, list[StepRecord]]:
    """Weights and records after `STEPS` steps; `device` "torch" is torch's optimizer."""
    model = Model(reentrant)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if device in DEVICES:
        optimizer = dos.DOSOptimizer(optimizer, **DEVICES[device])
    compiled = model if backend is None else torch.compile(model, backend=backend)
    records = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        x.requires_grad_()  # a reentrant checkpoint has no gradient otherwise
        compiled(x).square().mean().backward()
        optimizer.step()
        if isinstance(optimizer, dos.DOSOptimizer):
            assert optimizer.last_step is not None
            records.append(optimizer.last_step)
    if isinstance(optimizer, dos.DOSOptimizer):
        optimizer.close()
    return model, records


def host_grad_bytes(record: StepRecord) -> int:
    """The bytes of one gradient of everything that the host updates."""
    placed = zip(record.plan.sizes, record.plan.placement, strict=True)
    return sum(4 * size.numel for size, at in placed if at is Placement.HOST)


@every_device
@every_checkpoint
@every_backend
def test_weights_are_those_under_torch(
    device: str, backend: str | None, reentrant: bool | None
) -> None:
    mine, _ = train(device, backend, reentrant)
    its, _ = train("torch", backend, reentrant)
    allowed = AFTER_STEPS_OF_A_MODEL
    for one, other in zip(mine.parameters(), its.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=allowed.relative, atol=allowed.absolute)


@pytest.mark.parametrize("device", ["virtual", "released"])
@every_checkpoint
@every_backend
def test_from_the_second_step_on_gradients_are_sent_once_and_early(
    device: str, backend: str | None, reentrant: bool | None
) -> None:
    _, records = train(device, backend, reentrant)
    for record in records[1:]:
        assert record.early_grad_bytes == record.grad_bytes == host_grad_bytes(record)


def train_compiled_whole(device: str, *, compiled_steps: bool) -> Model:
    """Trained by one function, backward and step in it; `device` "torch" is torch's optimizer."""
    model = Model(None)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if device in DEVICES:
        optimizer = dos.DOSOptimizer(optimizer, **DEVICES[device])

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if device in DEVICES:
            optimizer.clip_grad_norm_(0.1)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    run = torch.compile(step, backend="aot_eager") if compiled_steps else step
    for number in range(STEPS):
        run(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)))
    return model


@every_device
@pytest.mark.filterwarnings("error")  # of the compiler, which finds our code
def test_a_compiled_step_with_its_backward_trains_as_in_torch(device: str) -> None:
    mine = train_compiled_whole(device, compiled_steps=True)
    its = train_compiled_whole("torch", compiled_steps=False)
    allowed = AFTER_STEPS_OF_A_MODEL
    for one, other in zip(mine.parameters(), its.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=allowed.relative, atol=allowed.absolute)


@every_checkpoint
@every_backend
def test_the_device_has_the_bits_of_the_host(backend: str | None, reentrant: bool | None) -> None:
    on_device, _ = train("virtual", backend, reentrant)
    on_host, _ = train("cpu", backend, reentrant)
    for one, other in zip(on_device.parameters(), on_host.parameters(), strict=True):
        assert torch.equal(one, other)
