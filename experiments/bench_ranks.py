"""How fast ranks of one machine save together: `python -m experiments.bench_ranks --dir D`.

A state of a fixed size is shared out among 1, 2, 4, ... processes, each of which saves its part
into one checkpoint: ours (`ranks=Ranks.of()`, one commit), torch.save (a file per rank), and
torch.distributed.checkpoint; and the bare disk takes as many bytes from one process. A save begins
and ends with a barrier and is durable. All take turns within a world; `ours_over` is the median of
the ratios of rates within a round, with quartiles. With `--json` standard output is one JSON object
and nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import distributed
from torch.multiprocessing.spawn import spawn

from dos.bench import raw
from dos.bench.peers import make_durable
from dos.bench.states import random_tensor
from dos.checkpoint import save
from dos.checkpoint.ranks import Ranks
from dos.stdout import own_stdout
from experiments.figures import AsJson, Output, environment, hand_over, median_and_quartiles

GIB = 1 << 30
REST_S = 1.0
TENSORS = 64
"""Of all ranks together."""
RAW_SHAPE = raw.Shape("8M", 8)

Rates = dict[str, list[float]]


def _save_torch(state: dict[str, torch.Tensor], path: str) -> None:
    os.makedirs(path, exist_ok=True)
    file = os.path.join(path, f"{distributed.get_rank()}.pt")
    torch.save(state, file)
    make_durable(file)


def _save_dcp(state: dict[str, torch.Tensor], path: str) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

    save_dcp(state, checkpoint_id=path)
    for file in Path(path).glob(f"__{distributed.get_rank()}_*"):
        make_durable(str(file))
    if distributed.get_rank() == 0:
        make_durable(os.path.join(path, ".metadata"))


def work(
    rank: int, world: int, path: str, n_bytes: int, rounds: int, rest_s: float, meeting: str
) -> None:
    """A rank of a world; the first one writes GiB/s of each way into the file `meeting`.json."""
    # gloo, and whoever asks the environment who they are
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world
    )
    count = max(TENSORS // world, 1)
    each_bytes = n_bytes // world // count
    state = {f"rank{rank}.{i}": random_tensor(each_bytes) for i in range(count)}
    ranks = Ranks.of()
    ways: dict[str, Callable[[], object]] = {
        "dos": lambda: save(state, path, ranks=ranks).result(),
        "torch.save": lambda: _save_torch(state, path),
        "DCP": lambda: _save_dcp(state, path),
    }
    if shutil.which("fio"):
        ways["raw"] = lambda: raw.write_gib_per_s(path, n_bytes, RAW_SHAPE) if rank == 0 else None
    rates: Rates = {name: [] for name in ways}
    moved = each_bytes * count * world / GIB
    for number in range(rounds + 1):
        for name in list(ways) if number % 2 == 0 else list(ways)[::-1]:
            if rank == 0:
                _fresh(path, rest_s)
            distributed.barrier()
            begun_s = time.perf_counter()
            told = ways[name]()
            distributed.barrier()
            if number:
                # fio's own rate: it spends some time to start
                rate = told if isinstance(told, float) else moved / (time.perf_counter() - begun_s)
                rates[name].append(rate)
    ranks.close(timeout_s=10)
    if rank == 0:
        _fresh(path, 0)
        Path(f"{meeting}.json").write_text(json.dumps(rates))
    distributed.destroy_process_group()


def _fresh(path: str, rest_s: float) -> None:
    """Remove what was saved, and let the disk come to rest."""
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.exists(path):
        os.unlink(path)
    os.sync()
    time.sleep(rest_s)


def measure(directory: str, n_bytes: int, worlds: list[int], rounds: int) -> dict[str, Any]:
    """Figures of each number of ranks, for programs."""
    os.makedirs(directory, exist_ok=True)
    found = {}
    for world in worlds:
        print(f"{world} ranks", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            meeting = os.path.join(folder, "rendezvous")
            arguments = (world, os.path.join(folder, "saved"), n_bytes, rounds, REST_S, meeting)
            spawn(work, arguments, nprocs=world)
            rates: Rates = json.loads(Path(f"{meeting}.json").read_text())
        found[str(world)] = {name: _figures(each, rates["dos"]) for name, each in rates.items()}
    return {
        "worlds": found,
        "gib": round(n_bytes / GIB, 3),
        "rounds": rounds,
        "raw_shape": RAW_SHAPE,
        "environment": environment(directory),
    }


def _figures(rates: list[float], ours: list[float]) -> dict[str, Any]:
    """The rate of one way, and how many times as fast ours is within a round."""
    rate, quartiles = median_and_quartiles(rates)
    pairs = zip(ours, rates, strict=True)
    ratio, ratio_quartiles = median_and_quartiles([mine / its for mine, its in pairs])
    return {
        "gib_per_s": rate,
        "quartiles": quartiles,
        "ours_over": ratio,
        "ours_over_quartiles": ratio_quartiles,
    }


def main(
    directory: Annotated[Path, typer.Option("--dir", help="on the disk to measure")],
    gib: Annotated[float, typer.Option(min=0.001, help="of all ranks together")] = 1.0,
    ranks: Annotated[list[int] | None, typer.Option(help="how many; may be repeated")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="rounds that count")] = 5,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Time saves of several ranks."""
    with own_stdout() as stdout:
        figures = measure(str(directory), int(gib * GIB), ranks or [1, 2, 4, 8], rounds)
        print(json.dumps(figures["worlds"], indent=1), file=sys.stderr)
        hand_over(figures, stdout, as_json=as_json, output=output)


if __name__ == "__main__":
    typer.run(main)
