"""`load`: all that the files say is checked, then data go to where they stay."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch

from dos.checkpoint.buffers import address_of, aligned_buffer
from dos.checkpoint.bulk import collector_paused
from dos.checkpoint.chunks import ChunkReader, Target, Wanted
from dos.checkpoint.commit import read_latest
from dos.checkpoint.decode import LEFT_OUT, Decoder, allowed_classes
from dos.checkpoint.encode import encode_state
from dos.checkpoint.format import OBJECTS
from dos.checkpoint.leaves import Leaves
from dos.checkpoint.manifest import MANIFEST
from dos.checkpoint.opened import Opened, OpenedFile
from dos.checkpoint.paths import Globs, text_of
from dos.checkpoint.replicas import PER_RANK
from dos.checkpoint.storage import Storage, make_storage
from dos.checkpoint.wholes import find_wholes
from dos.errors import ConfigError, FormatError, IntegrityError, RefusedError

Verify = bool | Literal["before"]


def load(
    path: str | os.PathLike[str],
    into: Any = None,
    only: str | Iterable[str] | None = None,
    map_location: str | torch.device | None = None,
    verify: Verify = True,
    allow: Iterable[type] = (),
    trusted: bool = False,
    *,
    rank: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    storage: Storage | None = None,
) -> Any:
    """The state of a checkpoint: that of its first rank, its pieces put together over all ranks.

    Args:
        path: the checkpoint's directory, or one with a file `latest` that names it.
        into: a state whose tensors, DTensors, `Pieces` and arrays are overwritten with those of
            the same path, and stand in the result; what it lacks is made anew. Of a DTensor or
            `Pieces` only the elements that it has are read, however they were cut when they were
            saved. It may have none that the checkpoint lacks, unless `only` leaves it out.
        only: patterns of paths, `*` matches `/` too; keys of dicts that match none are left out,
            items of sequences and fields are None.
        map_location: the device of new tensors; None: host memory, wherever they were.
        verify: compare checksums while reading; "before": read twice, and write to `into` only
            once all are right.
        allow: dataclasses, namedtuples and enums that may be rebuilt, besides
            `torch.serialization`'s safe globals.
        trusted: unpickle objects. That can run any code: only for files of people you trust.
        rank: what is below the key "rank" is that of this rank; of one that saved none there is
            none. None: as the first rank saved it.
        progress: called with the bytes that are read, and all that will be.
        storage: the file system; None: the best engine there is.

    Raises:
        FormatError: no checkpoint, or one that cannot be read so; nothing was overwritten.
        IntegrityError: damaged bytes. Unless `verify` is "before", tensors of `into` may be
            partly overwritten if the message says so.
    """
    if verify not in (True, False, "before"):
        raise ConfigError(
            f"there is no {verify!r}", where="verify", fix="use True, False or 'before'"
        )
    storage = storage or make_storage()
    device = None if map_location is None else torch.device(map_location)
    targets = {} if into is None else _targets(into)
    with collector_paused(), Opened(resolve(path, storage), storage) as opened:
        wanted = [Wanted(file) for file in opened.files]
        trees = _trees(opened.files, wanted, rank, targets, device)
        reading = _Reading(storage, wanted, verify, progress, overwrites=bool(targets))
        globs, allowed = Globs(only), allowed_classes(allow)
        try:
            for tree in trees:
                tree.plan(storage, globs, allowed, trusted)
            globs.check_used(opened.path)
            return _read(trees, reading)
        finally:
            reading.wait(raises=False)  # the disk writes to the memory that goes with `close`
            for tree in trees:
                tree.leaves.close()


def resolve(path: str | os.PathLike[str], storage: Storage) -> str:
    """The directory of a checkpoint, or of the newest one in a directory of them."""
    path = os.path.abspath(os.fspath(path))
    if storage.exists(os.path.join(path, MANIFEST)):
        return path
    return read_latest(storage, path) or path


def read_objects(storage: Storage, opened: OpenedFile) -> memoryview:
    """The long byte strings and pickled objects of a file, one behind the other."""
    entry = opened.header.entries.get(OBJECTS)
    if entry is None:
        return memoryview(b"")
    data = aligned_buffer(entry.end - entry.begin)
    target = Target(entry.begin, entry.end, address_of(data))
    ChunkReader(storage, Wanted(opened, targets=[target]), verify=True).read()
    return data


def blobs_of(objects: memoryview) -> Callable[[int, int], bytes]:
    """What gives one of them after the other, together no more than there are.

    It raises ValueError for one that is not there, or that overlaps others.
    """
    left = len(objects)

    def blob(offset: int, n_bytes: int) -> bytes:
        nonlocal left
        if type(offset) is not int or type(n_bytes) is not int:
            raise ValueError("malformed offset")
        if not 0 <= offset <= offset + n_bytes <= len(objects) or n_bytes > left:
            raise ValueError(f"bytes {offset} to {offset + n_bytes} of {len(objects)}")
        left -= n_bytes
        return bytes(objects[offset : offset + n_bytes])

    return blob


def _trees(
    files: Sequence[OpenedFile],
    wanted: list[Wanted],
    rank: int | None,
    targets: dict[str, Any],
    device: torch.device | None,
) -> list[_Tree]:
    """What makes up the state: the first file's tree, and what is the rank's own of another's."""
    wholes = find_wholes(files)
    first = files[0].index.said["tree"]
    places = [(0, first, "")]
    if rank not in (None, files[0].header.file_id.rank) and isinstance(first, dict):
        places = [(0, {key: node for key, node in first.items() if key != PER_RANK}, "")]
        for number, file in enumerate(files):
            tree = file.index.said["tree"]
            its = (file.header.file_id.rank, file.header.file_id.number) == (rank, 0)
            if its and isinstance(tree, dict) and PER_RANK in tree:
                places.append((number, tree[PER_RANK], PER_RANK))
    trees = []
    for number, node, path in places:
        into = {
            key: target
            for key, target in targets.items()
            if len(places) == 1 or (key.split("/")[0] == PER_RANK) == (path == PER_RANK)
        }
        ordered = [wanted[number], *wanted[:number], *wanted[number + 1 :]]
        trees.append(_Tree(node, path, files[number], Leaves(ordered, wholes, into, device)))
    return trees


