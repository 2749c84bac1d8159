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


@scenario("scenarios_loading.by_latest", 1, 2)
def test_without_a_good_latest_the_newest_by_its_own_date_is_loaded(outcome: Outcome) -> None:
    for its in outcome.ranks:
        bad = {key: its[key] for key in ("missing", "empty", "nothing there", "unfinished")}
        assert bad == dict.fromkeys(bad, 3)


@scenario("scenarios_loading.by_latest", 1, 2)
def test_a_fallback_goes_back_from_what_latest_names(outcome: Outcome) -> None:
    for its in outcome.ranks:
        assert (its["an older one"], its["an older one, damaged"]) == (2, 1)


@scenario("scenarios_loading.not_allowed", 1, 2)
def test_what_is_not_allowed_is_refused_and_no_older_one_taken(outcome: Outcome) -> None:
    for its in outcome.ranks:
        assert its["refused"].startswith("RefusedError")
        assert its["allowed"] == ("b", 7)


@scenario("scenarios_loading.unreadable", 1, 2)
def test_a_rank_that_fails_to_read_is_named_on_all_and_no_older_one_taken(outcome: Outcome) -> None:
    rank = len(outcome.ranks) - 1
    for its in outcome.ranks:
        assert its["refused"].startswith(f"CheckpointError: rank {rank} cannot load it: Memory")
        assert its["after"] == "b"


@scenario("scenarios_loading.given_up", 2)
def test_a_rank_that_gives_its_save_up_at_the_end_tells_the_others(outcome: Outcome) -> None:
    assert all("the last save is not durable" in its["next"] for its in outcome.ranks)
