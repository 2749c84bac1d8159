"""States to save, and what makes two of them the same."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import os
import pathlib
import types
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

import dos.checkpoint

WEIRD = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype)} - WEIRD,
    key=str,
)
ARRAY_DTYPES = ["<f4", ">f8", "<f2", "|b1", "<i8", ">u2", "<c16", "<M8[ns]", "|S5", "<U3", "|V7"]


@dataclasses.dataclass
class Config:
    rate: float
    weight: Any = None


class Point(NamedTuple):
    x: Any
    y: Any


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


CLASSES = (Config, Point, Color, Access)


def in_memory() -> TemporaryDirectory[str]:
    """A folder where fsync costs nothing, for tests of many examples."""
    return TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


def round_trip(state: Any, folder: Path, **how: Any) -> Any:
    dos.checkpoint.save(state, folder / "saved").result()
    return dos.checkpoint.load(folder / "saved", allow=CLASSES, **how)


def data_file(folder: Path) -> Path:
    return folder / "saved" / "rank-00000.safetensors"


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order."""
    if tensor.numel() == 0:
        return b""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.view(whole[tensor.element_size()]).contiguous().numpy().tobytes()


def assert_same(a: Any, b: Any, at: str = "") -> None:
    """Equal in every respect that a checkpoint keeps, NaN payloads and strides included."""
    assert type(a) is type(b), f"{at}: {type(a)} became {type(b)}"
    if isinstance(a, torch.Tensor):
        kept = ("dtype", "shape", "requires_grad")
        assert [getattr(a, k) for k in kept] == [getattr(b, k) for k in kept], at
        assert a.stride() == b.stride() or a.is_conj(), f"{at}: {a.stride()} became {b.stride()}"
        assert bits(a) == bits(b), at
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape, a.strides) == (b.dtype, b.shape, b.strides), at
        assert a.tobytes() == b.tobytes(), at
    elif dataclasses.is_dataclass(a) or isinstance(a, (argparse.Namespace, types.SimpleNamespace)):
        assert_same(vars(a), vars(b), at)
    elif isinstance(a, dict):
        assert list(a) == list(b), f"{at}: {list(a)} became {list(b)}"
        for key in a:
            assert_same(a[key], b[key], f"{at}/{key!r}")
        assert getattr(a, "default_factory", None) is getattr(b, "default_factory", None), at
    elif isinstance(a, (list, tuple, collections.deque)):
        assert len(a) == len(b), at
        for number, (one, other) in enumerate(zip(a, b, strict=True)):
            assert_same(one, other, f"{at}/{number}")
    elif isinstance(a, (set, frozenset)):
        assert a == b, f"{at}: {a!r} became {b!r}"
    else:
        assert repr(a) == repr(b), f"{at}: {a!r} became {b!r}"


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype, bits, dimensions, order; slices and expansions too."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    numel = int(np.prod(shape)) if shape else 1
    data = draw(st.binary(min_size=numel * dtype.itemsize, max_size=numel * dtype.itemsize))
    if numel == 0:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
    kind = draw(st.sampled_from(["plain", "permuted", "sliced", "expanded", "parameter"]))
    if kind == "permuted":
        return tensor.permute(draw(st.permutations(range(len(shape)))))
    if kind == "sliced" and shape:
        return tensor[:: draw(st.integers(1, 3))]
    if kind == "expanded":
        return tensor.unsqueeze(0).expand(3, *shape)
    if kind == "parameter" and (dtype.is_floating_point or dtype.is_complex):
        return torch.nn.Parameter(tensor, requires_grad=draw(st.booleans()))
    return tensor


@st.composite
def views(draw: st.DrawFn) -> list[torch.Tensor | np.ndarray[Any, Any]]:
    """Views of one piece of memory: of any dtype, overlapping or not, with gaps, repeated."""
    memory = torch.arange(160, dtype=torch.uint8)
    found: list[Any] = []
    for _ in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.complex128]))
        shape = draw(st.lists(st.integers(1, 3), max_size=2))
        strides = [draw(st.integers(0, 2)) for _ in shape]
        reach = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
        room = 160 // dtype.itemsize - reach
        view = memory.view(dtype).as_strided(shape, strides, draw(st.integers(0, max(room, 0))))
        as_array = dtype != torch.complex128 and draw(st.booleans())
        found.append(view.numpy() if as_array else view)
    return found


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = np.dtype(draw(st.sampled_from(ARRAY_DTYPES)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    n_bytes = int(np.prod(shape, dtype=int)) * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=n_bytes, max_size=n_bytes)))
    if dtype.kind == "U":
        data = bytearray(n_bytes)  # not every number is a character
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, bytes(data) if n_bytes else None)
    kind = draw(st.sampled_from(["plain", "fortran", "reversed"]))
    if kind == "fortran":
        return np.asfortranarray(array)
    return array[::-1] if kind == "reversed" and shape else array


texts = st.text(st.characters(), max_size=6) | st.sampled_from(
    ["", "a/b", "~", "#1", "__metadata__", "__dos__/index", "\ud800", "0"]
)
numbers = st.integers() | st.integers(-(1 << 80), 1 << 80) | st.booleans() | st.none()
plain = (
    numbers
    | texts
    | st.floats()
    | st.complex_numbers()
    | st.binary(max_size=8)
    | st.binary(min_size=1025, max_size=1030)
    | st.sampled_from(
        [
            torch.float32,
            torch.device("cuda:1"),
            torch.Size([2, 3]),
            torch.strided,
            torch.channels_last,
            np.dtype("<f4"),
            np.float32(1.5),
            np.int64(-3),
            range(1, 9, 2),
            slice(None, 3),
            ...,
            pathlib.Path("a/b"),
            pathlib.PureWindowsPath("c:\\x"),
            datetime.datetime(2024, 1, 2, 3, 4, 5, 6, datetime.timezone.utc, fold=1),
            datetime.date(2024, 1, 2),
            datetime.time(3, 4),
            datetime.timedelta(days=-1, microseconds=5),
            datetime.timezone(datetime.timedelta(hours=2)),
            Color.RED,
            Color.BLUE,
            Access.READ | Access.WRITE,
        ]
    )
)
keys = (
    texts
    | st.integers()
    | st.booleans()
    | st.none()
    | st.binary(max_size=3)
    | st.tuples(st.integers(), texts)
    | st.frozensets(st.integers(), max_size=3)
    | st.sampled_from(Color)
)


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(children, max_size=4)
    named = st.dictionaries(texts, children, max_size=4)
    identifiers = st.dictionaries(st.sampled_from(["a", "b_2", "lr"]), children, max_size=3)
    return (
        lists
        | lists.map(tuple)
        | lists.map(lambda items: collections.deque(items, maxlen=7))
        | named
        | st.dictionaries(keys, children, max_size=4)
        | named.map(collections.OrderedDict)
        | named.map(lambda items: collections.defaultdict(list, items))
        | st.sets(st.integers() | texts, max_size=4)
        | st.frozensets(st.integers(), max_size=4)
        | st.dictionaries(texts, st.integers(), max_size=3).map(collections.Counter)
        | identifiers.map(lambda items: argparse.Namespace(**items))
        | identifiers.map(lambda items: types.SimpleNamespace(**items))
        | st.builds(Config, rate=st.floats(), weight=children)
        | st.builds(Point, children, children)
    )


states = st.recursive(plain | tensors() | arrays(), _containers, max_leaves=12)
