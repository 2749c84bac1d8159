"""A nested state from its JSON; the other direction of `dos.checkpoint.encode`.

No class is looked up by name anywhere but among those that the caller allows, and its own code
is not run: objects are rebuilt by their fields.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import pickle
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from dos.checkpoint.encode import (
    FACTORIES,
    class_name,
    is_namedtuple,
    is_plain_dataclass,
    key_path,
)
from dos.checkpoint.objects import DECODERS, Node
from dos.checkpoint.paths import component, join, text_of
from dos.errors import DOSError, FormatError, RefusedError

LEFT_OUT = object()
"""Stands for what `only` does not want."""


def allowed_classes(allow: Iterable[type]) -> dict[str, type]:
    """Classes by the name that a file uses: those given, and torch's safe globals."""
    found = {}
    for item in (*torch.serialization.get_safe_globals(), *allow):
        kind, name = item if isinstance(item, tuple) else (item, None)
        if isinstance(kind, type):
            found[name or class_name(kind)] = kind
    return found


class Decoder:
    """Builds a state from its JSON.

    Args:
        tensor: makes the tensor or array at a path from what its node tells.
        blobs: makes what gives the bytes that were set aside, by offset and length, each once.
        wants: is the leaf of a path wanted?
        allowed: classes that may be rebuilt, by name.
        trusted: unpickle.
    """

    def __init__(
        self,
        tensor: Callable[[str, dict[str, Any]], Any],
        blobs: Callable[[], Callable[[int, int], bytes]],
        wants: Callable[[str], bool],
        allowed: dict[str, type],
        trusted: bool,
    ) -> None:
        self._tensor, self._blobs, self._wants = tensor, blobs, wants
        self._blob = blobs()
        self._allowed, self._trusted = allowed, trusted
        self._kept = 0  # leaves so far that are wanted
        self._unpickled: dict[tuple[int, int], Any] = {}
        self._containers: dict[str, Callable[..., Any]] = {
            "dict": lambda path, body: self._mapping(body, path),
            "list": lambda path, *items: self._items(items, path),
            "tuple": lambda path, *items: tuple(self._items(items, path)),
            "OrderedDict": self._ordered_dict,
            "defaultdict": self._defaultdict,
            "Counter": lambda path, body: Counter(self._mapping(body, path)),
            "deque": lambda path, n, *items: deque(self._items(items, path), n),
            "Namespace": self._namespace(argparse.Namespace),
            "SimpleNamespace": self._namespace(types.SimpleNamespace),
            "dataclass": self._dataclass,
            "namedtuple": self._namedtuple,
        }
        self._leaves: dict[str, Callable[..., Any]] = {
            **{tag: _without_path(decoder) for tag, decoder in DECODERS.items()},
            "t": lambda path, told: self._tensor(path, told),
            "bytes": lambda path, *told: self._bytes(*told),
            "bytearray": lambda path, *told: bytearray(self._bytes(*told)),
            "complex": lambda path, *parts: complex(*self._parts(parts, path)),
            "range": lambda path, *parts: range(*self._parts(parts, path)),
            "slice": lambda path, *parts: slice(*self._parts(parts, path)),
            "set": lambda path, *items: set(self._parts(items, path)),
            "frozenset": lambda path, *items: frozenset(self._parts(items, path)),
            "enum": self._enum,
            "pickle": self._pickled,
        }

    def decode(self, node: Node, path: str = "") -> Any:
        """The value of a node; `LEFT_OUT` where nothing in it is wanted.

        Raises:
            FormatError: the node is malformed.
            RefusedError: its class is not allowed, or is another by now.
        """
        if isinstance(node, dict):
            node = ["dict", node]
        elif not isinstance(node, list):
            return node if self._leaf_wanted(path) else LEFT_OUT
        tag, arguments = (node[0], node[1:]) if node else ("t", [{}])
        try:
            container = self._containers.get(tag)
            if container is None:
                decoder = self._leaves[tag]
                return decoder(path, *arguments) if self._leaf_wanted(path) else LEFT_OUT
            before = self._kept
            made = container(path, *arguments)
            # An empty container is a leaf.
            return made if self._kept > before or self._leaf_wanted(path) else LEFT_OUT
        except (DOSError, RecursionError):
            raise
        except Exception as error:
            raise FormatError(
                f"malformed value {str(node)[:80]!r}: {error!r}", where=text_of(path)
            ) from error

    def again(self, tensor: Callable[[str, dict[str, Any]], Any]) -> Decoder:
        """The same with another maker of tensors; nothing is unpickled twice."""
        other = Decoder(tensor, self._blobs, self._wants, self._allowed, self._trusted)
        other._unpickled = self._unpickled
        return other

    def _leaf_wanted(self, path: str) -> bool:
        wanted = self._wants(path)
        self._kept += wanted
        return wanted

    def _parts(self, nodes: Iterable[Node], path: str) -> list[Any]:
        """Keys and parts of one value: wanted because that is."""
        wants, kept = self._wants, self._kept
        self._wants = lambda _: True
        try:
            return [self.decode(node, path) for node in nodes]
        finally:
            self._wants, self._kept = wants, kept

    def _mapping(self, body: Node, path: str) -> dict[Any, Any]:
        if isinstance(body, dict):
            made = {k: self.decode(node, join(path, component(k))) for k, node in body.items()}
        else:
            keys = self._parts((key for key, _ in body), path)
            made = {
                key: self.decode(node, join(path, key_path(encoded)))
                for key, (encoded, node) in zip(keys, body, strict=True)
            }
        if any(value is LEFT_OUT for value in made.values()):
            made = {key: value for key, value in made.items() if value is not LEFT_OUT}
        return made

    def _items(self, nodes: Iterable[Node], path: str) -> list[Any]:
        """Items of a sequence, whose places stay: None for one that is left out."""
        made = (self.decode(node, join(path, str(i))) for i, node in enumerate(nodes))
        return [None if item is LEFT_OUT else item for item in made]

    def _ordered_dict(self, path: str, body: Node, metadata: Node = None) -> OrderedDict[Any, Any]:
        made: OrderedDict[Any, Any] = OrderedDict(self._mapping(body, path))
        if metadata is not None:
            (made._metadata,) = self._parts([metadata], path)  # type: ignore[attr-defined]
        return made

    def _defaultdict(self, path: str, factory: str | None, body: Node) -> defaultdict[Any, Any]:
        kind = None if factory is None else FACTORIES[factory]
        return defaultdict(kind, self._mapping(body, path))

    def _namespace(self, kind: Callable[..., Any]) -> Callable[..., Any]:
        def decode(path: str, body: Node) -> Any:
            made: Any = kind()
            vars(made).update(self._mapping(body, path))
            return made

        return decode

    def _bytes(self, *told: Any) -> bytes:
        return self._blob(*told) if len(told) == 2 else DECODERS["bytes"](*told)

    def _dataclass(self, path: str, name: str, body: dict[str, Node]) -> Any:
        values, kind = self._fields(path, name, body)
        if kind is None:
            return LEFT_OUT
        names = {field.name for field in dataclasses.fields(kind)}
        if not is_plain_dataclass(kind) or not values.keys() <= names:
            raise _changed(name, path)
        made: Any = object.__new__(kind)
        for field, value in values.items():
            object.__setattr__(made, field, value)
        return made

    def _namedtuple(self, path: str, name: str, body: dict[str, Node]) -> Any:
        values, kind = self._fields(path, name, body)
        if kind is None:
            return LEFT_OUT
        if not is_namedtuple(kind) or list(values) != list(kind._fields):  # type: ignore[attr-defined]
            raise _changed(name, path)
        return tuple.__new__(kind, values.values())

    def _fields(
        self, path: str, name: str, body: dict[str, Node]
    ) -> tuple[dict[str, Any], type | None]:
        """Values by field, None for one left out; and the class, None if all of them are."""
        before = self._kept
        made = {k: self.decode(node, join(path, component(k))) for k, node in body.items()}
        if self._kept == before and not self._wants(path):
            return made, None
        values = {k: None if value is LEFT_OUT else value for k, value in made.items()}
        return values, self._class(name, path)

    def _enum(self, path: str, name: str, member: str | None, number: int | None = None) -> Any:
        kind = self._class(name, path)
        if not issubclass(kind, enum.Enum):
            raise _changed(name, path)
        if member is None:
            return kind(number)
        if member not in kind.__members__:
            raise _changed(name, path)
        return kind.__members__[member]

    def _class(self, name: str, path: str) -> type:
        if name not in self._allowed:
            raise RefusedError(
                f"an object of class {name}, which is not allowed",
                where=text_of(path),
                fix="pass the class in `allow`, or leave the object out with `only`",
            )
        return self._allowed[name]

    def _pickled(self, path: str, name: str, offset: int, n_bytes: int) -> Any:
        if not self._trusted:
            raise RefusedError(
                f"a pickled object of class {name}; unpickling can run any code",
                where=text_of(path),
                fix="leave it out with `only`, or pass trusted=True if you trust who wrote it",
            )
        if (offset, n_bytes) not in self._unpickled:
            self._unpickled[offset, n_bytes] = pickle.loads(self._blob(offset, n_bytes))
        return self._unpickled[offset, n_bytes]


def _without_path(decoder: Callable[..., Any]) -> Callable[..., Any]:
    return lambda path, *arguments: decoder(*arguments)


def _changed(name: str, path: str) -> RefusedError:
    return RefusedError(
        f"the class {name} differs from the one that was saved",
        where=text_of(path),
        fix="leave the object out with `only`, or allow a class with the same members",
    )
