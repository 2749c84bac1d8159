"""What `experiments.bench_gpu_update` lets take turns on one device, ready to run again and again.

All of it runs on a CPU, too, as far as torch goes: that checks the arithmetic, not the speed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from dos.kernels import torch_adam, torch_cast
from experiments.update_rivals import BETAS, EPS, LEARNING_RATE, SCALARS, WEIGHT_DECAY, Update


def seconds_of(run: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Seconds that one run takes on the device, averaged over some that follow one another.

    By the device's own events; one run more, before those that count, keeps the device busy
    while the host gets ahead of it.
    """
    if device.type == "cpu":
        started_s = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - started_s) / repeats
    start, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
    run()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeats


def triton_kernels(device: torch.device) -> tuple[Any, Any] | None:
    """The modules with Triton's update and examination; None, and a word why, without them."""
    if device.type != "cuda":
        return None
    try:
        return import_module("dos.kernels.gpu.adam"), import_module("dos.kernels.gpu.cast")
    except ImportError as error:
        print(f"without Triton's kernels: {error}", file=sys.stderr)
        return None


class DeviceArrays:
    """p, m, v in fp32, g and w in bf16, with numbers that are not zero in p and g."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.p = torch.randn(numel, device=device)
        self.m, self.v = torch.zeros_like(self.p), torch.zeros_like(self.p)
        self.g = torch.randn(numel, device=device, dtype=torch.bfloat16)
        self.w = torch.empty_like(self.g)


def updates(numel: int, device: torch.device) -> dict[str, Update]:
    """Ways to update, and their bound: a copy that reads 14 bytes per parameter and writes 14.

    "triton" and "torch_operations" read bf16 gradients and write bf16 weights; the first in one
    pass over 28 bytes, the second in many, whose bytes are not counted beyond those 28.
    """
    arrays = DeviceArrays(numel, device)

    def by(update: Callable[..., None]) -> Update:
        return Update(lambda: update(arrays.p, arrays.m, arrays.v, arrays.g, arrays.w, SCALARS), 28)

    found = {"torch_operations": by(torch_adam.update)}
    if kernels := triton_kernels(device):
        found["triton"] = by(kernels[0].update)
    source = torch.empty(14 * numel, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return {
        **found,
        "torch_fused": torch_fused(numel, device),
        "copy": Update(lambda: void(target.copy_(source)), 28),
    }


def torch_fused(numel: int, device: torch.device) -> Update:
    """torch's fused AdamW with the passes that mixed precision adds.

    40 bytes: 6 to widen the gradient; 28 to step (g, and p, m, v there and back); 6 to round.
    """
    arrays = DeviceArrays(numel, device)
    parameter = torch.nn.Parameter(arrays.p)
    gradient = parameter.grad = torch.empty_like(arrays.p)
    optimizer = torch.optim.AdamW(
        [parameter], lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )
    master = parameter.detach()

    def run() -> None:
        gradient.copy_(arrays.g)
        optimizer.step()
        arrays.w.copy_(master)

    return Update(run, 40)


def examinations(numel: int, device: torch.device) -> dict[str, Update]:
    """Norm and fingerprint of a bf16 gradient, which one pass over 2 bytes could find."""
    g = torch.randn(numel, device=device, dtype=torch.bfloat16)
    found = {"torch_operations": Update(lambda: void(torch_cast.examine(g)), 2)}
    if kernels := triton_kernels(device):
        found["triton"] = Update(lambda: void(kernels[1].examine(g)), 2)
    return found


def link(numel: int, device: torch.device) -> dict[str, Update]:
    """Copies between pinned host memory and the device: each way alone, and both at once.

    2 bytes per parameter each way; "both" counts them together.
    """
    there = [torch.empty(numel, dtype=torch.bfloat16, device=device) for _ in range(2)]
    pinned = device.type != "cpu"
    here = [torch.zeros(numel, dtype=torch.bfloat16, pin_memory=pinned) for _ in range(2)]

    def h2d() -> None:
        there[0].copy_(here[0], non_blocking=True)

    def d2h() -> None:
        here[1].copy_(there[1], non_blocking=True)

    ways = {"h2d": Update(h2d, 2), "d2h": Update(d2h, 2)}
    return {**ways, "both": Update(at_once(h2d, d2h, device), 4)}


def at_once(
    first: Callable[[], None], second: Callable[[], None], device: torch.device
) -> Callable[[], None]:
    """Both on streams of their own, between what the current stream holds before and after."""
    if device.type == "cpu":

        def one_after_the_other() -> None:
            first()
            second()

        return one_after_the_other
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def run() -> None:
        current = torch.cuda.current_stream(device)
        for stream in streams:  # both, before either is waited for
            stream.wait_stream(current)
        for stream, work in zip(streams, (first, second), strict=True):
            with torch.cuda.stream(stream):
                work()
        for stream in streams:
            current.wait_stream(stream)

    return run


def void(_: object) -> None:
    """Drops a result: an `Update` returns nothing."""
