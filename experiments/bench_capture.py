"""What checkpoints cost a training loop: ours, torch.save, and DCP's asynchronous save.

`python -m experiments.bench_capture --json` trains with a forward and backward that take their
time elsewhere, as on an accelerator: at least 1.5 times what the bare disk needs for the state.
`--all` adds a disk that does not keep up, and a forward and backward on this processor.
"""

from __future__ import annotations

import gc
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import dos
from dos.bench import raw
from dos.bench.peers import make_durable
from dos.stdout import own_stdout
from experiments.capture_memory import peak_above
from experiments.capture_rivals import Rival, rivals
from experiments.figures import AsJson, Output, environment, hand_over, median_and_quartiles

Json = dict[str, Any]

KEEPS_UP, FALLS_BEHIND = 1.5, 0.5
SAVE_EVERY, OUR_ITERATIONS, THEIR_ITERATIONS = 2, 20, 4
PARAMETERS = 8
BYTES_PER_PARAMETER = 12  # of fp32 state


class Training:
    """Parameters with constant gradients, an optimizer, and a forward and backward of any length.

    Args:
        n_bytes: size of the optimizer's state.
    """

    def __init__(self, n_bytes: int) -> None:
        numel = n_bytes // BYTES_PER_PARAMETER // PARAMETERS
        self.model = torch.nn.ParameterDict(
            {
                f"layer{i}": torch.nn.Parameter(torch.randn(numel, dtype=torch.bfloat16))
                for i in range(PARAMETERS)
            }
        )
        for weight in self.model.values():
            weight.grad = torch.randn_like(weight)
        self.optimizer = dos.DOSOptimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-5))
        self.state_bytes = BYTES_PER_PARAMETER * numel * PARAMETERS

    def run(
        self, iterations: int, compute: Callable[[], object], save: Callable[[int], object]
    ) -> float:
        """Seconds of so many iterations; a save follows the first of every two."""
        gc.collect()
        since_s = time.perf_counter()
        for step in range(iterations):
            compute()
            self.optimizer.step()
            if step % SAVE_EVERY == 0:
                save(step)
        return time.perf_counter() - since_s


def paced(seconds: float) -> Callable[[], None]:
    """A forward and backward on another processor."""
    return lambda: time.sleep(seconds)


def on_this_processor(seconds: float) -> Callable[[], float]:
    """A forward and backward of about this time here, by all cores."""
    a = torch.randn(1024, 1024)

    def work(times: int) -> float:
        since_s = time.perf_counter()
        for _ in range(times):
            torch.mm(a, a)
        return time.perf_counter() - since_s

    work(3)
    times = max(1, round(20 * seconds / work(20)))
    return lambda: work(times)


def ours(training: Training, directory: str, compute: Callable[[], object]) -> Json:
    """A run with checkpoints of ours: its time, and what the memory and the saves were like."""
    rest(directory)
    saves: list[Json] = []
    with dos.Checkpointer(directory, keep=1) as checkpointer:

        def save(step: int) -> None:
            saves.append(checkpointer.metrics)  # of the save before
            checkpointer.save(step, model=training.model, optimizer=training.optimizer)

        with peak_above() as peak:
            loop_s = training.run(OUR_ITERATIONS, compute, save)
    return {"loop_s": loop_s, "extra_bytes": peak.bytes, "saves": saves[1:]}


def their(rival: Rival, training: Training, directory: str, compute: Callable[[], object]) -> float:
    """Seconds of a run with checkpoints of another library; the disk is at rest afterwards."""
    rest(directory)
    state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    running = rival(directory)
    loop_s = training.run(THEIR_ITERATIONS, compute, lambda step: running.save(state, step))
    running.close()
    return loop_s


def rest(directory: str) -> None:
    """Make a directory empty, on a disk that has nothing to do."""
    shutil.rmtree(directory, ignore_errors=True)
    Path(directory).mkdir()
    make_durable(directory)
    time.sleep(1)


