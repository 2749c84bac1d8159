"""Engines of every kind that saves, of a model with state that a forward changes."""

from __future__ import annotations

import threading
from typing import Any

import deepspeed
import torch

from tests.gated_disk import Gated
from tests.integration.zero3.training import MIXED, OUT, WIDTH, may_persist

# So little that what is held has to wait for the disk.
RING_BYTES = 8 << 20
CHECKPOINT: dict[str, Any] = {"deep_optimizer_states": {"checkpoint": {"ring_bytes": RING_BYTES}}}
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
ZERO_3 = {
    "stage": 3,
    "sub_group_size": 1_000_000,
    "stage3_param_persistence_threshold": 2_000 if may_persist() else 0,
    **OFFLOAD,
}
OURS = {
    "enabled": True,
    **MIXED,
    "subgroup_size": 200_000,
    "checkpoint": {"ring_bytes": RING_BYTES},
}

KINDS: dict[str, dict[str, Any]] = {
    "ours": {
        "zero_optimization": ZERO_3,
        "bf16": {"enabled": True},
        "deep_optimizer_states": OURS,
    },
    "ours with residents": {
        "zero_optimization": ZERO_3,
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "deep_optimizer_states": {**OURS, "resident_ratio": 0.5},
    },
    "ZeRO-3": {
        "zero_optimization": ZERO_3,
        "bf16": {"enabled": True},
        **CHECKPOINT,
    },
    "ZeRO-2 with offload": {
        "zero_optimization": {"stage": 2, **OFFLOAD},
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "datastates_ckpt": {"host_cache_size": RING_BYTES / 2**30},
    },
    "ZeRO-1": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, **CHECKPOINT},
    "no ZeRO": {"zero_optimization": {"stage": 0}, **CHECKPOINT},
}


class Model(torch.nn.Module):
    """Some 2.3 million parameters; a forward changes buffers."""

    def __init__(self, width: int = 1500) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, width)
        self.block = torch.nn.Linear(width, width)
        self.last = torch.nn.Linear(width, OUT)
        self.register_buffer("seen", torch.zeros(width))  # the same on all ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs."""
        self.seen += 0.125
        x = torch.tanh(self.first(x)) - self.seen.to(x.dtype)
        return self.last(torch.nn.functional.dropout(torch.tanh(self.block(x)), 0.1))


class Following(Model):
    """With parameters that no optimizer has and a forward changes, as in a momentum encoder."""

    def __init__(self) -> None:
        super().__init__(3000)  # what comes behind is not in the chunks that a ring takes first
        self.follower = torch.nn.Linear(1000, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs."""
        with torch.no_grad():
            self.follower.weight += 0.125
        return super().forward(x)


class Frozen(Model):
    """Whose first layer is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


def engine_of(kind: str, model: type[Model] = Model, **more: Any) -> Any:
    """A fresh engine; `more` are further sections of its configuration."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6}},
        **KINDS[kind],
        **more,
    }
    made = model()
    named = [(name, p) for name, p in made.named_parameters() if p.requires_grad]
    trained = [p for name, p in named if not name.startswith("follower")]
    engine, *_ = deepspeed.initialize(model=made, model_parameters=trained, config=config)
    return engine


def backward(engine: Any, step: int) -> float:
    """The forward and backward of a step; its loss."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(100 * step + rank)
    dtype = next(engine.module.parameters()).dtype
    x, y = torch.randn(4, WIDTH).to(dtype), torch.randn(4, OUT).to(dtype)
    loss = torch.nn.functional.mse_loss(engine(x), y)
    engine.backward(loss)
    return loss.item()


def train(engine: Any, *steps: int) -> list[float]:
    """The losses of these steps."""
    losses = []
    for step in steps:
        losses.append(backward(engine, step))
        engine.step()
    return losses


def picture(engine: Any) -> dict[str, Any]:
    """Copies of all that a checkpoint holds of an engine."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    tree = {
        "module": engine.module.state_dict(),
        "optimizer": engine.optimizer.state_dict(),
        "scheduler": engine.lr_scheduler.state_dict(),
        "steps": engine.global_steps,
        "scaler": None if scaler is None else dict(vars(scaler)),
    }
    return dict(_leaves(tree, ""))


def _leaves(tree: Any, path: str) -> Any:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}/{key}")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{path}/{index}")
    elif isinstance(tree, torch.Tensor):
        yield path, tree.detach().clone()
    elif isinstance(tree, (int, float, str, bool)):
        yield path, tree


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Paths of what is not the same bit by bit."""
    return sorted(one.keys() ^ other.keys()) + [
        path
        for path in one.keys() & other.keys()
        if not (
            torch.equal(one[path], other[path])
            if isinstance(one[path], torch.Tensor)
            else one[path] == other[path]
        )
    ]


def gate(engine: Any) -> Gated:
    """The disk that the engine saves to from now on."""
    engine.checkpoint_engine.storage = disk = Gated()
    return disk


def open_soon(disk: Gated) -> None:
    """Let the disk go on when this thread has long begun to change what is being saved."""
    threading.Timer(0.3, disk.open_now.set).start()
