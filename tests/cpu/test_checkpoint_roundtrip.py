"""What is saved comes back the same, whatever it is."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import dos
import dos.checkpoint
from dos.checkpoint.encode import DEPTH
from tests.cpu.checkpoint_cases import (
    DTYPES,
    WEIRD,
    assert_same,
    in_memory,
    round_trip,
    states,
    views,
)


@given(states)
@settings(max_examples=100)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_any_state_comes_back(state: Any) -> None:
    with in_memory() as folder:
        assert_same(state, round_trip(state, Path(folder)))


def byte_addresses(view: Any) -> list[int]:
    """Where each byte of each element lies."""
    array = view.numpy() if isinstance(view, torch.Tensor) else view
    raw = np.lib.stride_tricks.as_strided(
        array.view(f"V{array.itemsize}"), array.shape, array.strides
    )
    base = raw.__array_interface__["data"][0]
    offsets = np.zeros((), int)
    for length, step in zip(array.shape, array.strides, strict=True):
        offsets = offsets[..., None] + np.arange(length) * step
    return [base + int(at) + byte for at in offsets.ravel() for byte in range(array.itemsize)]


def sharing(some: list[Any]) -> list[list[bool]]:
    """Of each two views, does each byte of the one lie where that of the other does?"""
    flat = [address for view in some for address in byte_addresses(view)]
    return [[a == b for b in flat] for a in flat]


@given(views())
@settings(max_examples=60)
def test_views_share_memory_as_before(some: list[Any]) -> None:
    with in_memory() as folder:
        back = round_trip(some, Path(folder))
    assert_same(some, back)
    assert sharing(back) == sharing(some)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    words = torch.randint(0, 256, (6 * dtype.itemsize,), dtype=torch.uint8).numpy()
    state = [torch.frombuffer(bytearray(words), dtype=dtype).view(2, 3)]
    assert_same(state, round_trip(state, tmp_path))


@pytest.mark.parametrize("shape", [(300, 1000), (1 << 20, 3)])
def test_large_tensors_in_another_order_come_back(shape: tuple[int, int], tmp_path: Path) -> None:
    whole = torch.arange(shape[0] * shape[1], dtype=torch.int32).view(shape)
    state = {"turned": whole.t(), "part": whole.double()[:, 1:2], "odd": whole.byte()[1:]}
    assert_same(state, round_trip(state, tmp_path))


def test_extents_of_many_chunks_come_back(tmp_path: Path) -> None:
    state = {str(n): torch.randn(n) for n in (1 << 18, (3 << 20) + 5, 700_001, 5, (1 << 20) - 1)}
    assert_same(state, round_trip(state, tmp_path))


def test_tied_tensors_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    weight = torch.randn(1000, 10)
    state = {"in": weight, "out": weight, "detached": weight.detach(), "rows": weight[3:5]}
    back = round_trip(state, tmp_path)
    assert back["in"] is back["out"]
    back["in"][3, 0] = 7
    assert back["detached"][3, 0] == back["rows"][0, 0] == 7
    size = (tmp_path / "saved" / "rank-00000.safetensors").stat().st_size
    assert size < weight.nbytes + 3 * 4096


def test_views_that_overlap_and_have_no_common_base_share_memory(tmp_path: Path) -> None:
    whole = torch.arange(100)
    back = round_trip(
        {"a": whole[10:50], "b": whole[40:60], "bytes": whole.view(torch.uint8)[81:99]}, tmp_path
    )
    back["a"][30] = -1
    assert back["b"][0] == -1
    assert torch.equal(back["bytes"], whole.view(torch.uint8)[81:99])


def test_arrays_and_tensors_share_memory(tmp_path: Path) -> None:
    tensor = torch.arange(5.0)
    back = round_trip({"tensor": tensor, "array": tensor.numpy()[1:]}, tmp_path)
    back["array"][0] = 9
    assert back["tensor"][1] == 9


def test_a_view_saves_its_live_range_alone(tmp_path: Path) -> None:
    round_trip([torch.randn(1 << 20)[5:10]], tmp_path)
    assert (tmp_path / "saved" / "rank-00000.safetensors").stat().st_size < 4 * 4096


def test_conjugates_and_negatives_come_back_as_values(tmp_path: Path) -> None:
    numbers = torch.randn(3, 4, dtype=torch.complex64)
    state = {"plain": numbers, "conj": numbers.conj(), "neg": numbers.conj().imag}
    back = round_trip(state, tmp_path)
    assert all(torch.equal(state[name], back[name]) for name in state)


def test_a_state_dict_keeps_its_metadata(tmp_path: Path) -> None:
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)).state_dict()
    back = round_trip(state, tmp_path)
    assert type(back) is collections.OrderedDict
    assert back._metadata == state._metadata  # type: ignore[attr-defined]


def test_a_trained_optimizer_comes_back(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    state = {"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    assert_same(state, round_trip(state, tmp_path))


def test_a_state_that_is_one_tensor_comes_back(tmp_path: Path) -> None:
    assert_same(torch.arange(3), round_trip(torch.arange(3), tmp_path))


def test_structured_arrays_come_back(tmp_path: Path) -> None:
    dtype = [("a", "<f4"), ("b", "S5"), ("c", "<i2", (2,)), ("d", [("e", ">u8")])]
    state = {
        "records": np.ones(7, dtype),
        "none": np.empty(3, "V0"),
        "one": np.ones(7, dtype)[0],
        "dtype": np.dtype(dtype),
    }
    assert_same(state, round_trip(state, tmp_path))


def test_the_same_id_gives_the_same_bytes(tmp_path: Path) -> None:
    state = {"w": torch.arange(2000.0), "set": {"a", "b", "c"}, "blob": b"x" * 2000}
    files = []
    for name in ("one", "two"):
        dos.checkpoint.save(state, tmp_path / name, checkpoint_id="id").result()
        files.append((tmp_path / name / "rank-00000.safetensors").read_bytes())
    assert files[0] == files[1]


class Ours:
    def __init__(self, number: int) -> None:
        self.number = number


def test_other_objects_come_back_only_if_trusted(tmp_path: Path) -> None:
    state = {"ours": [Ours(3)], "w": torch.arange(3)}
    dos.checkpoint.save(state, tmp_path / "saved").result()
    with pytest.raises(dos.FormatError, match=r"ours/0.*Ours"):
        dos.checkpoint.load(tmp_path / "saved")
    assert dos.checkpoint.load(tmp_path / "saved", trusted=True)["ours"][0].number == 3
    assert list(dos.checkpoint.load(tmp_path / "saved", only="w")) == ["w"]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda: 0, "cannot be saved"),
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.empty(3, device="meta"), "meta"),
        ({torch.arange(3)}, "element of a set"),
        (torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8), "quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_saved_is_named_before_anything_is_written(
    value: object, says: str, tmp_path: Path
) -> None:
    with pytest.raises(dos.FormatError, match=rf"(?s)bad/0.*{says}"):
        dos.checkpoint.save({"bad": [value]}, tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_a_state_that_contains_itself_is_refused(tmp_path: Path) -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(dos.FormatError, match="contains itself"):
        dos.checkpoint.save(state, tmp_path / "saved")


def test_the_deepest_state_that_is_saved_can_be_loaded(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    for _ in range(DEPTH):
        state = {"a": state}
    assert_same(state, round_trip(state, tmp_path))
    with pytest.raises(dos.FormatError, match="nested"):
        dos.checkpoint.save({"a": {"a": state}}, tmp_path / "deeper")


def test_no_dtype_is_forgotten() -> None:
    known = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    assert known == {*DTYPES, *WEIRD}
