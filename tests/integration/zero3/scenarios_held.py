"""What is captured of a session beside training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import deepspeed.utils as ds
import torch

from tests.cpu.held_cases import SlowCapture
from tests.integration.zero3.training import HOST, MIXED, Job, state_of, train

MOMENTS = ("exp_avg", "exp_avg_sq")


def live(engine: Any) -> dict[str, list[torch.Tensor]]:
    """The tensors that a checkpoint of upstream's holds, and the weights."""
    optimizer = engine.optimizer
    flats = optimizer.fp32_partitioned_groups_flat
    found = {
        "weight": [flat.detach() for flat in optimizer.fp16_partitioned_groups_flat],
        "master": [flat.detach() for flat in flats],
    }
    for key in MOMENTS:
        found[key] = [optimizer.optimizer.state[flat][key] for flat in flats]
    return found


def captures() -> dict[str, Any]:
    """A slow capture while training goes on, refreshes or closes; beside the state before."""
    found: dict[str, Any] = {}
    residents = {**MIXED, "resident_ratio": 0.6}
    for name, options in {"host": HOST, "mixed": MIXED, "residents": residents}.items():
        for what in ("train", "refresh", "destroy"):
            job = Job(options=options, steps=2)
            engine = job.engine()
            train(engine, job)
            before = {key: value.clone() for key, value in state_of(engine).items()}
            tensors = live(engine)
            capture = SlowCapture(engine.optimizer._dos.hold("a test"), 0, pause_s=0.01)
            if what == "train":
                train(engine, replace(job, steps=3), first_step=2)
            elif what == "refresh":
                engine.optimizer.refresh_fp32_params()
            engine.destroy()
            capture.join()
            found[f"{name}, {what}"] = [
                key
                for key, parts in tensors.items()
                if not torch.equal(
                    torch.cat([capture.of(part).float() for part in parts]), before[key]
                )
            ]
    return found


def replaced() -> dict[str, Any]:
    """State that upstream's user has set between a step and a capture is held with the rest."""
    job = Job(options=MIXED, steps=2)
    engine = job.engine()
    train(engine, job)
    for p in engine.module.parameters():
        ds.safe_set_full_fp32_param(p, ds.safe_get_full_fp32_param(p) * 1.5)
    flat = engine.optimizer.fp32_partitioned_groups_flat[0]
    flat.data = flat.data.clone()
    held = engine.optimizer._dos.hold("a test")
    found = [(hold.begin, hold.end) for hold in held.holds]
    inside = any(begin <= flat.data_ptr() < end for begin, end in found)
    held.abandon()
    engine.destroy()
    return {"inside": inside}
