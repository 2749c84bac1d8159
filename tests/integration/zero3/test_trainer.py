"""Trainer counts on what it saved only once that is durable."""

from __future__ import annotations

import pytest

from tests.integration.worlds import Outcome
from tests.integration.zero3.scenario import scenario

pytest.importorskip("transformers", reason="needs deep-optimizer-states[transformers]")
pytest.importorskip("accelerate", reason="needs deep-optimizer-states[transformers]")


@scenario("scenarios_trainer.rotating", 1)
def test_an_older_checkpoint_goes_once_the_new_one_is_durable(outcome: Outcome) -> None:
    assert outcome.first["whole"] == [["checkpoint-2"], ["checkpoint-4"]]


@scenario("scenarios_trainer.rotating", 1)
def test_where_the_new_one_fails_the_older_one_stays_and_trainer_is_told(outcome: Outcome) -> None:
    assert "No space left on device" in outcome.first["told"]
    assert outcome.first["left"] == ["checkpoint-2"]


@scenario("scenarios_trainer.best", 1)
def test_the_best_model_is_loaded_though_it_was_saved_last(outcome: Outcome) -> None:
    assert outcome.first["best"] == "checkpoint-4"
