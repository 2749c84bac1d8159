"""FSDP2 saved beside training and resumed: see `checkpointer_scenarios.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dos
from tests.integration.processes.compare import same_bits
from tests.integration.processes.fsdp_model import PLANS, Model
from tests.integration.processes.pair import Pair, results

each_plan = pytest.mark.parametrize("plan", PLANS)


@each_plan
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(pair: Pair, plan: str) -> None:
    for its in (ran[plan] for ran in results(pair, "fsdp_resumed")):
        assert same_bits(its["resumed"], its["whole"])


@each_plan
def test_one_process_takes_up_what_two_saved(pair: Pair, checkpoints: Path, plan: str) -> None:
    saved = results(pair, "fsdp_resumed")[0][plan]
    model = Model().to(torch.bfloat16)
    optimizer = dos.DOSOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), **PLANS["two"])
    with dos.Checkpointer(checkpoints / "fsdp-resumed" / plan) as checkpointer:
        checkpointer.restore(model=model, optimizer=optimizer)
    assert same_bits([p.detach() for p in model.parameters()], saved["at save"])


def test_two_processes_of_trainer_resume_with_the_bits_of_a_run_never_stopped(pair: Pair) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    first, second = results(pair, "trainer_resumed")
    assert first["resumed"] == first["whole"] == second["resumed"]
