"""Trainer with `overlap_forward`: it evaluates, saves and resumes on the new weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs deep-optimizer-states[transformers]")
pytest.importorskip("accelerate", reason="needs deep-optimizer-states[transformers]")

from transformers import Trainer

from tests.integration.trainer.llama import PLANS, bits, inner, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:gradients were changed after")
SAVED = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 1}


def run(folder: Path, overlap_forward: bool, **options: Any) -> Trainer:
    trainer = make_trainer(folder, {**PLANS["k=1.5"], "overlap_forward": overlap_forward}, **SAVED)
    trainer.train(**options)
    inner(trainer.optimizer).synchronize()
    return trainer


def test_a_trainer_gives_the_same_bits_and_evaluations(tmp_path: Path) -> None:
    one, other = run(tmp_path / "one", True), run(tmp_path / "other", False)
    losses = [
        [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
        for trainer in (one, other)
    ]
    assert (bits(one.model), losses[0]) == (bits(other.model), losses[1])


def test_a_checkpoint_of_an_overlapped_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", True)
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    resumed = run(tmp_path / "resumed", False, resume_from_checkpoint=checkpoint)
    assert bits(resumed.model) == bits(whole.model)
