"""Every file opens with safetensors' own library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open

import dos.checkpoint
from dos.checkpoint.dtypes import header_name
from dos.checkpoint.encode import Encoder
from dos.checkpoint.format import BLOCK_BYTES
from tests.cpu.checkpoint_cases import bits, data_file, in_memory, states


def opened(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@given(states)
@settings(max_examples=60)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_any_file_opens_and_own_entries_bear_the_reserved_name(state: Any) -> None:
    encoder = Encoder()
    encoder.encode(state)
    with in_memory() as folder:
        dos.checkpoint.save(state, Path(folder) / "saved").result()
        names = {leaf.path or "~r" for leaf in encoder.leaves}
        found = opened(data_file(Path(folder)))
        assert {name for name in found if not name.startswith("__dos__/")} <= names


@pytest.mark.parametrize("turned", [False, True])
def test_every_dtype_that_it_knows_is_there_bit_by_bit(turned: bool, tmp_path: Path) -> None:
    known = [d for d in vars(torch).values() if isinstance(d, torch.dtype) and header_name(d)]
    words = torch.randint(0, 256, (64,), dtype=torch.uint8).numpy()
    state = {}
    for dtype in known:
        tensor = torch.frombuffer(bytearray(words), dtype=dtype).view(2, -1)
        state[str(dtype)] = tensor.t() if turned else tensor
    dos.checkpoint.save(state, tmp_path / "saved").result()
    found = opened(data_file(tmp_path))
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert bits(found[name]) == bits(tensor), name


def test_arrays_are_there(tmp_path: Path) -> None:
    state = {"a": np.arange(6.0).reshape(2, 3), "f": np.asfortranarray(np.eye(3, dtype="<f4"))}
    dos.checkpoint.save(state, tmp_path / "saved").result()
    found = opened(data_file(tmp_path))
    assert all(np.array_equal(found[name].numpy(), array) for name, array in state.items())


def test_large_and_small_and_empty_tensors_are_there(tmp_path: Path) -> None:
    state = {str(n): torch.randn(n) for n in (0, 1, 3, 1000, (1 << 18) + 1, 1 << 20, 3_000_001)}
    dos.checkpoint.save(state, tmp_path / "saved").result()
    found = opened(data_file(tmp_path))
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_large_tensors_begin_at_a_block(tmp_path: Path) -> None:
    state = [torch.full(((1 << 20) + 7 * n,), n, dtype=torch.uint8) for n in range(1, 5)]
    dos.checkpoint.save(state, tmp_path / "saved").result()
    raw = data_file(tmp_path).read_bytes()
    for number, tensor in enumerate(state, start=1):
        assert raw.index(bytes([number]) * len(tensor)) % BLOCK_BYTES == 0


def test_keys_that_look_alike_do_not_collide(tmp_path: Path) -> None:
    state = {
        "a/b": torch.tensor(1),
        "a": {"b": torch.tensor(2)},
        1: torch.tensor(3),
        "1": torch.tensor(4),
        "__metadata__": torch.tensor(5),
        "__dos__": {"index": torch.tensor(6)},
        "": torch.tensor(7),
        "x#1": torch.tensor(8),
        "\ud800": torch.tensor(9),
        (1, "a"): torch.tensor(10),
        "~k1": torch.tensor(11),
    }
    dos.checkpoint.save(state, tmp_path / "saved").result()
    found = opened(data_file(tmp_path))
    values = sorted(int(t) for name, t in found.items() if not name.startswith("__dos__/"))
    assert values == list(range(1, 12))


def test_small_tensors_cost_little_besides_their_header(tmp_path: Path) -> None:
    state = {f"model.layers.{n}.weight": torch.zeros(16) for n in range(20_000)}
    dos.checkpoint.save(state, tmp_path / "saved").result()
    path = data_file(tmp_path)
    header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
    assert path.stat().st_size <= 20_000 * 64 + header_bytes + (1 << 20)
