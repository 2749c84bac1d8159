"""How fast checkpoints are saved and loaded, beside the bare disk and other libraries.

Saves are timed until they are durable, into a new path, after the old one was removed, the disk
synced and a second passed; loads from a page cache that has forgotten the file, into fresh
memory, ours with every checksum compared. Ours and the bare disk take turns, ABBA; ratios are
medians of the ratios within a round.
"""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from dos.bench import raw, states
from dos.bench.peers import Peer, available_peers, drop_from_cache, make_durable
from dos.bench.raw import GIB
from dos.checkpoint import load, save

REST_S = 1.0
Rates = dict[str, list[float]]


class Bench:
    """The measurement of one state in one directory.

    Args:
        directory: on the disk that is measured; what is made there is removed again.
        n_bytes: size of the state.
        progress: told what is measured now.

    Attributes:
        saves, loads: GiB/s of each library, a figure per round.
    """

    def __init__(self, directory: str, n_bytes: int, progress: Callable[[str], None]) -> None:
        self.n_bytes, self._progress = n_bytes, progress
        self._path = os.path.join(os.path.abspath(directory), f"dos-bench-{os.getpid()}")
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        self.saves: Rates = {}
        self.loads: Rates = {}

    def run(self, rounds: int, peer_rounds: int) -> dict[str, object]:
        """All figures.

        Args:
            rounds: of ours beside the bare disk.
            peer_rounds: of them with the other libraries, too.
        """
        try:
            self._progress("looking for the bare disk's best requests")
            write, read = raw.best_shapes(self._path, self.n_bytes, self.fresh, rounds=2)
            state = states.blocks(self.n_bytes)
            peers = available_peers()
            self.measure("dos", _OURS, state, checked=True)
            self.saves, self.loads = {}, {}  # what is done first is no measurement
            for number in range(rounds):
                self._progress(f"round {number + 1} of {rounds}")
                for turn in ("dos", "raw") if number % 2 == 0 else ("raw", "dos"):
                    if turn == "dos":
                        self.measure("dos", _OURS, state)
                    else:
                        self._raw(write, read)
                for name, peer in peers.items() if number < peer_rounds else ():
                    self.measure(name, peer, state, checked=number == 0)
            self.fresh()
            extra_bytes = peak_bytes(lambda: _save_ours(state, self._path))
        finally:
            self.remove()
        return {
            "save_of_raw": _ratio(self.saves, "raw"),
            "load_of_raw": _ratio(self.loads, "raw"),
            "save_vs_torchsnapshot": _ratio(self.saves, "torchsnapshot"),
            "save": {name: _median(rates) for name, rates in self.saves.items()},
            "load": {name: _median(rates) for name, rates in self.loads.items()},
            "spreads": {
                "save": {name: _spread(rates) for name, rates in self.saves.items()},
                "load": {name: _spread(rates) for name, rates in self.loads.items()},
                "save_of_raw": _spread(_ratios(self.saves, "dos", "raw")),
                "load_of_raw": _spread(_ratios(self.loads, "dos", "raw")),
            },
            "save_extra_bytes": extra_bytes,
            "raw_shapes": {"save": write, "load": read},
            "gib": self.n_bytes / GIB,
            "rounds": rounds,
        }

    def measure(
        self, name: str, peer: Peer, state: dict[str, Any], *, checked: bool = False
    ) -> None:
        """Time one save and one load; with `checked` what comes back must be equal."""
        self.fresh()

        def save_durably() -> None:
            peer.save(state, self._path)
            if not peer.durable:
                make_durable(self._path)

        saved_s = _timed(save_durably)
        self.saves.setdefault(name, []).append(self.n_bytes / GIB / saved_s)
        drop_from_cache(self._path)
        loaded: list[dict[str, Any]] = []
        loaded_s = _timed(lambda: loaded.append(peer.load(self._path, state)))
        self.loads.setdefault(name, []).append(self.n_bytes / GIB / loaded_s)
        if checked and not all(torch.equal(state[key], loaded[0][key]) for key in state):
            raise AssertionError(f"{name} has not loaded what it saved")

    def shapes(self, rounds: int) -> dict[str, object]:
        """Many tensors and objects beside one tensor of their size; and very small ones."""
        large = {"one": states.one(self.n_bytes), "many": states.many(self.n_bytes)}
        tiny, tiny_s = states.tiny(), []
        try:
            for number in range(rounds):
                self._progress(f"shapes, round {number + 1} of {rounds}")
                for name in ("one", "many") if number % 2 == 0 else ("many", "one"):
                    self.measure(name, _OURS, large[name])
                self.fresh()
                tiny_s.append(_timed(lambda: _save_ours(tiny, self._path)))
            file = os.path.join(self._path, "rank-00000.safetensors")
            file_bytes = os.path.getsize(file)
            with open(file, "rb") as opened:
                header_bytes = 8 + int.from_bytes(opened.read(8), "little")
        finally:
            self.remove()
        payload_bytes = states.SMALL_TENSORS * states.TINY_BYTES
        slower = {
            "save": _ratios(self.saves, "one", "many"),
            "load": _ratios(self.loads, "one", "many"),
        }
        return {
            "many_vs_one": {name: _median(ratios) for name, ratios in slower.items()},
            "tiny_s": _median(tiny_s),
            "tiny_overhead_bytes": file_bytes - header_bytes - payload_bytes,
            "spreads": {
                **{name: _spread(ratios) for name, ratios in slower.items()},
                "tiny_s": _spread(tiny_s),
            },
        }

    def fresh(self) -> None:
        """Remove what was saved, and let the disk come to rest."""
        self.remove()
        os.sync()
        time.sleep(REST_S)

    def remove(self) -> None:
        """Remove what was saved."""
        if os.path.isdir(self._path):
            shutil.rmtree(self._path)
        elif os.path.exists(self._path):
            os.unlink(self._path)

    def _raw(self, write: raw.Shape, read: raw.Shape) -> None:
        self.fresh()
        rate = raw.write_gib_per_s(self._path, self.n_bytes, write)
        self.saves.setdefault("raw", []).append(rate)
        rate = raw.read_gib_per_s(self._path, self.n_bytes, read)
        self.loads.setdefault("raw", []).append(rate)
        rate = self.n_bytes / GIB / _timed(lambda: touch_fresh(self.n_bytes))
        self.loads.setdefault("fresh memory", []).append(rate)


