"""What is saved is of one step, on every kind of engine."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.utils as ds
import torch
from deepspeed.pipe import PipelineModule

from dos.errors import IntegrationError
from tests.integration.zero3.saving import (
    KINDS,
    RING_BYTES,
    Following,
    Frozen,
    backward,
    differences,
    engine_of,
    gate,
    open_soon,
    picture,
    train,
)
from tests.integration.zero3.scenarios_state import shared_folder


def step_exact() -> dict[str, Any]:
    """Save to a disk that takes nothing yet, change everything as early as allowed, resume."""
    found = {}
    for kind in KINDS:
        with shared_folder() as folder:
            found[kind] = _step_exact(kind, folder)
    return found


def _step_exact(kind: str, folder: Path) -> dict[str, Any]:
    engine = engine_of(kind)
    train(engine, 0, 1)
    saved, mine = picture(engine), {"tensor": torch.ones(3), "set": {1, 2}}
    disk = gate(engine)
    engine.save_checkpoint(str(folder), client_state={"mine": mine})
    mine["tensor"].zero_()
    mine["set"].clear()
    losses = [backward(engine, 2)]
    early = sorted(path.name for path in folder.glob("[!.z]*"))
    open_soon(disk)
    engine.step()
    losses += train(engine, 3)
    end = picture(engine)
    engine.destroy()
    torch.distributed.barrier()
    files = sorted(str(path.relative_to(folder)) for path in folder.glob("[!z]*/*"))
    latest = (folder / "latest").read_text()

    engine = engine_of(kind)
    _, client = engine.load_checkpoint(str(folder))
    loaded = picture(engine)
    again = train(engine, 2, 3)
    result = {
        "early": early,
        "files": files,
        "latest": latest,
        "client": (client["mine"]["tensor"].tolist(), client["mine"]["set"]),
        "loaded": differences(saved, loaded),
        "end": differences(end, picture(engine)),
        "losses": losses == again,
    }
    engine.destroy()
    return result


def step_exact_of_two() -> dict[str, Any]:
    """The same of the kinds whose ranks write differently."""
    found = {}
    for kind in ("ours", "ZeRO-2 with offload", "no ZeRO"):  # there the second has no file
        with shared_folder() as folder:
            found[kind] = _step_exact(kind, folder)
    return found


def several() -> dict[str, Any]:
    """Saves without a step between, of one name again, and of a model alone."""
    engine = engine_of("ours")
    engine._config.zero_config.gather_16bit_weights_on_model_save = True
    train(engine, 0)
    saved = picture(engine)
    found: dict[str, Any] = {}
    with shared_folder() as folder:
        for tag in ("a", "b", "a"):
            engine.save_checkpoint(str(folder), tag=tag)
        engine.save_16bit_model(str(folder / "model"))
        torch.distributed.barrier()
        found["model"] = sorted(torch.load(folder / "model" / "pytorch_model.bin"))
        found["left"] = [path.name for path in (folder / "model").iterdir()]
        train(engine, 1)
        engine.save_checkpoint(str(folder), tag="c", save_latest=False)
        ours = engine.checkpoint_engine
        found["contract"] = (
            ours.is_decoupled(),
            ours.get_commit_info(),
            ours.preserves_storage_sharing(),
        )
        engine.destroy()
        ours.cleanup()
        torch.distributed.barrier()
        found["latest"] = (folder / "latest").read_text()
        found["tags"] = sorted(path.parent.name for path in folder.glob("*/manifest.json"))
        engine = engine_of("ours")
        for tag in ("a", "b"):
            engine.load_checkpoint(str(folder), tag=tag)
            found[f"loaded {tag}"] = differences(saved, picture(engine))
        engine.destroy()
        return found


def setters() -> dict[str, Any]:
    """Masters and state that are set right after a save, which does not have them."""
    found = {}
    for kind in ("ours", "ZeRO-2 with offload"):
        engine = engine_of(kind)
        train(engine, 0)
        saved, disk = picture(engine), gate(engine)
        weight = engine.module.block.weight
        with shared_folder() as folder:
            engine.save_checkpoint(str(folder))
            open_soon(disk)
            ds.safe_set_full_fp32_param(weight, torch.zeros(1500, 1500))
            ds.safe_set_full_optimizer_state(weight, torch.ones(1500, 1500), "exp_avg")
            engine.destroy()
            engine = engine_of(kind)
            engine.load_checkpoint(str(folder))
        found[kind] = differences(saved, picture(engine))
        engine.destroy()
    return found


def unowned() -> dict[str, Any]:
    """A forward, after a save to a disk that takes nothing yet, changes a parameter of its own."""
    larger = {"checkpoint": {"ring_bytes": 2 * RING_BYTES}}  # all that is copied has to fit
    engine = engine_of("ZeRO-1", Following, deep_optimizer_states=larger)
    train(engine, 0)
    saved, disk = picture(engine), gate(engine)
    with shared_folder() as folder:
        engine.save_checkpoint(str(folder))
        backward(engine, 1)
        open_soon(disk)
        engine.destroy()
        engine = engine_of("ZeRO-1", Following)
        engine.load_checkpoint(str(folder))
        result = differences(saved, picture(engine))
        engine.destroy()
    return {"loaded": result}


def frozen() -> dict[str, Any]:
    """A save without what is not trained, loaded where that is another."""
    engine = engine_of("ZeRO-2 with offload", Frozen)
    train(engine, 0)
    with shared_folder() as folder:
        engine.save_checkpoint(str(folder), exclude_frozen_parameters=True)
        saved = picture(engine)
        engine.destroy()
        engine = engine_of("ZeRO-2 with offload", Frozen)
        with torch.no_grad():
            engine.module.first.weight.zero_()
            engine.module.first.bias.zero_()
        engine.load_checkpoint(str(folder), load_module_strict=False)
        result = differences(saved, picture(engine))
        engine.destroy()
    return {"different": result}


def in_part() -> dict[str, Any]:
    """What differs after a load of a part from what was saved, and from what was there before."""
    found: dict[str, Any] = {}
    for kind in ("ZeRO-1", "ZeRO-2 with offload", "no ZeRO", "ZeRO-3"):
        engine = engine_of(kind)
        train(engine, 0, 1)
        saved = picture(engine)
        with shared_folder() as folder:
            engine.save_checkpoint(str(folder))
            for part in ("load_module_only", "load_optimizer_states"):
                engine.load_checkpoint(str(folder))
                train(engine, 5)
                before = picture(engine)
                try:
                    engine.load_checkpoint(str(folder), **{part: part == "load_module_only"})
                except IntegrationError as error:
                    found[f"{kind}, {part}"] = error.what
                    continue
                after = picture(engine)
                found[f"{kind}, {part}"] = (differences(saved, after), differences(before, after))
            engine.destroy()
    return found


def universal() -> dict[str, Any]:
    """A load of a universal checkpoint, of which there is none, right after a save."""
    engine = engine_of("ZeRO-1", checkpoint={"load_universal": True})
    disk = gate(engine)
    with shared_folder() as folder:
        engine.save_checkpoint(str(folder), tag="a")
        open_soon(disk)
        with suppress(ValueError):
            engine.load_checkpoint(str(folder))
        whole = (folder / "a" / "manifest.json").exists()
        engine.destroy()
    return {"whole": whole}


def pipeline() -> dict[str, Any]:
    """A pipeline engine, which calls the step by itself, saves each layer in a file."""
    engine = _pipeline()
    ones = torch.ones(4, 800, dtype=torch.bfloat16)
    batches = iter([(ones * n, ones) for n in range(9)])
    engine.train_batch(batches)
    saved, disk = picture(engine), gate(engine)
    with shared_folder() as folder:
        engine.save_checkpoint(str(folder))
        open_soon(disk)
        engine.train_batch(batches)
        engine.destroy()
        engine = _pipeline()
        engine.load_checkpoint(str(folder))
        result = differences(saved, picture(engine))
        engine.destroy()
    return {"loaded": result}


def _pipeline() -> Any:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(800, 800), torch.nn.Tanh(), torch.nn.Linear(800, 800)]
    engine, *_ = deepspeed.initialize(
        model=PipelineModule(layers, num_stages=1, loss_fn=torch.nn.functional.mse_loss),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6}},
            **KINDS["ZeRO-1"],
        },
    )
    return engine
