"""Checkpoints of DeepSpeed's engines: of one step, durable, and as upstream's for the user."""

from __future__ import annotations

from typing import Any

from tests.integration.worlds import Outcome
from tests.integration.zero3.scenario import scenario, scenarios

step_exact = scenarios(
    ("scenarios_saving.step_exact", 1), ("scenarios_saving.step_exact_of_two", 2)
)


def of_all(outcome: Outcome, key: str) -> list[Any]:
    """What was found of every kind of engine, on every rank."""
    return [found[key] for its in outcome.ranks for found in its.values()]


@step_exact
def test_what_is_loaded_is_the_step_that_was_saved(outcome: Outcome) -> None:
    assert of_all(outcome, "loaded") == [[]] * len(of_all(outcome, "loaded"))


@step_exact
def test_training_resumes_with_the_bits_of_one_that_went_on(outcome: Outcome) -> None:
    assert of_all(outcome, "end") == [[]] * len(of_all(outcome, "end"))
    assert all(of_all(outcome, "losses"))


@step_exact
def test_the_state_of_the_client_is_frozen_when_the_save_returns(outcome: Outcome) -> None:
    assert all(found == ([1.0, 1.0, 1.0], {1, 2}) for found in of_all(outcome, "client"))


@step_exact
def test_nothing_bears_a_name_before_it_is_durable(outcome: Outcome) -> None:
    assert not any(of_all(outcome, "early"))


@step_exact
def test_the_last_save_is_durable_when_the_engine_is_destroyed(outcome: Outcome) -> None:
    files = [f"global_step2/rank-{rank:05d}.safetensors" for rank in range(len(outcome.ranks))]
    assert all(
        found == ["global_step2/manifest.json", *files] for found in of_all(outcome, "files")
    )
    assert set(of_all(outcome, "latest")) == {"global_step2"}


@scenario("scenarios_saving.several", 1)
def test_saves_without_a_step_between_are_all_whole(outcome: Outcome) -> None:
    assert outcome.first["tags"] == ["a", "b", "c"]
    assert (outcome.first["loaded a"], outcome.first["loaded b"]) == ([], [])


@scenario("scenarios_saving.several", 1)
def test_latest_names_the_last_save_that_asked_for_it(outcome: Outcome) -> None:
    assert outcome.first["latest"] == "a"


@scenario("scenarios_saving.several", 1)
def test_a_model_alone_is_written_by_torch_in_one_step(outcome: Outcome) -> None:
    assert "block.weight" in outcome.first["model"]
    assert outcome.first["left"] == ["pytorch_model.bin"]


@scenario("scenarios_saving.several", 1)
def test_upstream_is_told_neither_to_wait_nor_to_clone(outcome: Outcome) -> None:
    assert outcome.first["contract"] == (True, None, False)


@scenario("scenarios_saving.setters", 1)
def test_what_is_set_right_after_a_save_is_not_in_it(outcome: Outcome) -> None:
    assert outcome.first == {"ours": [], "ZeRO-2 with offload": []}


@scenario("scenarios_saving.pipeline", 1)
def test_a_pipeline_engine_saves_and_loads_its_layers_as_of_one_step(outcome: Outcome) -> None:
    assert outcome.first["loaded"] == []


@scenario("scenarios_saving.unowned", 1)
def test_a_parameter_of_no_optimizer_is_saved_as_it_was(outcome: Outcome) -> None:
    assert outcome.first["loaded"] == []


@scenario("scenarios_saving.universal", 1)
def test_a_universal_load_waits_for_what_is_being_saved(outcome: Outcome) -> None:
    assert outcome.first["whole"]


@scenario("scenarios_saving.frozen", 1)
def test_what_is_frozen_can_be_left_out(outcome: Outcome) -> None:
    assert sorted(outcome.first["different"]) == ["/module/first.bias", "/module/first.weight"]


ALL_BUT_3 = ("ZeRO-1", "ZeRO-2 with offload", "no ZeRO")


@scenario("scenarios_saving.in_part", 1)
def test_a_model_alone_is_loaded(outcome: Outcome) -> None:
    for kind in ALL_BUT_3:
        from_saved, from_before = outcome.first[f"{kind}, load_module_only"]
        assert not about("/module", from_saved)
        assert about("/module", from_before)
        assert not about("exp_avg", from_before) + about("/steps", from_before)


@scenario("scenarios_saving.in_part", 1)
def test_all_but_the_optimizer_is_loaded(outcome: Outcome) -> None:
    for kind in ALL_BUT_3:
        from_saved, from_before = outcome.first[f"{kind}, load_optimizer_states"]
        assert not about("/module", from_saved) + about("/steps", from_saved)
        assert not about("exp_avg", from_before)


@scenario("scenarios_saving.in_part", 1)
def test_zero_3_without_its_optimizer_is_refused_by_name(outcome: Outcome) -> None:
    assert outcome.first["ZeRO-3, load_optimizer_states"].startswith("ZeRO-3 without optimizer")


def about(part: str, paths: list[str]) -> list[str]:
    """Those of the paths that have such a part."""
    return [path for path in paths if part in path]
