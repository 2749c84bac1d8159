"""Ranks as forked children that share a process group of gloo."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import distributed

from dos.checkpoint.ranks import Ranks

KEPT: list[Any] = []
"""Stores of this process: the end of one that serves may wait for its thread for ever."""

LIFE_S = 120
"""After which a rank that hangs is dead."""


def run_ranks(
    work: Callable[[Ranks], object],
    world: int,
    folder: Path,
    *,
    store: str = "tcp",
    commit_timeout_s: float = 60.0,
) -> list[str]:
    """What `work` returns, or raises, on each rank, as text; "" of one that was killed.

    Args:
        work: run by all ranks.
        world: how many.
        folder: an empty one, for what they share.
        store: "tcp", served by rank 0, or "file".
        commit_timeout_s: of the ranks.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:

        def live(rank: int) -> object:
            made: Any
            if store == "file":
                made = distributed.FileStore(str(folder / "store"), world)
            else:
                port = server.getsockname()[1]
                fd = server.fileno() if rank == 0 else None
                made = distributed.TCPStore(
                    "127.0.0.1", port, world, rank == 0, master_listen_fd=fd
                )
            KEPT.append(made)
            distributed.init_process_group("gloo", store=made, rank=rank, world_size=world)
            ranks = Ranks.of(commit_timeout_s=commit_timeout_s)
            try:
                return work(ranks)
            finally:
                ranks.close(1.0)

        return join([fork(lambda rank=rank: live(rank)) for rank in range(world)])


def fork(work: Callable[[], object]) -> tuple[int, int]:
    """A child that does it; its number, and what its report is read from."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest has a handler of its own
        signal.alarm(LIFE_S)
        try:
            os.close(reader)
            text = str(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        try:
            os.write(writer, text.encode())
        finally:
            os._exit(0)  # never into the parent's tests
    os.close(writer)
    return child, reader


def join(children: list[tuple[int, int]]) -> list[str]:
    """The reports of children, once all have ended."""
    texts = []
    for child, reader in children:
        with os.fdopen(reader, "rb") as pipe:
            texts.append(pipe.read().decode())
        os.waitpid(child, 0)
    return texts
