"""A state cut over ranks, saved in pieces, and put together for any other number of ranks."""

from __future__ import annotations

from collections import OrderedDict
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import dos
from dos.checkpoint import Pieces, inspect, load, verify
from dos.checkpoint.commit import commit
from dos.checkpoint.convert import convert
from dos.checkpoint.draft import Draft
from dos.checkpoint.format import FileId
from dos.checkpoint.posix import PosixStorage
from dos.checkpoint.replicas import part_of, share
from dos.memory.regions import Cut, region_of, runs_of_region
from tests.cpu.checkpoint_cases import in_memory

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


def save_parts(parts: list[Any], path: Path) -> Path:
    """A checkpoint of one file per rank."""
    storage, records = PosixStorage(), []
    partial = path.with_suffix(".partial")
    partial.mkdir(parents=True)
    for rank, part in enumerate(parts):
        draft = Draft(FileId("id", rank, 0), part, None, lambda: None)
        records.append(draft.write(storage, str(partial), None, lambda n_bytes: None))
    commit(storage, str(partial), str(path), records)
    return path


def save_replicated(state: dict[str, Any], world: int, path: Path) -> Path:
    return save_parts([part_of(state, rank, world) for rank in range(world)], path)


@st.composite
def meshes(draw: st.DrawFn, dims: int) -> list[tuple[int | None, int]]:
    """Of each dimension of a mesh which one of the tensor it cuts, or None, and its size."""
    dim = st.none() if dims == 0 else st.none() | st.integers(0, dims - 1)
    return draw(st.lists(st.tuples(dim, st.integers(1, 3)), min_size=1, max_size=3))


def coordinates(mesh: list[tuple[int | None, int]]) -> list[tuple[int, ...]]:
    sizes = [size for _, size in mesh]
    return [tuple(int(i) for i in place) for place in torch.ones(sizes).nonzero()]


def placed(
    whole: torch.Tensor, mesh: list[tuple[int | None, int]], place: tuple[int, ...]
) -> torch.Tensor:
    """What torch puts at a place of a mesh."""
    part = whole
    for (dim, size), position in zip(mesh, place, strict=True):
        if dim is not None:
            chunks = part.chunk(size, dim)
            empty = part.narrow(dim, 0, 0)
            part = chunks[position] if position < len(chunks) else empty
    return part.contiguous()


def pieces_at(
    whole: torch.Tensor, mesh: list[tuple[int | None, int]], place: tuple[int, ...]
) -> Pieces:
    """The same as `Pieces`, with the number of the copy that it is."""
    pairs = list(zip(mesh, place, strict=True))
    cuts = [Cut(dim, size, position) for (dim, size), position in pairs if dim is not None]
    flat = placed(whole, mesh, place).view(-1)
    runs = runs_of_region(whole.shape, region_of(whole.shape, cuts))
    index, count = 0, 1
    for (dim, size), position in pairs:
        if dim is None:
            index, count = index * size + position, count * size
    parts = {start: flat[here : here + length] for start, here, length in runs}
    return Pieces(tuple(whole.shape), whole.dtype, parts, (index, count))


@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), meshes(len(shape)))))
def test_runs_are_what_torch_cuts(drawn: Any) -> None:
    shape, mesh = drawn
    whole = torch.arange(prod(shape)).reshape(shape)
    for place in coordinates(mesh):
        local = placed(whole, mesh, place)
        found = torch.cat(
            [
                torch.arange(start, start + part.numel())
                for start, part in pieces_at(whole, mesh, place).parts.items()
            ]
            or [torch.empty(0, dtype=torch.int64)]
        )
        assert torch.equal(found, local.view(-1))


@given(st.lists(st.integers(0, 20000), max_size=6), st.integers(1, 5), st.integers(0, 30000))
def test_shares_make_up_the_whole(sizes: list[int], count: int, ahead_bytes: int) -> None:
    shares = [share(sizes, count, index, ahead_bytes) for index in range(count)]
    for item, size in enumerate(sizes):
        ends = [0, *(its[item][1] for its in shares if its[item][0] < its[item][1])]
        begins = [*(its[item][0] for its in shares if its[item][0] < its[item][1]), size]
        assert begins == ends if size else not any(its[item] != (0, 0) for its in shares)


@given(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=6), st.integers(2, 5))
def test_shares_differ_by_no_more_than_a_page(sizes: list[int], count: int) -> None:
    of_each = [sum(end - begin for begin, end in share(sizes, count, i)) for i in range(count)]
    assert max(of_each) - min(of_each) <= 2 * 4096 + 1


