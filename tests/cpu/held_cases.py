"""Captures of held state, as slow as wanted, for tests."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from typing import Any

import torch

import dos
from dos.memory import HeldState
from dos.memory.pieces import Pieces

PLACES: dict[str, dict[str, Any]] = {
    "host": {"device": "cpu", "subgroup_size": 1500},
    "stride host": {"device": "virtual", "stride": "host", "subgroup_size": 700},
    "stride 2": {"device": "virtual", "stride": 2, "subgroup_size": 1024},
    "stride 1.5": {"device": "virtual", "stride": 1.5, "subgroup_size": 1024},
    "stride 1": {"device": "virtual", "stride": 1, "subgroup_size": 2048},
    "residents": {
        "device": "virtual",
        "stride": 2,
        "resident_ratio": 0.5,
        "subgroup_size": 1024,
    },
}


def whole(leaf: torch.Tensor | Pieces) -> torch.Tensor:
    """A copy of a leaf of held state, put together."""
    if isinstance(leaf, torch.Tensor):
        return leaf.clone()
    made = torch.full((torch.Size(leaf.shape).numel(),), float("nan"), dtype=leaf.dtype)
    for start, part in leaf.parts.items():
        made[start : start + part.numel()] = part
    return made.view(leaf.shape)


def snapshot(tree: dict[str, Any]) -> dict[str, Any]:
    """A copy of a held tree, put together."""
    tensors = {
        kind: {name: whole(leaf) for name, leaf in tree[kind].items()}
        for kind in ("master", "exp_avg", "exp_avg_sq")
    }
    groups = [dict(group) for group in tree["param_groups"]]
    return {**tensors, "steps": dict(tree["steps"]), "param_groups": groups}


def now(optimizer: dos.DOSOptimizer) -> dict[str, Any]:
    """A copy of the state as it is, by the documented `state`."""
    optimizer.synchronize()
    names = {
        p: f"{g}.{i}"
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
    }
    found: dict[str, Any] = {"master": {}, "exp_avg": {}, "exp_avg_sq": {}, "steps": {}}
    for parameter, entry in optimizer.state.items():
        for key, value in entry.items():
            if key == "step":
                found["steps"][names[parameter]] = int(value)
            else:
                found[key][names[parameter]] = value.clone()
    found["param_groups"] = [
        {**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups
    ]
    return found


def assert_equal(left: dict[str, Any], right: dict[str, Any]) -> None:
    """The same bits in every tensor, the same counts and groups."""
    assert (left["steps"], left["param_groups"]) == (right["steps"], right["param_groups"])
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        assert left[kind].keys() == right[kind].keys()
        for name, tensor in left[kind].items():
            assert tensor.shape == right[kind][name].shape
            same = tensor.contiguous().view(torch.int32)
            assert torch.equal(same, right[kind][name].contiguous().view(torch.int32)), (kind, name)


class SlowCapture:
    """Copies each hold's range on a thread of its own, in random order, then opens its gate."""

    def __init__(self, held: HeldState, seed: int, pause_s: float = 1e-3) -> None:
        self.held, self._random, self._pause_s = held, random.Random(seed), pause_s
        self.ranges: dict[tuple[int, int], bytes] = {}
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.held.ready()
            indices = sorted({hold.index for hold in self.held.holds})
            self._random.shuffle(indices)
            for index in indices:
                time.sleep(self._random.random() * self._pause_s)
                for hold in self.held.holds:
                    if hold.index == index:
                        n_bytes = hold.end - hold.begin
                        self.ranges[hold.begin, hold.end] = ctypes.string_at(hold.begin, n_bytes)
                self.held.release(index)
        except BaseException as error:
            self.error = error
            self.held.abandon()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What was captured of a dense tensor, in its memory order, 1-D."""
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        found = torch.zeros(tensor.nbytes, dtype=torch.uint8)
        covered = 0
        for (first, last), data in self.ranges.items():
            low, high = max(begin, first), min(end, last)
            if low < high:
                part = bytearray(data[low - first : high - first])
                found[low - begin : high - begin] = torch.frombuffer(part, dtype=torch.uint8)
                covered += high - low
        assert covered == tensor.nbytes, "a part of it is held by nobody, or twice"
        return found.view(tensor.dtype)

    def state_tree(self) -> dict[str, Any]:
        """The held tree, with what was captured in place of what is live."""

        def taken(leaf: torch.Tensor | Pieces) -> torch.Tensor | Pieces:
            if isinstance(leaf, Pieces):
                parts = {start: self.of(part) for start, part in leaf.parts.items()}
                return Pieces(leaf.shape, leaf.dtype, parts)
            if not any(first <= leaf.data_ptr() < last for first, last in self.ranges):
                return leaf  # a copy from the beginning, or empty
            return self.of(leaf).as_strided(leaf.shape, leaf.stride())

        tree = dict(self.held.tree)
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            tree[kind] = {name: taken(leaf) for name, leaf in tree[kind].items()}
        return tree

    def state(self) -> dict[str, Any]:
        """The captured state, put together as `snapshot` does."""
        return snapshot(self.state_tree())
