"""The compiled module refuses what it cannot do, and changes nothing then."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dos.kernels.scalars import AdamScalars, DType

native = pytest.importorskip("dos.kernels._native", reason="needs the compiled extension")

SCALARS = AdamScalars.at_step(
    lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=3, decoupled=True
)
FIELDS = ("p", "m", "v", "g", "w", "numel", "g_dtype", "w_dtype", "scalars")


def task(memory: np.ndarray[Any, Any], **changes: object) -> tuple[object, ...]:
    fields: dict[str, object] = dict(zip("pmvg", (row.ctypes.data for row in memory), strict=True))
    fields |= {"w": 0, "numel": memory.shape[1], "g_dtype": DType.FP32, "w_dtype": DType.NONE}
    return tuple({**fields, "scalars": SCALARS, **changes}[name] for name in FIELDS)


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="mmx"):
        native.adam_update([], "mmx")


@pytest.mark.parametrize(
    "change", [{"g_dtype": 0}, {"g_dtype": 4}, {"w_dtype": -1}, {"w_dtype": 4}, {"numel": -1}]
)
def test_a_task_that_cannot_be_right_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"number format|negative"):
        native.adam_update([task(np.ones((4, 8), np.float32), **change)], "scalar")


def test_a_task_with_too_few_fields_is_refused() -> None:
    with pytest.raises(ValueError, match="nine fields"):
        native.adam_update([(1, 2)], "scalar")


def test_nothing_is_changed_when_a_later_task_is_refused() -> None:
    memory = np.ones((4, 8), np.float32)
    with pytest.raises(ValueError, match="negative"):
        native.adam_update([task(memory), task(memory, numel=-1)], "scalar")
    assert (memory == 1).all()


def test_the_module_uses_no_openmp() -> None:
    # Whose threads would fight with torch's, and do not survive a fork.
    assert not re.search(rb"GOMP_|__kmpc_", Path(native.__file__).read_bytes())


def test_a_pool_with_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one thread"):
        native.ThreadPool(-1)


@pytest.mark.parametrize(
    ("numel", "dtype", "isa"),
    [(-1, 1, "scalar"), (8, 0, "scalar"), (8, 4, "scalar"), (8, 1, "mmx")],
)
def test_a_gradient_that_cannot_be_examined_is_refused(numel: int, dtype: int, isa: str) -> None:
    values, squares = np.ones(8, np.float32), np.zeros(1)
    with pytest.raises(ValueError, match=r"number format|negative|mmx"):
        native.examine(values.ctypes.data, numel, dtype, 0, squares.ctypes.data, isa)
    assert squares[0] == 0


@pytest.mark.parametrize(("numel", "dtype"), [(-1, 2), (8, 1), (8, 4)])
def test_a_rounding_that_cannot_be_right_is_refused(numel: int, dtype: int) -> None:
    values, words = np.ones(8, np.float32), np.zeros(8, np.uint16)
    with pytest.raises(ValueError, match=r"number format|negative"):
        native.downscale(values.ctypes.data, words.ctypes.data, numel, dtype, "scalar")
    assert not words.any()
