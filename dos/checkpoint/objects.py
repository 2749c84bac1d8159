"""Values without parts, as JSON: what is written of each, and how it comes back.

A JSON null, true, false, string, integer or number stands for itself, a JSON array
`[tag, ...]` for a value of another type. Nothing here runs code that a file names.
"""

from __future__ import annotations

import base64
import datetime
import functools
import pathlib
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dos.errors import FormatError

Node = Any
"""What a JSON text can hold."""

_INLINE_INT = 1 << 63
_PATHS = (
    pathlib.PosixPath,
    pathlib.WindowsPath,
    pathlib.PurePosixPath,
    pathlib.PureWindowsPath,
)
_PATH_NAMES = {kind.__name__: kind for kind in _PATHS}
_TIMES = {kind.__name__: kind for kind in (datetime.datetime, datetime.date, datetime.time)}


def _int(value: int) -> Node:
    # Through hexadecimal, because decimal text of long integers is refused by Python.
    return value if -_INLINE_INT <= value < _INLINE_INT else ["int", hex(value)]


def _float(value: float) -> Node:
    # JSON has no NaN and no infinity; a NaN keeps its payload.
    return value if value - value == 0 else ["float", struct.pack(">d", value).hex()]


def _complex(value: complex) -> Node:
    return ["complex", _float(value.real), _float(value.imag)]


def _bytes(value: bytes | bytearray) -> Node:
    return [type(value).__name__, base64.b64encode(value).decode()]


def _time(value: Any) -> Node | None:
    tz = getattr(value, "tzinfo", None)
    if tz is not None and (type(tz) is not datetime.timezone or _timezone(tz) is None):
        return None
    return [type(value).__name__, value.isoformat(), getattr(value, "fold", 0)]


def _timezone(value: datetime.timezone) -> Node | None:
    plain = datetime.timezone(value.utcoffset(None))
    if plain.tzname(None) != value.tzname(None):  # it has a name of its own
        return None
    return ["timezone", *_timedelta(value.utcoffset(None))[1:]]


def _timedelta(value: datetime.timedelta) -> list[Node]:
    return ["timedelta", value.days, value.seconds, value.microseconds]


def _numpy_dtype(value: np.dtype[Any]) -> Node | None:
    described = describe_dtype(value)
    return None if described is None else ["numpy.dtype", described]


def _torch_name(value: Any) -> str:
    return str(value).removeprefix("torch.")


_ENCODERS: dict[type, Callable[[Any], Node | None]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    str: lambda value: value,
    int: _int,
    float: _float,
    complex: _complex,
    bytes: _bytes,
    bytearray: _bytes,
    type(...): lambda value: ["..."],
    range: lambda value: ["range", *map(_int, (value.start, value.stop, value.step))],
    datetime.datetime: _time,
    datetime.date: _time,
    datetime.time: _time,
    datetime.timezone: _timezone,
    datetime.timedelta: _timedelta,
    torch.Size: lambda value: ["Size", *value],
    torch.dtype: lambda value: ["dtype", _torch_name(value)],
    torch.device: lambda value: ["device", str(value)],
    torch.layout: lambda value: ["layout", _torch_name(value)],
    torch.memory_format: lambda value: ["memory_format", _torch_name(value)],
    **dict.fromkeys(_PATHS, lambda value: ["path", type(value).__name__, str(value)]),
}


def encode_value(value: Any) -> tuple[Node] | None:
    """A value without parts, as the only item of a tuple; None: it is something else."""
    encoder = _ENCODERS.get(type(value))
    if encoder is None:
        if isinstance(value, np.dtype):
            encoder = _numpy_dtype
        elif isinstance(value, np.generic):
            encoder = _numpy_scalar
        else:
            return None
    node = encoder(value)
    return None if node is None and value is not None else (node,)


def _numpy_scalar(value: np.generic) -> Node | None:
    described = describe_dtype(value.dtype)
    if described is None:
        return None
    return ["scalar", described, base64.b64encode(np.asarray(value).tobytes()).decode()]


def _decode_time(name: str) -> Callable[..., Any]:
    def decode(text: str, fold: int) -> Any:
        made: Any = _TIMES[name].fromisoformat(text)
        return made.replace(fold=fold) if fold else made

    return decode


def _decode_timezone(days: int, seconds: int, microseconds: int) -> datetime.timezone:
    return datetime.timezone(datetime.timedelta(days, seconds, microseconds))


def _decode_path(name: str, text: str) -> pathlib.PurePath:
    kind = _PATH_NAMES[name]
    try:
        return kind(text)
    except NotImplementedError:  # a path of another system: the same text without its file system
        return (pathlib.PureWindowsPath if "Windows" in name else pathlib.PurePosixPath)(text)


def _decode_scalar(described: Node, text: str) -> Any:
    dtype, data = dtype_of(described), base64.b64decode(text, validate=True)
    if not dtype.itemsize:  # an empty text
        return np.zeros((), dtype)[()]
    return np.frombuffer(data, dtype, count=1)[0]


def _torch_attribute(kind: type) -> Callable[[str], Any]:
    def decode(name: str) -> Any:
        value = getattr(torch, name, None)
        if not isinstance(value, kind):
            raise ValueError(f"no {kind.__name__} {name!r} in this version of torch")
        return value

    return decode


DECODERS: dict[str, Callable[..., Any]] = {
    "int": lambda text: int(text, 16),
    "float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "bytearray": lambda text: bytearray(base64.b64decode(text, validate=True)),
    "...": lambda: ...,
    **{name: _decode_time(name) for name in _TIMES},
    "timezone": _decode_timezone,
    "timedelta": datetime.timedelta,
    "Size": lambda *sizes: torch.Size(sizes),
    "dtype": _torch_attribute(torch.dtype),
    "device": torch.device,
    "layout": _torch_attribute(torch.layout),
    "memory_format": _torch_attribute(torch.memory_format),
    "path": _decode_path,
    "numpy.dtype": lambda described: dtype_of(described),
    "scalar": _decode_scalar,
}
"""How a value comes back from what stands behind its tag; they raise what Python raises."""


@functools.cache
def describe_dtype(dtype: np.dtype[Any]) -> Node | None:
    """A numpy dtype as JSON; None for one that only Python can say: of objects, of extensions."""
    if dtype.hasobject:
        return None
    described = np.lib.format.dtype_to_descr(dtype)
    try:
        same = dtype_of(_lists(described)) == dtype
    except FormatError:
        return None
    return _lists(described) if same else None


def dtype_of(described: Node) -> np.dtype[Any]:
    """The numpy dtype of a description.

    Raises:
        FormatError: it describes none, or one that holds Python objects.
    """
    try:
        dtype = np.lib.format.descr_to_dtype(_tuples(described))
    except Exception as error:  # whatever numpy says to it
        raise FormatError(f"{str(described)[:80]!r} is no numpy dtype: {error}") from error
    if dtype.hasobject:
        raise FormatError(f"the numpy dtype {str(described)[:80]!r} holds Python objects")
    return dtype


def _lists(described: Any) -> Node:
    if isinstance(described, (list, tuple)):
        return [_lists(part) for part in described]
    return described


def _tuples(described: Node) -> Any:
    """JSON knows no tuples: a field is one, and so are a shape, a title and a subarray."""
    if not isinstance(described, list):
        return described
    if described and all(isinstance(field, list) for field in described):
        return [tuple(map(_tuples, field)) for field in described]  # the fields of a record
    return tuple(map(_tuples, described))
