"""Tensors and arrays of a checkpoint, made over memory that is read afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dos.checkpoint.buffers import Arena
from dos.checkpoint.chunks import Target, Wanted
from dos.checkpoint.paths import text_of
from dos.checkpoint.specs import Spec, make_spec
from dos.checkpoint.targets import (
    Places,
    check_fits,
    copy_bits,
    direct_address,
    is_partial,
)
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
        into: what is to be overwritten, by path.
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
        self._targets = {one.opened.header.file_id: one.targets for one in wanted}
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
            check_fits(path, spec, target)
        if spec.whole is not None or (is_partial(target) and spec.strides_bytes is None):
            return  # what takes it is found later
        if spec.order is not None and self._ordered.setdefault(spec.name, spec.same) != spec.same:
            raise FormatError(f"{spec.name!r} is told in two orders", where=text_of(path))
        entry = self._entries[spec.name]
        address = None if is_partial(target) else direct_address(spec, target)
        if address is not None:
            self._aim(spec, 0, math.prod(spec.shape), address)
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
            target = self._into.get(path)
            if is_partial(target):
                self._aim_at_places(path, spec, Places(target))
            elif spec.whole is not None:
                self._allocate_whole(path, spec)
        self._wanted[0].allocate()

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
        if is_partial(target):
            return target
        if direct_address(spec, target) is not None:
            if isinstance(target, torch.Tensor):
                self._finish.append(lambda: torch.autograd.graph.increment_version(target))
            return target
        if isinstance(target, np.ndarray):
            fresh = self._array(spec)
            self._finish.append(lambda: np.copyto(target, fresh))
        else:
            tensor = self._raw(spec, torch.device("cpu"))
            self._finish.append(lambda: copy_bits(target, tensor))
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
        self._wanted[0].close()

    def _allocate_whole(self, path: str, spec: Spec) -> None:
        address = direct_address(spec, self._into.get(path))
        name = _memory_name(spec)
        if address is None and spec.n_bytes:
            if self._into.get(path) is None and name in self._memory:
                return  # the same tensor as at another place
            arena = Arena(spec.n_bytes)
            self._arenas.append(arena)
            self._memory[name] = arena.keep(0, spec.n_bytes)
            address = arena.address
        self._aim(spec, 0, math.prod(spec.shape), address or 0)

    def _aim_at_places(self, path: str, spec: Spec, places: Places) -> None:
        if spec.strides_bytes is not None:  # there is no run of bytes that is a part of it
            whole = self._raw

            def cut() -> None:
                flat = whole(spec, torch.device("cpu")).reshape(-1)
                for start, part in places.parts:
                    copy_bits(part, flat[start : start + part.numel()])

            self._finish.append(cut)
        else:
            for start, part in places.parts:
                self._aim(spec, start, start + part.numel(), part.data_ptr())
        self._finish.append(places.finish)

    def _aim(self, spec: Spec, first: int, last: int, address: int) -> None:
        """Have elements, from `first` to before `last` in row-major order, read to an address."""
        item_bytes = spec.dtype.itemsize
        if spec.whole is None:
            at = self._entries[spec.name].begin + spec.offset
            begin, end = at + first * item_bytes, at + last * item_bytes
            if begin < end:
                self._wanted[0].targets.append(Target(begin, end, address))
            return
        for part in spec.whole.within(first, last):
            low, high = max(first, part.start), min(last, part.start + part.numel)
            at = part.opened.header.entries[part.name].begin - part.start * item_bytes
            self._targets[part.opened.header.file_id].append(
                Target(
                    at + low * item_bytes,
                    at + high * item_bytes,
                    address + (low - first) * item_bytes,
                )
            )

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
            self._storage(_memory_name(spec), device),
            spec.offset // spec.dtype.itemsize,
            spec.shape,
            steps or (),
        )
        if spec.order is None:
            return made
        order = spec.steps(spec.order)
        ordered = torch.empty_strided(spec.shape, order, dtype=spec.dtype, device=device)
        self._finish.append(lambda: copy_bits(ordered, made))
        return ordered

    def _storage(self, name: str, device: torch.device) -> torch.UntypedStorage:
        """The bytes of an entry, one storage for all leaves that lie in it."""
        key = name, device
        if key not in self._storages:
            memory = self._memory[name]
            flat = torch.frombuffer(memory, dtype=torch.uint8)
            if device.type != "cpu":
                host, flat = flat, torch.empty(len(memory), dtype=torch.uint8, device=device)
                self._finish.append(lambda: copy_bits(flat, host))
            self._storages[key] = flat.untyped_storage()
        return self._storages[key]


def _memory_name(spec: Spec) -> str:
    """The entry that a leaf lies in, or one name for all leaves that are the same pieces."""
    return spec.name or f"#{id(spec.whole)}"
