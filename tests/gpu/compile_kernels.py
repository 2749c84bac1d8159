"""Compiles what the library launches, for GPUs that need not be there.

The library's own functions are called, so that what is compiled is what a GPU would run: same
options, same types, same specialization. Only the launch is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from dos.kernels.gpu import adam, cast
from dos.kernels.scalars import AdamScalars

ARCHITECTURES = (80, 90)
FP32, FORMATS = torch.float32, (torch.float32, torch.bfloat16, torch.float16)
# Aligned, unaligned, a size that becomes a constant, and one that needs 64 bits.
PLACES = {"": (4096, 0), "unaligned": (4097, 1), "single": (1, 0), "huge": (2**31 + 16, 0)}


class AbsentGPU:
    """The driver of a GPU that code can be compiled for, and no more."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        """A number for Triton's cache, one per architecture."""
        return self._architecture

    def get_current_stream(self, device: int) -> int:
        """None that anything could run on."""
        return 0


def flat(place: str, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of which only the address and the length are used: it has the memory of one."""
    numel, start = PLACES[place]
    return torch.empty(start + 1, dtype=dtype)[start:].expand(numel)


Call = tuple[str, Callable[[], None]]


def some_calls() -> Iterator[Call]:
    """Every line of every kernel, by name."""
    half, brain = torch.float16, torch.bfloat16
    for form in (False, FP32, None), (True, brain, brain), (False, half, half), (True, FP32, FP32):
        yield f"update {form}", partial(update, "", *form)
    for place, *form in ("", FP32, True), ("", brain, False), ("unaligned", half, True):
        yield f"examine {place} {form}", partial(examine, place, *form)
    for dtype in half, brain:
        yield f"downscale {dtype}", partial(downscale, "", dtype)


def all_calls() -> Iterator[Call]:
    """Each kernel in each form, by name."""
    for form in product((False, True), FORMATS, (None, *FORMATS)):
        for place in PLACES if form[1:] == (torch.bfloat16, torch.bfloat16) else ("",):
            yield f"update {place} {form}", partial(update, place, *form)
    for place, *form in product(PLACES, FORMATS, (False, True)):
        yield f"examine {place} {form}", partial(examine, place, *form)
    for place, dtype in product(PLACES, FORMATS[1:]):
        yield f"downscale {place} {dtype}", partial(downscale, place, dtype)


def update(place: str, decoupled: bool, g: torch.dtype, w: torch.dtype | None) -> None:
    """One update in these formats."""
    scalars = AdamScalars.at_step(
        lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=3, decoupled=decoupled
    )
    p, m, v = (flat(place, FP32) for _ in range(3))
    adam.update(p, m, v, flat(place, g), None if w is None else flat(place, w), scalars)


def examine(place: str, dtype: torch.dtype, with_output: bool) -> None:
    """One gradient."""
    cast.examine(flat(place, dtype), flat(place, FP32) if with_output else None)


def downscale(place: str, dtype: torch.dtype) -> None:
    """One array rounded."""
    cast.downscale(flat(place, FP32), flat(place, dtype))


def main(calls: Callable[[], Iterator[Call]], folder: Path) -> None:
    """Write the PTX of the calls to `folder`, and that of an update whose products were fused."""
    ptx: list[str] = []
    fusing: dict[str, bool] = {}
    run = JITFunction.run

    def only_compile(self: JITFunction, *args: Any, warmup: bool, **options: Any) -> None:
        ptx.append(run(self, *args, warmup=True, **{**options, **fusing}).asm["ptx"])

    JITFunction.run = only_compile
    for architecture in ARCHITECTURES:
        driver.set_active(AbsentGPU(architecture))
        for name, call in calls():
            call()
            (folder / f"{architecture} {name}.ptx").write_text(ptx.pop())
    fusing["enable_fp_fusion"] = True
    update("", True, FP32, None)
    (folder / "fused.ptx").write_text(ptx.pop())


if __name__ == "__main__":
    main({"some": some_calls, "all": all_calls}[sys.argv[1]], Path(sys.argv[2]))
