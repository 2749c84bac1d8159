"""The profile of this machine, as it was measured last."""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

from dos.errors import ConfigError
from perfmodel.machine import same_machine
from perfmodel.profile import NodeProfile


def cache_path() -> Path | None:
    """`dos/node.json` under `$XDG_CACHE_HOME`, which is `~/.cache` unless it is set.

    As the XDG Base Directory Specification has it, which also tells to ignore a relative path.
    None where this user has no home.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():
        return given / "dos" / "node.json"
    try:
        return Path.home() / ".cache" / "dos" / "node.json"
    except RuntimeError:
        return None


def read_cache(machine: Mapping[str, str | int | float]) -> NodeProfile | None:
    """The kept profile if it is of this machine, as `machine_of` describes it; else None.

    Home folders are shared between machines: a profile of another one is passed over. A file
    that cannot be read is too, with a warning.
    """
    path = cache_path()
    if path is None or not os.path.exists(path):  # unlike Path.exists, False where access is denied
        return None
    try:
        profile = NodeProfile.load(path)
    except ConfigError as error:
        warnings.warn(f"ignored, and measured again: {error}", RuntimeWarning, stacklevel=2)
        return None
    return profile if same_machine(profile.machine, machine) else None


def write_cache(profile: NodeProfile) -> Path | None:
    """Keep a profile for later runs; the path, or None if that cannot be done.

    Whole or not at all: the ranks of a node may do so at the same time.
    """
    path = cache_path()
    if path is None:
        return None
    partial = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made, partial = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        os.close(made)
        profile.save(partial)
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        return None
    return path
