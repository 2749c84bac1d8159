"""State of DTensors, held and restored by two processes: see `held_scenarios.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integration.processes.compare import same_bits
from tests.integration.processes.fsdp_model import PLANS
from tests.integration.processes.pair import Pair, results

SCENARIOS = ("held_by_plan", "held_by_placement")
each_scenario = pytest.mark.parametrize("name", SCENARIOS)
each_plan = pytest.mark.parametrize("plan", PLANS)


def put_together(ranks: list[dict[str, Any]], name: str) -> torch.Tensor:
    """The whole of what both processes have pieces of."""
    shape = ranks[0][name][0]
    made = torch.full((torch.Size(shape).numel(),), float("nan"))
    for rank in ranks:
        for start, part in rank[name][1].items():
            made[start : start + part.numel()] = part
    return made.view(shape)


@each_scenario
@each_plan
def test_the_pieces_of_both_processes_are_the_state(pair: Pair, name: str, plan: str) -> None:
    ranks = [its[plan] for its in results(pair, name)]
    captured = [its["captured"] for its in ranks]
    expected = ranks[0]["expected"]
    assert captured[0].keys() == expected.keys()
    for leaf, tensor in expected.items():
        assert same_bits([put_together(captured, leaf)], [tensor])


@each_scenario
@each_plan
def test_what_is_restored_into_shards_is_what_was_held(pair: Pair, name: str, plan: str) -> None:
    for its in (ran[plan] for ran in results(pair, name)):
        assert its["restored"].keys() == its["expected"].keys()
        assert same_bits(list(its["restored"].values()), list(its["expected"].values()))


@each_plan
def test_shards_of_weights_are_held_too(pair: Pair, plan: str) -> None:
    ranks = [its[plan] for its in results(pair, "held_by_plan")]
    for index, weight in enumerate(ranks[0]["weights"]):
        shards = [its["captured weights"][index] for its in ranks]
        assert same_bits([torch.cat(shards)], [weight.reshape(-1)])
