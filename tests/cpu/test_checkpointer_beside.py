"""A Checkpointer beside a training: of many chunks, of a step that runs on, and what it costs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dos
import dos.checkpoint
from dos.checkpoint import Checkpointer
from dos.checkpoint.posix import PosixStorage
from dos.memory import HeldState
from tests.cpu.checkpoint_cases import in_memory
from tests.cpu.checkpointer_cases import WIDE, Training
from tests.cpu.overlap_cases import Gate, make_optimizer, pending
from tests.cpu.state_cases import PLANS
from tests.gated_disk import Gated, join_saves

WIDTH = 1024  # a layer is a chunk


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with in_memory() as folder:
        yield Path(folder)


def test_a_save_of_many_chunks_is_of_the_moment_it_was_called(tmp_path: Path) -> None:
    """Steps wait for a slow disk: little was captured when `save` returned."""
    disk = Gated()
    with Checkpointer(tmp_path, storage=disk) as checkpointer:
        training = Training(**WIDE).run(2)
        handle = checkpointer.save(2, **training.parts)
        assert handle is not None
        assert not handle.captured.done()
        opener = threading.Timer(0.1, disk.open_now.set)
        opener.start()
        training.run(4)
        opener.join()
        bits = Training(**WIDE).run(2).bits()
        assert checkpointer.restore(**training.parts) is not None
        assert training.bits() == bits


# --- a step that runs on ------------------------------------------------------------------------


def in_a_step(gate: Gate, model: torch.nn.Module, *, heedless: bool) -> dos.DOSOptimizer:
    """An optimizer in its second step; `heedless`: of who waits, until the gate is opened."""
    optimizer = make_optimizer(model, device="cpu", subgroup_size=WIDTH * WIDTH)
    for step in range(2):
        model(torch.randn(2, WIDTH)).square().mean().backward()
        if step:
            gate.close(after=1)
            gate.opens_for_waiters = not heedless
        optimizer.step()
    return optimizer


def layers(layer: type[torch.nn.Linear] = torch.nn.Linear) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(layer(WIDTH, WIDTH, bias=False) for _ in range(3)))


class Summing(torch.nn.Linear):
    """A layer whose state dict has a value of its weight."""

    def get_extra_state(self) -> float:
        return float(self.weight.detach().double().sum())

    def set_extra_state(self, state: float) -> None: ...


def test_a_save_of_a_model_does_not_wait_for_the_step_that_runs_on(
    gate: Gate, tmp_path: Path
) -> None:
    model = layers()
    optimizer = in_a_step(gate, model, heedless=True)
    with Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(2, model=model, optimizer=optimizer)
        assert pending(optimizer)
        gate.open()
        assert handle is not None
        handle.result(60)
    saved = dos.checkpoint.load(tmp_path)
    now = model.state_dict()
    assert all(torch.equal(saved["model"][name], weight) for name, weight in now.items())


def test_a_model_that_is_saved_without_its_optimizer_is_waited_for(
    gate: Gate, tmp_path: Path
) -> None:
    model = layers()
    optimizer = in_a_step(gate, model, heedless=False)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, model=model)
        assert not pending(optimizer)


def test_a_model_that_reads_its_weights_for_its_state_dict_is_waited_for(
    gate: Gate, tmp_path: Path
) -> None:
    model = layers(Summing)
    optimizer = in_a_step(gate, model, heedless=False)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, model=model, optimizer=optimizer)
    saved = dos.checkpoint.load(tmp_path)["model"]
    sums = [saved[f"{layer}._extra_state"] for layer in range(3)]
    assert sums == [layer.get_extra_state() for layer in model]


def test_state_dicts_wait_again_once_the_save_has_begun(gate: Gate, tmp_path: Path) -> None:
    model = layers()
    optimizer = in_a_step(gate, model, heedless=False)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, model=model, optimizer=optimizer)
        model.state_dict()
        assert not pending(optimizer)


# --- what is saved, and kept --------------------------------------------------------------------


def test_the_scale_of_a_scaler_is_restored(tmp_path: Path) -> None:
    training = Training(PLANS[1])
    scaler, other = (torch.amp.GradScaler("cpu", growth_interval=1) for _ in range(2))
    scaler.scale(training.model(torch.randn(8, 40)).square().mean()).backward()
    scaler.step(training.optimizer)
    scaler.update()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, extra={"scaler": scaler})
        checkpointer.restore(extra={"scaler": other})
    assert other.state_dict() == scaler.state_dict()


def test_tied_weights_need_room_once(tmp_path: Path) -> None:
    class Small(PosixStorage):
        def free_bytes(self, path: str) -> int:
            return 100_000

    one = torch.nn.Linear(200, 100, bias=False)  # 80,000 bytes
    with Checkpointer(tmp_path, storage=Small()) as checkpointer:
        assert checkpointer.save(1, model=torch.nn.ModuleList([one, one])) is not None


def test_the_handle_of_a_save_that_is_over_keeps_no_state(tmp_path: Path) -> None:
    training = Training(PLANS[1]).run(1)
    gates = training.optimizer._engine.state.gates
    with Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(1, **training.parts)
    join_saves()
    gc.collect()
    kept = [one for one in gc.get_objects() if type(one) is HeldState and one.gates is gates]
    assert handle is not None
    assert not kept
