"""ZeRO-3: the schedule changes no bit, and the training is upstream's."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

import pytest
from packaging.version import Version

from tests.cpu.tolerances import Tolerance
from tests.integration.worlds import Outcome
from tests.integration.zero3.scenario import scenario
from tests.integration.zero3.tolerances import AFTER_10_STEPS, AFTER_30_STEPS

# From there on a norm that is not finite skips the step whatever the dtype.
SKIPS_NON_FINITE = Version("0.19.7")


def too_far(distance: Mapping[str, float], tolerances: Mapping[str, Tolerance]) -> dict[str, float]:
    return {kind: far for kind, far in distance.items() if far > tolerances[kind].absolute}


@scenario("scenarios_exact.schedules", 1, 2)
def test_no_schedule_changes_a_bit(outcome: Outcome) -> None:
    for its in outcome.ranks:
        assert its["different"] == {key: [] for key in its["different"]}


@scenario("scenarios_exact.schedules", 1, 2)
def test_the_clipping_of_the_schedules_bites(outcome: Outcome) -> None:
    assert outcome.first["least norm"] > outcome.first["clip"]


@scenario("scenarios_exact.changing_strides", 1, 2)
def test_a_stride_that_changes_with_every_step_changes_no_bit(outcome: Outcome) -> None:
    assert all(different == [] for different in outcome.ranks)


@scenario("scenarios_exact.variants", 1, 2)
def test_no_schedule_changes_a_bit_of_any_variant(outcome: Outcome) -> None:
    for its in outcome.ranks:
        assert {name: one["different"] for name, one in its.items()} == {key: [] for key in its}


@scenario("scenarios_exact.variants", 1, 2)
def test_every_variant_trains_as_upstream_does(outcome: Outcome) -> None:
    for its in outcome.ranks:
        far = {name: too_far(one["distance"], AFTER_10_STEPS) for name, one in its.items()}
        assert far == {key: {} for key in its}


@scenario("scenarios_exact.variants", 1, 2)
def test_every_variant_counts_steps_and_scales_losses_as_upstream_does(outcome: Outcome) -> None:
    for its in outcome.ranks:
        assert all(all(one["same"].values()) for one in its.values())


@scenario("scenarios_exact.overflow", 1, 2)
def test_an_overflow_skips_the_step_and_halves_the_loss_scale_as_upstream_does(
    outcome: Outcome,
) -> None:
    for its in outcome.ranks:
        assert its["same"] == {"counts": True, "scales": True}


@scenario("scenarios_exact.overflow", 1, 2)
def test_overflows_happen_and_training_goes_on(outcome: Outcome) -> None:
    assert {True, False} == set(outcome.first["skipped"])
    assert outcome.first["scales"][-1] < outcome.first["scales"][0]


@scenario("scenarios_exact.overflow", 1, 2)
def test_no_schedule_changes_a_bit_around_an_overflow(outcome: Outcome) -> None:
    for its in outcome.ranks:
        assert its["different"] == []


@scenario("scenarios_exact.non_finite", 1, 2)
def test_an_infinite_gradient_is_treated_by_the_installed_versions_rule(outcome: Outcome) -> None:
    for its in outcome.ranks:
        assert its["host"] == its["mixed"] == its["upstream"]


@scenario("scenarios_exact.non_finite", 1)
def test_the_rule_for_infinite_gradients_is_the_known_one(outcome: Outcome) -> None:
    skips = Version(version("deepspeed")) >= SKIPS_NON_FINITE
    assert outcome.first["host"]["skipped"] == [False, False, skips, False, False]
    assert outcome.first["host"]["finite"] == skips


@scenario("scenarios_exact.unused", 1, 2)
def test_reading_gradients_changes_nothing_also_of_a_layer_without_one(outcome: Outcome) -> None:
    for its in outcome.ranks:
        assert its["different"] == {key: [] for key in its["different"]}


@scenario("scenarios_exact.unused_is_zero", 1)
def test_a_layer_that_took_no_part_gets_a_gradient_of_zeros(outcome: Outcome) -> None:
    assert outcome.first < 1e-6


@pytest.mark.slow
@scenario("scenarios_exact.cpu_adam", 1, 2)
def test_training_stays_near_that_of_deepspeed_cpu_adam(outcome: Outcome) -> None:
    # Slow: DeepSpeed compiles its kernel first.
    for its in outcome.ranks:
        assert too_far(its, AFTER_30_STEPS) == {}
