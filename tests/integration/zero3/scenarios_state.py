"""What is read, set, saved and loaded through upstream's interfaces."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed.utils as ds
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from tests.integration.zero3.training import (
    HOST,
    MIXED,
    Job,
    differences,
    distance,
    state_of,
    train,
)

PLAIN = None
STATES = ("exp_avg", "exp_avg_sq")


def read_all(engine: Any) -> dict[str, torch.Tensor]:
    """Everything that upstream's getters return, of all parameters."""
    found = {}
    for name, p in engine.module.named_parameters():
        found[f"{name} full fp32"] = ds.safe_get_full_fp32_param(p)
        found[f"{name} local fp32"] = ds.safe_get_local_fp32_param(p)
        found[f"{name} full grad"] = ds.safe_get_full_grad(p)
        found[f"{name} local grad"] = ds.safe_get_local_grad(p)
        for key in STATES:
            found[f"{name} full {key}"] = ds.safe_get_full_optimizer_state(p, key)
            found[f"{name} local {key}"] = ds.safe_get_local_optimizer_state(p, key)
    return {name: value.detach().clone() for name, value in found.items()}


def set_some(engine: Any) -> None:
    """Set something of every parameter by each of upstream's setters, scaled from what is there."""
    for p in engine.module.parameters():
        ds.safe_set_full_fp32_param(p, ds.safe_get_full_fp32_param(p) * 1.5)
        ds.safe_set_local_fp32_param(p, ds.safe_get_local_fp32_param(p) + 0.25)
        for key in STATES:
            ds.safe_set_full_optimizer_state(p, ds.safe_get_full_optimizer_state(p, key) * 2, key)
            local = ds.safe_get_local_optimizer_state(p, key)
            ds.safe_set_local_optimizer_state(p, local * 1.25, key)
    for index, p in enumerate(engine.module.parameters()):
        if index % 3 == 0:
            ds.safe_set_full_grad(p, ds.safe_get_full_grad(p) * 0.3)
        elif index % 3 == 1:
            ds.safe_set_local_grad(p, ds.safe_get_local_grad(p) * 0.7)


def interfaces() -> dict[str, Any]:
    """Read before a step, set, and step: by us and by upstream."""
    job = Job(precision="fp32", clip=0.0, steps=4, seldom_at=(0, 1, 2, 3))
    read: dict[str, Any] = {}
    after: dict[str, Any] = {}

    for name, options in (("host", HOST), ("mixed", MIXED), ("upstream", PLAIN)):

        def edit(engine: Any, step: int, name: str = name) -> None:
            if step == 2:
                read[name] = read_all(engine)
                set_some(engine)

        its = replace(job, options=options)
        engine = its.engine()
        log = train(engine, its, before_step=edit)
        after[name] = {**state_of(engine), "log": log}
        engine.destroy()
    far = {
        key: float((read["host"][key] - value).abs().max())
        for key, value in read["upstream"].items()
    }
    return {
        "read differs": [
            k for k, v in read["host"].items() if not torch.equal(v, read["mixed"][k])
        ],
        "read far": {key: value for key, value in far.items() if value > 1e-6},
        "shapes": [k for k, v in read["upstream"].items() if v.shape != read["host"][k].shape],
        "different": differences(after["host"], after["mixed"]),
        "distance": distance(after["host"], after["upstream"]),
    }


