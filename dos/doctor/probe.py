"""One measurement: an update beside a bare sweep over the same bytes by the same threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from statistics import median

from dos.doctor import findings
from dos.doctor.findings import Finding
from dos.kernels import adam
from dos.memory import Slab, available_host_bytes
from dos.memory.sizes import LINE_BYTES
from perfmodel.bench import UPDATE_BYTES, HostArrays
from perfmodel.profile import FUSED_BYTES_PER_PARAM

PARAMS = 20_000_000
FEWEST_PARAMS = 2_000_000  # fewer stay in the caches of a server's processor
ROUNDS = 7


def params_for(available_bytes: int | None) -> int:
    """How many parameters to measure with: less than a quarter of the memory, 0 if too little.

    Where the system does not say what is available, 1 GiB is taken for granted.
    """
    room_bytes = (1 << 30 if available_bytes is None else available_bytes) // 4
    params = min(PARAMS, room_bytes // UPDATE_BYTES)
    return params if params >= FEWEST_PARAMS else 0


def update(rounds: int = ROUNDS) -> Finding:
    """The update's rate against the sweep's, by turns in one process; medians."""
    params = params_for(available_host_bytes())
    if not params:
        return findings.no_probe("too little host memory is available")
    try:
        import dos.kernels._native as native
    except ModuleNotFoundError:
        return findings.no_probe("that needs the compiled extension")
    pool = native.ThreadPool()
    with closing(pool), closing(Slab(params * UPDATE_BYTES + 5 * LINE_BYTES)) as slab:
        adam.first_touch([(slab.address, slab.n_bytes)], pool)
        arrays = HostArrays(slab, params)
        # With regular and with streaming stores: which is faster depends on the machine.
        runs: list[Callable[[], object]] = [
            partial(adam.update, [arrays.segment()], pool=pool),
            partial(native.sweep, **arrays.at, numel=params, stream=False, pool=pool),
            partial(native.sweep, **arrays.at, numel=params, stream=True, pool=pool),
        ]
        times_s = [[_seconds_of(run) for run in runs] for _ in range(rounds + 1)][1:]
    update_s, regular_s, streaming_s = (list(column) for column in zip(*times_s, strict=True))
    sweep_s = min(regular_s, streaming_s, key=median)
    moved_bytes = FUSED_BYTES_PER_PARAM * params
    ratio = median(bound / ours for bound, ours in zip(sweep_s, update_s, strict=True))
    return findings.update_probe(
        moved_bytes / median(update_s), moved_bytes / median(sweep_s), ratio, params
    )


def _seconds_of(run: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s
