"""Golden vectors: what the reference makes of arrays, in files that C++ can read.

Little-endian; all integers are 32-bit but for a fingerprint. An array is its dtype, where it starts
in its buffer, how many elements it has and how many the buffer has, the buffer before and the
buffer after; all zero where there is none.

adam.bin: "ADAM", the number of cases, then for each case ten fp32 scalars in the order of the C++
struct, decoupled, and the arrays p, m, v, g, w.

gradient.bin: "GRAD", the numbers of gradients and of roundings; for each gradient the float64
max_abs, the fingerprint in 64 bits, the number of blocks, their float64 squares, and the arrays g
and out; for each rounding the arrays source and target.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from dos.kernels import reference
from dos.kernels.scalars import BLOCK_ELEMENTS, ROW_ELEMENTS, AdamScalars, DType
from tests.cpu import adam_cases as cases
from tests.cpu import cast_cases
from tests.cpu.adam_cases import Array, Arrays
from tests.cpu.cast_cases import Source

Case = tuple[Arrays, AdamScalars]
SCALARS = ("c1", "d1", "c2", "d2", "step_size", "inv_sqrt_bc2", "decay", "weight_decay", "eps")
FORMATS = [(g, w) for g in (DType.FP32, DType.BF16, DType.FP16) for w in DType]
CASES_PER_FORMAT = 6
# Around the ends of lanes, rows and blocks.
GRADIENT_LENGTHS = [
    0,
    1,
    100,
    ROW_ELEMENTS,
    3 * ROW_ELEMENTS + 65,
    BLOCK_ELEMENTS + ROW_ELEMENTS + 1,
]
ROUNDED_LENGTHS = [0, 1, 31, 1000, BLOCK_ELEMENTS + 33]


def random_scalars(rng: np.random.Generator, decoupled: bool) -> AdamScalars:
    """Ordinary and extreme hyperparameters."""
    return AdamScalars.at_step(
        lr=float(rng.random()),
        beta1=float(rng.choice([0.0, 0.9, rng.random()])),
        beta2=float(rng.choice([0.0, 0.999, rng.random()])),
        eps=float(rng.choice([0.0, 1e-45, 1e-40, 1e-8, 1.0])),
        weight_decay=float(rng.choice([0.0, 0.01])),
        step=int(rng.integers(1, 1000)),
        decoupled=decoupled,
        maximize=bool(rng.integers(2)),
        scale=float(rng.choice([1.0, 2.0**-24, 3.0])),
    )


def random_cases() -> list[Case]:
    """Every pair of formats, odd lengths and starts, AdamW and Adam."""
    found = []
    for g_dtype, w_dtype in FORMATS:
        for i in range(CASES_PER_FORMAT):
            seed = len(found)
            rng = np.random.default_rng(seed)
            starts = rng.integers(0, 16, 5)
            numel = int(rng.integers(0, 200))
            arrays = cases.random_arrays(seed, numel, g_dtype, w_dtype, tuple(map(int, starts)))
            found.append((arrays, random_scalars(rng, decoupled=i % 2 == 0)))
    return found


def tie_case(w_dtype: DType) -> Case:
    """Parameters half way between two weights, or just beside, that the update leaves alone."""
    arrays = cases.random_arrays(1, 1500, DType.FP32, w_dtype)
    rng = np.random.default_rng(2)
    p = arrays.array("p")
    words = rng.integers(0, 1 << 16, p.size, dtype=np.uint16)
    if w_dtype is DType.FP16:  # a third of them among fp16's subnormals
        words[::3] &= 0x83FF
    half = 1 << (15 if w_dtype is DType.BF16 else 12)
    beside = rng.integers(-1, 2, p.size)
    p[:] = reference.widen(words, w_dtype)
    p.view(np.uint32)[:] += (half + beside).astype(np.uint32)
    for name, value in (("m", 0), ("v", 1), ("g", 0)):
        arrays.array(name)[:] = value
    still = {"lr": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    return arrays, AdamScalars.at_step(**still, step=1, decoupled=True)


def subnormal_case() -> Case:
    """Every input and every result is subnormal; flushed to zero, nothing would be left."""
    arrays = cases.random_arrays(3, 100, DType.BF16, DType.FP16)
    for buffer in arrays.buffers.values():
        words = buffer.view(np.uint32 if buffer.itemsize == 4 else np.uint16)
        words[:] = np.arange(1, words.size + 1) % 0x7F
    scalars = AdamScalars.at_step(
        lr=1e-3, beta1=0.9, beta2=0.999, eps=1.0, weight_decay=0.01, step=3, decoupled=True
    )
    return arrays, scalars


def packed_array(dtype: DType, start: int, numel: int, before: Array, after: Array) -> bytes:
    """One array as the files hold it."""
    assert before.size == after.size
    head = struct.pack("<4I", dtype, start, numel, before.size)
    return head + before.tobytes() + after.tobytes()


NO_ARRAY = struct.pack("<4I", DType.NONE, 0, 0, 0)


def packed_update(case: Case) -> bytes:
    """One update as the file holds it."""
    arrays, scalars = case
    after = arrays.copy()
    reference.update(
        *(after.array(name) for name in "pmvg"),
        after.array("w") if "w" in after.buffers else None,
        scalars,
        g_dtype=arrays.g_dtype,
        w_dtype=arrays.w_dtype,
    )
    scale = -scalars.scale if scalars.maximize else scalars.scale
    parts = [struct.pack("<10f", *(getattr(scalars, name) for name in SCALARS), scale)]
    parts.append(struct.pack("<I", scalars.decoupled))
    for name in "pmvgw":
        if name not in arrays.buffers:
            parts.append(NO_ARRAY)
            continue
        dtype = {"g": arrays.g_dtype, "w": arrays.w_dtype}.get(name, DType.FP32)
        buffers = arrays.buffers[name], after.buffers[name]
        parts.append(packed_array(dtype, arrays.offsets[name], arrays.numel, *buffers))
    return b"".join(parts)


def packed_source(source: Source) -> bytes:
    """An array that is only read."""
    return packed_array(source.dtype, source.start, source.numel, source.buffer, source.buffer)


def packed_result(values: Array, dtype: DType, offset: int) -> bytes:
    """An array that is written, and becomes ``values``."""
    before, start = cast_cases.target(values.size, dtype, offset)
    after = before.copy()
    after[start : start + values.size] = values
    return packed_array(dtype, start, values.size, before, after)


def packed_gradient(gradient: Source, offset: int) -> bytes:
    """One gradient as the file holds it; ``offset`` of its widened copy from a cache line."""
    values = reference.widen(gradient.words, gradient.dtype)
    squares = reference.block_squares(values)
    fingerprint = reference.fingerprint(gradient.words)
    return b"".join(
        (
            struct.pack("<dQI", reference.max_abs(values), fingerprint, squares.size),
            squares.tobytes(),
            packed_source(gradient),
            packed_result(values, DType.FP32, offset),
        )
    )


def gradients() -> list[Source]:
    """Random ones of every format and length, and two that a mode of the thread would change."""
    lengths = [(numel, seed) for seed, numel in enumerate(GRADIENT_LENGTHS)]
    return [
        source
        for dtype in cast_cases.FORMATS
        for source in (
            *(cast_cases.source(10 * dtype + seed, numel, dtype, seed) for numel, seed in lengths),
            cast_cases.delicate(dtype),
            cast_cases.subnormal(dtype),
        )
    ]


def packed_roundings() -> list[bytes]:
    """Any bit patterns, and values half way between two words or just beside."""
    packed = []
    for dtype in cast_cases.SHORT:
        random = [
            cast_cases.source(seed, numel, DType.FP32, 3 * seed)
            for seed, numel in enumerate(ROUNDED_LENGTHS)
        ]
        ties = tie_case(dtype)[0]
        p, start = ties.buffers["p"], ties.offsets["p"]
        for offset, source in enumerate([*random, Source(p, start, ties.numel, DType.FP32)]):
            words = reference.round_to(source.words, dtype)
            packed.append(packed_source(source) + packed_result(words, dtype, offset))
    return packed


def write(folder: Path) -> None:
    """Write all golden vectors, the same in every call."""
    updates = [*random_cases(), subnormal_case(), tie_case(DType.BF16), tie_case(DType.FP16)]
    (folder / "adam.bin").write_bytes(
        b"ADAM" + struct.pack("<I", len(updates)) + b"".join(map(packed_update, updates))
    )
    examined = [packed_gradient(gradient, i) for i, gradient in enumerate(gradients())]
    roundings = packed_roundings()
    counts = struct.pack("<2I", len(examined), len(roundings))
    (folder / "gradient.bin").write_bytes(b"GRAD" + counts + b"".join((*examined, *roundings)))
