"""Tensors and arrays of a checkpoint, made over memory that is read afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dos.checkpoint.buffers import Arena
from dos.checkpoint.chunks import Target, Wanted
from dos.checkpoint.dtypes import as_bits
from dos.checkpoint.paths import text_of
from dos.checkpoint.specs import Spec, make_spec
from dos.checkpoint.wholes import Whole
from dos.errors import FormatError
from dos.memory.sizes import PAGE_BYTES, padded_bytes


class Leaves:
    """Makes the leaves of one file's tree.

    First `plan` is told of every leaf that is wanted, and checks it; `allocate`; then, while the
    wanted bytes are read, `keep_pages`, and `make` makes each; at last `finish` copies what has
    to be elsewhere.

    Args:
        wanted: what is wanted of each file, filled here; the first file holds the tree.
        wholes: tensors in pieces, by path.
        into: tensors and arrays that are to be overwritten, by path.
        device: where tensors are wanted; None: in host memory.
    """

    def __init__(
        self,
        wanted: list[Wanted],
        wholes: dict[str, Whole],
        into: dict[str, Any],
        device: torch.device | None,
    ) -> None:
        self._wanted, self._wholes, self._into = wanted, wholes, into
        self._device = torch.device("cpu") if device is None else device
        self._entries = wanted[0].opened.header.entries
        self._specs: dict[str, Spec] = {}
        # In another order each is a copy: of one entry one, so that a file takes no more memory.
        self._ordered: dict[str, str] = {}
        self._arenas: list[Arena] = []
        self._memory: dict[str, memoryview] = {}
        self._storages: dict[tuple[str, torch.device], torch.UntypedStorage] = {}
        self._made: dict[str, Any] = {}
        self._finish: list[Callable[[], None]] = []

    def plan(self, path: str, told: dict[str, Any]) -> None:
        """Check a leaf, and note which bytes it needs.

        Raises:
            FormatError: it is malformed, or does not fit what it is to be read into.
        """
        spec = self._specs[path] = make_spec(path, told, self._entries, self._wholes)
        target = self._into.get(path)
        if target is not None:
            _check_fits(path, spec, target)
        if spec.whole is not None:
            return  # its memory is made later
        if spec.order is not None and self._ordered.setdefault(spec.name, spec.same) != spec.same:
            raise FormatError(f"{spec.name!r} is told in two orders", where=text_of(path))
        entry = self._entries[spec.name]
        address = _direct_address(spec, target)
        if address is not None:
            begin = entry.begin + spec.offset
            self._wanted[0].targets.append(Target(begin, begin + spec.n_bytes, address))
        elif entry.end > entry.begin:
            self._wanted[0].fresh.append((entry.begin, entry.end))
            self._memory[spec.name] = memoryview(b"")  # until there is some

    @property
    def unread(self) -> list[str]:
        """Paths of what was to be overwritten, and was not planned."""
        return [path for path in self._into if path not in self._specs]

    def allocate(self) -> None:
        """Make the memory for all that was planned."""
        for path, spec in self._specs.items():
            if spec.whole is not None:
                self._allocate_whole(path, spec, spec.whole)
        for wanted in self._wanted:
            wanted.allocate()

    def keep_pages(self) -> None:
        """Give each entry its memory; entries that share a page stay and go together."""
        named = [(self._entries[name], name) for name in self._memory if name in self._entries]
        groups: list[tuple[int, int, list[str]]] = []
        for entry, name in sorted(named, key=lambda one: one[0][2:]):
            begin = entry.begin - entry.begin % PAGE_BYTES
            if groups and begin < padded_bytes(groups[-1][1]):
                begin, end, names = groups.pop()
                groups.append((begin, max(end, entry.end), names))
            else:
                groups.append((begin, entry.end, names := []))
            names.append(name)
        chunk_bytes = self._wanted[0].opened.header.chunk_bytes
        for begin, end, names in groups:
            found = self._wanted[0].arena_of(begin // chunk_bytes)
            assert found is not None
            at = found[1] + begin % chunk_bytes
            view = found[0].keep(at, at + end - begin)
            for name in names:
                entry = self._entries[name]
                self._memory[name] = view[entry.begin - begin : entry.end - begin]

    def make(self, path: str, told: dict[str, Any]) -> Any:
        """A leaf that was planned; its elements are undefined until they are read."""
        spec, target = self._specs[path], self._into.get(path)
        if target is None:
            if spec.same not in self._made:
                self._made[spec.same] = self._array(spec) if spec.is_array else self._tensor(spec)
            return self._made[spec.same]
        if _direct_address(spec, target) is not None:
            if isinstance(target, torch.Tensor):
                self._finish.append(lambda: torch.autograd.graph.increment_version(target))
            return target
        if isinstance(target, np.ndarray):
            fresh = self._array(spec)
            self._finish.append(lambda: np.copyto(target, fresh))
        else:
            tensor = self._raw(spec, torch.device("cpu"))
            self._finish.append(lambda: _copy(target, tensor))
        return target

    def finish(self) -> None:
        """Bring to their places what could not be read there."""
        for last in self._finish:
            last()
        self._finish = []

    def close(self) -> None:
        """Give back memory that no leaf keeps, and forget those that were made."""
        # A decoder that refers to itself refers to this: until the collector comes by.
        self._memory, self._storages, self._made = {}, {}, {}
        for arena in self._arenas:
            arena.close()
        for wanted in self._wanted:
            wanted.close()

    def _allocate_whole(self, path: str, spec: Spec, whole: Whole) -> None:
        address = _direct_address(spec, self._into.get(path))
        if address is None and spec.n_bytes:
            arena = Arena(spec.n_bytes)
            self._arenas.append(arena)
            self._memory[f"{path}#"] = arena.keep(0, spec.n_bytes)
            address = arena.address
        files = {wanted.opened.header.file_id: wanted for wanted in self._wanted}
        for part in whole.parts:
            entry = part.opened.header.entries[part.name]
            if entry.end > entry.begin:
                assert address is not None
                at = address + part.start * whole.dtype.itemsize
                targets = files[part.opened.header.file_id].targets
                targets.append(Target(entry.begin, entry.end, at))

    def _array(self, spec: Spec) -> np.ndarray[Any, Any]:
        if 0 in spec.shape or not spec.dtype.itemsize:
            return np.empty(spec.shape, spec.dtype)
        memory = self._memory[spec.name]
        made = np.ndarray(spec.shape, spec.dtype, memory, spec.offset, spec.strides_bytes)
        if spec.order is None:
            return made
        ordered: np.ndarray[Any, Any] = np.ndarray(spec.shape, spec.dtype, strides=spec.order)
        self._finish.append(lambda: np.copyto(ordered, made))
        return ordered

    def _tensor(self, spec: Spec) -> torch.Tensor:
        raw = self._raw(spec, self._device)
        if spec.parameter:
            return torch.nn.Parameter(raw, requires_grad=spec.grad)
        return raw.requires_grad_() if spec.grad else raw

    def _raw(self, spec: Spec, device: torch.device) -> torch.Tensor:
        steps = None if spec.strides_bytes is None else spec.steps(spec.strides_bytes)
        if 0 in spec.shape:
            order = None if spec.order is None else spec.steps(spec.order)
            steps = order or steps
            if steps:
                return torch.empty_strided(spec.shape, steps, dtype=spec.dtype, device=device)
            return torch.empty(spec.shape, dtype=spec.dtype, device=device)
        made = torch.empty(0, dtype=spec.dtype, device=device).set_(
            self._storage(spec.name or f"{spec.same}#", device),
            spec.offset // spec.dtype.itemsize,
            spec.shape,
            steps or (),
        )
        if spec.order is None:
            return made
        order = spec.steps(spec.order)
        ordered = torch.empty_strided(spec.shape, order, dtype=spec.dtype, device=device)
        self._finish.append(lambda: _copy(ordered, made))
        return ordered

    def _storage(self, name: str, device: torch.device) -> torch.UntypedStorage:
        """The bytes of an entry, one storage for all leaves that lie in it."""
        key = name, device
        if key not in self._storages:
            memory = self._memory[name]
            flat = torch.frombuffer(memory, dtype=torch.uint8)
            if device.type != "cpu":
                host, flat = flat, torch.empty(len(memory), dtype=torch.uint8, device=device)
                self._finish.append(lambda: _copy(flat, host))
            self._storages[key] = flat.untyped_storage()
        return self._storages[key]


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        if target.is_conj() or target.is_neg():
            target.copy_(source)
        else:
            as_bits(target.detach()).copy_(as_bits(source))
            torch.autograd.graph.increment_version(target)


def _check_fits(path: str, spec: Spec, target: Any) -> None:
    kind = np.ndarray if spec.is_array else torch.Tensor
    if not isinstance(target, kind) or (target.dtype, tuple(target.shape)) != (
        spec.dtype,
        spec.shape,
    ):
        raise FormatError(
            f"{spec.dtype} of shape {list(spec.shape)} does not fit what it is to be read into, "
            f"{getattr(target, 'dtype', type(target).__name__)} of shape "
            f"{list(getattr(target, 'shape', ()))}",
            where=text_of(path),
            fix="give a tensor of the same dtype and shape, or leave it out of `into`",
        )
    if isinstance(target, np.ndarray):
        takes = target.flags.writeable
    else:
        takes = target.layout == torch.strided and not target.is_meta
        takes = takes and all(
            n < 2 or step for n, step in zip(target.shape, target.stride(), strict=True)
        )
    if not takes:
        raise FormatError(
            "it cannot be read into what is read-only, sparse, expanded or without memory",
            where=text_of(path),
            fix="give a dense tensor with memory of its own, or leave it out of `into`",
        )


def _direct_address(spec: Spec, target: Any) -> int | None:
    """Address of a target that can take the file's bytes as they are."""
    if target is None or spec.strides_bytes is not None or spec.order is not None:
        return None
    if isinstance(target, np.ndarray):
        return target.ctypes.data if target.flags.c_contiguous else None
    plain = target.device.type == "cpu" and not target.is_conj() and not target.is_neg()
    return target.data_ptr() if plain and target.is_contiguous() else None
