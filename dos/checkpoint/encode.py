"""A nested state as JSON: containers, names of classes, and where a tensor stands.

A JSON object stands for a dict whose keys are strings, and `[tag, ...]` for a container of
another type; see `dos.checkpoint.objects` for values without parts. An empty array is a tensor
or array; what the file's header does not tell of it is put in later.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import pickle
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from dos.checkpoint.bulk import make_tuple
from dos.checkpoint.dtypes import header_name
from dos.checkpoint.objects import Node, describe_dtype, encode_value
from dos.checkpoint.paths import ROOT_ENTRY, component, components, join, key_component, text_of
from dos.errors import FormatError
from dos.memory.pieces import Pieces
from dos.shards import is_sharded

FACTORIES = {kind.__name__: kind for kind in (list, dict, set, int, float, str, tuple, bool)}
"""Default factories of a defaultdict that are known by name."""

DEPTH = 128
"""Levels of nesting that are written, and so many can be read."""

_LONG_BYTES = 1024
"""Bytes objects above this are no part of the JSON text."""


class Leaf(NamedTuple):
    """A tensor or numpy array of the state, and the node that will tell of it."""

    path: str
    value: Any
    node: list[Node]


class Encoder:
    """Turns a state into JSON, its tensors and long bytes set aside.

    Args:
        for_reading: the state is one to read into. Nothing is pickled, and `Pieces` and DTensors
            are leaves.

    Attributes:
        leaves: tensors and arrays in the tree's order, each object once.
        repeats: a leaf, and the same object at another place.
        pieces: path, first element and shape of the whole, by the name of a piece.
        blobs: long byte strings and pickled objects, one behind the other.
    """

    def __init__(self, *, for_reading: bool = False) -> None:
        self._for_reading = for_reading
        self.leaves: list[Leaf] = []
        self.repeats: list[tuple[Leaf, Leaf]] = []
        self.blobs = bytearray()
        self.pieces: dict[str, list[Node]] = {}
        self._seen: dict[int, Leaf] = {}
        self._in_pieces_at: dict[int, str] = {}
        self._in_key = False
        self._depth = 0
        self._encoders: dict[type, Callable[[Any, str], Node]] = {
            dict: self._dict,
            list: self._items("list"),
            tuple: self._items("tuple"),
            bytes: self._bytes,
            bytearray: self._bytes,
            set: self._set,
            frozenset: self._set,
            OrderedDict: self._ordered_dict,
            defaultdict: self._defaultdict,
            Counter: lambda value, path: ["Counter", self._mapping(value, path)],
            deque: self._deque,
            slice: lambda value, path: [
                "slice",
                *(self.encode(part, path) for part in (value.start, value.stop, value.step)),
            ],
            argparse.Namespace: self._namespace,
            types.SimpleNamespace: self._namespace,
            torch.Tensor: self._leaf,
            torch.nn.Parameter: self._leaf,
            np.ndarray: self._array,
            Pieces: self._leaf if for_reading else self._in_pieces,
        }

    def encode(self, value: Any, path: str = "") -> Node:
        """The node of a value at a path.

        Raises:
            FormatError: something that cannot be saved, with its path and class.
        """
        encoder = self._encoders.get(type(value))
        if encoder is None:
            encoded = encode_value(value)
            if encoded:
                return encoded[0]
            encoder = self._other
        if self._depth > DEPTH:
            raise RecursionError
        self._depth += 1
        node = encoder(value, path)
        self._depth -= 1
        return node

    def _leaf(self, value: Any, path: str) -> Node:
        if self._in_key:
            raise FormatError(
                f"a {type(value).__name__} is an element of a set or part of a key",
                where=text_of(path),
                fix="keep tensors and arrays in lists, tuples or as values of a dict",
            )
        first = self._seen.get(id(value))
        if first is not None:
            again = Leaf(path, value, [])
            self.repeats.append((first, again))
            return again.node
        leaf = make_tuple(Leaf, (path, value, []))
        self._seen[id(value)] = leaf
        self.leaves.append(leaf)
        return leaf.node

    def _array(self, value: np.ndarray[Any, Any], path: str) -> Node:
        if describe_dtype(value.dtype) is None:  # of Python objects
            return self._pickled(value, path)
        return self._leaf(value, path)

    def _in_pieces(self, value: Pieces, path: str) -> Node:
        first = self._in_pieces_at.setdefault(id(value), path)
        if first != path:
            return ["t", {"pieces": first, "same": first}]
        parts = value.parts
        if not value.numel:  # so that some file tells its dtype
            parts = {0: torch.empty(0, dtype=value.dtype, device="cpu")}
        for start, tensor in parts.items():
            if tensor.dim() != 1 or tensor.dtype != value.dtype or header_name(value.dtype) is None:
                raise FormatError(
                    f"a piece of {tensor.dtype} with {tensor.dim()} dimensions",
                    where=text_of(path),
                    fix=f"give pieces of {value.dtype} with one dimension",
                )
            name = f"{path or ROOT_ENTRY}#{start}"
            self.leaves.append(Leaf(name, tensor, []))
            self.pieces[name] = [path, start, list(value.shape)]
        return ["t", {"pieces": True}]

    def _dict(self, value: Mapping[Any, Any], path: str) -> Node:
        body = self._mapping(value, path)
        return body if isinstance(body, dict) else ["dict", body]

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Node:
        """An object if all keys are strings, else an array of pairs."""
        if all(type(key) is str for key in value):
            start, names = join(path, ""), components(value.keys())
            named = zip(value.items(), names, strict=True)
            return {key: self.encode(child, start + name) for (key, child), name in named}
        pairs = []
        for key, child in value.items():
            encoded = self._hashable(key, path)
            pairs.append([encoded, self.encode(child, join(path, key_path(encoded)))])
        return pairs

    def _hashable(self, value: Any, path: str) -> Node:
        outer, self._in_key = self._in_key, True
        try:
            return self.encode(value, path)
        finally:
            self._in_key = outer

    def _items(self, tag: str) -> Callable[[Any, str], Node]:
        def encode(value: Any, path: str) -> Node:
            return [tag, *(self.encode(v, join(path, str(i))) for i, v in enumerate(value))]

        return encode

    def _set(self, value: Any, path: str) -> Node:
        items = [self._hashable(item, path) for item in value]
        # Sorted, because the order of a set differs from run to run.
        return [type(value).__name__, *sorted(items, key=json.dumps)]

    def _bytes(self, value: bytes | bytearray, path: str) -> Node:
        if len(value) <= _LONG_BYTES or self._in_key:
            encoded = encode_value(value)
            assert encoded
            return encoded[0]
        return [type(value).__name__, *self._blob(value)]

    def _blob(self, data: bytes | bytearray) -> list[int]:
        begin = len(self.blobs)
        self.blobs += data
        return [begin, len(data)]

    def _ordered_dict(self, value: OrderedDict[Any, Any], path: str) -> Node:
        extra = vars(value)
        if extra.keys() - {"_metadata"}:
            return self._pickled(value, path)
        node = ["OrderedDict", self._mapping(value, path)]
        if extra:  # of a module's state dict
            node.append(self._hashable(extra["_metadata"], join(path, "~m")))
        return node

    def _defaultdict(self, value: defaultdict[Any, Any], path: str) -> Node:
        factory = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and FACTORIES.get(name) is not factory:
            return self._pickled(value, path)
        return ["defaultdict", name, self._mapping(value, path)]

    def _deque(self, value: deque[Any], path: str) -> Node:
        return ["deque", value.maxlen, *self._items("")(value, path)[1:]]

    def _namespace(self, value: Any, path: str) -> Node:
        return [type(value).__name__, self._mapping(vars(value), path)]

    def _other(self, value: Any, path: str) -> Node:
        kind = type(value)
        if isinstance(value, enum.Enum):
            # A combination of flags has no name that is looked up.
            known = kind.__members__.get(value.name or "") is value
            return ["enum", class_name(kind), *([value.name] if known else self._number(value))]
        if is_namedtuple(kind):
            return ["namedtuple", class_name(kind), self._fields(value, kind._fields, path)]
        if is_plain_dataclass(kind):
            names = [
                field.name for field in dataclasses.fields(value) if hasattr(value, field.name)
            ]
            return ["dataclass", class_name(kind), self._fields(value, names, path)]
        if is_sharded(value) and self._for_reading:
            return self._leaf(value, path)
        if isinstance(value, torch.Tensor):
            raise FormatError(
                f"tensors of class {class_name(kind)} cannot be saved",
                where=text_of(path),
                fix="save its local or dense tensor; of a DTensor, what "
                "`dos.checkpoint.replicas.part_of` makes of it",
            )
        return self._pickled(value, path)

    def _number(self, value: enum.Enum) -> list[Node]:
        return [None, value.value if type(value.value) is int else int(value.value)]

    def _fields(self, value: Any, names: Any, path: str) -> Node:
        return {
            name: self.encode(getattr(value, name), join(path, component(name))) for name in names
        }

    def _pickled(self, value: Any, path: str) -> Node:
        kind = class_name(type(value))
        if self._for_reading:
            return ["pickle", kind, 0, 0]
        try:
            data = pickle.dumps(value, protocol=4)
        except Exception as error:  # whatever an object's own code raises
            raise FormatError(
                f"an object of class {kind} cannot be saved: {error}",
                where=text_of(path),
                fix="leave it out, or save its state_dict or its fields",
            ) from error
        return ["pickle", kind, *self._blob(data)]


def encode_state(state: Any, *, for_reading: bool = False) -> tuple[Node, Encoder]:
    """The JSON of a state, and what was set aside; see `Encoder`.

    Raises:
        FormatError: something in it cannot be saved, with its path and class.
    """
    encoder = Encoder(for_reading=for_reading)
    try:
        return encoder.encode(state), encoder
    except RecursionError:
        raise FormatError(
            f"the state is nested more than {DEPTH} levels deep, or contains itself",
            where="state",
            fix="save flatter containers",
        ) from None


def key_path(encoded: Node) -> str:
    """The component of a key in a mapping that has other keys than strings."""
    if isinstance(encoded, str):
        return component(encoded)
    return key_component(json.dumps(encoded, separators=(",", ":")))


def class_name(kind: type) -> str:
    """The name by which a class is written, and allowed."""
    return f"{kind.__module__}.{kind.__qualname__}"


def is_namedtuple(kind: type) -> bool:
    """Is it a class made by collections.namedtuple or typing.NamedTuple?"""
    return kind.__bases__ == (tuple,) and isinstance(getattr(kind, "_fields", None), tuple)


def is_plain_dataclass(kind: type) -> bool:
    """Is it a dataclass whose state is its fields, no subclass of a container or a tensor?"""
    builtin = (dict, list, tuple, set, frozenset, str, bytes, int, float, torch.Tensor)
    return dataclasses.is_dataclass(kind) and not issubclass(kind, builtin)
