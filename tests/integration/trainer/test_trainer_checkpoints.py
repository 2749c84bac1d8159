"""Trainer saves through a Checkpointer, and resumes to the same bits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs deep-optimizer-states[transformers]")
pytest.importorskip("accelerate", reason="needs deep-optimizer-states[transformers]")

from transformers import Trainer, TrainerCallback

import dos
from tests.integration.trainer.llama import PLANS, bits, inner, make_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:gradients were changed after"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
]
SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}


class Noise(TrainerCallback):  # type: ignore[misc]
    """Draws from the generators in every step, and notes what."""

    def __init__(self) -> None:
        self.drawn: list[tuple[float, float]] = []

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.drawn.append((random.random(), float(torch.rand(()))))


def run(
    folder: Path, plan: dict[str, Any], stop_at: int | None = None, **arguments: Any
) -> tuple[Trainer, Noise]:
    """Train in a folder, resuming from what is there; stop behind a step as if killed."""
    trainer = make_trainer(folder, plan, **{**SAVED, **arguments})
    saver, noise = dos.CheckpointCallback(folder / "saved", ring_bytes=16 << 20), Noise()
    trainer.add_callback(noise)
    if stop_at is not None:
        trainer.add_callback(Stop(stop_at))
    trainer.add_callback(saver)
    resumed = saver.resume(trainer)
    try:
        trainer.train(resume_from_checkpoint=resumed)
    except Stopped:
        saver._open().close()
    return trainer, noise


class Stopped(Exception):
    pass


class Stop(TrainerCallback):  # type: ignore[misc]
    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Stopped


EACH_EPOCH = {"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2}


@pytest.mark.parametrize(
    ("plan", "arguments", "stop_at"),
    [
        ("cpu", {}, 3),
        ("k=2, residents", {}, 3),
        ("cpu", {"eval_strategy": "steps", "eval_steps": 1}, 3),
        ("cpu", {"gradient_accumulation_steps": 16, "max_steps": 6}, 5),
        ("cpu", EACH_EPOCH, 9),
    ],
    ids=["within an epoch", "residents", "evaluated", "over epochs", "by epochs"],
)
def test_a_resumed_run_is_the_uninterrupted_one(
    plan: str, arguments: dict[str, Any], stop_at: int, tmp_path: Path
) -> None:
    whole, drawn = run(tmp_path / "whole", PLANS[plan], **arguments)
    run(tmp_path / "other", PLANS[plan], stop_at, **arguments)
    random.seed(7)
    resumed, rest = run(tmp_path / "other", PLANS[plan], **arguments)
    assert bits(resumed.model) == bits(whole.model)
    assert rest.drawn
    assert rest.drawn == drawn.drawn[-len(rest.drawn) :]


def test_trainer_writes_no_checkpoints_of_its_own(tmp_path: Path) -> None:
    run(tmp_path, PLANS["cpu"])
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    checkpoints = dos.Checkpointer(tmp_path / "saved").list()
    assert [one.step for one in checkpoints] == [2, 4]


def test_the_log_goes_on(tmp_path: Path) -> None:
    run(tmp_path, PLANS["cpu"], 3)
    resumed, _ = run(tmp_path, PLANS["cpu"])
    logged = [row["step"] for row in resumed.state.log_history if "loss" in row]
    assert logged == [1, 2, 3, 4]


def test_the_scheduler_goes_on(tmp_path: Path) -> None:
    run(tmp_path, PLANS["cpu"], 3)
    resumed, _ = run(tmp_path, PLANS["cpu"])
    rates = [row["learning_rate"] for row in resumed.state.log_history if "loss" in row]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert inner(resumed.optimizer).param_groups[0]["lr"] == 0


def test_a_trainer_that_was_resumed_loads_other_checkpoints_again(tmp_path: Path) -> None:
    run(tmp_path, PLANS["cpu"], 3)
    resumed, _ = run(tmp_path, PLANS["cpu"])
    resumed.save_model(tmp_path / "own")
    saved = bits(resumed.model)
    with torch.no_grad():
        for parameter in resumed.model.parameters():
            parameter.zero_()
    resumed._load_from_checkpoint(str(tmp_path / "own"))
    assert bits(resumed.model) == saved


@pytest.mark.parametrize(
    ("option", "arguments"),
    [("load_best_model_at_end", {**SAVED, "eval_strategy": "steps", "eval_steps": 2})],
)
def test_what_trainer_does_itself_is_refused(
    option: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(dos.ConfigError, match=option):
        run(tmp_path, PLANS["cpu"], **{option: True}, **arguments)


def test_every_is_trainers_to_say(tmp_path: Path) -> None:
    with pytest.raises(dos.ConfigError, match="Trainer says when"):
        dos.CheckpointCallback(tmp_path, every=3)
