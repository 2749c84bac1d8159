"""ZeRO-3: what upstream reads, sets, saves and loads is the state itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.worlds import Outcome, run_world
from tests.integration.zero3.scenario import scenario
from tests.integration.zero3.tolerances import AFTER_10_STEPS, FP32_AFTER_4_STEPS


@scenario("scenarios_state.interfaces", 1, 2)
def test_every_getter_returns_what_upstream_returns(outcome: Outcome) -> None:
    for its in outcome.ranks:
        assert its["shapes"] == []
        assert its["read far"] == {}


@scenario("scenarios_state.interfaces", 1, 2)
def test_getters_return_the_same_bits_with_gradients_on_the_device(outcome: Outcome) -> None:
    for its in outcome.ranks:
        assert its["read differs"] == []


@scenario("scenarios_state.interfaces", 1, 2)
def test_what_setters_set_counts_in_the_next_step_as_upstream(outcome: Outcome) -> None:
    for its in outcome.ranks:
        assert its["different"] == []
        assert max(its["distance"].values()) < FP32_AFTER_4_STEPS.absolute


@scenario("scenarios_state.after_a_step", 1, 2)
def test_after_a_step_gradients_are_read_clipped_as_upstream(outcome: Outcome) -> None:
    for its in outcome.ranks:
        assert {name for name, far in its.items() if max(far) > 1e-7} == set()


@scenario("scenarios_state.rigid", 1, 2)
def test_a_checkpoint_loads_bit_by_bit(outcome: Outcome) -> None:
    for its in outcome.ranks:
        assert {name: one["loaded"] for name, one in its.items()} == {key: [] for key in its}


@scenario("scenarios_state.rigid", 1, 2)
def test_training_resumes_bit_by_bit_also_by_another_stride(outcome: Outcome) -> None:
    for its in outcome.ranks:
        ours = {name: one["end"] for name, one in its.items() if "plain" not in name}
        assert ours == {key: [] for key in ours}


@scenario("scenarios_state.rigid", 1, 2)
def test_training_goes_on_from_and_into_upstreams_own_offload(outcome: Outcome) -> None:
    for its in outcome.ranks:
        for name in ("host, plain", "plain, mixed"):
            for kind, far in its[name]["distance"].items():
                assert far <= AFTER_10_STEPS[kind].absolute


@scenario("scenarios_state.to_fp32", 1, 2)
def test_zero_to_fp32_finds_the_masters(outcome: Outcome) -> None:
    assert outcome.first["count"] == 8
    assert outcome.first["different"] == []


@pytest.mark.parametrize(
    ("writers", "readers", "saved_by"),
    [(2, 1, "us"), pytest.param(1, 2, "torch", marks=pytest.mark.slow)],
)
def test_a_universal_checkpoint_loads_on_another_number_of_ranks(
    writers: int, readers: int, saved_by: str, tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")

    def run(scenario: str, ranks: int) -> Outcome | str:
        name = f"tests.integration.zero3.scenarios_universal.{scenario}"
        around = {"DS_ACCELERATOR": "cpu", "CHECKPOINTS": str(tmp_path), "SAVED_BY": saved_by}
        return run_world([name], ranks, **around)[name]

    written, read = run("write", writers), run("read", readers)
    assert isinstance(written, Outcome), written
    assert isinstance(read, Outcome), read
    assert written.first["groups"] == read.first["groups"]
    for name, value in written.first["state"].items():
        assert torch.equal(value, read.first["state"][name]), name
    # Saved last, by processes that ended at once.
    assert (tmp_path / "latest").read_text() == "last"
    assert any((tmp_path / "last").iterdir())
