"""Element types: their names in a safetensors header, in torch and in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes per element by name in a header; every other dtype is written as bytes, U8."""

_TORCH = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": getattr(torch, "float8_e8m0fnu", None),  # newer than the oldest torch
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_OF_TORCH = {dtype: name for name, dtype in _TORCH.items() if dtype is not None}
_OF_NUMPY = {
    "|b1": "BOOL",
    "|u1": "U8",
    "|i1": "I8",
    "<u2": "U16",
    "<i2": "I16",
    "<f2": "F16",
    "<u4": "U32",
    "<i4": "I32",
    "<f4": "F32",
    "<u8": "U64",
    "<i8": "I64",
    "<f8": "F64",
    "<c8": "C64",
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def header_name(dtype: torch.dtype) -> str | None:
    """The name in a header; None: safetensors has none."""
    return _OF_TORCH.get(dtype)


def header_name_of_numpy(dtype: np.dtype[Any]) -> str | None:
    """The name in a header; None: safetensors has none."""
    return None if dtype.names else _OF_NUMPY.get(dtype.str)


def torch_dtype(header: str) -> torch.dtype:
    """The dtype of a name in a header. KeyError: this torch has none."""
    dtype = _TORCH[header]
    if dtype is None:
        raise KeyError(header)
    return dtype


def torch_name(dtype: torch.dtype) -> str:
    """As torch calls it, without `torch.`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype_named(name: str) -> torch.dtype:
    """The dtype that torch calls so. KeyError: none, or one whose tensors are not saved."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype) or "qint" in name or "quint" in name:
        raise KeyError(name)
    return dtype


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as a dtype of that size which every operation knows."""
    return tensor.view(_BITS[tensor.element_size()])
