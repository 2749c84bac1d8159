"""What a disk holds, and what changes it: the parts of which a power loss keeps any."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

SECTOR_BYTES = 512
ROOT_INODE = 0

Names = dict[str, int]
"""Inode by name: a directory's content."""


@dataclass(eq=False)
class Write:
    """Bytes of a file, since it was last synced."""

    inode: int
    offset: int
    data: bytes
    lost: bool = False  # for ever: a sync that failed has let go of it

    def apply(self, image: Image) -> None:
        content = image.files[self.inode]
        content = content.ljust(self.offset, b"\0")
        image.files[self.inode] = (
            content[: self.offset] + self.data + content[self.offset + len(self.data) :]
        )

    def torn(self, random: Random) -> list[Write]:
        """Some of its sectors."""
        cuts = range(0, len(self.data), SECTOR_BYTES)
        return [
            replace(self, offset=self.offset + at, data=self.data[at : at + SECTOR_BYTES])
            for at in cuts
            if random.random() < 0.5
        ]


@dataclass(eq=False)
class Resize:
    """A file's size, since it was last synced."""

    inode: int
    n_bytes: int
    lost: bool = False

    def apply(self, image: Image) -> None:
        image.files[self.inode] = image.files[self.inode][: self.n_bytes].ljust(self.n_bytes, b"\0")


@dataclass(eq=False)
class Rename:
    """What names mean from now on (None: nothing), all of them or none.

    Not where a directory would have a second name, which no file system lets it have: a later
    change has overtaken this one.
    """

    names: dict[tuple[int, str], int | None]  # by directory and name
    unsynced: set[int]  # of these directories

    def apply(self, image: Image) -> None:
        named = {inode for inode in self.names.values() if inode in image.directories}
        for directory, names in image.directories.items():
            for name, inode in names.items():
                if inode in named and (directory, name) not in self.names:
                    return
        for (directory, name), inode in self.names.items():
            image.directories[directory].pop(name, None)
            if inode is not None:
                image.directories[directory][name] = inode


Change = Write | Resize | Rename


@dataclass
class Image:
    """What a disk holds: files and directories by inode."""

    files: dict[int, bytes] = field(default_factory=dict)
    directories: dict[int, Names] = field(default_factory=lambda: {ROOT_INODE: {}})

    def after(self, changes: Iterable[Change]) -> Image:
        """Another image: this one, changed."""
        made = Image(dict(self.files), {n: dict(names) for n, names in self.directories.items()})
        for change in changes:
            change.apply(made)
        return made

    def tree(self, directory: int = ROOT_INODE, at: str = "") -> tuple[Any, ...]:
        """All that can be reached by a name: equal for images that nobody can tell apart."""
        found: list[tuple[Any, ...]] = [(at,)]
        for name, inode in sorted(self.directories[directory].items()):
            if inode in self.files:
                found.append((f"{at}/{name}", self.files[inode]))
            else:
                found += self.tree(inode, f"{at}/{name}")
        return tuple(found)
