"""Loading a part, into what is there, from pieces, elsewhere."""

from __future__ import annotations

import gc
import resource
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import dos
import dos.checkpoint
from dos.checkpoint import Pieces
from dos.checkpoint.capture import Capture
from dos.checkpoint.commit import commit
from dos.checkpoint.encode import encode_state
from dos.checkpoint.format import FileId, index_text
from dos.checkpoint.layout import lay_out
from dos.checkpoint.posix import PosixStorage
from dos.checkpoint.providers import plan_extents
from dos.checkpoint.tuning import IoShape
from dos.checkpoint.writer import FileWriter
from tests.cpu.checkpoint_cases import CLASSES, Config, assert_same, data_file

BIG = (3 << 20) + 5


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {
        "model": {"w": torch.arange(BIG, dtype=torch.float32), "b": torch.arange(10)},
        "optimizer": [torch.ones(5), {"step": 3}, torch.arange(6).view(2, 3).t()],
        "array": np.arange(8),
        "config": Config(0.5, torch.arange(4)),
        "tied": None,
    }
    state["tied"] = state["model"]["b"][2:4]
    return Path(dos.checkpoint.save(state, tmp_path / "saved").result())


def test_only_what_a_pattern_matches_comes_back(saved: Path) -> None:
    back = dos.checkpoint.load(saved, only=["model", "*/step"])
    assert list(back) == ["model", "optimizer"]
    assert list(back["model"]) == ["w", "b"]
    assert back["optimizer"] == [None, {"step": 3}, None]


def test_containers_are_left_out_though_their_keys_and_metadata_have_parts(tmp_path: Path) -> None:
    state = {"module": torch.nn.Tanh().state_dict(), "numbers": {1: 2}, "wanted": 3}
    dos.checkpoint.save(state, tmp_path / "saved").result()
    assert dos.checkpoint.load(tmp_path / "saved", only="wanted") == {"wanted": 3}


def test_an_empty_container_is_matched_by_its_path(tmp_path: Path) -> None:
    state = {"module": torch.nn.Tanh().state_dict(), "other": 3}
    dos.checkpoint.save(state, tmp_path / "saved").result()
    assert dos.checkpoint.load(tmp_path / "saved", only="module") == {"module": {}}


def test_a_class_that_is_left_out_need_not_be_allowed(saved: Path) -> None:
    assert list(dos.checkpoint.load(saved, only="array")) == ["array"]
    with pytest.raises(dos.FormatError, match=r"config.*Config"):
        dos.checkpoint.load(saved, only="config/*")


def test_a_pattern_that_matches_nothing_is_an_error(saved: Path) -> None:
    with pytest.raises(dos.ConfigError, match="nosuch"):
        dos.checkpoint.load(saved, only=["model", "nosuch*"], allow=CLASSES)


def test_part_of_a_checkpoint_is_read_without_the_rest(saved: Path) -> None:
    read = []
    dos.checkpoint.load(saved, only="model/b", progress=lambda done, total: read.append(total))
    assert read[-1] < BIG * 4


def test_tensors_are_read_into_those_given(saved: Path) -> None:
    w, turned, array = torch.zeros(BIG), torch.zeros(3, 2, dtype=torch.int64), np.zeros(8, int)
    rows = torch.zeros(5, 2)
    into = {"model": {"w": w}, "optimizer": [rows[:, 1], None, turned], "array": array}
    back = dos.checkpoint.load(saved, into=into, allow=CLASSES)
    assert back["model"]["w"] is w
    assert torch.equal(w, torch.arange(BIG, dtype=torch.float32))
    assert torch.equal(turned, torch.arange(6).view(2, 3).t())
    assert torch.equal(rows, torch.tensor([[0.0, 1.0]] * 5))
    assert np.array_equal(array, np.arange(8))
    assert torch.equal(back["model"]["b"], torch.arange(10))


def test_parameters_are_read_into_and_their_version_tells(saved: Path) -> None:
    w = torch.nn.Parameter(torch.zeros(BIG))
    before = w._version
    back = dos.checkpoint.load(saved, into={"model": {"w": w}}, only="model/w")
    assert back["model"]["w"] is w
    assert w[-1] == BIG - 1
    assert w._version > before


@pytest.mark.parametrize(
    "target",
    [torch.zeros(BIG - 1), torch.zeros(BIG, dtype=torch.float64), np.zeros(BIG, "<f4")],
)
def test_a_target_that_does_not_fit_is_refused(saved: Path, target: object) -> None:
    b = torch.zeros(10, dtype=torch.int64)
    with pytest.raises(dos.FormatError, match=r"model/w.*does not fit"):
        dos.checkpoint.load(saved, into={"model": {"b": b, "w": target}}, allow=CLASSES)
    assert not b.any()


def test_damage_found_late_says_that_the_target_is_overwritten(saved: Path) -> None:
    flip(saved, -1)
    w = torch.zeros(BIG)
    with pytest.raises(dos.IntegrityError, match="partly overwritten"):
        dos.checkpoint.load(saved, into={"model": {"w": w}}, only="model/w")
    assert w.any()


def test_verifying_before_leaves_the_target_alone(saved: Path) -> None:
    flip(saved, -1)
    w = torch.zeros(BIG)
    with pytest.raises(dos.IntegrityError, match="model/w"):
        dos.checkpoint.load(saved, into={"model": {"w": w}}, only="model/w", verify="before")
    assert not w.any()


