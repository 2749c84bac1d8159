"""One norm: the same for any split into threads, and what it clips to is torch's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dos.errors import ConfigError
from dos.kernels import adam, cast, norm
from dos.kernels.scalars import BLOCK_ELEMENTS, DType
from tests.cpu.float_modes import ROUNDING, float_mode
from tests.cpu.tolerances import CLIP


def gradients() -> list[np.ndarray]:  # type: ignore[type-arg]
    rng = np.random.default_rng(3)
    sizes = (7, 1000, 3 * BLOCK_ELEMENTS + 11, BLOCK_ELEMENTS)
    return [rng.standard_normal(size).astype(np.float32) for size in sizes]


def norm_of(arrays: list[np.ndarray], threads: int = 1) -> float:  # type: ignore[type-arg]
    pool = adam.make_pool(threads)
    found = [cast.examine(a.ctypes.data, a.size, DType.FP32, pool=pool) for a in arrays]
    return norm.norm([each.square_sum for each in found])


def test_the_norm_is_the_root_of_all_squares() -> None:
    exact = math.fsum(float(x) ** 2 for array in gradients() for x in array)
    assert norm_of(gradients()) == pytest.approx(math.sqrt(exact), rel=1e-14)


def test_the_norm_does_not_depend_on_the_threads() -> None:
    assert len({norm_of(gradients(), threads) for threads in (1, 2, 3, 7)}) == 1


def test_no_gradients_have_norm_0() -> None:
    assert norm.norm([]) == norm.infinity_norm([]) == 0.0


def test_parts_are_added_from_the_first() -> None:
    assert norm.square_sum([1.0, 2.0**53, 1.0, 1.0]) == 2.0**53
    assert norm.square_sum([1.0, 1.0, 1.0, 2.0**53]) == 2.0**53 + 4.0


@pytest.mark.parametrize("mode", ROUNDING)
def test_a_threads_rounding_does_not_change_norm_or_scale(mode: str) -> None:
    parts = [0.1, 0.2, 0.3, 0.7]
    wanted = norm.norm(parts), norm.clip_scale(3.0, 1.0)
    with float_mode(mode):
        found = norm.norm(parts), norm.clip_scale(3.0, 1.0)
    assert found == wanted


def test_the_infinity_norm_is_the_largest_magnitude() -> None:
    assert norm.infinity_norm([1.0, 3.0, 2.0]) == 3.0


@pytest.mark.parametrize("parts", [[math.nan, math.inf], [1.0, math.nan]])
def test_nan_wins_the_infinity_norm(parts: list[float]) -> None:
    assert math.isnan(norm.infinity_norm(parts))


@pytest.mark.parametrize("max_norm", [0.0, 1e-3, 1.0, 500.0, 1e9, math.inf])
def test_the_scale_is_what_torch_clips_by(max_norm: float) -> None:
    parameters = [torch.zeros(g.size, dtype=torch.float64) for g in gradients()]
    for parameter, grad in zip(parameters, gradients(), strict=True):
        parameter.grad = torch.from_numpy(grad).double()
    total = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    assert parameters[0].grad is not None
    by_torch = (parameters[0].grad[0] / float(gradients()[0][0])).item()
    ours = norm_of(gradients())
    assert ours == pytest.approx(total.item(), rel=CLIP.relative)
    assert norm.clip_scale(ours, max_norm) == pytest.approx(by_torch, rel=CLIP.relative)


@pytest.mark.parametrize(("total", "scale"), [(math.inf, 0.0), (0.0, 1.0), (math.nan, math.nan)])
def test_the_scale_of_an_odd_norm_is_torchs(total: float, scale: float) -> None:
    assert norm.clip_scale(total, 1.0) == pytest.approx(scale, nan_ok=True)


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_a_bound_that_is_no_norm_is_refused(max_norm: float) -> None:
    with pytest.raises(ConfigError, match="max_norm"):
        norm.clip_scale(1.0, max_norm)
