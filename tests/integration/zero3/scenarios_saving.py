"""What is saved is of one step, on every kind of engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.integration.zero3.saving import (
    KINDS,
    backward,
    differences,
    engine_of,
    gate,
    open_soon,
    picture,
    train,
)
from tests.integration.zero3.scenarios_state import shared_folder


def step_exact() -> dict[str, Any]:
    """Save to a disk that takes nothing yet, change everything as early as allowed, resume."""
    found = {}
    for kind in KINDS:
        with shared_folder() as folder:
            found[kind] = _step_exact(kind, folder)
    return found


def _step_exact(kind: str, folder: Path) -> dict[str, Any]:
    engine = engine_of(kind)
    train(engine, 0, 1)
    saved, mine = picture(engine), {"tensor": torch.ones(3), "set": {1, 2}}
    disk = gate(engine)
    engine.save_checkpoint(str(folder), client_state={"mine": mine})
    mine["tensor"].zero_()
    mine["set"].clear()
    losses = [backward(engine, 2)]
    early = sorted(path.name for path in folder.glob("[!.z]*"))
    open_soon(disk)
    engine.step()
    losses += train(engine, 3)
    end = picture(engine)
    engine.destroy()
    torch.distributed.barrier()
    files = sorted(str(path.relative_to(folder)) for path in folder.glob("[!z]*/*"))
    latest = (folder / "latest").read_text()

    engine = engine_of(kind)
    _, client = engine.load_checkpoint(str(folder))
    loaded = picture(engine)
    again = train(engine, 2, 3)
    result = {
        "early": early,
        "files": files,
        "latest": latest,
        "client": (client["mine"]["tensor"].tolist(), client["mine"]["set"]),
        "loaded": differences(saved, loaded),
        "end": differences(end, picture(engine)),
        "losses": losses == again,
    }
    engine.destroy()
    return result
