"""How two processes save, stop and go on; `test_checkpointer.py` says what comes of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import dos
from tests.integration.processes.fsdp_model import PLANS, TWO, optimize, sharded, train, weights
from tests.integration.processes.pair import scenario

HALF = torch.bfloat16


@scenario
def fsdp_resumed() -> Any:
    """By plan, the weights of a run that was never stopped, and of one resumed by another plan."""
    saved = Path(os.environ["CHECKPOINTS"], "fsdp-resumed")
    found = {}
    for name, plan in PLANS.items():
        model = sharded(HALF)
        optimizer = optimize(model, plan)
        with dos.Checkpointer(saved / name, ring_bytes=4 << 20) as checkpointer:
            train(model, optimizer, range(2))
            at_save = weights(model)
            checkpointer.save(2, model=model, optimizer=optimizer)
            train(model, optimizer, range(2, 5))
        other = sharded(HALF)
        follower = optimize(other, TWO)
        with dos.Checkpointer(saved / name, ring_bytes=4 << 20) as checkpointer:
            restored = checkpointer.restore(model=other, optimizer=follower)
        assert restored is not None
        assert restored.step == 2
        train(other, follower, range(2, 5))
        found[name] = {
            "at save": at_save,
            "whole": weights(model),
            "resumed": weights(other),
        }
    return found
