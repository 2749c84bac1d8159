"""Checkpointer: a training is saved beside itself, and restored to the same bits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import dos
import dos.checkpoint
from dos.checkpoint import Checkpointer
from dos.checkpoint.format import VERSION
from dos.errors import RefusedError
from tests.cpu.checkpoint_cases import in_memory
from tests.cpu.checkpointer_cases import Training
from tests.cpu.state_cases import PLANS

each_plan = pytest.mark.parametrize(
    "plan", [None, PLANS[1], PLANS[4], {**PLANS[1], "overlap_forward": True}], ids=str
)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with in_memory() as folder:
        yield Path(folder)


def saved(checkpointer: Checkpointer, training: Training, *steps: int) -> None:
    for step in steps:
        handle = checkpointer.save(step, **training.run(step).parts)
        assert handle is not None
        handle.result()


def steps(checkpointer: Checkpointer) -> list[int]:
    return [one.step for one in checkpointer.list()]


@each_plan
@each_dtype
def test_a_restored_run_goes_on_with_the_same_bits(
    plan: dict[str, Any] | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        training = Training(plan, dtype)
        saved(checkpointer, training, 3)
        whole = training.run(6).bits()
        other = Training(plan, dtype, seed=1)
        restored = checkpointer.restore(**other.parts)
        assert restored is not None
        other.step = restored.step
        assert other.run(6).bits() == whole


def test_a_save_is_of_the_moment_it_was_called(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        training = Training(PLANS[1]).run(3)
        checkpointer.save(3, **training.parts)
        training.run(5)
        bits = Training(PLANS[1]).run(3).bits()
        assert checkpointer.restore(**training.parts) is not None
        assert training.bits() == bits


@pytest.mark.parametrize("number", [1, 4])
def test_state_is_written_under_the_names_of_the_parameters(number: int, tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        training = Training(PLANS[number], torch.bfloat16)
        saved(checkpointer, training, 2)
    held = dos.checkpoint.load(tmp_path)["optimizer"]
    names = sorted(name for name, _ in training.model.named_parameters())
    assert all(sorted(held[kind]) == names for kind in ("master", "exp_avg", "exp_avg_sq", "steps"))
    weight = training.optimizer.state[training.model[3].weight]
    assert torch.equal(held["exp_avg"]["3.weight"], weight["exp_avg"])


def test_metrics_are_those_of_the_last_save(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        saved(checkpointer, Training(PLANS[1]), 2)
    metrics = checkpointer.metrics
    assert metrics["bytes"] == checkpointer.list()[0].n_bytes
    assert metrics["gib_per_s"] == metrics["bytes"] / metrics["seconds"] / 2**30
    assert metrics["failures"] == 0
    assert {"frozen_s", "waited_s"} <= metrics.keys()


def test_after_a_load_that_failed_half_way_the_optimizer_does_not_step(tmp_path: Path) -> None:
    model = torch.nn.Linear(1200, 1200)  # several chunks
    optimizer = dos.DOSOptimizer(torch.optim.AdamW(model.parameters()), device="cpu")
    model(torch.ones(1200)).sum().backward()
    optimizer.step()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model=model, optimizer=optimizer)
        checkpointer._background.wait()
        path = tmp_path / "step-00000001" / "rank-00000.safetensors"
        moment = optimizer.state[model.weight]["exp_avg_sq"]
        flip(path, path.read_bytes().index(moment.numpy().tobytes()[: 1 << 20]))
        with pytest.raises(dos.IntegrityError), pytest.warns(RuntimeWarning):
            checkpointer.restore(model=model, optimizer=optimizer)
        with pytest.raises(dos.ConfigError, match="load"):
            optimizer.step()


def test_an_empty_directory_restores_none(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "none") as checkpointer:
        assert checkpointer.restore(**Training(None).parts) is None


def test_a_restored_run_knows_its_step_and_what_was_in_extra(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        training = Training(None)
        saved(checkpointer, training, 2)
        restored = checkpointer.restore(**training.parts)
    assert restored is not None
    assert (restored.step, restored.path) == (2, str(tmp_path / "step-00000002"))
    assert restored.extra["note"] == (1, "a")
    assert restored.extra["position"] == {"at": 2}


def test_saves_are_due_at_multiples(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, every=3) as checkpointer:
        due = [checkpointer.save(step, extra={}) is not None for step in range(1, 8)]
    assert due == [False, False, True, False, False, True, False]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, [4, 5, 6]),
        ({"keep": 1}, [6]),
        ({"keep": None}, [1, 2, 3, 4, 5, 6]),
        ({"keep": 2, "keep_every": 3}, [3, 5, 6]),
    ],
    ids=str,
)
def test_the_newest_and_every_nth_stay(
    options: dict[str, Any], left: list[int], tmp_path: Path
) -> None:
    with Checkpointer(tmp_path, **options) as checkpointer:
        for step in range(1, 7):
            checkpointer.save(step, extra={"step": step})
    assert steps(checkpointer) == left
    assert sorted(os.listdir(tmp_path)) == ["latest", *(f"step-{step:08d}" for step in left)]


def test_what_is_pinned_stays_until_it_is_not(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        saved(checkpointer, Training(None), 1)
        checkpointer.pin(1)
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        saved(checkpointer, Training(None), 2, 3)
    assert [(one.step, one.pinned) for one in checkpointer.list()] == [(1, True), (3, False)]
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.unpin(1)
        saved(checkpointer, Training(None), 4)
    assert steps(checkpointer) == [4]


def test_only_what_is_there_can_be_pinned(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        saved(checkpointer, Training(None), 4)
        with pytest.raises(dos.ConfigError, match="no checkpoint of step 5, only of steps: 4"):
            checkpointer.pin(5)


def test_with_damaged_pins_nothing_is_removed_and_all_is_restored(tmp_path: Path) -> None:
    (tmp_path / "pins.json").write_text("{")
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        saved(checkpointer, Training(None), 1, 2)
        assert steps(checkpointer) == [1, 2]
        with pytest.raises(dos.CheckpointError, match="cannot be read"):
            checkpointer.pin(1)
        assert checkpointer.restore() is not None


def test_a_run_that_went_back_is_the_newer_one(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        saved(checkpointer, Training(None), 2, 4)
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        training = Training(None)
        checkpointer.restore(2, **training.parts)
        training.step = 2
        saved(checkpointer, training, 3)
    assert steps(checkpointer) == [4, 3]
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore()
    assert restored is not None
    assert restored.step == 3


def flip(path: Path, at: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "manifest.json"])
def test_a_damaged_newest_falls_back_to_the_one_before(file: str, tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        saved(checkpointer, Training(None), 1, 2)
        flip(tmp_path / "step-00000002" / file)
        training = Training(None, seed=1)
        with pytest.warns(RuntimeWarning, match="step-00000002 is not whole"):
            restored = checkpointer.restore(**training.parts)
        assert restored is not None
        assert restored.step == 1
        assert training.bits() == Training(None).run(1).bits()


def test_the_newest_is_told_without_being_restored(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        saved(checkpointer, Training(None), 1, 2)
        newest = checkpointer.newest()
        assert newest is not None
        assert (newest.step, newest.extra["note"]) == (2, (1, "a"))
        flip(tmp_path / "step-00000002" / "rank-00000.safetensors")
        with pytest.warns(RuntimeWarning, match="step-00000002 is not whole"):
            newest = checkpointer.newest()
        assert newest is not None
        assert newest.step == 1


@pytest.mark.filterwarnings("ignore:.*not whole")
def test_where_none_is_whole_the_newest_says_why(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        saved(checkpointer, Training(None), 1, 2)
        for step in 1, 2:
            flip(tmp_path / f"step-0000000{step}" / "rank-00000.safetensors")
        with pytest.raises(dos.IntegrityError):
            checkpointer.restore(**Training(None).parts)


@pytest.mark.filterwarnings("error")
def test_what_is_damaged_and_older_is_not_warned_of(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        saved(checkpointer, Training(None), 1, 2)
        flip(tmp_path / "step-00000001" / "manifest.json")
        restored = checkpointer.restore()
    assert restored is not None
    assert restored.step == 2


def test_of_a_run_that_went_back_a_damaged_newest_is_warned_of(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        saved(checkpointer, Training(None), 2, 4)
        checkpointer.save(3, extra={})
    flip(tmp_path / "step-00000003" / "manifest.json")
    whole = pytest.warns(RuntimeWarning, match="step-00000003 is not whole")
    with Checkpointer(tmp_path) as checkpointer, whole:
        restored = checkpointer.restore()
    assert restored is not None
    assert restored.step == 4


@pytest.mark.filterwarnings("ignore:.*not whole")
def test_where_none_is_whole_a_newest_manifest_says_why(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        saved(checkpointer, Training(None), 1, 2)
        flip(tmp_path / "step-00000001" / "rank-00000.safetensors")
        flip(tmp_path / "step-00000002" / "manifest.json")
        with pytest.raises(dos.IntegrityError, match="step-00000002: the manifest is damaged"):
            checkpointer.restore()


@dataclass
class Note:
    text: str


@pytest.mark.filterwarnings("error")
def test_for_what_is_not_allowed_no_older_one_is_taken(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, extra={})
        checkpointer.save(2, extra={"note": Note("a")})
        asks: list[Any] = [checkpointer.restore, checkpointer.newest]
        for ask in asks:
            with pytest.raises(RefusedError, match="pass the class in `allow`"):
                ask()
            restored = ask(allow=[Note])
            assert restored is not None
            assert restored.extra == {"note": Note("a")}


@pytest.mark.filterwarnings("error")
def test_for_one_of_a_newer_version_no_older_one_is_taken(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        saved(checkpointer, Training(None), 1, 2)
        manifest = tmp_path / "step-00000002" / "manifest.json"
        text = manifest.read_bytes()
        manifest.write_bytes(text.replace(b'"version":%d' % VERSION, b'"version":1000'))
        with pytest.raises(RefusedError, match="version 1000 of the format"):
            checkpointer.restore()
        restored = checkpointer.restore(1)
    assert restored is not None
    assert restored.step == 1


def test_a_step_that_is_asked_for_is_taken_or_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        saved(checkpointer, Training(None), 1, 2)
        restored = checkpointer.restore(1)
        assert restored is not None
        assert restored.step == 1
        with pytest.raises(dos.ConfigError, match="no checkpoint of step 7, only of steps: 1, 2"):
            checkpointer.restore(7)
        flip(tmp_path / "step-00000002" / "manifest.json")
        with pytest.raises(dos.IntegrityError):
            checkpointer.restore(2)
