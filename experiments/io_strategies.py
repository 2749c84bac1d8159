"""Ways to lay the tensors of some ranks out in files, and to write and read them.

They call the engines that checkpoints are written with, so that only the strategy differs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from dos.checkpoint.buffers import Slots, aligned_buffer
from dos.checkpoint.native import Piece, gather, scatter
from dos.checkpoint.storage import BLOCK_BYTES, Storage, make_storage

REQUEST_BYTES = 4 << 20
"""Of one read or write; what a checkpoint uses."""
DEPTH = 16
"""Requests in flight of each rank of the product's."""

Tensors = list[list[torch.Tensor]]
"""Of each rank."""


@dataclass(frozen=True)
class Strategy:
    """How tensors become requests.

    Attributes:
        files: one for each tensor, one for each rank, or one that all ranks write to.
        coalesced: tensors that follow each other share requests, as large as they may be; else
            each tensor has requests of its own.
        direct: past the page cache.
        engine: "io_uring", "threads" or "posix", which has one request in flight at a time.
        depth: requests in flight of each rank.
    """

    files: Literal["tensor", "rank", "all"] = "rank"
    coalesced: bool = True
    direct: bool = True
    engine: str = "io_uring"
    depth: int = DEPTH

    @property
    def name(self) -> str:
        """For tables."""
        joined = "coalesced" if self.coalesced else "by tensor"
        cache = "direct" if self.direct else "buffered"
        files = "one file" if self.files == "all" else f"file per {self.files}"
        return f"{files}, {joined}, {cache}, {self.engine}, depth {self.depth}"


class Request(NamedTuple):
    """One write or read: which file, where in it, and which bytes of which tensors."""

    file: int
    offset: int
    n_bytes: int
    pieces: list[Piece]


@dataclass
class Plan:
    """What a strategy does with tensors.

    Attributes:
        file_bytes: size of each file.
        requests: of each rank, in the order in which they begin.
    """

    file_bytes: list[int]
    requests: list[list[Request]]


def plan_requests(strategy: Strategy, tensors: Tensors) -> Plan:
    """Where each tensor goes. Every request begins and ends at a block, for direct I/O."""
    file_bytes: list[int] = []
    requests: list[list[Request]] = []
    for rank, of_rank in enumerate(tensors):
        groups = [of_rank] if strategy.coalesced else [[tensor] for tensor in of_rank]
        requests.append([])
        for number, group in enumerate(groups):
            new = {"tensor": True, "rank": number == 0, "all": rank == number == 0}
            if new[strategy.files]:
                file_bytes.append(0)
            for pieces, n_bytes in _cut(group):
                at = file_bytes[-1]
                requests[-1].append(Request(len(file_bytes) - 1, at, n_bytes, pieces))
                file_bytes[-1] += n_bytes
    return Plan(file_bytes, requests)


def save(strategy: Strategy, tensors: Tensors, directory: str) -> None:
    """Write tensors into a new directory, durably.

    Raises:
        OSError: of the file system.
    """
    storage = make_storage(strategy.engine)
    plan = plan_requests(strategy, tensors)
    storage.mkdir(directory)
    files: list[Any] = []
    try:
        for number, n_bytes in enumerate(plan.file_bytes):
            path = _path(directory, number)
            files.append(storage.open(path, write=True, create=True, direct=strategy.direct))
            storage.preallocate(files[-1], n_bytes)
        _by_ranks(partial(_move, storage, files, strategy.depth, write=True), plan)
        for file in files:
            storage.fsync(file)
    finally:
        for file in files:
            storage.close(file)
    storage.fsync_directory(directory)
    storage.fsync_directory(os.path.dirname(directory))


def load(strategy: Strategy, like: Tensors, directory: str) -> Tensors:
    """What was saved so, in fresh tensors of the same shapes.

    Raises:
        OSError: of the file system.
    """
    storage = make_storage(strategy.engine)
    fresh = [[torch.empty_like(tensor) for tensor in of_rank] for of_rank in like]
    plan = plan_requests(strategy, fresh)
    files: list[Any] = []
    try:
        for number in range(len(plan.file_bytes)):
            path = _path(directory, number)
            files.append(storage.open(path, write=False, direct=strategy.direct))
        _by_ranks(partial(_move, storage, files, strategy.depth, write=False), plan)
    finally:
        for file in files:
            storage.close(file)
    return fresh


def _cut(group: Sequence[torch.Tensor]) -> Iterator[tuple[list[Piece], int]]:
    """Tensors one behind the other, cut into requests, the last up to the next block."""
    pieces: list[Piece] = []
    used = 0
    for tensor in group:
        address, left = tensor.data_ptr(), tensor.nbytes
        while left:
            n_bytes = min(left, REQUEST_BYTES - used)
            pieces.append((used, address, n_bytes))
            used, address, left = used + n_bytes, address + n_bytes, left - n_bytes
            if used == REQUEST_BYTES:
                yield pieces, used
                pieces, used = [], 0
    if pieces:
        yield pieces, -(-used // BLOCK_BYTES) * BLOCK_BYTES


def _path(directory: str, number: int) -> str:
    return os.path.join(directory, f"{number:05d}")


def _by_ranks(move: Callable[[list[Request]], None], plan: Plan) -> None:
    """Ranks at once, each a thread here; a failure is raised."""
    with ThreadPoolExecutor(len(plan.requests)) as pool:
        list(pool.map(move, plan.requests))


def _move(
    storage: Storage, files: list[Any], depth: int, requests: list[Request], *, write: bool
) -> None:
    """All requests of a rank, through slots of memory."""
    slots = Slots(aligned_buffer(min(depth, len(requests)) * REQUEST_BYTES), REQUEST_BYTES)
    queue = storage.queue(depth=depth, registered=slots.views)
    flying: dict[int, tuple[Request, int]] = {}

    def land() -> None:
        for token, error in queue.completed(wait=True):
            request, slot = flying.pop(token)
            if error is not None:
                raise error
            if not write:
                scatter(slots.views[slot], request.pieces)
            slots.free.append(slot)

    try:
        for token, request in enumerate(requests):
            while not slots.free:
                land()
            slot = slots.free.pop()
            view = slots.view(slot, request.n_bytes)
            flying[token] = request, slot
            if write:
                gather(view, request.pieces)
            begin = queue.write if write else queue.read
            begin(files[request.file], request.offset, view, token)
        while flying:
            land()
    finally:
        queue.close()
