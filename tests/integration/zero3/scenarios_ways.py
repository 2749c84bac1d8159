"""Ways in, and what surrounds the update: model parallelism, client optimizers, teardown."""

from __future__ import annotations

import copy
import io
import json
import logging
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.utils import logger as ds_logger

import dos.run
from tests.integration.worlds import ROOT
from tests.integration.zero3.training import (
    HOST,
    MIXED,
    WIDTH,
    Job,
    differences,
    run,
    state_of,
    train,
)


def client_optimizer() -> dict[str, Any]:
    """A torch.optim.AdamW of the caller, which upstream refuses with offload to the CPU."""
    job = Job()
    model = job.model()
    client = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    config = job.config()
    del config["optimizer"]
    engine, *_ = deepspeed.initialize(model=model, optimizer=client, config=config)
    mine = {"log": train(engine, job), **state_of(engine)}
    engine.destroy()
    return {"different": differences(run(job), mine)}


def config_untouched() -> bool:
    """Whether the caller's configuration is as upstream leaves it."""
    left = []
    for options in (HOST, None):
        job = Job(options=options)
        config = job.config()
        section = copy.deepcopy(config.get("deep_optimizer_states"))
        model = job.model()
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        engine.destroy()
        assert config.pop("deep_optimizer_states", None) == section
        left.append(config)
    return left[0] == left[1]


def refused() -> dict[str, str]:
    """What each unusable setting is answered with, by deepspeed.initialize."""
    job = Job()
    offload = {"device": "cpu"}
    settings: dict[str, dict[str, Any]] = {
        "stage": {"zero": {"stage": 2}},
        "no offload": {"zero": {"offload_optimizer": {"device": "none"}}},
        "nvme": {"zero": {"offload_optimizer": {"device": "nvme", "nvme_path": "x"}}},
        "super_offload": {"zero": {"offload_optimizer": {**offload, "super_offload": True}}},
        "ratio": {"zero": {"offload_optimizer": {**offload, "ratio": 0.5}}},
        "zenflow": {"zero": {"zenflow": {"topk_ratio": 0.1}}},
        "offload_param": {"zero": {"offload_param": {"device": "cpu"}}},
        "mics": {"zero": {"mics_shard_size": 1}},
        "muon": {"extra": {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}},
        "bf16 masters": {
            "extra": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
        },
        "unknown option": {"options": {"strid": 2}},
        "upstream's option": {"options": {"pin_memory": True}},
        "too small": {"options": {"subgroup_size": 100}},
        "wire": {"options": {"wire": "fp32"}},
        "option in zero_optimization": {"zero": {"stride": 2}},
        "option in offload_optimizer": {"zero": {"offload_optimizer": {**offload, "stride": 2}}},
        "option at the top level": {"extra": {"stride": 2}},
        "section in zero_optimization": {
            "options": None,
            "zero": {"deep_optimizer_states": {"enabled": True}},
        },
        "section in the optimizer": {
            "options": None,
            "extra": {"optimizer": {"type": "AdamW", "deep_optimizer_states": {"enabled": True}}},
        },
        "section in offload_param": {
            "options": None,
            "zero": {"offload_param": {"deep_optimizer_states": {"enabled": True}}},
        },
        "value that is not valid": {"options": {"stride": 0.5}},
        "misspelt section": {"options": None, "extra": {"deep_optimizer_state": {"enabled": True}}},
        "not said whether on": {"options": None, "extra": {"deep_optimizer_states": {"stride": 2}}},
    }
    answers = {}
    for name, its in settings.items():
        try:
            replace(job, **its).engine()
            answers[name] = "accepted"
        except Exception as error:
            answers[name] = f"{type(error).__name__}: {error}"
    return answers


def experts() -> str:
    """What a mixture of experts is answered with; upstream itself refuses its own."""
    job = Job()
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), MoE(WIDTH, torch.nn.Linear(WIDTH, WIDTH), num_experts=2)
    )
    try:
        job.engine(model)
    except (AssertionError, ValueError) as error:
        return str(error)
    return "accepted"


