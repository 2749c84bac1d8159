"""How two processes train by Trainer, stop and go on; `test_checkpointer.py` tells what of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import dos
from tests.integration.processes.pair import scenario
from tests.integration.trainer.llama import PLANS, bits, make_trainer


@scenario
def trainer_resumed() -> Any:
    """The weights of a Trainer that was never stopped, and of one that went on from half-way."""
    folder = Path(os.environ["CHECKPOINTS"], "trainer")
    whole = _train(folder / "whole", 4)
    _train(folder / "other", 2)
    return {"whole": whole, "resumed": _train(folder / "other", 4)}


def _train(folder: Path, steps: int) -> list[bytes]:
    arguments = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    trainer = make_trainer(folder, PLANS["cpu"], max_steps=steps, **arguments)
    saver = dos.CheckpointCallback(folder / "saved", ring_bytes=16 << 20)
    trainer.add_callback(saver)
    trainer.train(resume_from_checkpoint=saver.resume(trainer))
    return bits(trainer.model)
