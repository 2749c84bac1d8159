"""ZeRO-3: what is captured beside training is of one step."""

from __future__ import annotations

from tests.integration.worlds import Outcome
from tests.integration.zero3.scenario import scenario


@scenario("scenarios_held.captures", 1, 2)
def test_a_capture_beside_training_is_of_one_step(outcome: Outcome) -> None:
    for its in outcome.ranks:
        assert its == {key: [] for key in its}


@scenario("scenarios_held.replaced", 1)
def test_what_upstream_replaced_comes_home_before_it_is_held(outcome: Outcome) -> None:
    assert outcome.ranks[0]["inside"]
