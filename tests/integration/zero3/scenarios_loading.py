"""Which checkpoint is loaded when some are damaged, unfinished, or of others."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dos.checkpoint.posix import PosixStorage
from dos.errors import DOSError
from tests.gated_disk import Gated
from tests.integration.zero3.saving import (
    RING_BYTES,
    differences,
    engine_of,
    gate,
    picture,
    train,
)
from tests.integration.zero3.scenarios_state import shared_folder


def fallback() -> dict[str, Any]:
    """The newest is damaged: in the middle of a rank's state, and by what is missing."""
    found: dict[str, Any] = {}
    with shared_folder() as folder:
        pictures = _three(folder, "ours")
        _damage(folder / "global_step3")
        engine = engine_of("ours")
        found["refused"] = _refusal(lambda: engine.load_checkpoint(str(folder), tag="global_step3"))
        found["step"] = _refusal(lambda: train(engine, 3))
        engine.load_checkpoint(str(folder))
        found["damaged"] = differences(pictures[2], picture(engine))
        _alone(lambda: os.unlink(folder / "global_step2" / "manifest.json"))
        engine.load_checkpoint(str(folder))
        found["unfinished"] = differences(pictures[1], picture(engine))
        found["no manifest"] = _refusal(
            lambda: engine.load_checkpoint(str(folder), tag="global_step2")
        )
        _damage(folder / "global_step1")
        found["none"] = _refusal(lambda: engine.load_checkpoint(str(folder)))
        found["empty"] = engine.load_checkpoint(str(folder / "nowhere"))
        engine.destroy()
    return found


def by_latest() -> dict[str, int]:
    """The step that is loaded without a tag, by what the file `latest` says."""
    with shared_folder() as folder:
        _three(folder, "ZeRO-1")
        engine, latest = engine_of("ZeRO-1"), folder / "latest"
        _alone(lambda: _as_if_copied(folder))

        def loaded(change: Callable[[], object]) -> int:
            _alone(change)
            engine.load_checkpoint(str(folder))
            return int(engine.global_steps)

        found = {
            "missing": loaded(latest.unlink),
            "empty": loaded(latest.touch),
            "nothing there": loaded(lambda: latest.write_text("global_step8")),
            "unfinished": loaded((folder / "global_step8").mkdir),
            "an older one": loaded(lambda: latest.write_text("global_step2")),
        }
        _damage(folder / "global_step2")
        found["an older one, damaged"] = loaded(lambda: None)
        engine.destroy()
    return found


def _as_if_copied(folder: Path) -> None:
    """Give the files of tags the times in another order than they were saved in."""
    for step in (1, 2, 3):
        os.utime(folder / f"global_step{step}" / "manifest.json", (-step, -step))


def _three(folder: Path, kind: str) -> dict[int, dict[str, Any]]:
    engine = engine_of(kind)
    pictures = {}
    for step in (1, 2, 3):
        train(engine, step - 1)
        pictures[step] = picture(engine)
        engine.save_checkpoint(str(folder))
    engine.destroy()
    torch.distributed.barrier()
    return pictures


