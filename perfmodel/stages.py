"""The measurements of a calibration, one by one: which rates, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dos.kernels import adam, cast
from dos.kernels.scalars import DType
from perfmodel.bench import Bench, DeviceArrays, MeasuredDevice
from perfmodel.disk import disk_rates
from perfmodel.profile import FUSED_BYTES_PER_PARAM
from perfmodel.timing import Work, rates

Found = Mapping[str, Any]
"""Fields of a `NodeProfile` with their values."""

_IN_A_ROW = 4
"""Ops that follow one another, so that the wait for the last one weighs little."""

_TINY = 32
"""Ops that follow one another where the cost of one is measured."""


class Lacking(Exception):
    """The machine has nothing of the kind that is measured; the message says what it lacks."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One measurement: its name for people, the fields that it finds, and how."""

    name: str
    fields: tuple[str, ...]
    measure: Callable[[Bench], Found]


def _device(bench: Bench) -> MeasuredDevice:
    if bench.device is None:
        raise Lacking("there is no accelerator")
    return bench.device


def _beyond_pace(bench: Bench) -> None:
    """For what no op of a plan is, so that no pace speaks of it."""
    if bench.device is not None and bench.device.emulated:
        raise Lacking("the virtual device is paced, and its pace says nothing of it")


def _alone(bench: Bench, work: Work) -> float:
    return rates([work], bench.effort.window_s)[0]


def device_and_link(bench: Bench) -> Found:
    """The update on the device, each way of the link, and both at once; all or none."""
    return {"device_params_per_s": _device_update(bench), **_link(bench, bench.here, "")}


def pageable_link(bench: Bench) -> Found:
    """The link from and to ordinary memory."""
    if _device(bench).device.type == "cpu":
        raise Lacking("a virtual device pins no memory")
    here = [torch.zeros(bench.copy_numel, dtype=torch.float32, device="cpu") for _ in range(2)]
    return _link(bench, here, "pageable_")


def _device_update(bench: Bench) -> float:
    device, numel = _device(bench), bench.copy_numel
    arrays = DeviceArrays(device, numel)
    update = device.work(
        "device", numel, lambda: device.update(arrays), numel=numel, repeats=_IN_A_ROW
    )
    return _alone(bench, update)


def _link(bench: Bench, here: list[torch.Tensor], prefix: str) -> Found:
    copies = bench.copies(here, repeats=_IN_A_ROW)
    h2d, d2h = (_alone(bench, copy) for copy in copies)
    return {
        f"{prefix}h2d_bytes_per_s": h2d,
        f"{prefix}d2h_bytes_per_s": d2h,
        f"{prefix}link_bytes_per_s": min(sum(rates(copies, bench.effort.window_s)), h2d + d2h),
    }


def device_memory(bench: Bench) -> Found:
    """Rounding fp32 to bf16 on the device, and a copy there, which reads and writes each byte."""
    device = _device(bench)
    _beyond_pace(bench)
    numel = bench.copy_numel
    source, target = (device.empty(numel, torch.float32) for _ in range(2))
    rounded = device.empty(numel, torch.bfloat16)
    round_, copy = lambda: rounded.copy_(source), lambda: target.copy_(source)
    return {
        "device_cast_params_per_s": _alone(
            bench, device.work("device", numel, round_, numel=numel)
        ),
        "device_memory_bytes_per_s": _alone(
            bench, device.work("device", 8 * numel, copy, numel=numel)
        ),
    }


def host_update(bench: Bench) -> Found:
    """The fused update with all threads."""
    rate = _alone(bench, bench.host_update())
    return {"host_params_per_s": rate, "threads": bench.pool.threads}


def host_update_beside_copies(bench: Bench) -> Found:
    """The fused update while both ways of the link are busy."""
    _device(bench)
    works = [bench.host_update(), *bench.copies(bench.here, repeats=_IN_A_ROW)]
    return {"host_params_per_s_beside_copies": rates(works, bench.effort.window_s)[0]}


