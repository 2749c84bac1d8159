"""How fast the host update is: `python -m experiments.bench_update`.

Four updates of the same number of parameters take turns in one process, beginning with another
one each round. What is reported are medians of the ratios within a round, with quartiles:

vs_deepspeed    time of what DeepSpeed's ZeRO-3 CPU offload does per subgroup, over ours: the
                fp32 gradient scaled in place, DeepSpeedCPUAdam, a copy to bf16; 42 bytes per
                parameter to and from memory. null where DeepSpeed is missing or does not build
vs_torch_fused  the same with torch's fused AdamW on the CPU; 42 bytes
of_bandwidth    time of a bare sweep over as many arrays and bytes as ours, by the same threads,
                over ours; 28 bytes. w is written with regular or streaming stores, whichever
                took less time here (`sweep_stores`)

Ours reads bf16 gradients and writes bf16 weights in one pass; 28 bytes. Ours and the sweep work
in a slab, advised to huge pages, as the product does; the rivals in ordinary torch tensors, as
their users do. With `THP_MEM_ALLOC_ENABLE=1` in the environment torch advises those to huge
pages, too; `rivals_memory` says what it was.

With `--json` standard output is one JSON object and nothing else; the table is on standard error.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from dos.errors import ConfigError
from dos.stdout import own_stdout
from experiments import update_rivals as rivals
from experiments.figures import (
    AsJson,
    Output,
    environment,
    hand_over,
    median_and_quartiles,
    native_isas,
)
from experiments.update_rivals import Update

REST_S = 0.01
"""Between two updates: the threads of OpenMP go on spinning for a while after their work, on
cores that the next update wants."""

RATIOS = {"vs_deepspeed": "deepspeed", "vs_torch_fused": "torch_fused", "of_bandwidth": "sweep"}


def measure(params: int, rounds: int, isa: str, threads: int, deepspeed: bool) -> dict[str, object]:
    """All figures, for programs.

    Raises:
        ConfigError: no such instruction set, or no compiled extension.
    """
    isas = native_isas()
    if not isas:
        raise ConfigError(
            "there is no compiled extension to measure",
            where="bench_update",
            fix="install a C++ compiler, then the project again",
        )
    isa = isas[0] if isa == "auto" else isa
    if isa not in isas:
        raise ConfigError(
            f"no {isa!r} on this machine", where="--isa", fix=f"one of {', '.join(isas)}"
        )
    import dos.kernels._native as native  # there, since it has instruction sets

    pool = native.ThreadPool(threads)
    # Read by OpenMP when a library with a copy of its own is loaded, as DeepSpeed's kernel is.
    os.environ["OMP_NUM_THREADS"] = str(pool.threads)
    torch.set_num_threads(pool.threads)
    updates = {"ours": rivals.ours(params, isa, pool), "torch_fused": rivals.torch_fused(params)}
    if deepspeed and (built := rivals.deepspeed_offload(params)):
        updates["deepspeed"] = built
    sweeps = rivals.sweeps(params, pool)
    updates |= {"sweep, regular": sweeps[False], "sweep, streaming": sweeps[True]}
    take_turns(updates, rounds)
    regular, streaming = updates.pop("sweep, regular"), updates.pop("sweep, streaming")
    streamed = _median(streaming.times_s) < _median(regular.times_s)
    updates["sweep"] = streaming if streamed else regular
    return {
        **figures_of(updates, params),
        "params": params,
        "isa": isa,
        "threads": pool.threads,
        "rounds": rounds,
        "sweep_stores": "streaming" if streamed else "regular",
        "our_memory": "slab, advised to huge pages",
        "rivals_memory": _rivals_memory(),
        "environment": environment(),
    }


def take_turns(updates: dict[str, Update], rounds: int) -> None:
    """Run each update once per round, after one round that does not count."""
    names = list(updates)
    for done in range(rounds + 1):
        first = done % len(names)
        for name in names[first:] + names[:first]:
            time.sleep(REST_S)
            started_s = time.perf_counter()
            updates[name].run()
            if done:
                updates[name].times_s.append(time.perf_counter() - started_s)


def figures_of(updates: dict[str, Update], params: int) -> dict[str, object]:
    """Ratios within a round and their quartiles; times, rates and bytes of each update."""
    ours_s = updates["ours"].times_s
    ratios: dict[str, object] = {}
    quartiles: dict[str, object] = {}
    for ratio, name in RATIOS.items():
        ratios[ratio] = quartiles[ratio] = None
        if name in updates:
            pairs = zip(updates[name].times_s, ours_s, strict=True)
            median, spread = median_and_quartiles([other / mine for other, mine in pairs])
            ratios[ratio], quartiles[ratio] = round(median, 3), [round(q, 3) for q in spread]
    step_s = {name: _median(update.times_s) for name, update in updates.items()}
    gbytes = {n: params * update.param_bytes / 1e9 for n, update in updates.items()}
    return {
        **ratios,
        "quartiles": quartiles,
        "gparams_per_s": round(params / 1e9 / step_s["ours"], 3),
        "step_s": {name: round(time_s, 6) for name, time_s in step_s.items()},
        "gbytes_per_s": {name: round(gbytes[name] / step_s[name], 2) for name in updates},
        "param_bytes": {name: update.param_bytes for name, update in updates.items()},
    }


def table_of(figures: dict[str, Any]) -> Table:
    """The figures, for people."""
    heading = "{params:,} parameters, {isa}, {threads} threads, {rounds} rounds"
    table = Table(title=heading.format(**figures))
    for column in ("update", "ms", "bytes/parameter", "GB/s", "time over ours", "quartiles"):
        table.add_column(column, justify="right")
    ratio_of = {name: ratio for ratio, name in RATIOS.items()}
    for name, time_s in figures["step_s"].items():
        ratio = ratio_of.get(name, "")
        low_high = figures["quartiles"].get(ratio) or []
        table.add_row(
            name,
            f"{time_s * 1e3:.2f}",
            str(figures["param_bytes"][name]),
            f"{figures['gbytes_per_s'][name]:.1f}",
            f"{figures.get(ratio, 1.0):.3f}",
            " to ".join(f"{quartile:.3f}" for quartile in low_high),
        )
    return table


def _median(values: list[float]) -> float:
    return median_and_quartiles(values)[0]


def _rivals_memory() -> str:
    huge = os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"
    return "torch tensors, advised to huge pages" if huge else "ordinary torch tensors"


def main(
    params: Annotated[int, typer.Option(min=1, help="parameters")] = 50_000_000,
    rounds: Annotated[int, typer.Option(min=1, help="rounds that count")] = 30,
    isa: Annotated[str, typer.Option(help="instruction set, or the best one")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="0: all this process has")] = 0,
    deepspeed: Annotated[bool, typer.Option(help="compare with DeepSpeed")] = True,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Time the host update against its rivals and its bound."""
    with own_stdout() as stdout:
        try:
            figures = measure(params, rounds, isa, threads, deepspeed)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        Console(stderr=True).print(table_of(figures))
        hand_over(figures, stdout, as_json=as_json, output=output)


if __name__ == "__main__":
    typer.run(main)
