"""The sweep that bounds an update touches each element as an update does, and no other."""

from __future__ import annotations

import numpy as np
import pytest

from dos.kernels import adam
from tests.cpu.adam_cases import Array, aligned_copy

native = pytest.importorskip("dos.kernels._native", reason="needs the compiled extension")

LENGTH = 1_300_000  # several chunks


def arrays() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    fp32 = {name: aligned_copy(rng.random(LENGTH, np.float32)) for name in "pmv"}
    words = {name: aligned_copy(rng.integers(0, 1 << 16, LENGTH, np.uint16)) for name in "gw"}
    return {**fp32, **words}


def addresses(of: dict[str, Array]) -> dict[str, int]:
    return {name: array.ctypes.data for name, array in of.items()}


@pytest.mark.parametrize("threads", [None, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_every_group_is_written_and_the_rest_left_out(stream: bool, threads: int | None) -> None:
    swept, before = arrays(), arrays()
    pool = None if threads is None else adam.make_pool(threads)
    numel = LENGTH - 5
    native.sweep(**addresses(swept), numel=numel, stream=stream, pool=pool)
    done = numel - numel % 32
    for name in "pmv":
        assert (swept[name][:done] == before[name][:done] + 1).all()
        assert (swept[name][done:] == before[name][done:]).all()
    assert (swept["w"][:done] == before["g"][:done]).all()
    assert (swept["w"][done:] == before["w"][done:]).all()
    assert (swept["g"] == before["g"]).all()


def test_an_array_off_a_cache_line_is_refused() -> None:
    at = addresses(arrays())
    with pytest.raises(ValueError, match="cache line"):
        native.sweep(**{**at, "w": at["w"] + 2}, numel=32, stream=True)
