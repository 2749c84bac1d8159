"""ZeRO-3 with optimizer offload, upstream's and ours: `python -m experiments.bench_zero3`.

Engines over the same model take turns in one process, beginning with another one each round. What
is reported are medians of the ratios within a round, with quartiles, per setting:

host     plain ZeRO-3 offload (DeepSpeedCPUAdam) over ours without a device lane, unpaced, both on
         this machine's processor: `step` is engine.step(), `iteration` forward and backward, too.
         On the processor forward and backward take most of an iteration; on a GPU they would not
virtual  ours updated on the host alone over ours interleaved, both on a virtual device paced like
         an H100 node. An emulation: nothing in it is a GPU's time
gpu      as host, on a real GPU, and Twin-Flow and SuperOffload over ours; null without one

With `--json` standard output is one JSON object and nothing else.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer

import dos
from dos.stdout import own_stdout
from experiments.figures import AsJson, Output, environment, hand_over, median_and_quartiles
from experiments.pacing import MeasuredSteps, time_scale_for
from experiments.update_rivals import use_own_ninja
from perfmodel.profile import H100_NODE

BATCH = 8
SUBGROUP_SIZE = 1 << 20
WARM_UP = 2
Json = dict[str, Any]


@dataclass
class Rival:
    """An engine and what its rounds took."""

    engine: Any
    step_s: list[float] = field(default_factory=list)
    iteration_s: list[float] = field(default_factory=list)
    steps: MeasuredSteps = field(default_factory=MeasuredSteps)

    def run(self, x: torch.Tensor, counts: bool) -> None:
        """One iteration."""
        started_s = _now_s()
        loss = self.engine(x).float().square().mean()
        self.engine.backward(loss)
        reduced_s = _now_s()
        self.engine.step()
        ended_s = _now_s()
        if counts:
            self.step_s.append(ended_s - reduced_s)
            self.iteration_s.append(ended_s - started_s)
            session = getattr(self.engine.optimizer, "_dos", None)
            if session is not None:
                self.steps.add(session.last_step)


def _now_s() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def prepare() -> None:
    """One process that is a world of its own, without the operators DeepSpeed would compile."""
    if not torch.accelerator.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    use_own_ninja()
    import deepspeed

    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    meeting = f"file://{tempfile.mkdtemp()}/rendezvous"
    torch.distributed.init_process_group(backend, init_method=meeting, rank=0, world_size=1)
    deepspeed.init_distributed(backend, verbose=False)
    dos.register_deepspeed()


def engine_of(params: int, width: int, ours: Json | None, cpu_adam: bool, **offload: Any) -> Any:
    """A ZeRO-3 engine over a stack of square layers, with our section or without."""
    import deepspeed

    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(-(-params // width**2)):
        layers += [torch.nn.Linear(width, width, bias=False), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers)
    config: Json = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": not cpu_adam}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {
                "device": "cpu",
                "pin_memory": torch.accelerator.is_available(),
                **offload,
            },
            "sub_group_size": 25_000_000,
            "reduce_bucket_size": 50_000_000,
        },
    }
    if ours is not None:
        config["deep_optimizer_states"] = {"enabled": True, **ours}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    return engine


def take_turns(rivals: dict[str, Rival], width: int, rounds: int) -> None:
    """Run each rival once per round, after rounds that do not count."""
    names = list(rivals)
    device = rivals[names[0]].engine.device
    for done in range(rounds + WARM_UP):
        x = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(done))
        first = done % len(names)
        for name in names[first:] + names[:first]:
            rivals[name].run(x.to(device, torch.bfloat16), done >= WARM_UP)


def ratios(other: Rival, ours: Rival, rival: str) -> Json:
    """How many times as long the other takes, step and iteration."""
    found: Json = {}
    for what in ("step", "iteration"):
        theirs, mine = getattr(other, f"{what}_s"), getattr(ours, f"{what}_s")
        pairs = [its / my for its, my in zip(theirs, mine, strict=True)]
        median, quartiles = median_and_quartiles(pairs)
        found[f"{what}_vs_{rival}"] = round(median, 3)
        found[f"{what}_vs_{rival}_quartiles"] = [round(quartile, 3) for quartile in quartiles]
    return found


def compare(params: int, width: int, rounds: int, ours: Json, rivals: dict[str, Json]) -> Json:
    """Upstream's rivals over ours."""
    running = {name: Rival(engine_of(params, width, None, **its)) for name, its in rivals.items()}
    cpu_adam = next(iter(rivals.values()))["cpu_adam"]
    running["ours"] = mine = Rival(engine_of(params, width, ours, cpu_adam))
    take_turns(running, width, rounds)
    found: Json = {"params": sum(p.ds_numel for p in mine.engine.module.parameters())}
    for name in rivals:
        found |= ratios(running[name], mine, name)
    for name, rival in running.items():
        found[f"{name}_step_s"] = round(statistics.median(rival.step_s), 6)
        found[f"{name}_step_least_s"] = round(min(rival.step_s), 6)
        found[f"{name}_iteration_s"] = round(statistics.median(rival.iteration_s), 6)
        rival.engine.destroy()
    return {**found, "rounds": rounds, "label": str(mine.engine.device)}


