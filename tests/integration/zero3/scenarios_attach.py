"""Attaching to an engine, and what is left when that, a step or the training is over."""

from __future__ import annotations

import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dos.integrations.deepspeed_zero3 import attach
from tests.integration.zero3.training import HOST, MIXED, Job, differences, run, state_of, train


def attached() -> dict[str, Any]:
    """`attach(engine, ...)` and the section inside offload_optimizer against the section."""
    job = Job(options=MIXED)
    expected = run(job)
    engine = replace(job, options=None).engine()
    attach(engine, **MIXED)
    by_hand = {"log": train(engine, job), **state_of(engine)}
    engine.destroy()
    offload = {"device": "cpu", "pin_memory": False}
    nested = {"offload_optimizer": {**offload, "deep_optimizer_states": {"enabled": True, **MIXED}}}
    inside = run(replace(job, options=None, zero=nested))
    off = replace(job, options=None, extra={"deep_optimizer_states": {"enabled": False}}).engine()
    kind = type(off.optimizer).__name__
    off.destroy()
    return {
        "by hand": differences(expected, by_hand),
        "inside offload_optimizer": differences(expected, inside),
        "off": kind,
    }


def attached_late() -> dict[str, Any]:
    """Attached after three steps of upstream's own: goes on from its state."""
    job = Job(options=None)
    engine = job.engine()
    train(engine, replace(job, steps=3))
    before = {**state_of(engine), "log": None}
    attach(engine, **MIXED)
    after = {**state_of(engine), "log": None}
    train(engine, replace(job, steps=3), first_step=3)
    counts = {
        float(engine.optimizer.optimizer.state[flat]["step"])
        for flat in engine.optimizer.fp32_partitioned_groups_flat
    }
    twice = ""
    try:
        attach(engine)
    except ValueError as error:
        twice = str(error)
    engine.destroy()
    return {"different": differences(before, after), "counts": counts, "twice": twice}


def attach_refused() -> dict[str, Any]:
    """An engine that could not be attached trains on by itself."""
    job = Job(options=None)
    engine = job.engine()
    answer = ""
    try:
        attach(engine, **MIXED, host_memory_bytes=1000)
    except ValueError as error:
        answer = str(error)
    alone = {"log": train(engine, job), **state_of(engine)}
    engine.destroy()
    return {"answer": answer, "different": differences(run(job), alone)}


def memory_of_attach() -> dict[str, float]:
    """How much the process grows at most while attached, in bytes per parameter."""
    job = Job(options=None, sub_group_size=1 << 30)
    layers = [
        torch.nn.Linear(1024, 1024, bias=False) for _ in range(9)
    ]  # large enough to go back to the system
    engine = job.engine(torch.nn.Sequential(*layers))
    engine.optimizer.step()  # all of upstream's memory is there
    Path("/proc/self/clear_refs").write_text("5")
    before_bytes = _memory_bytes("VmRSS")
    attach(engine, **HOST)
    grown_bytes = _memory_bytes("VmHWM") - before_bytes
    engine.destroy()
    return {"grown": grown_bytes / (9 << 20)}


def _memory_bytes(kind: str) -> int:
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(kind))
    return 1024 * int(line.split()[1])


def no_threads_left() -> list[str]:
    """Names of threads that an engine leaves behind."""
    before = set(threading.enumerate())
    run(Job(options=MIXED, steps=2))
    return [thread.name for thread in threading.enumerate() if thread not in before]


def torn() -> dict[str, str]:
    """What saving and a further step are answered with after a step that failed half-way."""
    job = Job(options=MIXED, steps=1)
    engine = job.engine()
    train(engine, job)
    interpreter = engine.optimizer._dos.engine._interpreter
    start, answers = interpreter.start, {}

    def fail(plan: Any, work: Any, *others: Any) -> Any:
        def last_fails(op: Any) -> Any:
            if op.index == len(plan.ops) - 1:
                raise OSError("the device is gone")
            return work(op)

        return start(plan, last_fails, *others)

    interpreter.start = fail
    with tempfile.TemporaryDirectory() as folder:
        for name, call in {
            "step": lambda: train(engine, job),
            "save": lambda: engine.save_checkpoint(folder),
            "again": lambda: train(engine, job),
        }.items():
            try:
                call()
                answers[name] = "done"
            except (OSError, ValueError) as error:
                answers[name] = str(error)
    engine.destroy()
    return answers