def test_unverified_loading_takes_what_is_there(saved: Path) -> None:
    flip(saved, -1)
    dos.checkpoint.load(saved, only="model/w", verify=False)


def flip(saved: Path, element: int) -> None:
    """Change a bit of an element of model/w."""
    raw = bytearray((saved / "rank-00000.safetensors").read_bytes())
    value = np.float32((BIG + element) % BIG).tobytes() + b""
    at = raw.index(np.arange(BIG - 3, BIG, dtype="<f4").tobytes())
    assert raw[at + 8 : at + 12] == value
    raw[at + 9] ^= 4
    (saved / "rank-00000.safetensors").write_bytes(raw)


def test_memory_goes_with_the_last_tensor(tmp_path: Path) -> None:
    big = {str(n): torch.zeros(4 << 20) for n in range(8)}  # 128 MiB
    saved = dos.checkpoint.save({**big, "small": torch.ones(3)}, tmp_path / "saved").result()
    gc.collect()  # what earlier tests left
    before = resident_bytes()
    back = dos.checkpoint.load(saved)
    assert resident_bytes() > before + (120 << 20)
    small = back["small"]
    del back
    assert resident_bytes() < before + (32 << 20)
    assert torch.equal(small, torch.ones(3))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_memory_does_not_wait_for_the_collector(saved: Path) -> None:
    gc.disable()
    try:
        tensor = dos.checkpoint.load(saved, only="model/w")["model"]["w"]
        gone = weakref.ref(tensor)
        del tensor
        assert gone() is None
    finally:
        gc.enable()


def test_a_loaded_tensor_is_saved_alone(saved: Path, tmp_path: Path) -> None:
    back = dos.checkpoint.load(saved, only="model/b")
    assert back["model"]["b"].untyped_storage().nbytes() == 80


def write_ranks(path: Path, states: list[object]) -> None:
    """A checkpoint of several ranks."""
    path.mkdir()
    storage, records = PosixStorage(), []
    partial = path.parent / f".{path.name}.id.partial"
    partial.mkdir()
    for rank, state in enumerate(states):
        file_id = FileId("id", rank, 0)
        node, encoder = encode_state(state)
        extents = plan_extents(encoder.leaves, encoder.repeats)
        text = index_text({"tree": node, "pieces": encoder.pieces})
        layout = lay_out(file_id, extents, bytes(encoder.blobs), text)
        file = str(partial / file_id.name)
        capture = Capture(layout, None, lambda: None)
        writer = FileWriter(
            storage, file, layout, text, IoShape(), progress=lambda _: None, capture=capture
        )
        records.append(writer.write())
    commit(storage, str(partial), str(path), records)


def pieces(whole: torch.Tensor, *spans: tuple[int, int]) -> Pieces:
    flat = whole.flatten()
    return Pieces(tuple(whole.shape), whole.dtype, {a: flat[a:b].clone() for a, b in spans})


@pytest.mark.parametrize("into", [False, True])
def test_pieces_of_several_ranks_become_whole(into: bool, tmp_path: Path) -> None:
    whole = torch.randn(3, 1 << 20)
    n = whole.numel()
    cuts = [[(0, 1000), (5000, n)], [(1000, 5000)]]
    write_ranks(
        tmp_path / "saved",
        [{"w": pieces(whole, *spans), "rank": r} for r, spans in enumerate(cuts)],
    )
    target = torch.zeros(3, 1 << 20)
    back = dos.checkpoint.load(tmp_path / "saved", into={"w": target} if into else None)
    assert torch.equal(back["w"], whole)
    assert (back["w"] is target) == into
    assert not dos.checkpoint.verify(tmp_path / "saved")


@pytest.mark.parametrize(
    ("spans", "says"), [([(0, 5), (6, 12)], "missing"), ([(0, 7), (6, 12)], "overlap")]
)
def test_pieces_that_do_not_fit_are_refused(
    spans: list[tuple[int, int]], says: str, tmp_path: Path
) -> None:
    whole = torch.randn(3, 4)
    write_ranks(tmp_path / "saved", [{"w": pieces(whole, span)} for span in spans])
    with pytest.raises(dos.FormatError, match=rf"w: pieces.*{says}"):
        dos.checkpoint.load(tmp_path / "saved")


def test_small_chunks_and_other_files_are_read(tmp_path: Path) -> None:
    """Another writer may choose other chunks."""
    state = {"a": torch.arange(5000), "b": torch.arange(3), "c": torch.arange(700_001)}
    node, encoder = encode_state(state)
    text = index_text({"tree": node})
    extents = plan_extents(encoder.leaves, encoder.repeats)
    file_id = FileId("id", 0, 0)
    layout = lay_out(file_id, extents, b"", text, chunk_bytes=8192)
    partial = tmp_path / ".saved.id.partial"
    partial.mkdir()
    storage = PosixStorage()
    writer = FileWriter(
        storage,
        str(partial / file_id.name),
        layout,
        text,
        IoShape(),
        progress=print,
        capture=Capture(layout, None, lambda: None),
    )
    commit(storage, str(partial), str(tmp_path / "saved"), [writer.write()])
    assert_same(state, dos.checkpoint.load(tmp_path / "saved"))
    assert data_file(tmp_path).stat().st_size == layout.file_bytes
