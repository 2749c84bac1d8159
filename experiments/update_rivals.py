"""The updates that `experiments.bench_update` compares, each ready to run again and again."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dos.kernels import adam
from dos.kernels.scalars import AdamScalars, DType, Segment
from dos.memory.pinned import Slab

if TYPE_CHECKING:
    from dos.kernels._native import ThreadPool

LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
SCALARS = AdamScalars.at_step(
    lr=LEARNING_RATE,
    beta1=BETAS[0],
    beta2=BETAS[1],
    eps=EPS,
    weight_decay=WEIGHT_DECAY,
    step=10,
    decoupled=True,
)
LINE_BYTES = 64


@dataclass
class Update:
    """One way to update all parameters.

    Attributes:
        run: does it once.
        param_bytes: bytes of memory that it reads and writes for a parameter, counted without
            what a cache fetches before it overwrites it.
        memory: lives as long as the update does.
        times_s: of the runs so far.
    """

    run: Callable[[], None]
    param_bytes: int
    memory: object = None
    times_s: list[float] = field(default_factory=list)


class SlabArrays:
    """p, m, v in fp32, g and w in bf16, in memory as the product has it: a slab.

    Gradients are no zeros, nor is what is made of them: a processor may write whole lines of
    zeros without moving them (on a Zen 4, streamed zeros took 0.4 of the time of other numbers).
    """

    def __init__(self, numel: int) -> None:
        self.numel = numel
        offsets, end = {}, 0
        for name, itemsize in (("p", 4), ("m", 4), ("v", 4), ("g", 2), ("w", 2)):
            offsets[name] = end
            end += -(-numel * itemsize // LINE_BYTES) * LINE_BYTES
        self._slab = Slab(end)
        self.address = {name: self._slab.address + at for name, at in offsets.items()}
        self._slab.tensor(offsets["p"], numel, torch.float32).normal_()
        self._slab.tensor(offsets["g"], numel, torch.bfloat16).normal_()


def ours(numel: int, isa: str, pool: ThreadPool) -> Update:
    """This project: one pass that reads bf16 gradients and writes bf16 weights (28 bytes)."""
    arrays = SlabArrays(numel)
    segment = Segment(
        **arrays.address, numel=numel, g_dtype=DType.BF16, w_dtype=DType.BF16, scalars=SCALARS
    )

    return Update(lambda: adam.update([segment], impl=isa, pool=pool), 28, arrays)


def sweeps(numel: int, pool: ThreadPool) -> dict[bool, Update]:
    """The bandwidth bound, with regular (False) and streaming (True) stores of w (28 bytes)."""
    from dos.kernels._native import sweep

    arrays = SlabArrays(numel)

    def with_stores(stream: bool) -> Update:
        move = partial(sweep, **arrays.address, numel=numel, stream=stream, pool=pool)
        return Update(move, 28, arrays)

    return {stream: with_stores(stream) for stream in (False, True)}


def torch_fused(numel: int) -> Update:
    """torch's fused AdamW, with the passes that mixed precision adds; see `_three_passes`."""
    return _three_passes(
        numel,
        lambda p: torch.optim.AdamW(
            [p], lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
        ),
    )


def use_own_ninja() -> None:
    """Let DeepSpeed compile its kernel, at first use, with the ninja beside the interpreter.

    Another one, of another version, would compile it anew each time they take turns.
    """
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def deepspeed_offload(numel: int) -> Update | None:
    """What DeepSpeed's ZeRO-3 CPU offload does per subgroup; None, and a word why, without it.

    `DeepSpeedZeroOptimizer_Stage3.step` calls per subgroup `unscale_and_clip_grads`,
    `_optimizer_step` and `_reassign_or_swap_out_partitioned_parameters`: `_three_passes`.
    """
    use_own_ninja()
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return _three_passes(
            numel,
            lambda p: DeepSpeedCPUAdam(
                [p], lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY
            ),
        )
    except Exception as error:  # whatever goes wrong in a compilation on a foreign machine
        print(f"without DeepSpeed: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def _three_passes(
    numel: int, make: Callable[[torch.nn.Parameter], torch.optim.Optimizer]
) -> Update:
    """Scale the fp32 gradient in place, step, copy the parameter to bf16.

    42 bytes: 8 to scale; 28 to step (g, and p, m, v there and back); 6 to copy. That the
    gradient had to be made fp32 before is left out.
    """
    parameter = torch.nn.Parameter(torch.randn(numel))
    gradient = parameter.grad = torch.randn(numel)
    weight = torch.empty(numel, dtype=torch.bfloat16)
    optimizer = make(parameter)
    scale = 1.0 - 2.0**-20  # not 1, which a library might leave out; small over all rounds

    def run() -> None:
        gradient.mul_(scale)
        optimizer.step()
        weight.copy_(parameter.data)

    run()  # allocates the state
    return Update(run, 42)