def _damage(tag: Path) -> None:
    """Change a byte of the last rank's file."""

    def change() -> None:
        file = max(tag.glob("rank-*"))
        with open(file, "r+b") as its:
            its.seek(os.path.getsize(file) // 2)
            byte = its.read(1)
            its.seek(-1, os.SEEK_CUR)
            its.write(bytes([byte[0] ^ 1]))

    _alone(change)


def _alone(work: Callable[[], object]) -> None:
    """Have rank 0 do it."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        work()
    torch.distributed.barrier()


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except DOSError as error:
        return f"{type(error).__name__}: {error.what}"
    return "went through"


class Full(PosixStorage):
    """A disk without space for a file."""

    def preallocate(self, file: Any, n_bytes: int) -> None:
        """Fails."""
        raise OSError(errno.ENOSPC, "No space left on device")


def failing() -> dict[str, Any]:
    """A save that fails on the last rank, in the background: training goes on."""
    engine = engine_of("ZeRO-1")
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    ours, disk = engine.checkpoint_engine, engine.checkpoint_engine.storage
    found: dict[str, Any] = {}
    with shared_folder() as folder:
        train(engine, 0)
        ours.storage = Full() if last else disk
        engine.save_checkpoint(str(folder), tag="a")
        train(engine, 1)
        ours.wait()
        ours.storage = disk
        found["next"] = _refusal(lambda: engine.save_checkpoint(str(folder), tag="b"))
        found["after"] = _refusal(lambda: engine.save_checkpoint(str(folder), tag="c"))
        engine.destroy()
        torch.distributed.barrier()
        found["tags"] = sorted(path.parent.name for path in folder.glob("*/manifest.json"))
        found["latest"] = (folder / "latest").read_text()
        found["left"] = sorted(path.name for path in folder.glob(".*"))
    return found


def unsaveable() -> dict[str, Any]:
    """What one rank cannot save fails at once there, and on the others with the next save."""
    engine = engine_of("ZeRO-1")
    rank = torch.distributed.get_rank()
    found: dict[str, Any] = {}
    with shared_folder() as folder:
        state = {"mine": (lambda: 0) if rank == 0 else 0}
        found["first"] = _refusal(
            lambda: engine.save_checkpoint(str(folder), tag="a", client_state=state)
        )
        engine.checkpoint_engine.wait()
        found["next"] = _refusal(lambda: engine.save_checkpoint(str(folder), tag="b"))
        engine.destroy()
        torch.distributed.barrier()
        found["tags"] = sorted(path.parent.name for path in folder.glob("*/manifest.json"))
    return found


@dataclass
class Settings:
    """What a script puts into a checkpoint."""

    rate: int = 7


def not_allowed() -> dict[str, Any]:
    """The newest is whole, and holds an object of a class that nobody allowed yet."""
    engine = engine_of("ZeRO-1")
    found: dict[str, Any] = {}
    with shared_folder() as folder:
        engine.save_checkpoint(str(folder), tag="a")
        engine.save_checkpoint(str(folder), tag="b", client_state={"settings": Settings()})
        found["refused"] = _refusal(lambda: engine.load_checkpoint(str(folder)))
        with torch.serialization.safe_globals([Settings]):
            path, client = engine.load_checkpoint(str(folder))
        found["allowed"] = (Path(path).parent.name, client["settings"].rate)
        engine.destroy()
    return found


class OutOfMemory(PosixStorage):
    """Has no room for what is read."""

    def read_bytes(self, path: str) -> bytes:
        """Fails."""
        raise MemoryError


def unreadable() -> dict[str, Any]:
    """One rank fails to read, by no fault of the checkpoint."""
    engine = engine_of("ZeRO-1")
    ours, disk = engine.checkpoint_engine, engine.checkpoint_engine.storage
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    found: dict[str, Any] = {}
    with shared_folder() as folder:
        engine.save_checkpoint(str(folder), tag="a")
        engine.save_checkpoint(str(folder), tag="b")
        ours.wait()
        ours.storage = OutOfMemory() if last else disk
        found["refused"] = _refusal(lambda: engine.load_checkpoint(str(folder)))
        ours.storage = disk
        found["after"] = Path(engine.load_checkpoint(str(folder))[0]).parent.name
        engine.destroy()
    return found


def given_up() -> dict[str, Any]:
    """The last rank's disk takes nothing, and at the end it waits no longer."""
    last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    options = {"ring_bytes": RING_BYTES, "close_timeout_s": 0.2 if last else 600.0}
    engine = engine_of("ZeRO-1", deep_optimizer_states={"checkpoint": options})
    disk = gate(engine) if last else Gated()
    with shared_folder() as folder:
        engine.save_checkpoint(str(folder), tag="a")
        engine.checkpoint_engine.cleanup()
        disk.open_now.set()
        engine.checkpoint_engine.wait()
        found = {"next": _refusal(lambda: engine.save_checkpoint(str(folder), tag="b"))}
        engine.destroy()
    return found
