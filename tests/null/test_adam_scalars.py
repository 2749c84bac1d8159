"""The scalars of an update, the front door's checks, and the oracle's conversions."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dos.errors import ConfigError
from dos.kernels import adam, reference
from dos.kernels.scalars import AdamScalars, DType, Segment, to_fp32

SCALARS = AdamScalars.at_step(
    lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=3, decoupled=True
)
FIELDS = {"c1": 0.9, "d1": 1 - 0.9, "c2": 0.999, "d2": 1 - 0.999, "eps": 1e-8}
FORMULAS = {
    **FIELDS,
    "step_size": 1e-3 / (1 - 0.9**3),
    "inv_sqrt_bc2": 1 / math.sqrt(1 - 0.999**3),
    "decay": 1 - 1e-3 * 0.01,
    "weight_decay": 0.01,
    "scale": 1.0,
}


def hardware_fp32(value: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


@given(st.floats(allow_nan=False) | st.floats(-1e-37, 1e-37) | st.floats(width=32, allow_nan=False))
def test_to_fp32_rounds_as_the_hardware_does(value: float) -> None:
    assert struct.pack("d", to_fp32(value)) == struct.pack("d", hardware_fp32(value))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_to_fp32_overflows_at_halfway_to_the_next_power(sign: float) -> None:
    halfway = sign * (2.0**128 - 2.0**103)
    largest = sign * (2.0**128 - 2.0**104)
    assert [to_fp32(math.nextafter(halfway, 0.0)), to_fp32(halfway)] == [largest, sign * math.inf]


@pytest.mark.parametrize("name", FORMULAS)
def test_each_scalar_is_its_formula_rounded_once(name: str) -> None:
    assert getattr(SCALARS, name) == float(np.float32(FORMULAS[name]))


@pytest.mark.parametrize("step", [0, -1])
def test_a_step_below_one_is_refused(step: int) -> None:
    with pytest.raises(ConfigError, match="count steps from 1"):
        AdamScalars.at_step(
            lr=1.0, beta1=0.9, beta2=0.9, eps=0.0, weight_decay=0.0, step=step, decoupled=True
        )


@pytest.mark.parametrize("beta", [1.0, -0.1, math.nan])
def test_a_beta_outside_its_range_is_refused(beta: float) -> None:
    with pytest.raises(ConfigError, match="beta2"):
        AdamScalars.at_step(
            lr=1.0, beta1=0.9, beta2=beta, eps=0.0, weight_decay=0.0, step=1, decoupled=True
        )


@pytest.mark.parametrize(("dtype", "itemsize"), [*zip(DType, (0, 4, 2, 2), strict=True)])
def test_itemsize(dtype: DType, itemsize: int) -> None:
    assert dtype.itemsize == itemsize


def segment(**changes: object) -> Segment:
    fields = {"p": 64, "m": 64, "v": 64, "g": 64, "w": 64, "numel": 1}
    kinds = {"g_dtype": DType.FP32, "w_dtype": DType.BF16, "scalars": SCALARS}
    return Segment(**{**fields, **kinds, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [{"numel": -1}, {"g_dtype": DType.NONE}, *({name: 0} for name in "pmvgw")],
    ids=str,
)
def test_a_segment_that_cannot_be_right_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"segments\[0\]"):
        adam.update([segment(**change)])


def test_an_empty_segment_needs_no_addresses() -> None:
    adam.update([segment(p=0, m=0, v=0, g=0, w=0, numel=0)])


def test_an_unknown_implementation_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'mmx'.*\n.*reference"):
        adam.update([], impl="mmx")


def test_the_reference_is_always_available() -> None:
    assert adam.available()[-1] == "reference"


@pytest.mark.parametrize("missing", ["dos.kernels._native", "numba"])
def test_the_front_door_opens_without_an_optional_part(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "import importlib.util; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n: None if sys.modules.get(n, 0) is None else find(n)\n"
        "from dos.kernels import adam; adam.update([]); print(*adam.available())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    absent = {"numba": "numba", "dos.kernels._native": "scalar"}[missing]
    assert absent not in done.stdout.split()


def test_the_kernels_load_no_torch() -> None:
    code = "import sys; from dos.kernels import adam; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"


ALL_WORDS = np.arange(1 << 16, dtype=np.uint16)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_every_16_bit_word_survives_widening_and_rounding(dtype: DType) -> None:
    wide = reference.widen(ALL_WORDS, dtype)
    ordinary = ~np.isnan(wide)
    assert np.array_equal(reference.round_to(wide, dtype)[ordinary], ALL_WORDS[ordinary])


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_a_nan_stays_a_nan_when_rounded(dtype: DType) -> None:
    fractions = np.append(1 << np.arange(23), 0x7FFFFF).astype(np.uint32)
    nans = np.concatenate([fractions | 0x7F800000, fractions | 0xFF800000]).astype(np.uint32)
    words = reference.round_to(nans.view(np.float32), dtype)
    assert np.isnan(reference.widen(words, dtype)).all()


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_halfway_values_round_to_the_even_word(dtype: DType) -> None:
    last = 0x7F7F if dtype is DType.BF16 else 0x7BFF  # the largest finite word
    words = np.arange(last, dtype=np.uint16)
    low = reference.widen(words, dtype).astype(np.float64)
    high = reference.widen(words + np.uint16(1), dtype).astype(np.float64)
    halfway = ((low + high) / 2).astype(np.float32)
    assert np.array_equal(reference.round_to(halfway, dtype), words + (words & 1))


def test_the_reference_is_silent() -> None:
    hostile = np.array([0xFF800000, 0x7F7FFFFF, 0x7F800001, 1], np.uint32).view(np.float32)
    p, m, v = hostile.copy(), hostile.copy(), hostile.copy()
    words = np.zeros(4, np.uint16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reference.update(p, m, v, hostile, words, SCALARS, w_dtype=DType.FP16)
