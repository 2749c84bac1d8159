"""What ranks tell each other about a save: one commit, or one error on all of them."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import dos
from dos.checkpoint import Pieces, load, save
from dos.checkpoint.format import FileId
from dos.checkpoint.lines import StoreLine
from dos.checkpoint.manifest import FileRecord
from dos.checkpoint.posix import PosixStorage
from dos.checkpoint.ranks import Ranks
from tests.cpu.rank_processes import KEPT, fork, join, run_ranks
from tests.cpu.test_checkpoint_save import Failing

pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this torch has no gloo",
)
STORES = ["tcp", "file", "hash", "without clone"]


def make_store(kind: str, folder: Path) -> Any:
    if kind == "file":
        return distributed.FileStore(str(folder / "store"), 1)
    if kind == "hash":
        return distributed.HashStore()
    KEPT.append(distributed.TCPStore("127.0.0.1", 0, 1, True))
    return KEPT[-1] if kind == "tcp" else WithoutClone(KEPT[-1])


class WithoutClone:
    """A store that cannot be connected to again."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name in ("clone", "_underlying_non_prefix_store"):
            raise AttributeError(name)
        return getattr(self._inner, name)


def ranks_of(store: Any, world: int, timeout_s: float = 30.0) -> list[Ranks]:
    lines = [StoreLine(store, timeout_s) for _ in range(world)]
    return [Ranks(line, rank, world, "nonce", timeout_s) for rank, line in enumerate(lines)]


def on_all(ranks: list[Ranks], work: Callable[[Ranks], Any]) -> list[Any]:
    """What each returns, or the DOSError that it raises."""

    def run(rank: Ranks) -> Any:
        try:
            return work(rank)
        except dos.DOSError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks))


def one_save(ranks: Ranks, fails: int | None = None) -> list[int] | None:
    """The protocol of a save; rank 0 returns whose files it gathered."""
    checkpoint_id = ranks.enter()
    try:
        if ranks.rank == 0:
            ranks.begin(checkpoint_id, "step", {})
        else:
            ranks.await_begin(checkpoint_id, "step", {})
        if fails == ranks.rank:
            raise dos.CheckpointError("no space")
        file_id = FileId(checkpoint_id, ranks.rank, 0)
        ranks.report(checkpoint_id, [FileRecord(file_id, 8192, 4096, "0" * 32)])
        if ranks.rank != 0:
            ranks.await_commit(checkpoint_id)
            return None
        files = ranks.gather(checkpoint_id)
        ranks.announce(checkpoint_id)
        return [file.file_id.rank for file in files]
    except dos.CheckpointError as error:
        ranks.fail(checkpoint_id, error)
        raise


@pytest.mark.parametrize("kind", STORES)
def test_rank_0_gathers_and_all_see_the_commit(kind: str, tmp_path: Path) -> None:
    ranks = ranks_of(make_store(kind, tmp_path), 3)
    assert on_all(ranks, one_save) == [[0, 1, 2], None, None]


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_rank_is_that_of_all(kind: str, failing: int, tmp_path: Path) -> None:
    ranks = ranks_of(make_store(kind, tmp_path), 3)
    for error in on_all(ranks, lambda rank: one_save(rank, failing)):
        assert "no space" in str(error)


@pytest.mark.parametrize("failing", [None, 2])
def test_the_keys_of_a_save_that_ended_are_gone(failing: int | None, tmp_path: Path) -> None:
    store = make_store("tcp", tmp_path)
    before = store.num_keys()
    on_all(ranks_of(store, 3), lambda rank: one_save(rank, failing))
    assert store.num_keys() == before


def test_after_a_failed_save_the_next_one_succeeds(tmp_path: Path) -> None:
    ranks = ranks_of(make_store("tcp", tmp_path), 2)
    on_all(ranks, lambda rank: one_save(rank, 1))
    assert on_all(ranks, one_save) == [[0, 1], None]


def test_a_wait_in_the_background_holds_up_nobody_else(tmp_path: Path) -> None:
    store = make_store("tcp", tmp_path)
    (ranks, _) = ranks_of(store, 2, timeout_s=60.0)
    checkpoint_id = ranks.enter()
    waiting = threading.Thread(target=lambda: on_all([ranks], lambda r: r.gather(checkpoint_id)))
    waiting.start()
    store.set("gradients", "reduced")
    assert store.get("gradients") == b"reduced"
    assert waiting.is_alive()
    ranks.abandon("the end")
    waiting.join()


def test_an_abandoned_save_fails_on_all_ranks(tmp_path: Path) -> None:
    ranks = ranks_of(make_store("tcp", tmp_path), 2)

    def work(rank: Ranks) -> None:
        checkpoint_id = rank.enter()
        if rank.rank == 0:
            rank.abandon("out of time")
            rank.gather(checkpoint_id)
        else:
            rank.await_begin(checkpoint_id, "step", {})

    for error in on_all(ranks, work):
        assert "out of time" in str(error)


def test_a_silent_rank_is_named(tmp_path: Path) -> None:
    ranks = ranks_of(make_store("tcp", tmp_path), 3, timeout_s=0.2)
    (error,) = on_all(ranks[:1], one_save)
    assert "rank 1, 2 said nothing" in str(error)


def test_ranks_that_save_different_things_are_told(tmp_path: Path) -> None:
    ranks = ranks_of(make_store("tcp", tmp_path), 2)

    def work(rank: Ranks) -> None:
        checkpoint_id = rank.enter()
        if rank.rank == 0:
            rank.begin(checkpoint_id, "step-10", {})
        else:
            rank.await_begin(checkpoint_id, "step-20", {})

    assert "saving 'step-10', rank 1 'step-20'" in str(on_all(ranks, work)[1])


