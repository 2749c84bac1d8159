"""A parameter that is partitioned over processes (a DTensor), and the part of it that lies here."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.autograd.graph import increment_version

from dos.errors import ConfigError
from dos.memory.regions import Cut, region_of, runs_of_region

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor; loads nothing that is not loaded."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a DTensor that lies in this process; any other tensor itself.

    It is asked for anew at each use: FSDP2 exchanges it when weights are loaded or moved.
    """
    if not is_sharded(tensor):
        return tensor
    local: torch.Tensor = tensor._local_tensor
    wait = getattr(local, "wait", None)  # an AsyncCollectiveTensor is still being communicated
    return local if wait is None else wait()


def identity(tensor: torch.Tensor) -> tuple[int, int, int]:
    """What changes when torch writes to it, or its memory is exchanged.

    A DTensor and its shard have a version each; torch's foreach operations on DTensors count
    up neither.
    """
    local = local_of(tensor)
    return tensor._version, local._version, local.data_ptr()


def count_write(tensor: torch.Tensor) -> None:
    """Have autograd know that it was written to."""
    increment_version(tensor)
    if is_sharded(tensor):
        increment_version(tensor._local_tensor)


def placed_like(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`local`, wherever it lies, as this process's shard of a DTensor that is placed as `like`.

    `local` itself where `like` is a plain tensor.
    """
    if not is_sharded(like):
        return local
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    # Not from_local, which would move state in host memory to the mesh's device.
    made: torch.Tensor = DTensor(local, spec, requires_grad=False)
    return made


def same_placement(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether both are plain, or both DTensors whose elements lie in the same processes."""
    if not (is_sharded(tensor) and is_sharded(like)):
        return is_sharded(tensor) == is_sharded(like)
    return tensor.device_mesh == like.device_mesh and tensor.placements == like.placements


def cut_like(whole: torch.Tensor, like: DTensor) -> torch.Tensor | None:
    """A view of the part of a plain tensor that lies here where it is placed as `like`.

    None for a placement that is not made of chunks along single dimensions.
    """
    from torch.distributed.tensor import Replicate, Shard

    mesh, part = like.device_mesh, whole
    for position, n_parts, placement in zip(
        coordinate(mesh), mesh.shape, like.placements, strict=True
    ):
        if type(placement) is Shard:
            chunks = part.chunk(n_parts, placement.dim)
            empty = part.narrow(placement.dim, 0, 0)
            part = chunks[position] if position < len(chunks) else empty
        elif type(placement) is not Replicate:
            return None
    return part


def coordinate(mesh: DeviceMesh) -> Sequence[int]:
    """Where this process is in a mesh that it is part of."""
    here = mesh.get_coordinate()
    assert here is not None, "parameters of other processes are refused"
    return here


def is_counted_here(tensor: torch.Tensor) -> bool:
    """Whether a sum over all processes is to count it here: one of its replicas is."""
    if not is_sharded(tensor):
        return True
    places = zip(tensor.placements, coordinate(tensor.device_mesh), strict=True)
    return not any(placement.is_replicate() and position for placement, position in places)


def gather(value: float, mesh: Any) -> list[float]:
    """The float64 of each process of a mesh, in the mesh's order, on all of them."""
    from torch import distributed

    values = torch.tensor([value], dtype=torch.float64, device=mesh.device_type)
    for dim in reversed(range(mesh.ndim)):
        parts = [torch.empty_like(values) for _ in range(mesh.size(dim))]
        distributed.all_gather(parts, values, group=mesh.get_group(dim))
        values = torch.cat(parts)
    found: list[float] = values.tolist()
    return found


def runs_of(tensor: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Where the elements that lie here stand in the whole tensor, as of `runs_of_region`.

    Raises:
        ConfigError: a placement that is not made of chunks along single dimensions.
    """
    shape = tuple(tensor.shape)
    return runs_of_region(shape, region_of(shape, cuts_of(tensor)))


def cuts_of(tensor: torch.Tensor) -> list[Cut]:
    """Which chunks of its dimensions lie here; none for a plain tensor.

    Raises:
        ConfigError: a placement that is not made of chunks along single dimensions.
    """
    if not is_sharded(tensor):
        return []
    from torch.distributed.tensor import Replicate, Shard

    mesh, cuts = tensor.device_mesh, []
    for position, n_parts, placement in zip(
        coordinate(mesh), mesh.shape, tensor.placements, strict=True
    ):
        if type(placement) is Shard:
            cuts.append(Cut(placement.dim, n_parts, position))
        elif type(placement) is not Replicate:
            raise ConfigError(
                f"it is placed as {tensor.placements}, which is not made of chunks",
                where="a DTensor",
                fix="save its state with torch.distributed.checkpoint",
            )
    return cuts


def copy_of(tensor: DTensor) -> tuple[int, int]:
    """Which copy of the elements that lie here this process has, and how many copies there are."""
    index, count = 0, 1
    mesh = tensor.device_mesh
    for position, size, placement in zip(
        coordinate(mesh), mesh.shape, tensor.placements, strict=True
    ):
        if placement.is_replicate():
            index, count = index * size + position, count * size
    return index, count
