"""DTensors saved by the ranks that have them, and read by any others, in processes of gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import dos
from dos.checkpoint import load, save
from dos.checkpoint.ranks import Ranks
from dos.checkpoint.replicas import part_of
from tests.cpu.rank_processes import run_ranks

if not (distributed.is_available() and distributed.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)

# Here, so that the children have them; of what DTensor imports when it is first used, the most.
import torch._dynamo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard


def whole_state() -> dict[str, torch.Tensor]:
    """Uneven over 2 and 3, with shards that are empty over 3, and of 16 bits."""
    return {
        "matrix": torch.arange(35.0).reshape(7, 5),
        "half": torch.arange(24).reshape(4, 6).to(torch.bfloat16),
        "short": torch.arange(2.0),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
    }


def over(shape: tuple[int, ...], *placements: Any) -> dict[str, Any]:
    """The state as DTensors over a mesh of this shape; a dimension is cut where there is one."""
    mesh = init_device_mesh("cpu", shape)

    def place(tensor: torch.Tensor) -> Any:
        fitting = [
            Replicate() if dim is None or dim >= tensor.dim() else Shard(dim) for dim in placements
        ]
        return distribute_tensor(tensor.clone(), mesh, fitting)

    return {name: place(tensor) for name, tensor in whole_state().items()}


def saved_over(world: int, place: Callable[[], dict[str, Any]], folder: Path) -> Path:
    """A checkpoint of DTensors, saved by `world` processes."""

    def work(ranks: Ranks) -> str:
        part = part_of({"model": place()}, ranks.rank, ranks.world)
        return save(part, folder / "step", ranks=ranks).result(60)

    folder.mkdir(exist_ok=True)
    assert run_ranks(work, world, folder) == [str(folder / "step")] * world
    return folder / "step"


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) and found[name].dtype == expected[name].dtype
        for name in expected
    )


PLACES: dict[str, tuple[int, Callable[[], dict[str, Any]]]] = {
    "rows over 2": (2, lambda: over((2,), 0)),
    "columns over 3": (3, lambda: over((3,), 1)),
    "copies over 2": (2, lambda: over((2,), None)),
    "rows over 2, copied": (4, lambda: over((2, 2), None, 0)),
    "rows and columns": (4, lambda: over((2, 2), 0, 1)),
}


@pytest.mark.parametrize("place", PLACES)
def test_one_process_reads_what_several_saved(place: str, tmp_path: Path) -> None:
    assert same(load(saved_over(*PLACES[place], tmp_path))["model"], whole_state())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("rows over 2", "columns over 3"),
        ("columns over 3", "rows over 2"),
        ("rows and columns", "copies over 2"),
    ],
)
def test_other_processes_read_what_they_have_of_it(before: str, after: str, tmp_path: Path) -> None:
    path = saved_over(*PLACES[before], tmp_path / "before")
    world, place = PLACES[after]

    def work(ranks: Ranks) -> bool:
        into = place()
        expected = {name: tensor.to_local().clone() for name, tensor in into.items()}
        for tensor in into.values():
            tensor.to_local().fill_(-1)
        loaded = load(path, into={"model": into})["model"]
        assert all(loaded[name] is tensor for name, tensor in into.items())
        return same({name: tensor.to_local() for name, tensor in into.items()}, expected)

    assert run_ranks(work, world, tmp_path) == ["True"] * world


def test_processes_read_what_one_saved(tmp_path: Path) -> None:
    path = save({"model": whole_state()}, tmp_path / "step").result()

    def work(ranks: Ranks) -> bool:
        into = over((2,), 0)
        expected = {name: tensor.to_local().clone() for name, tensor in into.items()}
        for tensor in into.values():
            tensor.to_local().fill_(-1)
        load(path, into={"model": into})
        return same({name: tensor.to_local() for name, tensor in into.items()}, expected)

    assert run_ranks(work, 2, tmp_path) == ["True"] * 2


def test_tied_dtensors_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    def tied() -> dict[str, Any]:
        state = over((2,), 0)
        return {"embed": state["matrix"].detach(), "head": state["matrix"].detach()}

    loaded = load(saved_over(2, tied, tmp_path))["model"]
    assert torch.equal(loaded["head"], whole_state()["matrix"])
    assert loaded["head"].data_ptr() == loaded["embed"].data_ptr()


def test_a_sharded_model_is_read_in_place(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> bool:
        torch.manual_seed(ranks.rank)  # made alike by the load only
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
        fully_shard(model)
        if ranks.rank == 0:
            save({"model": whole_model()}, tmp_path / "step").result(60)
        distributed.barrier()
        load(tmp_path / "step", into={"model": model.state_dict()})
        found = {
            name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            for name, tensor in model.state_dict().items()
        }
        return same(found, whole_model())

    def whole_model() -> dict[str, torch.Tensor]:
        torch.manual_seed(7)
        return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7)).state_dict()

    assert run_ranks(work, 2, tmp_path) == ["True"] * 2


def test_what_is_not_in_chunks_is_refused_by_name(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> str:
        mesh = init_device_mesh("cpu", (2,))
        strided = DTensor.from_local(
            torch.ones(2, 3), mesh, [_StridedShard(0, split_factor=2)], run_check=False
        )
        said = []
        for call in (
            lambda: part_of({"model": {"w": strided}}, ranks.rank, 2),
            lambda: load(tmp_path / "step", into={"w": strided}),
        ):
            with pytest.raises(dos.FormatError, match="not made of chunks") as raised:
                call()
            said.append(raised.value.where)
        return str(said)

    save({"w": torch.ones(4, 3)}, tmp_path / "step").result()
    assert run_ranks(work, 2, tmp_path) == ["['model/w', 'w']"] * 2


def test_a_dtensor_of_fewer_ranks_is_refused(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> str:
        try:
            part_of({"model": over((2,), 0)}, ranks.rank, 3)
        except dos.FormatError as error:
            return error.what
        return "saved"

    assert run_ranks(work, 2, tmp_path) == ["a DTensor over 2 of 3 ranks"] * 2
