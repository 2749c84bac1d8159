"""What a gradient is known by: the oracle of its norm and fingerprint keeps its own promises."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dos.kernels import reference
from dos.kernels.scalars import BLOCK_ELEMENTS


def normal(numel: int, seed: int = 0) -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(seed).standard_normal(numel).astype(np.float32)


def test_the_squares_of_a_block_add_up() -> None:
    values = normal(3 * BLOCK_ELEMENTS + 777)
    exact = math.fsum(float(x) ** 2 for x in values)
    assert math.isclose(reference.sum_in_order(reference.block_squares(values)), exact)


def test_zeros_behind_a_gradient_change_no_bit_of_its_norm() -> None:
    values = normal(1000)
    longer = np.concatenate([values, np.zeros(500, np.float32)])
    assert reference.block_squares(values).tobytes() == reference.block_squares(longer).tobytes()


def test_the_largest_gradient_squared_is_finite() -> None:
    values = np.full(100, np.finfo(np.float32).max)
    assert np.isfinite(reference.block_squares(values)).all()


def test_no_elements_have_no_blocks() -> None:
    assert reference.block_squares(np.zeros(0, np.float32)).size == 0


def test_one_nan_makes_its_block_nan() -> None:
    values = normal(2 * BLOCK_ELEMENTS)
    values[-1] = np.nan
    assert np.isnan(reference.block_squares(values)).tolist() == [False, True]


@given(numel=st.integers(0, 300), cut=st.integers(0, 300), seed=st.integers(0, 99))
def test_fingerprints_of_parts_add_up(numel: int, cut: int, seed: int) -> None:
    values = normal(numel, seed)
    cut = min(cut, numel)
    parts = reference.fingerprint(values[:cut]) + reference.fingerprint(values[cut:], cut)
    assert parts % 2**64 == reference.fingerprint(values)


def test_a_fingerprint_knows_places() -> None:
    values = normal(2)
    assert reference.fingerprint(values) != reference.fingerprint(values[::-1].copy())


def test_a_fingerprint_knows_minus_zero() -> None:
    zeros = np.zeros(8, np.float32)
    assert reference.fingerprint(zeros) != reference.fingerprint(-zeros)


def test_halving_every_element_is_seen() -> None:
    values = normal(10_000)
    assert reference.fingerprint(values) != reference.fingerprint(values / 2)
