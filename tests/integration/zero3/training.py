"""A small model trained by DeepSpeed ZeRO-3, with and without this library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger
from packaging.version import Version
from torch.utils.checkpoint import checkpoint

import dos


def _prepare() -> None:
    """Real DeepSpeed over the gloo of this process, without what it would compile first."""
    logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # torch computes fp16 on the CPU, which DeepSpeed does not know.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    deepspeed.init_distributed("gloo", verbose=False)
    dos.register_deepspeed()


_prepare()

# Until then upstream's own runs on two ranks are not repeatable with parameters that persist. We
# suspect, without proof, that it reads such parameters while other ranks' parts still arrive.
REPEATABLE = Version(deepspeed.__version__) >= Version("0.19.7")

WIDTH, HIDDEN, OUT = 32, 80, 8
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HOST = {"device": "cpu"}
MIXED = {"device": "virtual", "stride": 2, "subgroup_size": 1024}


class Model(torch.nn.Module):
    """An MLP of some 12,000 parameters with one that no batch needs."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.first = torch.nn.Linear(WIDTH, HIDDEN)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(1))
        self.last = torch.nn.Linear(HIDDEN, OUT)
        self.seldom = torch.nn.Linear(OUT, OUT)

    def forward(self, x: torch.Tensor, *, seldom: bool = False) -> torch.Tensor:
        """Outputs; with `seldom` through the layer that is otherwise left out."""
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            if self.checkpointed:
                x = torch.tanh(checkpoint(block, x, use_reentrant=False))
            else:
                x = torch.tanh(block(x))
        x = self.last(x)
        return self.seldom(x) if seldom else x


def may_persist() -> bool:
    """Whether training is repeatable with parameters that persist."""
    return REPEATABLE or torch.distributed.get_world_size() == 1


@dataclass
class Job:
    """Settings of one run; the fields of a DeepSpeed configuration under their short names."""

    options: dict[str, Any] | None = field(default_factory=lambda: dict(HOST))
    precision: str = "bf16"
    steps: int = 10
    sub_group_size: int = 3000
    clip: float = 0.05
    accumulation: int = 1
    groups: bool = False
    scheduler: bool = False
    frozen: bool = False
    zero_init: bool = False
    checkpointed: bool = False
    seldom_at: tuple[int, ...] = ()
    cpu_adam: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        """The DeepSpeed configuration."""
        optimizer: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
        if not self.cpu_adam:
            optimizer["torch_adam"] = True
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "optimizer": {"type": "AdamW", "params": optimizer},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "pin_memory": False},
                "sub_group_size": self.sub_group_size,
                "stage3_param_persistence_threshold": 100 if may_persist() else 0,
                "reduce_bucket_size": 10_000,
                **self.zero,
            },
            **self.extra,
        }
        if self.precision != "fp32":
            config.setdefault(self.precision, {"enabled": True})
        if self.scheduler:
            params = {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 6}
            config["scheduler"] = {"type": "WarmupLR", "params": params}
        if self.options is not None:
            config["deep_optimizer_states"] = {"enabled": True, **self.options}
        return config

    def model(self) -> Model:
        """The same weights every time; partitioned when made, with `zero_init`."""
        torch.manual_seed(0)
        config = self.config()
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=self.zero_init):
            model = Model(checkpointed=self.checkpointed)
        if self.frozen:
            model.first.requires_grad_(False)
        return model

    def engine(self, model: torch.nn.Module | None = None) -> Any:
        """A fresh engine over a fresh model."""
        model = self.model() if model is None else model
        parameters: Any = [p for p in model.parameters() if p.requires_grad]
        if self.groups:
            named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
            parameters = [
                {"params": [p for n, p in named if n.endswith("weight")], "lr": 2e-2},
                {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
            ]
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=parameters, config=self.config()
        )
        return engine


def batches(job: Job, first_step: int = 0) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Micro-step after micro-step its step, input and target, different on every rank."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for step in range(first_step, first_step + job.steps):
        for micro in range(job.accumulation):
            seed = (step * job.accumulation + micro) * world + rank
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(4, WIDTH, generator=generator)
            y = torch.randn(4, OUT, generator=generator)
            dtype = DTYPES[job.precision]
            yield step, x.to(dtype), y.to(dtype)


Edit = Callable[[Any, int], None]


def train(
    engine: Any, job: Job, *, first_step: int = 0, before_step: Edit | None = None
) -> list[Any]:
    """Train on; per step the loss, the norm, the loss scale, and whether it was left out."""
    log = []
    for step, x, y in batches(job, first_step):
        out = engine(x, seldom=step in job.seldom_at)
        loss = torch.nn.functional.mse_loss(out, y)
        engine.backward(loss)
        boundary = engine.is_gradient_accumulation_boundary()
        if boundary and before_step is not None:
            before_step(engine, step)
        engine.step()
        if boundary:
            norm = engine.get_global_grad_norm()
            norm = None if norm is None else float(norm)
            scale = float(engine.optimizer.loss_scale)
            log.append((loss.item(), norm, scale, bool(engine.optimizer.overflow)))
    return log


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    """All weights and fp32 state of this rank, in the order of the parameters."""
    optimizer = engine.optimizer
    flats = optimizer.fp32_partitioned_groups_flat
    found = {
        "weight": [flat.float() for flat in optimizer.fp16_partitioned_groups_flat],
        "master": [flat.detach() for flat in flats],
    }
    for key in ("exp_avg", "exp_avg_sq"):
        found[key] = [optimizer.optimizer.state[flat][key] for flat in flats]
    return {key: torch.cat([part.flatten() for part in parts]) for key, parts in found.items()}


def run(job: Job, before_step: Edit | None = None) -> dict[str, Any]:
    """Train from the start; state, log, and the number of flat groups."""
    engine = job.engine()
    log = train(engine, job, before_step=before_step)
    result = {**state_of(engine), "log": log, "flat_groups": len(engine.optimizer.fp16_groups)}
    counts = [
        float(engine.optimizer.optimizer.state[flat]["step"])
        for flat in engine.optimizer.fp32_partitioned_groups_flat
    ]
    result["counts"] = sorted(set(counts))
    engine.destroy()
    return result


KINDS = ("weight", "master", "exp_avg", "exp_avg_sq")


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What of two runs is not the same bit by bit."""
    different = [k for k in KINDS if not torch.equal(one[k], other[k])]
    return different + (["log"] if one["log"] != other["log"] else [])


def distance(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """The largest difference of each kind of state."""
    return {k: float((one[k] - other[k]).abs().max()) for k in KINDS}
