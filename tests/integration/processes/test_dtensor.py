"""State of DTensors saved and loaded, and what is refused: see `dtensor_scenarios.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import dos
from tests.cpu.tolerances import CLIP
from tests.integration.processes.compare import assert_near, same_bits
from tests.integration.processes.dtensor_scenarios import ROUND_TRIPS
from tests.integration.processes.fsdp_model import PLANS, Model
from tests.integration.processes.pair import Pair, results


@pytest.mark.parametrize("how", ROUND_TRIPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip_through_a_checkpoint_keeps_the_bits(
    pair: Pair, dtype: torch.dtype, how: str
) -> None:
    for ran in results(pair, "round_trips"):
        assert same_bits(ran[f"{dtype}, {how}"], ran[f"{dtype}, at once"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_two_processes_loads_into_one(pair: Pair, checkpoints: Path) -> None:
    saved = results(pair, "saved_for_one_process")[0]
    model = Model().to(torch.bfloat16)
    optimizer = dos.DOSOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), **PLANS["two"])
    into: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(into, checkpoint_id=checkpoints / "dcp", no_dist=True)
    set_model_state_dict(model, into["model"])
    set_optimizer_state_dict(model, optimizer, into["optimizer"])
    assert same_bits([p.detach() for p in model.parameters()], saved["weights"])
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert state.keys() == saved["state"].keys()
    for name, entry in saved["state"].items():
        assert list(state[name]) == list(entry) == ["step", "exp_avg", "exp_avg_sq", "master"]
        assert same_bits(list(state[name].values()), list(entry.values()))


def test_a_parameter_without_state_passes_through_a_flattened_checkpoint() -> None:
    flattened = StateDictOptions(flatten_optimizer_state_dict=True)
    model = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(2))
    optimizer = dos.DOSOptimizer(torch.optim.AdamW(model.parameters()), device="cpu")
    model[0](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer, options=flattened)
    set_optimizer_state_dict(model, optimizer, saved, options=flattened)
    assert [len(optimizer.state[p]) for p in model.parameters()] == [3, 3, 0, 0]


@pytest.mark.parametrize("what", ["unchanged", "placed as the parameters"])
def test_state_that_is_asked_for_before_the_first_step(pair: Pair, what: str) -> None:
    for ran in results(pair, "states"):
        assert ran[what]


def test_state_of_one_process_loads_into_shards(pair: Pair) -> None:
    for ran in results(pair, "from_one_process"):
        assert all(ran)


@pytest.mark.parametrize("plan", PLANS)
def test_placements_may_differ_from_parameter_to_parameter(pair: Pair, plan: str) -> None:
    for ran in results(pair, "many_placements"):
        assert ran[f"{plan}, norm"] == pytest.approx(ran["norm"], rel=CLIP.relative)
        assert same_bits(ran[f"{plan}, weights"], ran["cpu, weights"])
        assert_near(ran[f"{plan}, weights"], ran["torch, weights"])


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_counts_as_a_write_to_tensor_and_shard(pair: Pair, plan: str) -> None:
    for ran in results(pair, "many_placements"):
        assert ran[f"{plan}, counted"]


def test_gradients_to_be_summed_are_summed(pair: Pair) -> None:
    for ran in results(pair, "gradients_to_be_summed"):
        assert ran["cpu"]["norm"] == ran["two"]["norm"] == pytest.approx(3.0 * 10**0.5)
        for plan in ("cpu", "two"):
            torch.testing.assert_close(ran[plan]["exp_avg"], torch.full((10,), 0.3))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("partial parameter", "yet to be summed"),
        ("gradient of a plain parameter", "one is a DTensor"),
        ("state placed otherwise", "torch.distributed.checkpoint"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(pair: Pair, what: str, says: str) -> None:
    for ran in results(pair, "refused"):
        assert says in ran[what]
