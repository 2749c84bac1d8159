"""State where it lies: what a capture reads and a load writes, without a copy."""

from __future__ import annotations

import torch

from dos.memory import Hold
from dos.memory.flat import flat
from dos.memory.pieces import Pieces
from dos.shards import copy_of, is_sharded, local_of, runs_of
from dos.state import OptimizerState


def holds_of(state: OptimizerState) -> list[Hold]:
    """All that a step writes for good, by subgroup: master, moments, and the trained weights."""
    weights = [local_of(parameter) for parameter in state.parameters]
    places = [(str(w.device), w.data_ptr(), w.element_size()) for w in weights]
    holds = []
    for index, memory in enumerate(state.subgroups):
        for part in memory.state:
            if part.numel():
                begin = part.data_ptr()
                holds.append(Hold(str(part.device), begin, begin + part.nbytes, index))
        for piece in memory.pieces:
            place, base, item_bytes = places[piece.parameter]
            begin, end = base + piece.start * item_bytes, base + piece.stop * item_bytes
            holds.append(Hold(place, begin, end, index))
    return holds


def live(state: OptimizerState, index: int, kind: str) -> torch.Tensor | Pieces | None:
    """A parameter's "master", "exp_avg" or "exp_avg_sq" as it lies in memory.

    A tensor of its shape where its pieces adjoin in host memory; else, and of a DTensor, its
    pieces. None where they have another memory order than row-major, and are in pieces.
    """
    # Kept: they lie where they lie, and thousands of them take a while to make.
    key = index, kind
    if key not in state.leaves:
        state.leaves[key] = _find(state, index, kind)
    return state.leaves[key]


def _find(state: OptimizerState, index: int, kind: str) -> torch.Tensor | Pieces | None:
    parameter = state.parameters[index]
    view = state.view(index, kind)
    if not is_sharded(parameter) and (view is not None or not parameter.numel()):
        return state.whole(index, kind) if view is None else view
    if not local_of(parameter).is_contiguous():
        return None
    parts = [(flat(view), 0)] if view is not None else list(state.parts(index, kind))
    return in_pieces(parameter, parts)


def in_pieces(parameter: torch.Tensor, parts: list[tuple[torch.Tensor, int]]) -> Pieces:
    """`parts` of a parameter's state as pieces of the whole, which may lie in many processes.

    Args:
        parameter: whose state it is.
        parts: 1-D tensors, each with the first element that it holds of what lies here, in
            row-major order.
    """
    found = {}
    for start, here, length in runs_of(parameter):
        for part, first in parts:
            begin, end = max(here, first), min(here + length, first + part.numel())
            if begin < end:
                found[start + begin - here] = part[begin - first : end - first]
    copies = copy_of(parameter) if is_sharded(parameter) else None
    return Pieces(tuple(parameter.shape), torch.float32, found, copies)
