"""What a save is made of: `python -m experiments.bench_ablation --dir D`.

Three saves, each doing more than the one before, so that what each part costs is the difference:

serialize  what will be written is known: ours plans the file, objects as JSON; torch.save hands
           all of its bytes to a file that drops them
stage      it goes through staging memory, too: ours brings chunks together and hashes them for a
           disk that drops them; torch.save writes into host memory
flush      it is durable on the disk, under its name

Of three states as large as each other: ordinary torch tensors, which have to be staged; tensors
that begin on a page, as the optimizer's pool has them, which ours writes where they lie; 20,000
tensors and 2,000 objects. All take turns; figures are medians. In a save the parts overlap: what
flush adds is what the disk does not hide behind. With `--json` standard output is one JSON object
and nothing else.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dos.bench import states
from dos.bench.peers import make_durable
from dos.checkpoint import save
from dos.checkpoint.buffers import aligned_buffer
from dos.checkpoint.draft import Draft
from dos.checkpoint.format import FileId
from dos.checkpoint.posix import Completion, PosixFile, PosixFiles
from dos.stdout import own_stdout
from experiments.figures import AsJson, Output, environment, hand_over, median_and_quartiles

GIB = 1 << 30
REST_S = 1.0
PARTS = ("serialize", "stage", "flush")
Saves = dict[str, Callable[[Any, str], object]]


class DroppingStorage(PosixFiles):
    """A disk that takes no time: files are opened, and what is written into them is dropped."""

    name = "dropping"

    def queue(self, *, depth: int = 32, registered: Sequence[memoryview] = ()) -> DroppingQueue:
        """See `dos.checkpoint.storage.Storage.queue`."""
        return DroppingQueue()

    def preallocate(self, file: PosixFile, n_bytes: int) -> None:
        """Nothing will be there."""

    def fsync(self, file: PosixFile) -> None:
        """Nothing is there."""


class DroppingQueue:
    """Writes that end as they begin."""

    def __init__(self) -> None:
        self._ended: list[Completion] = []

    def write(self, file: PosixFile, offset_bytes: int, buffer: memoryview, token: int) -> None:
        """See `dos.checkpoint.storage.Queue.write`."""
        self._ended.append((token, None))

    read = write

    def completed(self, *, wait: bool) -> list[Completion]:
        """See `dos.checkpoint.storage.Queue.completed`."""
        ended, self._ended = self._ended, []
        return ended

    def drain(self) -> list[Completion]:
        """All of them."""
        return self.completed(wait=True)

    def close(self) -> None:
        """Nothing is held."""


class _Sink(io.BytesIO):
    """A file that drops what is written into it."""

    def write(self, data: Any, /) -> int:
        return len(data)


def _draft(state: Any) -> Draft:
    return Draft(FileId("ablation", 0, 0), state, None, lambda: None)


def _stage_ours(state: Any, path: str) -> None:
    os.mkdir(path)
    _draft(state).write(DroppingStorage(), path, None, lambda n_bytes: None)


def _flush_torch(state: Any, path: str) -> None:
    torch.save(state, path)
    make_durable(path)


OURS: Saves = {
    "serialize": lambda state, path: _draft(state),
    "stage": _stage_ours,
    "flush": lambda state, path: save(state, path).result(),
}
TORCH: Saves = {
    "serialize": lambda state, path: torch.save(state, _Sink()),
    "stage": lambda state, path: torch.save(state, io.BytesIO()),
    "flush": _flush_torch,
}


def on_pages(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors, each in memory that begins on a page."""
    moved = {}
    for name, tensor in state.items():
        memory = torch.frombuffer(aligned_buffer(tensor.nbytes), dtype=tensor.dtype)
        moved[name] = memory.copy_(tensor)
    return moved


def measure(directory: str, n_bytes: int, rounds: int) -> dict[str, Any]:
    """Seconds of each part of each way, for programs."""
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(os.path.abspath(directory), f"dos-bench-ablation-{os.getpid()}")
    ordinary, many = states.blocks(n_bytes), states.many(n_bytes)
    ways: dict[str, tuple[Saves, Any]] = {
        "ours, ordinary tensors": (OURS, ordinary),
        "ours, tensors on pages": (OURS, on_pages(ordinary)),
        "ours, 20,000 tensors": (OURS, many),
        "torch.save, ordinary tensors": (TORCH, ordinary),
        "torch.save, 20,000 tensors": (TORCH, many),
    }
    turns = [(way, part) for way in ways for part in PARTS]
    times_s: dict[tuple[str, str], list[float]] = {turn: [] for turn in turns}
    try:
        for number in range(rounds + 1):
            print(f"round {number} of {rounds}; the first one does not count", file=sys.stderr)
            for way, part in turns if number % 2 == 0 else turns[::-1]:
                saves, state = ways[way]
                time_s = _timed(saves[part], state, path)
                if number:
                    times_s[way, part].append(time_s)
    finally:
        _remove(path)
    found: dict[str, dict[str, Any]] = {way: {} for way in ways}
    for (way, part), each_s in times_s.items():
        found[way][f"{part}_s"], found[way][f"{part}_quartiles_s"] = median_and_quartiles(each_s)
    return {
        "ways": found,
        "gib": round(n_bytes / GIB, 3),
        "rounds": rounds,
        "environment": environment(directory),
    }


def _timed(call: Callable[[Any, str], object], state: Any, path: str) -> float:
    _remove(path)
    os.sync()
    time.sleep(REST_S)
    begun_s = time.perf_counter()
    call(state, path)
    return time.perf_counter() - begun_s


def _remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with suppress(FileNotFoundError):
        os.unlink(path)


def main(
    directory: Annotated[Path, typer.Option("--dir", help="on the disk to measure")],
    gib: Annotated[float, typer.Option(min=0.001, help="size of each state")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="rounds that count")] = 5,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Time the parts of a save."""
    with own_stdout() as stdout:
        figures = measure(str(directory), int(gib * GIB), rounds)
        print(json.dumps(figures["ways"], indent=1), file=sys.stderr)
        hand_over(figures, stdout, as_json=as_json, output=output)


if __name__ == "__main__":
    typer.run(main)
