"""Which tag is loaded: the newest whole one, the same on all ranks."""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dos.checkpoint.commit import LATEST
from dos.errors import DOSError, FormatError, IntegrityError
from dos.integrations.deepspeed_engine import DOSCheckpointEngine
from dos.integrations.deepspeed_tags import TagReader, is_tag, open_tag

_log = logging.getLogger(__name__)


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
        ours: the checkpoint engine.
        load_dir: where tags lie.
        tag: the one to load; None: that which `latest` names or, where it is damaged, the newest
            one that is not.
        targets: for a tag, names of its files that this rank will ask for, each with what it is
            to be read into, or None.
        load: upstream's, of a tag.

    Raises:
        FormatError: there is no checkpoint of that tag.
        IntegrityError: it is damaged; without a tag: all are.
    """
    ours.wait()
    asked = None if tag is None else [str(tag)]
    candidates = ours.agree(asked or _candidates(load_dir))[0]
    damages: list[str] = []
    for candidate in candidates:
        path = os.path.join(load_dir, candidate)
        if not is_tag(path):
            _check_other(path)
            return load(candidate)
        try:
            damage = _read(ours, path, targets(candidate))
            if damage is None:
                return load(candidate)
        finally:
            ours.loaded = {}
        if len(candidates) == 1:
            raise damage
        damages.append(f"{candidate}: {damage.where}: {damage.what}")
        _log.warning("%s cannot be loaded, an older one is tried: %s", path, damage)
    if damages:
        raise IntegrityError(
            f"no checkpoint can be loaded: {'; '.join(damages)}",
            where=load_dir,
            fix="load from another directory",
        )
    return load(tag)  # upstream says that there is none


def _candidates(load_dir: str) -> list[str]:
    """The tag that `latest` names, and then the others of ours, the newest first."""
    try:
        with open(os.path.join(load_dir, LATEST)) as file:
            newest = file.read().strip()
    except (OSError, UnicodeDecodeError):
        return []
    manifests = glob.glob(os.path.join(glob.escape(load_dir), "*", "manifest.json"))
    by_age = sorted(manifests, key=os.path.getmtime, reverse=True)
    tags = [os.path.basename(os.path.dirname(path)) for path in by_age]
    if not os.path.exists(os.path.join(load_dir, newest)) and tags:
        _log.warning("%s is not there, an older one is tried", os.path.join(load_dir, newest))
        return tags
    return [newest, *(other for other in tags if other != newest)]


def _check_other(path: str) -> None:
    """Refuse what is no whole checkpoint of ours, and none that torch wrote."""
    if not glob.glob(os.path.join(glob.escape(path), "*.pt")):
        raise FormatError(
            "no checkpoint: it has no manifest, and no files of torch",
            where=path,
            fix="load another tag, or none for the newest; one without manifest is unfinished",
        )


def _read(
    ours: DOSCheckpointEngine, path: str, targets: Mapping[str, Target | None]
) -> DOSError | None:
    """Read this rank's files of a tag, and check its share of the others; why not, on any rank."""
    failure: DOSError | None = None
    try:
        tag = open_tag(os.path.abspath(path), ours.storage)
        for name, target in targets.items():
            if name in tag.rank_of:
                ours.loaded[name] = _read_file(tag, name, target, trusted=ours.options.trusted)
        tag.check(ours.ranks.rank, ours.ranks.world, but=ours.loaded)
    except DOSError as error:
        failure = error
    return next(filter(None, ours.agree(failure)), None)


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
