"""State that is held while the step that makes it runs on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dos
import dos.checkpoint
from dos.checkpoint.saving import begin_save
from tests.cpu.held_cases import assert_equal, now, snapshot
from tests.cpu.overlap_cases import Gate, backward, make_model, make_optimizer

HALF = torch.bfloat16


def running_on(gate: Gate, error: Exception | None = None) -> dos.DOSOptimizer:
    """An optimizer in its second step, which runs on until the gate opens, and then may fail."""
    model = make_model(HALF)
    optimizer = make_optimizer(model, device="cpu")
    for step in range(2):
        backward(model, step)
        if step:
            gate.close()
            gate.opens_for_waiters = False
            gate.error = error
        optimizer.step()
    return optimizer


def test_a_hold_does_not_wait_for_the_step(gate: Gate) -> None:
    optimizer = running_on(gate)
    held = optimizer.hold_state()
    gate.open()
    held.ready()
    assert set(held.tree["steps"].values()) == {2}
    held.abandon()
    assert_equal(snapshot(held.tree), now(optimizer))


def test_a_step_that_fails_leaves_nothing_to_capture(gate: Gate) -> None:
    optimizer = running_on(gate, RuntimeError("a kernel that fails"))
    held = optimizer.hold_state()
    gate.open()
    with pytest.raises(RuntimeError, match="a kernel that fails"):
        held.ready()
    held.abandon()
    with pytest.raises(RuntimeError, match="a kernel that fails"):
        optimizer.synchronize()
    with pytest.raises(dos.ConfigError, match=r"^hold_state: an earlier step failed half-way"):
        optimizer.hold_state()


def test_a_step_that_fails_is_not_saved(gate: Gate, tmp_path: Path) -> None:
    """Though all that the file is made of was home before it failed."""
    optimizer = running_on(gate, RuntimeError("a kernel that fails"))
    held = optimizer.hold_state()
    handle = begin_save({"steps": held.tree["steps"]}, tmp_path / "a", held=[held])
    gate.open()
    with pytest.raises(RuntimeError, match="a kernel that fails"):
        handle.result(60)
    assert not (tmp_path / "a").exists()
    with pytest.raises(RuntimeError, match="a kernel that fails"):
        optimizer.synchronize()


def test_a_save_waits_for_each_part_on_its_own(gate: Gate, tmp_path: Path) -> None:
    width = 1024
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(3)))
    optimizer = make_optimizer(model, device="cpu", subgroup_size=width * width)
    for step in range(2):
        model(torch.randn(2, width)).square().mean().backward()
        if step:
            gate.close(after=1)
            gate.opens_for_waiters = False
        optimizer.step()
    held, loose = optimizer.hold_state(), torch.randn(3 << 20)
    copy = loose.clone()
    handle = begin_save({"loose": loose, "state": held.tree}, tmp_path / "a", held=[held])
    loose.zero_()  # it has been copied
    assert not handle.captured.done()
    gate.open()
    handle.result(60)
    back = dos.checkpoint.load(tmp_path / "a")
    assert torch.equal(back["loose"], copy)
    assert_equal(back["state"], now(optimizer))