def touch_fresh(n_bytes: int) -> None:
    """Have the kernel give this much memory, on two threads; no load into it is faster."""
    with mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        with memoryview(memory) as view, ThreadPoolExecutor(2) as pool:
            half = n_bytes // 2
            parts = [np.frombuffer(view[begin : begin + half], np.uint8) for begin in (0, half)]
            for touched in [pool.submit(part[:: mmap.PAGESIZE].fill, 1) for part in parts]:
                touched.result()
            del parts, touched


def peak_bytes(call: Callable[[], object]) -> int:
    """How much more memory this process had at once during a call than before it."""
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # the peak begins anew
    before = _memory_bytes("VmRSS")
    call()
    return max(_memory_bytes("VmHWM") - before, 0)


def _memory_bytes(name: str) -> int:
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(name))
    return int(line.split()[1]) * 1024


def _save_ours(state: Any, path: str) -> None:
    save(state, path).result()


_OURS = Peer(_save_ours, lambda path, _: dict(load(path)), durable=True)


def _timed(call: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    call()
    return time.perf_counter() - begun_s


def _ratios(rates: Rates, of: str, to: str) -> list[float]:
    """Of the rounds that have both."""
    return [one / other for one, other in zip(rates[of], rates.get(to, []), strict=False)]


def _ratio(rates: Rates, other: str) -> float | None:
    ratios = _ratios(rates, "dos", other)
    return _median(ratios) if ratios else None


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def _spread(values: list[float]) -> list[float]:
    """The least and the largest."""
    return [round(min(values), 3), round(max(values), 3)]