@settings(max_examples=40)
@given(
    shape=SHAPES,
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.int64]),
    data=st.data(),
)
def test_any_mesh_is_read_by_any_other(shape: Any, dtype: torch.dtype, data: Any) -> None:
    saved, read = data.draw(meshes(len(shape))), data.draw(meshes(len(shape)))
    whole = torch.arange(prod(shape)).reshape(shape).to(dtype)
    places = coordinates(saved)
    with in_memory() as folder:
        states = [{"optimizer": {"w": pieces_at(whole, saved, place)}} for place in places]
        parts = [part_of(state, n, len(places)) for n, state in enumerate(states)]
        path = save_parts(parts, Path(folder, "step"))
        assert torch.equal(load(path)["optimizer"]["w"], whole)
        for place in coordinates(read):
            into = pieces_at(torch.zeros_like(whole), read, place)
            load(path, into={"optimizer": {"w": into}})
            for start, part in pieces_at(whole, read, place).parts.items():
                assert torch.equal(into.parts[start], part)


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=5),
    world=st.integers(1, 4),
    dtype=st.sampled_from([torch.float16, torch.float32]),
)
def test_replicas_write_each_byte_once(sizes: list[int], world: int, dtype: torch.dtype) -> None:
    tensors = {f"w{n}": torch.randn(size).to(dtype) for n, size in enumerate(sizes)}
    with in_memory() as folder:
        path = save_replicated({"model": tensors, "step": 3}, world, Path(folder, "step"))
        loaded = load(path)
        assert loaded["step"] == 3
        for name, tensor in tensors.items():
            assert torch.equal(loaded["model"][name], tensor)
        assert verify(path) == []


def test_all_ranks_write_about_as_much(tmp_path: Path) -> None:
    state = {"model": {"w": torch.randn(1 << 20), "b": torch.randn(1 << 10)}}
    path = save_replicated(state, 4, tmp_path / "step")
    sizes = [file["bytes"] for file in inspect(path)["files"]]
    assert max(sizes) - min(sizes) <= 4 * 4096


def test_tied_weights_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    weight = torch.randn(1 << 18)
    state = {"model": {"embed": weight.detach(), "head": weight.detach(), "b": torch.ones(3)}}
    path = save_replicated(state, 2, tmp_path / "step")
    loaded = load(path)["model"]
    assert torch.equal(loaded["head"], weight)
    assert loaded["head"].data_ptr() == loaded["embed"].data_ptr()
    assert sum(file["bytes"] for file in inspect(path)["files"]) < 1.1 * weight.nbytes


def test_views_that_overlap_stay_with_the_first_rank(tmp_path: Path) -> None:
    base = torch.arange(1000.0)
    state = {"model": {"low": base[:600], "high": base[400:], "other": torch.ones(5000)}}
    loaded = load(save_replicated(state, 3, tmp_path / "step"))["model"]
    assert torch.equal(loaded["high"], base[400:])
    loaded["low"][500] = -1.0
    assert loaded["high"][100] == -1.0


def test_what_a_module_is_told_of_stays(tmp_path: Path) -> None:
    module = torch.nn.BatchNorm1d(2000)
    state = {"model": module.state_dict(), "optimizer": {"groups": [{"lr": 0.1}, ()]}}
    loaded = load(save_replicated(state, 2, tmp_path / "step"))
    assert type(loaded["model"]) is OrderedDict
    assert loaded["model"]._metadata == module.state_dict()._metadata
    assert loaded["optimizer"] == state["optimizer"]


def test_each_rank_has_what_is_its_own(tmp_path: Path) -> None:
    parts = [
        part_of({"model": {"w": torch.ones(9)}, "rank": {"seed": n, "t": torch.tensor([n])}}, n, 2)
        for n in range(2)
    ]
    path = save_parts(parts, tmp_path / "step")
    for rank in range(2):
        loaded = load(path, rank=rank)
        assert (loaded["rank"]["seed"], loaded["rank"]["t"].item()) == (rank, rank)
        assert loaded["model"]["w"].tolist() == [1.0] * 9
    assert "rank" not in load(path, rank=2)
    assert load(path, rank=1, only="rank/seed") == {"rank": {"seed": 1}}


def test_what_is_the_rank_s_own_is_read_in_place(tmp_path: Path) -> None:
    parts = [part_of({"rank": {"t": torch.full((4,), float(n))}}, n, 2) for n in range(2)]
    target = torch.zeros(4)
    load(save_parts(parts, tmp_path / "step"), into={"rank": {"t": target}}, rank=1)
    assert target.tolist() == [1.0] * 4


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    whole = torch.arange(1 << 22).float()
    path = save_replicated({"model": {"w": whole}}, 2, tmp_path / "step")
    into = Pieces(tuple(whole.shape), whole.dtype, {10: torch.zeros(20)})
    totals = []
    load(path, into={"model": {"w": into}}, progress=lambda done, total: totals.append(total))
    assert totals[0] <= 4 << 20
    assert torch.equal(into.parts[10], whole[10:30])