def setting(
    training: Training,
    base: str,
    compute: Callable[[], object],
    rounds: int,
    others: dict[str, Rival],
) -> Json:
    """Rounds of every kind of run in turn."""
    none_s: list[float] = []
    mine: list[Json] = []
    theirs: dict[str, list[float]] = {name: [] for name in others}
    for number in range(rounds):
        runs: list[Callable[[], None]] = [
            lambda: none_s.append(training.run(OUR_ITERATIONS, compute, lambda step: None)),
            lambda: mine.append(ours(training, base, compute)),
        ]
        for run in runs if number % 2 else reversed(runs):
            run()
        for name, rival in others.items():
            theirs[name].append(their(rival, training, base, compute))
    return summary(none_s, mine, theirs)


def summary(none_s: list[float], mine: list[Json], theirs: dict[str, list[float]]) -> Json:
    """What saves add to a loop, of ours and of the others: medians of the rounds' own ratios."""
    saves, their_saves = OUR_ITERATIONS // SAVE_EVERY, THEIR_ITERATIONS // SAVE_EVERY
    share = THEIR_ITERATIONS / OUR_ITERATIONS
    pairs = [(my["loop_s"], none) for my, none in zip(mine, none_s, strict=True)]
    slowdown, spread = median_and_quartiles([loop / none for loop, none in pairs])
    ours_s = [(loop - none) / saves for loop, none in pairs]
    found: Json = {
        "iteration_s": round(statistics.median(none_s) / OUR_ITERATIONS, 4),
        "slowdown": round(slowdown, 4),
        "slowdown_quartiles": [round(quartile, 4) for quartile in spread],
        "added_s": {"ours": ours_s},
    }
    for name, loops in theirs.items():
        its_s = [(t - n * share) / their_saves for t, n in zip(loops, none_s, strict=True)]
        found["added_s"][name] = its_s
        ratio = statistics.median(my / its for my, its in zip(ours_s, its_s, strict=True))
        found[f"stall_vs_{name}"] = round(ratio, 4)
    found["extra_host_bytes"] = max(my["extra_bytes"] for my in mine)
    found["saves"] = mine[-1]["saves"]
    found["ring_bytes"] = found["saves"][-1]["ring_bytes"]
    return found


def measure(base: str, gib: float, rounds: int, everything: bool) -> Json:
    """The bare disk, and the settings."""
    training = Training(int(gib * (1 << 30)))
    path = str(Path(base, "raw"))
    shape, _ = raw.best_shapes(path, training.state_bytes, lambda: rest(base), rounds=1)
    rate = raw.write_gib_per_s(path, training.state_bytes, shape)
    disk_s = training.state_bytes / raw.GIB / rate
    found: Json = {
        "state_bytes": training.state_bytes,
        "raw_gib_per_s": round(rate, 3),
        "disk_s": round(disk_s, 3),
        "rounds": rounds,
    }
    bar = setting(training, base, paced(KEEPS_UP * disk_s), rounds, rivals())
    found |= {**bar, "emulated": "forward and backward are a wait, as on an accelerator"}
    if everything:
        found["falls_behind"] = setting(training, base, paced(FALLS_BEHIND * disk_s), 1, {})
        work = on_this_processor(KEEPS_UP * disk_s)
        found["on_this_processor"] = setting(training, base, work, 1, rivals(deepspeed=True))
    training.optimizer.close()
    return {**found, "environment": environment(Path(base).parent)}


def main(
    directory: Annotated[Path, typer.Option("--dir", help="on the disk to be measured")] = Path(),
    gib: Annotated[float, typer.Option(min=0.01, help="state of the optimizer")] = 2.0,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    everything: Annotated[bool, typer.Option("--all", help="more settings")] = False,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Time a training loop with and without checkpoints."""
    with own_stdout() as stdout, tempfile.TemporaryDirectory(dir=directory) as base:
        figures = measure(str(Path(base, "saves")), gib, rounds, everything)
        print(json.dumps(figures, indent=2), file=sys.stderr)
        hand_over(figures, stdout, as_json=as_json, output=output)


if __name__ == "__main__":
    typer.run(main)
