"""ZeRO-3: the ways in, what is refused, and what surrounds the update."""

from __future__ import annotations

import sys

import pytest

import dos.run
from dos.errors import ConfigError, IntegrationError
from tests.integration.worlds import Outcome
from tests.integration.zero3.scenario import scenario
from tests.integration.zero3.tolerances import NORM

REFUSALS = {
    "stage": "only ZeRO-3",
    "no offload": "has to be in host memory",
    "nvme": "NVMe",
    "super_offload": "super_offload",
    "ratio": "resident_ratio",
    "zenflow": "zenflow",
    "offload_param": "offload_param",
    "mics": "mics",
    "muon": "Muon",
    "bf16 masters": "bf16_master_weights_and_grads",
    "unknown option": "did you mean 'stride'",
    "upstream's option": "it belongs in zero_optimization.offload_optimizer",
    "too small": "subgroup_size",
    "wire": "no meaning in ZeRO-3",
    "option in zero_optimization": 'put it in the top-level section "deep_optimizer_states"',
    "option in offload_optimizer": 'put it in the top-level section "deep_optimizer_states"',
    "option at the top level": 'put it in the top-level section "deep_optimizer_states"',
    "section in zero_optimization": "wrong place",
    "section in the optimizer": "optimizer: 'deep_optimizer_states' is in the wrong place",
    "section in offload_param": "offload_param: 'deep_optimizer_states' is in the wrong place",
    "value that is not valid": "deep_optimizer_states.stride: 0.5 is not valid",
    "misspelt section": "did you mean 'deep_optimizer_states'",
    "not said whether on": '"enabled": true',
}


@scenario("scenarios_attach.attached", 1)
def test_attach_and_both_sections_train_alike(outcome: Outcome) -> None:
    assert outcome.first["by hand"] == []
    assert outcome.first["inside offload_optimizer"] == []


@scenario("scenarios_attach.attached", 1)
def test_a_section_that_is_off_leaves_upstream_alone(outcome: Outcome) -> None:
    assert outcome.first["off"] == "DeepSpeedZeroOptimizer_Stage3"


@scenario("scenarios_ways.experts", 1)
def test_a_mixture_of_experts_is_refused(outcome: Outcome) -> None:
    assert "not supported" in outcome.first


@scenario("scenarios_attach.attached_late", 1)
def test_attach_takes_over_the_state_of_a_running_engine(outcome: Outcome) -> None:
    assert outcome.first["different"] == []
    assert outcome.first["counts"] == {6.0}


@scenario("scenarios_attach.attached_late", 1)
def test_attach_refuses_to_be_called_twice(outcome: Outcome) -> None:
    assert "attached already" in outcome.first["twice"]


@scenario("scenarios_attach.attach_refused", 1)
def test_an_engine_that_could_not_be_attached_is_as_it_was(outcome: Outcome) -> None:
    assert "raise host_memory_bytes" in outcome.first["answer"]
    assert outcome.first["different"] == []


@scenario("scenarios_attach.memory_of_attach", 1)
def test_attaching_a_new_engine_does_not_hold_its_state_twice(outcome: Outcome) -> None:
    # Masters of four bytes move, moments of twice four are made anew.
    assert outcome.first["grown"] < 6.0


@scenario("scenarios_ways.client_optimizer", 1)
def test_an_adamw_of_the_caller_is_taken(outcome: Outcome) -> None:
    assert outcome.first["different"] == []


@scenario("scenarios_attach.no_threads_left", 1)
def test_destroying_the_engine_ends_all_threads(outcome: Outcome) -> None:
    assert outcome.first == []


@scenario("scenarios_ways.config_untouched", 1)
def test_the_callers_configuration_is_left_as_it_was(outcome: Outcome) -> None:
    assert outcome.first is True


@pytest.mark.parametrize("name", REFUSALS)
@scenario("scenarios_ways.refused", 1)
def test_what_cannot_work_is_refused_with_the_reason(outcome: Outcome, name: str) -> None:
    assert REFUSALS[name] in outcome.first[name]


@scenario("scenarios_ways.refused", 1)
def test_no_refusal_is_left_untested(outcome: Outcome) -> None:
    assert set(outcome.first) == set(REFUSALS)


@scenario("scenarios_ways.model_parallel", 2)
def test_the_norm_spans_the_model_parallel_group(outcome: Outcome) -> None:
    for its in outcome.ranks:
        assert its["norms"] == pytest.approx(its["expected"], rel=NORM.relative)
        assert its["norms"] == pytest.approx(its["upstream"], rel=NORM.relative)


@scenario("scenarios_ways.model_parallel", 2)
def test_no_schedule_changes_a_bit_with_model_parallelism(outcome: Outcome) -> None:
    for its in outcome.ranks:
        assert its["different"] == []


@scenario("scenarios_ways.monitored", 1)
def test_the_monitor_gets_every_phase_the_stride_and_the_prediction(outcome: Outcome) -> None:
    rows = outcome.first["rows"]
    phases = {"fetch_s", "update_device_s", "flush_s", "update_host_s", "publish_s"}
    assert phases | {"step_s", "predicted_s", "stride"} <= rows.keys()
    assert set(rows.values()) == {3}
    assert float(outcome.first["stride"]) == 2.0


@scenario("scenarios_ways.monitored", 1)
def test_wall_clock_breakdown_logs_the_phases(outcome: Outcome) -> None:
    assert len(outcome.first["times"]) == 3
    assert "dos_predicted" in outcome.first["times"][0]


@scenario("scenarios_ways.announced", 1)
def test_one_line_says_how_many_parameters_are_updated_where(outcome: Outcome) -> None:
    (line,) = outcome.first
    assert "stride 2" in line
    assert "parameters of this rank: " in line


@scenario("scenarios_attach.torn", 1)
def test_after_a_step_that_failed_half_way_nothing_is_saved_or_trained(outcome: Outcome) -> None:
    assert outcome.first["step"] == "the device is gone"
    assert "left state of two steps" in outcome.first["save"]
    assert "left state of two steps" in outcome.first["again"]


@scenario("scenarios_ways.example", 1)
def test_the_example_runs_through_dos_run(outcome: Outcome) -> None:
    assert "optimizer DOSZeroOptimizer_Stage3" in outcome.first


def test_dos_run_without_a_script_says_how_to_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["dos.run", "--local_rank=0"])
    with pytest.raises(ConfigError, match=r"deepspeed --module dos\.run train\.py"):
        dos.run.main()


def test_dos_run_without_deepspeed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setattr("sys.argv", ["dos.run", "train.py"])
    with pytest.raises(IntegrationError, match=r"deep-optimizer-states\[deepspeed\]"):
        dos.run.main()