def test_pieces_are_read_from_a_tensor_saved_as_a_view(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    path = save_parts([{"a": base, "t": base.T}], tmp_path / "step")
    into = Pieces((4, 3), base.dtype, {2: torch.zeros(5)})
    load(path, into={"t": into})
    assert torch.equal(into.parts[2], base.T.reshape(-1)[2:7])


@pytest.mark.parametrize(
    ("present", "says"),
    [
        ([(0, 3), (5, 9)], "w: pieces are missing: elements 3 to 4 of 9"),
        ([(0, 5), (5, 8)], "w: pieces are missing: elements 8 to 8 of 9"),
        ([(0, 6), (4, 9)], "w: pieces overlap: elements 4 to 5"),
        ([(0, 9), (2, 4)], "w: pieces overlap: elements 2 to 3"),
    ],
)
def test_holes_and_overlaps_are_named_and_nothing_is_written(
    present: list[tuple[int, int]], says: str, tmp_path: Path
) -> None:
    parts = [
        {"v": torch.ones(2), "w": Pieces((9,), torch.float32, {low: torch.ones(high - low)})}
        for low, high in present
    ]
    path, into = save_parts(parts, tmp_path / "step"), torch.zeros(2)
    with pytest.raises(dos.FormatError, match=says):
        load(path, into={"v": into})
    assert into.tolist() == [0.0, 0.0]


def test_a_damaged_header_of_the_last_file_is_found_before_anything_is_written(
    tmp_path: Path,
) -> None:
    path = save_replicated({"model": {"w": torch.ones(5000)}}, 3, tmp_path / "step")
    with open(path / "rank-00002.safetensors", "r+b") as file:
        file.seek(100)
        file.write(b"#")
    into = torch.zeros(5000)
    with pytest.raises(dos.IntegrityError, match="rank-00002"):
        load(path, into={"model": {"w": into}})
    assert not into.any()


def test_a_piece_in_another_order_is_written_row_major(tmp_path: Path) -> None:
    every_other = torch.arange(10.0)[::2]
    path = save_parts([{"w": Pieces((5,), torch.float32, {0: every_other})}], tmp_path / "step")
    assert torch.equal(load(path)["w"], every_other)


def test_a_piece_that_shares_memory_is_refused(tmp_path: Path) -> None:
    whole = torch.ones(8)
    state = {"w": whole, "p": Pieces((8,), whole.dtype, {0: whole})}
    with pytest.raises(dos.FormatError, match="shares memory"):
        save_parts([state], tmp_path / "step")


def test_pieces_into_must_fit(tmp_path: Path) -> None:
    path = save_parts([{"w": torch.ones(8)}], tmp_path / "step")
    for into in (
        Pieces((9,), torch.float32, {0: torch.ones(1)}),
        Pieces((8,), torch.float32, {7: torch.ones(2)}),
        Pieces((8,), torch.float32, {0: torch.ones(1, 1)}),
    ):
        with pytest.raises(dos.FormatError, match="fit"):
            load(path, into={"w": into})


@pytest.fixture
def several_files(tmp_path: Path) -> Path:
    """A tensor in pieces, tied ones, objects, and what is the ranks' own, in three files."""
    weight = torch.arange(6000.0)
    model = {"w": weight, "tied": weight.detach(), "b": torch.ones(3, dtype=torch.bfloat16)}
    groups = [{"lr": 0.1}, {"steps": torch.arange(3000)}]
    states = [
        {"model": model, "optimizer": {"groups": groups}, "rank": {"seed": n}} for n in range(3)
    ]
    parts = [part_of(state, n, 3) for n, state in enumerate(states)]
    return save_parts(parts, tmp_path / "step")


def test_inspect_lists_a_tensor_in_pieces_once(several_files: Path) -> None:
    found = inspect(several_files)
    names = [one["name"] for one in found["tensors"]]
    assert sorted(names) == ["model/b", "model/tied", "model/w", "optimizer/groups/1/steps"]
    assert next(one for one in found["tensors"] if one["name"] == "model/w")["pieces"] > 1
    assert [one["value"] for one in found["objects"] if one["name"] == "rank/seed"] == [0, 1, 2]


def test_every_file_opens_with_safetensors(several_files: Path) -> None:
    found = [load_file(several_files / f"rank-0000{rank}.safetensors") for rank in range(3)]
    parts = {
        int(name.split("#")[1]): tensor
        for file in found
        for name, tensor in file.items()
        if name.startswith("model/w#")
    }
    assert torch.equal(torch.cat([parts[start] for start in sorted(parts)]), torch.arange(6000.0))


def test_damage_in_any_file_is_found(several_files: Path) -> None:
    path = several_files / "rank-00001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[8 + int.from_bytes(raw[:8], "little") + 100] ^= 1
    path.write_bytes(raw)
    (damage,) = verify(several_files)
    assert damage.where == "rank-00001.safetensors"


def test_conversion_writes_whole_tensors(several_files: Path, tmp_path: Path) -> None:
    convert(several_files, tmp_path / "out", "safetensors", part="model")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {"w", "tied", "b"}
    assert torch.equal(found["tied"], torch.arange(6000.0))
    convert(several_files, tmp_path / "again", "dos")
    assert len(inspect(tmp_path / "again")["files"]) == 1
    assert torch.equal(load(tmp_path / "again")["model"]["w"], torch.arange(6000.0))