class Halves:
    """An mpu: all ranks are one model-parallel group, each a data-parallel group of its own."""

    def __init__(self) -> None:
        self.world = torch.distributed.get_world_size()
        self.rank = torch.distributed.get_rank()
        self.model = torch.distributed.new_group(list(range(self.world)))
        alone = [torch.distributed.new_group([rank]) for rank in range(self.world)]
        self.data = alone[self.rank]

    def get_model_parallel_group(self) -> Any:
        """Both ranks."""
        return self.model

    def get_model_parallel_rank(self) -> int:
        """This rank."""
        return self.rank

    def get_model_parallel_world_size(self) -> int:
        """All of them."""
        return self.world

    def get_data_parallel_group(self) -> Any:
        """This rank alone."""
        return self.data

    def get_data_parallel_rank(self) -> int:
        """The only one."""
        return 0

    def get_data_parallel_world_size(self) -> int:
        """1."""
        return 1


def model_parallel() -> dict[str, Any]:
    """The first layer is cut over the ranks, the rest is the same everywhere."""
    mpu = Halves()
    found: dict[str, Any] = {}
    for name, options in (("host", HOST), ("mixed", MIXED), ("upstream", None)):
        job = Job(options=options, steps=5, precision="fp32")
        model = job.model()
        with torch.no_grad():
            model.first.weight.mul_(1.0 + mpu.rank)
        for parameter in model.first.parameters():
            parameter.model_parallel = True
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=job.config(), mpu=mpu
        )
        # The same on both ranks, except for what goes through the layer that is cut.
        log, expected = [], []
        for step in range(job.steps):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
            loss = engine(x).square().mean()
            engine.backward(loss)
            expected.append(_norm(engine, mpu))
            engine.step()
            log.append((float(engine.get_global_grad_norm()), loss.item()))
        found[name] = {**state_of(engine), "log": log, "expected": expected}
        engine.destroy()
    deepspeed.utils.groups.mpu = None  # upstream remembers it for all later engines
    return {
        "different": differences(found["host"], found["mixed"]),
        "norms": [norm for norm, _ in found["host"]["log"]],
        "expected": found["host"]["expected"],
        "upstream": [norm for norm, _ in found["upstream"]["log"]],
    }


def _norm(engine: Any, mpu: Halves) -> float:
    """By hand: the layer that is cut of both ranks, the rest of rank 0."""
    cut = rest = 0.0
    for name, parameter in engine.module.named_parameters():
        grad = deepspeed.utils.safe_get_full_grad(parameter).double()
        if name.startswith("first"):
            cut += float(grad.square().sum())
        elif mpu.rank == 0:
            rest += float(grad.square().sum())
    both = torch.tensor([cut + rest], dtype=torch.float64)
    torch.distributed.all_reduce(both)
    return float(both.sqrt())


def monitored() -> dict[str, Any]:
    """What DeepSpeed's monitor and standard output get of three steps."""
    shown = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(shown):
        monitor = {"enabled": True, "output_path": folder, "job_name": "run"}
        extra = {"csv_monitor": monitor, "wall_clock_breakdown": True, "steps_per_print": 100}
        run(Job(options=MIXED, steps=3, extra=extra))
        files = {path.stem: path.read_text().split() for path in Path(folder).rglob("*DOS*.csv")}
    return {
        "rows": {name.removeprefix("Train_DOS_"): len(rows) - 1 for name, rows in files.items()},
        "stride": files["Train_DOS_stride"][-1].split(",")[-1],
        "times": [line for line in shown.getvalue().splitlines() if "dos_update_host" in line],
    }


def announced() -> list[str]:
    """What is logged at the level that upstream's logger has by itself."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = ds_logger.level
    ds_logger.setLevel("WARNING")
    ds_logger.addHandler(handler)
    Job(options=MIXED).engine().destroy()
    ds_logger.removeHandler(handler)
    ds_logger.setLevel(level)
    return [line for line in lines if "deep_optimizer_states" in line]


def example() -> str:
    """What the example prints, started by `dos.run` as the launcher starts it."""
    shown = io.StringIO()
    config = {**json.loads((ROOT / "examples" / "zero3.json").read_text())}
    config["zero_optimization"]["offload_optimizer"]["pin_memory"] = False
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(shown):
        path = Path(folder, "config.json")
        path.write_text(json.dumps(config))
        script, argv = str(ROOT / "examples" / "zero3.py"), sys.argv
        sys.argv = ["dos.run", "--local_rank=0", script, "--deepspeed_config", str(path)]
        try:
            dos.run.main()
        finally:
            sys.argv = argv
    return shown.getvalue()
