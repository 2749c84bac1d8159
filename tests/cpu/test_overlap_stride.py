"""With `overlap_forward` the stride changes while a step runs on, and no bit of training does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import dos
from dos.engine import UpdateEngine
from dos.execute.virtual import VirtualBackend
from dos.stride import AutoStride, Stride
from perfmodel.profile import H100_NODE
from tests.cpu.overlap_cases import (
    Gate,
    backward,
    batch,
    bits,
    make_model,
    make_optimizer,
    pending,
    trained,
)

STEPS = 7
STRIDES: list[Stride] = [2, "host", 1, 3, 1.5, "host", 2]
PACED = dos.VirtualDevice(pace=replace(H100_NODE, name="slow", host_params_per_s=1e5))


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Stride, bool]]:
    """Grows by each change of a stride: which one, and whether a step was running on."""
    made = []
    change = UpdateEngine.change_stride

    def noting(engine: UpdateEngine, stride: Stride) -> None:
        made.append((stride, engine._tail._running is not None))
        change(engine, stride)

    monkeypatch.setattr(UpdateEngine, "change_stride", noting)
    return made


@pytest.fixture(scope="module")
def on_the_host() -> list[bytes]:
    return bits(trained(STEPS, {"device": "cpu"}, overlap_forward=False)[0])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ratio", [0.0, 0.4])
def test_changes_while_a_step_runs_on_give_the_bits_of_the_host(
    on_the_host: list[bytes], seed: int, ratio: float
) -> None:
    model = make_model()
    optimizer = make_optimizer(
        model,
        device=dos.VirtualDevice(jitter_seed=seed, poison=True),
        subgroup_size=300,
        resident_ratio=ratio,
        release_grads=seed % 2 == 1,
    )
    for step in range(STEPS):
        backward(model, step)
        optimizer.step()
        optimizer._engine.change_stride(STRIDES[(step + seed) % len(STRIDES)])
        optimizer.zero_grad()
    optimizer.synchronize()
    assert bits(model) == on_the_host


def test_a_change_does_not_wait_for_the_step(gate: Gate) -> None:
    model, optimizer = trained(2, {"device": "virtual"})
    backward(model, 2)
    gate.close()
    gate.opens_for_waiters = False
    optimizer.step()
    optimizer._engine.change_stride("host")
    assert pending(optimizer)
    gate.open()


def test_the_stride_that_is_chosen_anew_changes_no_bit(
    on_the_host: list[bytes],
    changes: list[tuple[Stride, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = iter([-1] * 3 + [1 << 40] * STEPS)  # as it is seen, from the second step on
    monkeypatch.setattr(VirtualBackend, "free_bytes", lambda _: next(free))
    model, optimizer = trained(STEPS, {"device": PACED})
    optimizer.synchronize()
    assert bits(model) == on_the_host
    assert [stride == "host" for stride, _ in changes] == [True, False]
    assert all(running for _, running in changes)


def test_a_step_is_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[Any] = []
    after_step = AutoStride.after_step

    def noting(auto: AutoStride, record: Any, *rest: Any) -> Stride:
        judged.append(record)
        return after_step(auto, record, *rest)

    monkeypatch.setattr(AutoStride, "after_step", noting)
    model, optimizer = trained(0, {"device": "virtual"})
    ran = []
    for step in range(4):
        backward(model, step)
        ran.append(optimizer.last_step)
        optimizer.step()
    assert judged == ran[1:]


def test_nothing_runs_while_the_machine_is_measured() -> None:
    model, optimizer = trained(0, {"device": "virtual"})
    auto, running = optimizer._engine._auto, []
    assert auto is not None

    def measure() -> Any:
        running.append(pending(optimizer))
        return H100_NODE

    auto._measure = measure
    for step in range(3):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    assert running == [False]
    assert pending(optimizer)
    model(batch(9))
    assert torch.isfinite(model(batch(9))).all()