def after_a_step() -> dict[str, Any]:
    """Gradients read after a step that clipped them, some of which were set before: twice each."""
    job = Job(precision="fp32", steps=3, seldom_at=(0, 1, 2))
    read: dict[str, Any] = {}

    def negate(engine: Any, step: int) -> None:
        # Upstream clips by the norm from before: this does not change it.
        if step == job.steps - 1:
            for p in engine.module.first.parameters():
                ds.safe_set_full_grad(p, -ds.safe_get_full_grad(p))

    auto = {**MIXED, "stride": "auto"}
    for name, options in {"host": HOST, "mixed": MIXED, "auto": auto, "upstream": PLAIN}.items():
        its = replace(job, options=options)
        engine = its.engine()
        if name == "auto":  # all on the host, and on the device in the next step
            update = engine.optimizer._dos.engine
            update.change_stride("host")
            engine.optimizer._dos.gradients.place()
            update._choose_stride = lambda auto, record, update=update: update.change_stride(1)
        train(engine, its, before_step=negate)
        read[name] = [
            {key: value for key, value in read_all(engine).items() if "grad" in key}
            for _ in range(2)
        ]
        engine.destroy()
    return {
        name: [
            float((one[key] - value).abs().max())
            for one in its
            for key, value in read["upstream"][0].items()
        ]
        for name, its in read.items()
    }


@contextmanager
def shared_folder() -> Iterator[Path]:
    """One folder for all ranks."""
    with tempfile.TemporaryDirectory() as mine:
        names: list[Any] = [mine]
        torch.distributed.broadcast_object_list(names)
        yield Path(names[0])
        torch.distributed.barrier()


def resumed(first: Job, then: Job, folder: Path) -> dict[str, Any]:
    """Train and save by one job, load and train on by another; its end, and the way there."""
    engine = first.engine()
    train(engine, first)
    tag = engine.save_checkpoint(str(folder), tag="here") and "here"
    saved = {**state_of(engine), "log": None}
    engine.destroy()
    engine = then.engine()
    engine.load_checkpoint(str(folder), tag=tag)
    loaded = {**state_of(engine), "log": None}
    log = train(engine, then, first_step=first.steps)
    end = {**state_of(engine), "log": log}
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in engine.optimizer.param_groups
    ]
    engine.destroy()
    return {"saved": saved, "loaded": loaded, "end": end, "groups": groups}


def rigid() -> dict[str, Any]:
    """Save and resume, with another stride, from and into upstream's own update."""
    job = Job(groups=True, scheduler=True, steps=5)
    whole = replace(job, steps=10)
    engine = whole.engine()
    train(engine, whole)
    straight = {**state_of(engine), "log": None}
    engine.destroy()
    found: dict[str, Any] = {}
    pairs = {
        "host, host": (HOST, HOST),
        "mixed, host": (MIXED, HOST),
        "host, another stride": (HOST, {**MIXED, "stride": 1.5}),
        "residents, mixed": ({**MIXED, "resident_ratio": 0.6}, MIXED),
        "mixed, residents": (MIXED, {**MIXED, "resident_ratio": 0.6}),
        "host, plain": (HOST, PLAIN),
        "plain, mixed": (PLAIN, MIXED),
    }
    for name, (first, then) in pairs.items():
        with shared_folder() as folder:
            result = resumed(replace(job, options=first), replace(job, options=then), folder)
        end = {**result["end"], "log": None}
        found[name] = {
            "loaded": differences(result["saved"], result["loaded"]),
            "end": differences(straight, end),
            "distance": distance(straight, end),
        }
    return found


def to_fp32() -> dict[str, Any]:
    """zero_to_fp32 of a checkpoint, and the masters of all ranks put together."""
    job = Job(options=MIXED, steps=3)
    engine = job.engine()
    train(engine, job)
    with shared_folder() as folder:
        engine.save_checkpoint(str(folder), tag="here")
        torch.distributed.barrier()
        found = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="here")
    different = [
        name
        for name, p in engine.module.named_parameters()
        if not torch.equal(ds.safe_get_full_fp32_param(p).cpu(), found[name])
    ]
    engine.destroy()
    return {"different": different, "count": len(found)}


def full_state(engine: Any) -> dict[str, torch.Tensor]:
    """fp32 weights and moments of whole parameters, which do not depend on the number of ranks."""
    found = {}
    for name, p in engine.module.named_parameters():
        found[name] = ds.safe_get_full_fp32_param(p).clone()
        for key in STATES:
            found[f"{name} {key}"] = ds.safe_get_full_optimizer_state(p, key).clone()
    return found
