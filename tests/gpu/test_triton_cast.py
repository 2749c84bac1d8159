"""A gradient on a device: one norm, one fingerprint and one rounding, those of the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dos.kernels import reference
from dos.kernels.scalars import BLOCK_ELEMENTS, DType
from tests.cpu import adam_cases as cases

pytest.importorskip("triton")
from dos.kernels.gpu import cast

Array = npt.NDArray[Any]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TORCH = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}
every_format = pytest.mark.parametrize("dtype", TORCH)
every_narrow_format = pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])


def gradient(numel: int, dtype: DType, seed: int = 0) -> Array:
    """Words of a gradient without infinities, so that its norm says something."""
    values = np.random.default_rng(seed).standard_normal(numel).astype(np.float32)
    return reference.round_to(values, dtype)


def on(device: torch.device, words: Array, dtype: DType, start: int = 0) -> torch.Tensor:
    """The words in device memory, `start` elements behind an aligned address."""
    buffer = torch.from_numpy(np.concatenate([np.zeros(start, words.dtype), words])).to(device)
    return buffer[start:].view(TORCH[dtype])


def same(got: torch.Tensor, expected: Array) -> bool:
    """Equal bits, with one NaN standing for all."""
    here = got.cpu().numpy()
    bits = [np.where(np.isnan(x), np.nan, x).astype(x.dtype) for x in (here, expected)]
    return bits[0].dtype == bits[1].dtype and bits[0].tobytes() == bits[1].tobytes()


def assert_examined(words: Array, dtype: DType, device: torch.device, start: int = 0) -> None:
    g = on(device, words, dtype, start)
    out = torch.full((words.size + 1,), 7.0, device=device)
    got = cast.examine(g, out[: words.size])
    values = reference.widen(words, dtype)
    blocks = np.split(values, range(BLOCK_ELEMENTS, values.size, BLOCK_ELEMENTS))
    maxima = [reference.max_abs(block) for block in blocks if block.size]
    assert same(got.squares, reference.block_squares(values))
    assert same(got.max_abs, np.array(maxima, np.float32))
    assert got.fingerprint.item() % 2**64 == reference.fingerprint(words)
    assert same(out, np.append(values, np.float32(7)))


# Without shrinking, which takes minutes in the interpreter.
@settings(max_examples=25, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    numel=st.integers(1, 2100) | st.integers(BLOCK_ELEMENTS - 2, BLOCK_ELEMENTS + 2),
    dtype=st.sampled_from(list(TORCH)),
    seed=st.integers(0, 2**32),
    start=st.integers(0, 15),
)
def test_any_pattern_gives_what_the_reference_gives(
    device: torch.device, numel: int, dtype: DType, seed: int, start: int
) -> None:
    words = cases.random_arrays(seed, numel, dtype, DType.NONE).array("g")
    assert_examined(words, dtype, device, start)


@every_format
@pytest.mark.parametrize("numel", [1, 64, BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS + 777])
def test_gradients_give_what_the_reference_gives(
    device: torch.device, dtype: DType, numel: int
) -> None:
    assert_examined(gradient(numel, dtype), dtype, device)


def test_one_norm_on_every_device(device: torch.device) -> None:
    words = gradient(3 * BLOCK_ELEMENTS + 5, DType.BF16)
    squares = cast.examine(on(device, words, DType.BF16)).squares.cpu().numpy()
    expected = reference.block_squares(reference.widen(words, DType.BF16))
    assert reference.sum_in_order(squares).hex() == reference.sum_in_order(expected).hex()


@every_format
def test_without_an_output_nothing_else_changes(device: torch.device, dtype: DType) -> None:
    g = on(device, gradient(5000, dtype), dtype)
    alone, with_output = cast.examine(g), cast.examine(g, torch.empty(5000, device=device))
    assert torch.equal(alone.squares, with_output.squares)
    assert torch.equal(alone.max_abs, with_output.max_abs)
    assert torch.equal(alone.fingerprint, with_output.fingerprint)


@pytest.mark.parametrize("place", [0, 63, 64, 1023, 5000, 65_535])
def test_a_nan_wins_over_infinity_in_its_block_only(device: torch.device, place: int) -> None:
    words = gradient(2 * BLOCK_ELEMENTS, DType.FP32)
    words[20] = np.inf
    words[BLOCK_ELEMENTS + place] = np.nan
    got = cast.examine(on(device, words, DType.FP32))
    assert got.max_abs.tolist()[0] == np.inf
    assert got.max_abs.isnan().tolist() == [False, True]
    assert got.squares.isnan().tolist() == [False, True]


@every_narrow_format
def test_every_word_widens_exactly(device: torch.device, dtype: DType) -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    out = torch.empty(words.size, device=device)
    cast.examine(on(device, words, dtype), out)
    assert same(out, reference.widen(words, dtype))


@every_narrow_format
@pytest.mark.parametrize("start", [0, 3])
def test_every_value_near_a_tie_rounds_to_nearest_even(
    device: torch.device, dtype: DType, start: int
) -> None:
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    # Ties of bfloat16, of float16's normal numbers, and their neighbours.
    lower = np.uint32([0, 1, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    values = (upper[:, None] | lower).reshape(-1).view(np.float32)
    target = torch.zeros(start + values.size + 1, dtype=TORCH[dtype], device=device)
    cast.downscale(on(device, values, DType.FP32, start), target[start:-1])
    expected = reference.widen(reference.round_to(values, dtype), dtype)
    padded = np.concatenate([np.zeros(start, np.float32), expected, np.zeros(1, np.float32)])
    assert same(target.float(), padded)


@pytest.mark.usefixtures("flushing")
def test_a_thread_that_flushes_subnormals_examines_the_same(device: torch.device) -> None:
    words = np.arange(1, 0x7F, dtype=np.uint16)
    got = cast.examine(on(device, words, DType.BF16))
    torch.set_flush_denormal(False)
    assert same(got.squares, reference.block_squares(reference.widen(words, DType.BF16)))


def test_an_empty_gradient_has_no_blocks(device: torch.device) -> None:
    got = cast.examine(torch.empty(0, device=device))
    assert (got.squares.numel(), got.max_abs.numel(), got.fingerprint.item()) == (0, 0, 0)
