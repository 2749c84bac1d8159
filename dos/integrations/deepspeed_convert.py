"""A tag of DeepSpeed's, from torch's files to a checkpoint of ours and back."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from dos.checkpoint.convert import atomically, read_torch
from dos.checkpoint.draft import Draft
from dos.checkpoint.format import FileId
from dos.checkpoint.ranks import Ranks
from dos.checkpoint.reader import resolve
from dos.checkpoint.replicas import PER_RANK
from dos.checkpoint.rounds import Round
from dos.checkpoint.storage import make_storage
from dos.errors import ConfigError, IntegrationError
from dos.integrations.deepspeed_objects import by_fields, classes
from dos.integrations.deepspeed_tags import TagReader

_STATES = "*_states.pt"
_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_")


def is_deepspeed(path: str | os.PathLike[str]) -> bool:
    """Is it the directory of a tag that DeepSpeed wrote by torch?"""
    return any(Path(path).glob(_STATES))


def convert_deepspeed(
    source: str,
    target: str,
    to: str,
    *,
    only: str | None = None,
    part: str | None = None,
    trusted: bool = False,
) -> None:
    """`to_deepspeed` or `from_deepspeed`; ConfigError: another form, or a part is asked for."""
    if only is not None or part is not None:
        raise ConfigError(
            "a tag of DeepSpeed's is converted as a whole",
            where="only" if part is None else "part",
            fix="leave it out",
        )
    if to == "deepspeed":
        to_deepspeed(source, target, trusted=trusted)
    elif to == "dos":
        from_deepspeed(source, target, trusted=trusted)
    else:
        raise ConfigError(
            f"what DeepSpeed wrote does not become {to!r} at once",
            where="to",
            fix="use its zero_to_fp32 for whole tensors, or convert it to 'dos' first",
        )


def to_deepspeed(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, trusted: bool = False
) -> None:
    """Write a tag as DeepSpeed does, for its own loader and tools.

    Args:
        source: the checkpoint that an engine saved, or the directory with `latest` above it.
        target: the tag's directory, which must not exist.
        trusted: unpickle objects of classes that are not known.

    Raises:
        ConfigError: the target exists.
        FormatError, IntegrityError: the source is no such checkpoint, or damaged.
        CheckpointError: the target cannot be written.
    """
    _check_installed()
    there = Path(target)
    if there.exists():
        raise ConfigError("it exists", where=str(there), fix="name another target")
    storage = make_storage()
    tag = TagReader(resolve(source, storage), storage)

    def write(folder: Path) -> None:
        folder.mkdir()
        for name in tag.rank_of:
            torch.save(tag.read(name, trusted=trusted), folder / name)

    atomically(there, write)


def from_deepspeed(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, trusted: bool = False
) -> None:
    """Write a checkpoint of ours of a tag that DeepSpeed wrote by torch.

    Args:
        source: the tag's directory.
        target: the checkpoint; one that has the name is replaced.
        trusted: unpickle objects of any class.

    Raises:
        FormatError: a file that cannot be read so.
        CheckpointError: the target cannot be written.
    """
    _check_installed()
    names: dict[int, list[str]] = {}
    for file in sorted(Path(source).glob("*.pt")):
        found = _RANK.match(file.name)
        names.setdefault(int(found.group(1)) if found else 0, []).append(file.name)
    storage = make_storage()
    with Round(Ranks.alone(), storage, os.path.abspath(target)) as taken:
        taken.claim()
        taken.begin()
        records = []
        for rank, its in sorted(names.items()):
            states = {name: _read(Path(source, name), trusted=trusted) for name in its}
            file_id = FileId(taken.file_id.checkpoint_id, rank, 0)
            draft = Draft(file_id, {PER_RANK: states}, None, lambda: None)
            records.append(draft.write(storage, taken.partial, None, lambda n_bytes: None))
        taken.commit(records, latest=False)


def _read(path: Path, *, trusted: bool) -> Any:
    return by_fields(read_torch(path, classes(), trusted))


def _check_installed() -> None:
    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        raise IntegrationError(
            f"DeepSpeed, whose classes its files hold, cannot be imported: {error}",
            where="convert",
            fix="pip install 'deep-optimizer-states[deepspeed]'",
        ) from error
