"""Checkpoints that go from our form to DeepSpeed's and back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import deepspeed.utils as ds
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from dos.integrations.deepspeed_convert import from_deepspeed, to_deepspeed
from tests.integration.zero3.saving import differences, engine_of, picture, train
from tests.integration.zero3.scenarios_state import shared_folder


def ours() -> dict[str, Any]:
    """Saved by us, read by DeepSpeed's own loader, converted back and read by us."""
    return _round_trip("ours")


def zero_2() -> dict[str, Any]:
    """The same of ZeRO-2, in float16."""
    return _round_trip("ZeRO-2 with offload")


def _round_trip(kind: str) -> dict[str, Any]:
    engine = engine_of(kind)
    train(engine, 0, 1)
    saved = picture(engine)
    masters = {
        name: ds.safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()
    }
    found: dict[str, Any] = {}
    with shared_folder() as folder:
        engine.save_checkpoint(str(folder), tag="ours")
        engine.destroy()
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            to_deepspeed(folder, folder / "theirs")
            from_deepspeed(folder / "theirs", folder / "back")
            fp32 = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="theirs")
            found["fp32"] = [name for name in masters if not torch.equal(masters[name], fp32[name])]
        torch.distributed.barrier()
        for name, switched_off in {"theirs": True, "theirs by us": False, "back": False}.items():
            engine = _engine(kind, upstream=switched_off)
            engine.load_checkpoint(str(folder), tag=name.split()[0])
            found[name] = differences(saved, picture(engine))
            if switched_off:
                engine.save_checkpoint(str(folder), tag="torch")
            engine.destroy()
        found["bytes"] = [_sizes(folder / "theirs"), _sizes(folder / "torch")]
    return found


def _engine(kind: str, *, upstream: bool) -> Any:
    """One that saves by us, or as DeepSpeed does."""
    if not upstream:
        return engine_of(kind)
    off = {"enabled": False}
    return engine_of(kind, deep_optimizer_states=off, datastates_ckpt=False)


def _sizes(tag: Path) -> dict[str, int]:
    return {file.name: os.path.getsize(file) for file in tag.glob("*.pt")}
