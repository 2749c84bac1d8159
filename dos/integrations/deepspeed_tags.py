"""A tag of DeepSpeed's in a checkpoint of ours: what each file that upstream asks for holds.

Below the key "rank", which is each rank's own, lies a branch for each file that upstream saved
there, by its name.
"""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Container
from typing import Any

import torch

from dos.checkpoint.chunks import ChunkReader, Wanted
from dos.checkpoint.format import FileId
from dos.checkpoint.manifest import MANIFEST
from dos.checkpoint.opened import Opened
from dos.checkpoint.paths import component, join
from dos.checkpoint.reader import load
from dos.checkpoint.replicas import PER_RANK
from dos.checkpoint.storage import Storage
from dos.errors import FormatError
from dos.integrations.deepspeed_objects import classes, rebuilt


class FoundPath(str):
    """Path of a file of ours, at which upstream sees that there is one.

    Attributes:
        name: of the file that upstream asks for, which is a branch in it.
    """

    name: str


class TagReader:
    """Reads the files of a tag.

    Args:
        path: of the tag's directory.
        storage: the file system.

    Attributes:
        path, storage: as given.
        rank_of: the rank that wrote it, by the name of a file.

    Raises:
        FormatError: it is no checkpoint of DeepSpeed's.
        IntegrityError: a manifest, header or index is damaged.
    """

    def __init__(self, path: str, storage: Storage) -> None:
        self.path, self.storage = path, storage
        self.rank_of: dict[str, int] = {}
        with Opened(path, storage) as opened:
            for file in opened.files:
                tree = file.index.said["tree"]
                names = tree.get(PER_RANK) if isinstance(tree, dict) else None
                if not isinstance(names, dict):
                    raise FormatError("no engine of DeepSpeed saved this", where=path)
                self.rank_of.update(dict.fromkeys(names, file.header.file_id.rank))

    def read(
        self,
        name: str,
        into: Any = None,
        map_location: str | torch.device | None = None,
        *,
        trusted: bool = False,
    ) -> Any:
        """What upstream saved in the file of that name.

        Args:
            name: of the file.
            into: see `dos.checkpoint.load`.
            map_location: the device of new tensors; None: host memory.
            trusted: unpickle objects of classes that are not known.

        Raises:
            FormatError, IntegrityError: see `dos.checkpoint.load`.
        """
        if name not in self.rank_of:
            raise FormatError(
                f"there is no {name}", where=self.path, fix="load it by as many ranks as saved it"
            )
        state = load(
            self.path,
            None if into is None else {PER_RANK: {name: into}},
            join(PER_RANK, glob.escape(component(name))),
            map_location,
            allow=classes(),
            trusted=trusted,
            rank=self.rank_of[name],
            storage=self.storage,
        )
        return rebuilt(state[PER_RANK][name])

    def check(self, rank: int, world: int, but: Container[str]) -> None:
        """Compare the checksums of one of `world` shares of what is there.

        Args:
            rank: which share.
            world: how many.
            but: names of files that were read.

        Raises:
            IntegrityError: the first damage.
        """
        left = {its for name, its in self.rank_of.items() if name not in but}
        with Opened(self.path, self.storage) as opened:
            for file in opened.files:
                its = file.header.file_id.rank
                if its in left and its % world == rank:
                    ChunkReader(self.storage, Wanted(file), verify=True).check()

    def find(self, pattern: str) -> list[FoundPath]:
        """The files whose names a glob matches, sorted by name."""
        found = []
        for name in sorted(fnmatch.filter(self.rank_of, pattern)):
            file = FileId("0", self.rank_of[name], 0).name
            found.append(FoundPath(os.path.join(self.path, file)))
            found[-1].name = name
        return found


def is_tag(path: str) -> bool:
    """Is there a checkpoint of ours?"""
    return os.path.isfile(os.path.join(path, MANIFEST))


_last: tuple[bytes, TagReader] | None = None


def open_tag(path: str, storage: Storage) -> TagReader:
    """A reader of the tag at a path, the one from before if it is the same checkpoint."""
    global _last
    try:
        manifest = storage.read_bytes(os.path.join(path, MANIFEST))
    except OSError:
        manifest = b""  # which the reader tells of
    if _last is None or _last[0] != manifest or _last[1].path != path:
        _last = manifest, TagReader(path, storage)
    return _last[1]
