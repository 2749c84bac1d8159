"""How a file system wants to be read and written: measured by `dos bench ckpt --tune`, or as usual.

What was measured is kept per mount point in `$XDG_CACHE_HOME/dos/io.json`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class IoShape(BaseModel):
    """How the chunks of a checkpoint are read and written. Their size is the format's."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    depth: int = Field(default=32, ge=1, le=256, description="in flight, of all queues together")
    queues: int = Field(default=2, ge=1, le=16, description="each used by a thread of its own")
    direct: bool = Field(default=True, description="past the page cache")


def shape_for(path: str) -> IoShape:
    """The shape that was measured for the file system of a path; else what is usually good."""
    try:
        return IoShape.model_validate(_kept()[mount_of(path)])
    except (KeyError, ValidationError):
        return IoShape()


def keep_shape(path: str, shape: IoShape) -> Path:
    """Keep a shape for the file system of a path; returns where.

    Raises:
        OSError: the cache cannot be written.
    """
    file = cache_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.{os.getpid()}")
    new.write_text(json.dumps({**_kept(), mount_of(path): shape.model_dump()}, indent=2) + "\n")
    new.replace(file)
    return file


def mount_of(path: str) -> str:
    """The mount point that a path, or what is there of it, lies below."""
    at = os.path.realpath(path)
    while not os.path.ismount(at):
        at = os.path.dirname(at)
    return at


def cache_file() -> Path:
    """Where measured shapes are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base, "dos", "io.json")


def _kept() -> Mapping[str, object]:
    """A missing or damaged cache holds nothing: it can be measured again."""
    try:
        kept = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}
