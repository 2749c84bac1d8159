"""Universal checkpoints: written by one number of ranks, loaded by another."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.checkpoint.ds_to_universal import main as ds_to_universal

from dos.integrations.deepspeed_convert import to_deepspeed
from tests.integration.zero3.scenarios_state import full_state
from tests.integration.zero3.training import MIXED, Job, train


def _folder() -> Path:
    return Path(os.environ["CHECKPOINTS"])


def _options(**more: Any) -> dict[str, Any]:
    """With or without our checkpoints."""
    return {**MIXED, **more, **({"checkpoint": {}} if os.environ["SAVED_BY"] == "us" else {})}


def write() -> dict[str, Any]:
    """Train, save, convert; and save again as the process ends."""
    job = Job(options=_options(), groups=True, scheduler=True, steps=5)
    engine = job.engine()
    train(engine, job)
    engine.save_checkpoint(str(_folder()), tag="rigid")
    state, groups = full_state(engine), _hyperparameters(engine)
    if "checkpoint" in job.options:
        engine.checkpoint_engine.wait()
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        rigid = _folder() / "rigid"
        if "checkpoint" in job.options:
            to_deepspeed(rigid, rigid := _folder() / "torch")
        ds_to_universal(
            SimpleNamespace(
                input_folder=str(rigid),
                output_folder=str(_folder() / "universal"),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=False,
            )
        )
    torch.distributed.barrier()
    engine.save_checkpoint(str(_folder()), tag="last")
    return {"state": state, "groups": groups}


def read() -> dict[str, Any]:
    """Load what `write` has left, and train on."""
    job = Job(
        options=_options(stride=1.5),
        groups=True,
        scheduler=True,
        steps=2,
        extra={"checkpoint": {"load_universal": True}},
    )
    engine = job.engine()
    engine.load_checkpoint(str(_folder()), tag="universal")
    state, groups = full_state(engine), _hyperparameters(engine)
    log = train(engine, job, first_step=5)
    engine.destroy()
    return {"state": state, "groups": groups, "log": log}


def _hyperparameters(engine: Any) -> list[dict[str, Any]]:
    return [
        {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
        for group in engine.optimizer.param_groups
    ]
