"""Host memory that somebody else owns, as numpy arrays."""

from __future__ import annotations

import numpy as np

from dos.kernels.reference import Array
from dos.kernels.scalars import DType

_STORAGE = {DType.FP32: "<f4", DType.BF16: "<u2", DType.FP16: "<u2"}


class _Memory:
    """Foreign memory in numpy's array protocol.

    ctypes would do too, but makes and keeps a new type for every length.
    """

    def __init__(self, address: int, numel: int, storage: str) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (numel,),
            "typestr": storage,
            "version": 3,
        }


def host_array(address: int, numel: int, dtype: DType) -> Array:
    """The elements at an address: float32, or uint16 words of a 16-bit format.

    The memory must outlive the array.
    """
    return np.asarray(_Memory(address, numel, _STORAGE[dtype]))