class _Tree:
    """A tree, or a branch of one, that is read.

    Args:
        node: the root of it.
        path: where that stands.
        opened: its file.
        leaves: its tensors and arrays.
    """

    def __init__(self, node: Any, path: str, opened: OpenedFile, leaves: Leaves) -> None:
        self._node, self._path, self._opened = node, path, opened
        self.leaves = leaves

    def plan(self, storage: Storage, globs: Globs, allowed: dict[str, type], trusted: bool) -> None:
        """Check all that the tree says, and tell the leaves."""
        objects = read_objects(storage, self._opened)
        blobs = partial(blobs_of, objects)
        self._decoder = Decoder(self.leaves.plan, blobs, globs.wants, allowed, trusted)
        try:
            self._decoder.decode(self._node, self._path)
        except RecursionError:
            raise FormatError("the tree is nested too deeply", where=self._opened.name) from None
        for path in self.leaves.unread:
            if globs.wants(path):  # else it would go on with what it was
                raise RefusedError(
                    "there is nothing in the checkpoint to read into it",
                    where=text_of(path),
                    fix="`dos inspect` lists the names; leave it out of `into`",
                )

    def make(self) -> Any:
        """The state, whose elements are undefined until they are read."""
        self.leaves.keep_pages()
        decoder = self._decoder.again(self.leaves.make)
        return decoder.decode(self._node, self._path)


def _read(trees: Sequence[_Tree], reading: _Reading) -> Any:
    """The state of trees that were planned: of one, or with the branch that is the rank's own."""
    for tree in trees:
        tree.leaves.allocate()
    reading.start()
    state, *own = [tree.make() for tree in trees]
    reading.wait()
    for tree in trees:
        tree.leaves.finish()
    if own and own[0] is not LEFT_OUT:
        return {**({} if state is LEFT_OUT else state), PER_RANK: own[0]}
    return None if state is LEFT_OUT else state


class _Reading:
    """Reads what is wanted, on a thread of its own, while the state is built around it."""

    def __init__(
        self,
        storage: Storage,
        wanted: list[Wanted],
        verify: Verify,
        progress: Callable[[int, int], None] | None,
        *,
        overwrites: bool,
    ) -> None:
        self._storage, self._wanted, self._verify = storage, wanted, verify
        self._progress, self._overwrites = progress, overwrites
        self._done_bytes, self._total_bytes = 0, 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._total_bytes = sum(one.n_bytes for one in self._wanted)
        self._thread.start()

    def wait(self, *, raises: bool = True) -> None:
        """Until it has ended; raises why it failed."""
        if self._thread.ident is not None:
            self._thread.join()
        if raises and self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            if self._verify == "before":
                for one in self._wanted:
                    ChunkReader(self._storage, one, verify=True).check_wanted()
            for one in self._wanted:
                self._read(one)
        except BaseException as error:
            self._error = error

    def _read(self, wanted: Wanted) -> None:
        verify = bool(self._verify)
        reader = ChunkReader(self._storage, wanted, verify=verify, progress=self._advance)
        try:
            reader.read()
        except IntegrityError as error:
            if not self._overwrites:
                raise
            what = f"{error.what}; what it was read into is partly overwritten"
            raise IntegrityError(what, where=error.where, fix=error.fix) from error

    def _advance(self, n_bytes: int) -> None:
        self._done_bytes += n_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


def _targets(into: Any) -> dict[str, Any]:
    _, encoder = encode_state(into, for_reading=True)
    found = {leaf.path: leaf.value for leaf in encoder.leaves}
    found.update((again.path, again.value) for _, again in encoder.repeats)
    return found