def interleaving(params: int, width: int, rounds: int) -> Json:
    """Ours on the host alone over ours interleaved, paced."""
    from dos.integrations.deepspeed_zero3 import attach

    scale = time_scale_for(H100_NODE, SUBGROUP_SIZE)
    device = dos.VirtualDevice(pace=H100_NODE, time_scale=scale)
    running = {}
    for name in ("host", "auto"):
        engine = engine_of(params, width, None, cpu_adam=False)
        attach(engine, device=device, stride=name, subgroup_size=SUBGROUP_SIZE)
        running[name] = Rival(engine)
    take_turns(running, width, rounds)
    host, auto = running["host"].steps, running["auto"].steps
    latest = auto.latest
    assert latest is not None
    found: Json = {
        "step_vs_host_only": round(host.step_s / auto.step_s, 3),
        "step_s": {name: rival.steps.step_s for name, rival in running.items()},
        "stride": latest.stride,
        "label": latest.label,
        "virtual": True,
        "time_scale": scale,
        "steps_left_out": host.left_out + auto.left_out,
        "void": host.void or auto.void,
        "params": params,
        "rounds": rounds,
    }
    for rival in running.values():
        rival.engine.destroy()
    return found


def measure(params: int, width: int, rounds: int, virtual_params: int, cpu_adam: bool) -> Json:
    """All settings."""
    prepare()
    plain: Json = {"zero_offload": {"cpu_adam": cpu_adam}}
    settings: Json = {"host": None, "virtual": None, "gpu": None}
    if torch.accelerator.is_available():
        others: Json = {
            "twin_flow": {"cpu_adam": True, "ratio": 0.6},
            "super_offload": {"cpu_adam": True, "super_offload": True},
        }
        settings["gpu"] = compare(params, width, rounds, {}, {**plain, **others})
    else:
        settings["host"] = compare(params, width, rounds, {"device": "cpu"}, plain)
        settings["virtual"] = interleaving(virtual_params, width, rounds)
    rival = "DeepSpeedCPUAdam" if cpu_adam else "torch.optim.AdamW"
    return {"settings": settings, "plain_optimizer": rival, "environment": environment()}


def main(
    params: Annotated[int, typer.Option(min=1, help="parameters of the model")] = 100_000_000,
    width: Annotated[int, typer.Option(min=8, help="of its square layers")] = 2048,
    rounds: Annotated[int, typer.Option(min=1, help="rounds that count")] = 12,
    virtual_params: Annotated[int, typer.Option(min=1, help="of the emulation")] = 16_000_000,
    cpu_adam: Annotated[bool, typer.Option(help="plain offload by DeepSpeedCPUAdam")] = True,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Time ZeRO-3 steps against upstream's."""
    with own_stdout() as stdout:
        figures = measure(params, width, rounds, virtual_params, cpu_adam)
        for name, its in figures["settings"].items():
            print(name, json.dumps(its, indent=2), file=sys.stderr)
        hand_over(figures, stdout, as_json=as_json, output=output)


if __name__ == "__main__":
    typer.run(main)