def host_update_by_threads(bench: Bench) -> Found:
    """The fused update with 1, 2, 4 ... threads, and with all of them."""
    _beyond_pace(bench)
    most = bench.pool.threads
    counts = sorted({1 << bits for bits in range(most.bit_length())} | {most})
    found = {}
    for count in counts:
        with closing(adam.make_pool(count)) as pool:
            found[str(count)] = _alone(bench, bench.host_update(pool))
    return {"host_params_per_s_by_threads": found}


def host_memory(bench: Bench) -> Found:
    """The bytes of a fused update moved by a bare loop, with whichever stores are faster."""
    _beyond_pace(bench)
    native = _native()
    numel = bench.arrays.numel
    sweeps = [
        partial(native.sweep, **bench.arrays.at, numel=numel, stream=stream, pool=bench.pool)
        for stream in (False, True)
    ]
    moved_bytes = FUSED_BYTES_PER_PARAM * numel
    return {"host_memory_bytes_per_s": max(_alone(bench, Work(moved_bytes, run)) for run in sweeps)}


def host_cast(bench: Bench) -> Found:
    """fp32 rounded to bf16 with all threads, past the cache."""
    _beyond_pace(bench)
    _native()
    numel, at = bench.arrays.numel, bench.arrays.at
    body = partial(cast.downscale, at["p"], at["w"], numel, DType.BF16, pool=bench.pool)
    return {"host_cast_params_per_s": _alone(bench, Work(numel, body))}


def host_op_cost(bench: Bench) -> Found:
    """What an update of one parameter takes on the host."""
    return {"launch_s": 1 / _alone(bench, bench.host_update(numel=1, repeats=_TINY))}


def device_op_cost(bench: Bench) -> Found:
    """What an op of one element takes; the median over the lanes of the device."""
    device = _device(bench)
    copies = bench.copies(bench.here, numel=1, repeats=_TINY)
    arrays = DeviceArrays(device, 1)
    update = device.work("device", 1, lambda: device.update(arrays), numel=1, repeats=_TINY)
    costs_s = [4 / _alone(bench, copy) for copy in copies]  # their units are bytes
    return {"launch_s": median([*costs_s, 1 / _alone(bench, update)])}


def disk(directory: Path | None, bench: Bench) -> Found:
    """Direct writes and reads in a directory."""
    if directory is None:
        raise Lacking("no directory was given")
    write, read = disk_rates(directory, bench.effort.disk_bytes)
    return {"disk_write_bytes_per_s": write, "disk_read_bytes_per_s": read}


def _native() -> Any:
    try:
        return import_module("dos.kernels._native")
    except ModuleNotFoundError:
        raise Lacking("that needs the compiled extension") from None


NEEDED = (
    Stage("host update", ("host_params_per_s", "threads"), host_update),
    Stage("cost of an op on the host", ("launch_s",), host_op_cost),
)
"""Without these there is no profile."""

FOR_STRIDE = (
    Stage("cost of an op on the device", ("launch_s",), device_op_cost),
    Stage(
        "link and device",
        ("h2d_bytes_per_s", "d2h_bytes_per_s", "link_bytes_per_s", "device_params_per_s"),
        device_and_link,
    ),
    Stage(
        "host update beside copies",
        ("host_params_per_s_beside_copies",),
        host_update_beside_copies,
    ),
)
"""What a stride is solved from, beside the needed ones."""


def further(directory: Path | None) -> tuple[Stage, ...]:
    """All else; the disk in `directory`, if there is one."""
    return (
        Stage("host update by threads", ("host_params_per_s_by_threads",), host_update_by_threads),
        Stage("host memory", ("host_memory_bytes_per_s",), host_memory),
        Stage("host cast", ("host_cast_params_per_s",), host_cast),
        Stage(
            "pageable link",
            (
                "pageable_h2d_bytes_per_s",
                "pageable_d2h_bytes_per_s",
                "pageable_link_bytes_per_s",
            ),
            pageable_link,
        ),
        Stage(
            "device memory",
            ("device_cast_params_per_s", "device_memory_bytes_per_s"),
            device_memory,
        ),
        Stage(
            "disk",
            ("disk_write_bytes_per_s", "disk_read_bytes_per_s"),
            partial(disk, directory),
        ),
    )
