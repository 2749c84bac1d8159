"""Which tag is loaded: the newest whole one, the same on all ranks."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from dos.checkpoint.commit import LATEST
from dos.checkpoint.manifest import MANIFEST, parse_manifest
from dos.errors import (
    CheckpointError,
    DOSError,
    FormatError,
    IntegrityError,
    RefusedError,
    first_line,
)
from dos.integrations.deepspeed_engine import DOSCheckpointEngine
from dos.integrations.deepspeed_tags import TagReader, is_tag, open_tag

_log = logging.getLogger(__name__)

_TIMED = re.compile(r"(\d+)-.*")
"""Ids of tags, which say when those were saved."""


class Target(NamedTuple):
    """Live tensors that a file is read into, and what is told that it overwrote them."""

    tree: Any
    overwritten: Callable[[], None]


def load_checked(
    ours: DOSCheckpointEngine,
    load_dir: str,
    tag: str | None,
    targets: Callable[[str], Mapping[str, Target | None]],
    load: Callable[[str | None], Any],
) -> Any:
    """Load a tag that is whole on all ranks, who call this together.

    Before upstream's code, in which ranks wait for each other, is asked to load, every file is
    read by some rank and the ranks agree.

    Args:
        ours: the checkpoint engine, which saves nothing now.
        load_dir: where tags lie.
        tag: the one to load; None: that which `latest` names or, where it is damaged, the newest
            one that is not.
        targets: for a tag, names of its files that this rank will ask for, each with what it is
            to be read into, or None.
        load: upstream's, of a tag.

    Raises:
        FormatError: there is no checkpoint of that tag.
        RefusedError: what it holds is not allowed, or newer than this library: no other is tried.
        IntegrityError: it is damaged; without a tag: all are.
        CheckpointError: a rank cannot read for another reason.
    """
    # Rank 0's view of what there is counts.
    look = partial(_candidates, load_dir, tag) if ours.ranks.rank == 0 else list
    candidates: list[tuple[str, bool]] = _by_all(ours, load_dir, look)[0][0]
    damages: list[str] = []
    for candidate, of_torch in candidates:
        if of_torch:
            return load(candidate)
        path = os.path.join(load_dir, candidate)
        try:
            _, damage = _by_all(ours, path, partial(_read, ours, path, partial(targets, candidate)))
            if damage is None:
                return load(candidate)
        finally:
            ours.loaded = {}
        if len(candidates) == 1:
            raise damage
        damages.append(f"{candidate}: {damage.where}: {damage.what}")
        _log.warning("%s cannot be loaded, another one is tried: %s", path, damage)
    if damages:
        raise IntegrityError(
            f"no checkpoint can be loaded: {'; '.join(damages)}",
            where=load_dir,
            fix="load from another directory",
        )
    return load(tag)  # upstream says that there is none


def _by_all(
    ours: DOSCheckpointEngine, path: str, work: Callable[[], Any]
) -> tuple[list[Any], DOSError | None]:
    """What all ranks make of a path; or why it is not whole, for any of them.

    Raises:
        DOSError: the first that is no damage, on all ranks; on each its own, if it has one.
    """
    value, failure = None, None
    try:
        value = work()
    except DOSError as error:
        failure = error
    except Exception as error:  # the others wait
        what = f"rank {ours.ranks.rank} cannot load it: {type(error).__name__}: {first_line(error)}"
        failure = CheckpointError(what, where=path, fix="see the cause, on that rank")
        failure.__cause__ = error
    values, failures = zip(*ours.agree((value, failure)), strict=True)
    for one in filter(None, (failure, *failures)):
        is_damage = isinstance(one, FormatError | IntegrityError)
        if not is_damage or isinstance(one, RefusedError):
            raise one
    return list(values), next(filter(None, failures), None)


def _candidates(load_dir: str, tag: str | None) -> list[tuple[str, bool]]:
    """Tags in the order in which they are tried, and of each whether torch wrote it."""
    names = _tags(load_dir) if tag is None else [str(tag)]
    return [(name, _is_of_torch(os.path.join(load_dir, name))) for name in names]


def _tags(load_dir: str) -> list[str]:
    """The tag that `latest` names, then ours: those saved before it, the newest first; the rest."""
    path, newest = os.path.join(load_dir, LATEST), ""
    with suppress(OSError, UnicodeDecodeError), open(path) as file:
        newest = file.read().strip()
    manifests = glob.glob(os.path.join(glob.escape(load_dir), "*", MANIFEST))
    by_age = sorted(manifests, key=_saved_ns, reverse=True)
    tags = [os.path.basename(os.path.dirname(manifest)) for manifest in by_age]
    if newest in tags:
        at = tags.index(newest)
        return tags[at:] + tags[:at]
    if newest:
        return [newest, *tags]
    if tags:
        _log.warning("%s names no tag, the newest one that is whole is taken", path)
    return tags


def _saved_ns(manifest: str) -> int:
    """When a tag was saved, in nanoseconds; where its id does not say, when its manifest was."""
    with suppress(OSError, DOSError):  # gone, or damaged: it is tried last
        with open(manifest, "rb") as file:
            records = parse_manifest(file.read(), manifest)
        timed = _TIMED.fullmatch(records[0].file_id.checkpoint_id)
        return int(timed[1]) if timed else os.stat(manifest).st_mtime_ns
    return 0


def _is_of_torch(path: str) -> bool:
    return not is_tag(path) and any(glob.iglob(os.path.join(glob.escape(path), "*.pt")))


def _read(
    ours: DOSCheckpointEngine, path: str, targets: Callable[[], Mapping[str, Target | None]]
) -> None:
    """Read this rank's files of a tag, and check its share of the others."""
    if not is_tag(path):
        raise FormatError(
            "no checkpoint: it has no manifest, and no files of torch",
            where=path,
            fix="load another tag, or none for the newest; one without manifest is unfinished",
        )
    tag = open_tag(os.path.abspath(path), ours.storage)
    for name, target in targets().items():
        if name in tag.rank_of:
            ours.loaded[name] = _read_file(tag, name, target, trusted=ours.options.trusted)
    tag.check(ours.ranks.rank, ours.ranks.world, but=ours.loaded)


def _read_file(tag: TagReader, name: str, target: Target | None, *, trusted: bool) -> Any:
    if target is not None:
        try:
            state = tag.read(name, into=target.tree, trusted=trusted)
            target.overwritten()
            return state
        except FormatError:
            pass  # of another shape: nothing was overwritten, and upstream will see what it does
        except BaseException:
            target.overwritten()
            raise
    return tag.read(name, trusted=trusted)
