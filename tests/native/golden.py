"""Golden vectors: updates as the reference does them, in a file that C++ can read.

Little-endian. "ADAM", the number of cases, then for each case: ten fp32 scalars in the order of
the C++ struct; decoupled, g_dtype, w_dtype, numel; for each of p, m, v, g, w where its array
starts and how many elements the buffer around it has (0: there is none); the buffers before the
update; the buffers after. All integers are 32-bit.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from dos.kernels import reference
from dos.kernels.scalars import AdamScalars, DType
from tests.cpu import adam_cases as cases
from tests.cpu.adam_cases import Arrays

Case = tuple[Arrays, AdamScalars]
SCALARS = ("c1", "d1", "c2", "d2", "step_size", "inv_sqrt_bc2", "decay", "weight_decay", "eps")
FORMATS = [(g, w) for g in (DType.FP32, DType.BF16, DType.FP16) for w in DType]
CASES_PER_FORMAT = 6


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


def packed(case: Case) -> bytes:
    """One case as the file holds it."""
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
    integers = [int(scalars.decoupled), arrays.g_dtype, arrays.w_dtype, arrays.numel]
    for name in "pmvgw":
        there = name in arrays.buffers
        integers += [arrays.offsets[name], arrays.buffers[name].size] if there else [0, 0]
    parts.append(struct.pack("<14I", *integers))
    for state in (arrays, after):
        parts += [state.buffers[name].tobytes() for name in "pmvgw" if name in state.buffers]
    return b"".join(parts)


def write_adam(path: Path) -> None:
    """Write the golden vectors of the Adam update, the same in every call."""
    everything = [*random_cases(), subnormal_case(), tie_case(DType.BF16), tie_case(DType.FP16)]
    path.write_bytes(
        b"ADAM" + struct.pack("<I", len(everything)) + b"".join(map(packed, everything))
    )
