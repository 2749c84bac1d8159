"""Inputs for the bit tests of the Adam update, and what it means for two results to agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from dos.kernels import adam, reference
from dos.kernels.scalars import AdamScalars, DType, Segment

Array = npt.NDArray[Any]
STORAGE = {DType.FP32: np.float32, DType.BF16: np.uint16, DType.FP16: np.uint16}
GUARD = 16  # elements kept free on both sides of an array, to see writes that go too far


@dataclass
class Arrays:
    """The five arrays of an update, each somewhere inside a larger buffer of its own."""

    buffers: dict[str, Array]
    offsets: dict[str, int]
    numel: int
    g_dtype: DType
    w_dtype: DType

    def segment(self, scalars: AdamScalars) -> Segment:
        """The arrays as an update wants them."""
        at = {
            name: self.buffers[name].ctypes.data + start * self.buffers[name].itemsize
            for name, start in self.offsets.items()
        }
        return Segment(
            p=at["p"],
            m=at["m"],
            v=at["v"],
            g=at["g"],
            w=at.get("w", 0),
            numel=self.numel,
            g_dtype=self.g_dtype,
            w_dtype=self.w_dtype,
            scalars=scalars,
        )

    def array(self, name: str) -> Array:
        """The array itself, without its surroundings."""
        start = self.offsets[name]
        return self.buffers[name][start : start + self.numel]

    def copy(self) -> Arrays:
        """The same again in memory of its own, at the same distances from a cache line."""
        copies = {name: aligned_copy(buffer) for name, buffer in self.buffers.items()}
        return Arrays(copies, self.offsets, self.numel, self.g_dtype, self.w_dtype)

    def canonical(self) -> bytes:
        """Every byte of every buffer, with one NaN standing for all."""
        parts = []
        for name, buffer in self.buffers.items():
            dtype = {"g": self.g_dtype, "w": self.w_dtype}.get(name, DType.FP32)
            words = buffer.copy()
            nan = np.isnan(reference.widen(buffer, dtype))
            words.view(np.uint32 if dtype.itemsize == 4 else np.uint16)[nan] = 0x7FFF
            parts.append(words.tobytes())
        return b"".join(parts)


def aligned_copy(source: Array) -> Array:
    """A copy that begins on a cache line, so that an offset means the same in each."""
    raw = np.empty(source.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    copy = raw[start : start + source.nbytes].view(source.dtype)
    copy[:] = source
    return copy


def random_floats(rng: np.random.Generator, numel: int) -> Array:
    """Any bit pattern, or ordinary values, or values around the smallest normal ones."""
    kind = rng.integers(3)
    if kind == 0:
        return rng.integers(0, 1 << 32, numel, dtype=np.uint32).view(np.float32)
    values = rng.standard_normal(numel).astype(np.float32)
    with np.errstate(all="ignore"):
        return values * np.float32(1e-2 if kind == 1 else 1e-38)


def random_arrays(
    seed: int,
    numel: int,
    g_dtype: DType,
    w_dtype: DType,
    offsets: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0),
) -> Arrays:
    """Arrays of random content; ``offsets`` of p, m, v, g, w from a cache line, in elements."""
    rng = np.random.default_rng(seed)
    buffers: dict[str, Array] = {}
    for name, offset in zip("pmvgw", offsets, strict=True):
        dtype = {"g": g_dtype, "w": w_dtype}.get(name, DType.FP32)
        if dtype is DType.NONE:
            continue
        length = GUARD + offset + numel + GUARD
        values = random_floats(rng, length)
        if name == "v" and rng.integers(2):
            values = np.abs(values)
        if dtype.itemsize == 2:
            values = reference.round_to(values, dtype)
            if rng.integers(2):
                values = rng.integers(0, 1 << 16, length, dtype=np.uint16)
        buffers[name] = aligned_copy(values.astype(STORAGE[dtype], copy=False))
    starts = {name: GUARD + o for name, o in zip("pmvgw", offsets, strict=True) if name in buffers}
    return Arrays(buffers, starts, numel, g_dtype, w_dtype)


def expected(arrays: Arrays, scalars: AdamScalars) -> bytes:
    """What the reference makes of the arrays."""
    result = arrays.copy()
    reference.update(
        result.array("p"),
        result.array("m"),
        result.array("v"),
        result.array("g"),
        result.array("w") if "w" in result.buffers else None,
        scalars,
        g_dtype=arrays.g_dtype,
        w_dtype=arrays.w_dtype,
    )
    return result.canonical()


def updated(arrays: Arrays, scalars: AdamScalars, impl: str) -> bytes:
    """What an implementation makes of the arrays."""
    result = arrays.copy()
    adam.update([result.segment(scalars)], impl=impl)
    return result.canonical()


def unit(smallest: float = 0.0) -> st.SearchStrategy[float]:
    """Floats from ``smallest`` to just below 1."""
    return st.floats(smallest, 1.0, exclude_max=True)


scalars = st.builds(
    AdamScalars.at_step,
    lr=unit(),
    beta1=st.just(0.0) | st.just(0.9) | unit(),
    beta2=st.just(0.0) | st.just(0.999) | unit(),
    eps=st.sampled_from([0.0, 1e-45, 1e-40, 1e-8, 1e-3]) | unit(),
    weight_decay=st.sampled_from([0.0, 0.01]) | unit(),
    step=st.integers(1, 10**7),
    decoupled=st.booleans(),
    maximize=st.booleans(),
    scale=st.just(1.0) | st.floats(2.0**-24, 2.0**16),
)
g_dtypes = st.sampled_from([DType.FP32, DType.BF16, DType.FP16])
w_dtypes = st.sampled_from(list(DType))
offset = st.integers(0, 15)
arrays = st.builds(
    random_arrays,
    seed=st.integers(0, 2**32),
    numel=st.integers(0, 300),
    g_dtype=g_dtypes,
    w_dtype=w_dtypes,
    offsets=st.tuples(offset, offset, offset, offset, offset),
)
