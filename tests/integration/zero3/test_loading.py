"""Which of DeepSpeed's checkpoints are loaded, and what failures do."""

from __future__ import annotations

from tests.integration.worlds import Outcome
from tests.integration.zero3.scenario import scenario


@scenario("scenarios_loading.fallback", 1, 2)
def test_a_tag_that_is_asked_for_and_damaged_is_refused_on_all_ranks(outcome: Outcome) -> None:
    assert all("damaged: the" in its["refused"] for its in outcome.ranks)


@scenario("scenarios_loading.fallback", 1, 2)
def test_after_a_load_that_failed_half_way_no_step_is_taken(outcome: Outcome) -> None:
    assert all("a load failed half-way" in its["step"] for its in outcome.ranks)


@scenario("scenarios_loading.fallback", 1, 2)
def test_the_newest_whole_one_is_loaded_on_all_ranks(outcome: Outcome) -> None:
    for its in outcome.ranks:
        assert (its["damaged"], its["unfinished"]) == ([], [])


@scenario("scenarios_loading.fallback", 1, 2)
def test_a_tag_without_manifest_is_refused(outcome: Outcome) -> None:
    assert all("it has no manifest" in its["no manifest"] for its in outcome.ranks)


@scenario("scenarios_loading.fallback", 1, 2)
def test_when_none_is_whole_each_is_told_of(outcome: Outcome) -> None:
    for its in outcome.ranks:
        assert its["none"].startswith("IntegrityError")
        assert "global_step3: " in its["none"]
        assert "global_step1: " in its["none"]


@scenario("scenarios_loading.fallback", 1, 2)
def test_where_nothing_was_saved_nothing_is_loaded(outcome: Outcome) -> None:
    assert all(its["empty"] == (None, None) for its in outcome.ranks)


@scenario("scenarios_loading.failing", 1, 2)
def test_a_failed_save_is_raised_by_the_next_one_on_all_ranks_and_once(outcome: Outcome) -> None:
    for its in outcome.ranks:
        assert "No space left on device" in its["next"]
        assert its["after"] == "went through"


@scenario("scenarios_loading.failing", 1, 2)
def test_of_a_failed_save_nothing_is_left_and_the_others_are_there(outcome: Outcome) -> None:
    for its in outcome.ranks:
        assert (its["tags"], its["latest"], its["left"]) == (["b", "c"], "c", [])


@scenario("scenarios_loading.unsaveable", 2)
def test_what_one_rank_cannot_save_is_raised_there_at_once(outcome: Outcome) -> None:
    assert "cannot be saved" in outcome.ranks[0]["first"]
    assert outcome.ranks[1]["first"] == "went through"


@scenario("scenarios_loading.unsaveable", 2)
def test_the_other_ranks_are_told_of_it_and_all_save_again(outcome: Outcome) -> None:
    assert all("rank 0" in its["next"] for its in outcome.ranks)
    assert all(its["tags"] == ["b"] for its in outcome.ranks)
