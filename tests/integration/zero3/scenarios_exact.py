"""Training by schedule after schedule, and by upstream's own update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from deepspeed.utils import (
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_grad,
    safe_set_local_grad,
)

from tests.integration.zero3.training import (
    HOST,
    MIXED,
    Job,
    differences,
    distance,
    may_persist,
    run,
    state_of,
    train,
)

SCHEDULES: dict[str, dict[str, Any]] = {
    "one flat group": {"sub_group_size": 1_000_000_000},
    "flat group per parameter": {"sub_group_size": 1},
    "stride 2": {"options": MIXED},
    "stride 1.5, one slot": {"options": {**MIXED, "stride": 1.5, "device_slots": 1}},
    "stride 1, three slots": {
        "options": {**MIXED, "stride": 1, "device_slots": 3},
        "sub_group_size": 10**9,
    },
    "stride 3, larger subgroups": {"options": {**MIXED, "stride": 3, "subgroup_size": 2500}},
    "stride host": {"options": {**MIXED, "stride": "host"}},
    "stride auto": {"options": {**MIXED, "stride": "auto"}},
    "residents": {"options": {**MIXED, "resident_ratio": 0.5}},
    "all resident": {"options": {**MIXED, "stride": "host", "resident_ratio": 1.0}},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "fp16": {"precision": "fp16"},
    "fp32": {"precision": "fp32"},
    "no clipping": {"clip": 0.0},
    "accumulation": {"accumulation": 4},
    "accumulation in fp32": {
        "accumulation": 4,
        "extra": {"data_types": {"grad_accum_dtype": "fp32"}},
    },
    "groups and scheduler": {"groups": True, "scheduler": True},
    "frozen": {"frozen": True},
    "zero.Init": {"zero_init": True},
    "nothing persists": {"zero": {"stage3_param_persistence_threshold": 0}},
    "everything persists": {"zero": {"stage3_param_persistence_threshold": 10**6}},
    "activation checkpointing": {"checkpointed": True},
    "contiguous gradients": {"zero": {"reduce_scatter": False}},
}


def schedules() -> dict[str, Any]:
    """30 steps by each schedule: what differs from the first of them; and clipping bites."""
    base = Job(steps=30)
    expected = run(base)
    found = {
        name: differences(expected, run(replace(base, **its))) for name, its in SCHEDULES.items()
    }
    norms = [norm for _, norm, *_ in expected["log"]]
    return {"different": found, "least norm": min(norms), "clip": base.clip}


def changing_strides() -> list[str]:
    """What differs where each step is by another stride, as stride="auto" may choose."""
    job = Job(options={**MIXED, "stride": "auto"}, steps=8)
    engine = job.engine()
    update = engine.optimizer._dos.engine
    strides = iter([1, "host", 3, 1.5, 2, "host", 1, 2])
    update._choose_stride = lambda auto, record: update.change_stride(next(strides))
    mine = {"log": train(engine, job), **state_of(engine)}
    engine.destroy()
    return differences(run(replace(job, options=HOST)), mine)


def _compare(**settings: Any) -> dict[str, Any]:
    """What differs between two schedules, and how far upstream's update is."""
    job = Job(**settings)
    host, mixed = run(job), run(replace(job, options=MIXED, sub_group_size=10**9))
    upstream = run(replace(job, options=None))
    return {
        "different": differences(host, mixed),
        "distance": distance(host, upstream),
        "same": {
            "counts": host["counts"] == upstream["counts"],
            "scales": [log[2:] for log in host["log"]] == [log[2:] for log in upstream["log"]],
        },
        "skipped": [log[3] for log in host["log"]],
        "scales": [log[2] for log in host["log"]],
    }


def variants() -> dict[str, Any]:
    """Every variant that upstream can repeat."""
    names = set(VARIANTS) - (set() if may_persist() else {"everything persists"})
    return {name: _compare(**its) for name, its in VARIANTS.items() if name in names}


def cpu_adam() -> dict[str, float]:
    """How far DeepSpeedCPUAdam's update is after 30 steps."""
    job = Job(steps=30, cpu_adam=True)
    return distance(run(job), run(replace(job, options=None)))


def overflow() -> dict[str, Any]:
    """fp16 with a dynamic loss scale that is too large at first, and grows again later."""
    fp16 = {"enabled": True, "initial_scale_power": 22, "loss_scale_window": 3, "hysteresis": 1}
    return _compare(precision="fp16", steps=20, extra={"fp16": fp16})


def non_finite() -> dict[str, Any]:
    """bf16, with one gradient infinite in the third step: by us and by upstream."""

    def spoil(engine: Any, step: int) -> None:
        if step == 2:
            for parameter in engine.module.first.parameters():
                grad = safe_get_local_grad(parameter)
                grad[0] = float("inf")
                safe_set_local_grad(parameter, grad)

    job = Job(steps=5)
    found = {}
    for name, options in (("host", HOST), ("mixed", MIXED), ("upstream", None)):
        result = run(replace(job, options=options), before_step=spoil)
        found[name] = {
            "finite": bool(torch.isfinite(result["weight"]).all()),
            "skipped": [log[3] for log in result["log"]],
        }
    return found


def unused() -> dict[str, Any]:
    """A layer that takes part in two steps only; with all gradients read and without."""

    def read(engine: Any, step: int) -> None:
        for parameter in engine.module.parameters():
            safe_get_full_grad(parameter)

    job = Job(steps=5, seldom_at=(0, 2), accumulation=2)
    mixed = replace(job, options=MIXED)
    expected = run(job)
    first = run(replace(job, steps=1))
    parts = {
        "mixed": run(mixed),
        "read": run(job, before_step=read),
        "mixed, read": run(mixed, before_step=read),
    }
    return {
        "different": {name: differences(expected, its) for name, its in parts.items()},
        "trained": not torch.equal(first["exp_avg"], expected["exp_avg"]),
    }


def unused_is_zero() -> float:
    """One step with a layer and two without: its momentum decays, as by a gradient of zeros."""
    job = Job(steps=1, seldom_at=(0,), clip=0.0, precision="fp32")
    engine = job.engine()
    train(engine, job)
    weight = engine.module.seldom.weight
    before = safe_get_full_optimizer_state(weight, "exp_avg").clone()
    train(engine, replace(job, steps=2), first_step=1)
    after = safe_get_full_optimizer_state(weight, "exp_avg")
    engine.destroy()
    return float((after - before * 0.9 * 0.9).abs().max() / before.abs().max())