def test_values_are_exchanged_again_and_again(tmp_path: Path) -> None:
    store = make_store("tcp", tmp_path)
    before = store.num_keys()

    def work(rank: Ranks) -> list[Any]:
        return [rank.exchange("step", rank.rank + n) for n in range(2)]

    assert on_all(ranks_of(store, 2), work) == [[[0, 1], [1, 2]]] * 2
    assert store.num_keys() == before


def test_a_shared_directory_is_proved_and_left_empty(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "out"
    ranks = ranks_of(distributed.HashStore(), 2)
    proved = on_all(ranks, lambda rank: rank.prove_shared(PosixStorage(), str(folder)))
    assert proved == [None, None]
    assert os.listdir(folder) == []


def test_a_directory_of_its_own_is_refused_on_all_ranks(tmp_path: Path) -> None:
    def work(rank: Ranks) -> None:
        rank.prove_shared(PosixStorage(), str(tmp_path / str(rank.rank % 2)), timeout_s=0.3)

    for error in on_all(ranks_of(distributed.HashStore(), 3), work):
        assert "rank 1 cannot see" in str(error)


def test_a_directory_that_cannot_be_made_is_refused_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def work(rank: Ranks) -> None:
        rank.prove_shared(PosixStorage(), str(tmp_path / "file" / "out"), timeout_s=5)

    for error in on_all(ranks_of(distributed.HashStore(), 2), work):
        assert "rank 0 cannot write there" in str(error)


def test_a_closed_line_leaves_no_keys(tmp_path: Path) -> None:
    store = make_store("tcp", tmp_path)
    before = store.num_keys()
    on_all(ranks_of(store, 3), lambda rank: rank.close(30.0))
    assert store.num_keys() == before


# --- processes ----------------------------------------------------------------------------------


def part(ranks: Ranks, step: int = 1) -> dict[str, Any]:
    """This rank's piece of a tensor of 4 elements per rank; rank 0 tells of the step too."""
    mine = torch.full((4,), float(step + ranks.rank))
    pieces = Pieces((4 * ranks.world,), torch.float32, {4 * ranks.rank: mine})
    return {"w": pieces, **({"step": step} if ranks.rank == 0 else {})}


def left_in(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name not in ("store", "latest"))


@pytest.mark.parametrize(("world", "store"), [(2, "tcp"), (3, "tcp"), (3, "file")])
def test_all_ranks_save_one_checkpoint(world: int, store: str, tmp_path: Path) -> None:
    def work(ranks: Ranks) -> str:
        handles = [
            save(part(ranks, n), tmp_path / f"step-{n}", latest=True, ranks=ranks) for n in (1, 2)
        ]
        assert load(handles[1].result(60))["step"] == 2
        return ranks.nonce

    nonces = run_ranks(work, world, tmp_path, store=store)
    assert len(set(nonces)) == 1, nonces
    loaded = load(tmp_path)
    assert loaded["w"].tolist() == [2.0 + element // 4 for element in range(4 * world)]
    assert left_in(tmp_path) == ["step-1", "step-2"]


def test_each_incarnation_has_a_nonce_of_its_own(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> bool:
        again = Ranks.of()
        return again.nonce != ranks.nonce and again.exchange("nonce", again.nonce)[1] == again.nonce

    assert run_ranks(work, 2, tmp_path) == ["True", "True"]


def test_a_full_disk_of_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> str:
        storage = Failing("preallocate") if ranks.rank == 1 else PosixStorage()
        failed = save(part(ranks), tmp_path / "step", storage=storage, ranks=ranks)
        error = failed.durable.exception(60)
        assert save(part(ranks), tmp_path / "step", storage=storage, ranks=ranks).result(60)
        return str(error)

    for text in run_ranks(work, 2, tmp_path):
        assert os.strerror(errno.ENOSPC) in text
    assert left_in(tmp_path) == ["step"]


def test_a_state_that_one_rank_cannot_save_fails_on_all(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> str:
        state = {"w": torch.ones(2, device="meta" if ranks.rank == 1 else None)}
        return str(save(state, tmp_path / "step", ranks=ranks).durable.exception(60))

    first, second = run_ranks(work, 2, tmp_path)
    assert "rank 1: " in first
    assert second.startswith("FormatError")
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("method", ["enter", "report"])
@pytest.mark.parametrize(("killed", "store"), [(1, "tcp"), (0, "file")])
def test_a_killed_rank_fails_the_save_of_the_others(
    killed: int, store: str, method: str, tmp_path: Path
) -> None:
    def work(ranks: Ranks) -> str:
        if ranks.rank == killed:
            setattr(ranks, method, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        try:
            save(part(ranks), tmp_path / "step", ranks=ranks).result(60)
        except dos.CheckpointError as error:
            return str(error)
        return "saved"

    texts = run_ranks(work, 3, tmp_path, store=store, commit_timeout_s=1.0)
    assert texts.pop(killed) == ""
    for text in texts:
        assert f"rank {killed}" in text
    assert not (tmp_path / "step").exists()


def test_training_goes_on_where_the_store_is_gone(tmp_path: Path) -> None:
    reader, writer = os.pipe()

    def serve() -> None:
        store = distributed.TCPStore("127.0.0.1", 0, 1, True)
        os.write(writer, store.port.to_bytes(4, "little"))
        signal.pause()

    def train() -> str:
        port = int.from_bytes(os.read(reader, 4), "little")
        ranks = ranks_of(distributed.TCPStore("127.0.0.1", port), 2)[0]
        failed = save(part(ranks), tmp_path / "step", ranks=ranks)
        os.kill(server[0], signal.SIGKILL)
        return str(failed.durable.exception(60))

    server = fork(serve)
    text, _ = join([fork(train), server])
    assert "the store that the ranks talk through is gone" in text
    assert left_in(tmp_path) == []
