"""DistributedDataParallel in two processes: `ddp_scenarios.py` has what they did."""

from __future__ import annotations

import pytest
import torch

import dos
from tests.integration.processes.compare import assert_near, same_bits
from tests.integration.processes.ddp_scenarios import MODES
from tests.integration.processes.pair import Pair, results

each_mode = pytest.mark.parametrize("mode", MODES)
SENT_ONCE = [mode for mode in MODES if mode != "unused at times"]


@each_mode
def test_weights_are_those_of_torch(pair: Pair, mode: str) -> None:
    for ran in results(pair, "ddp_modes"):
        assert_near(ran[mode]["cpu"]["weights"], ran[mode]["torch"]["weights"])


@each_mode
def test_both_processes_have_the_same_weights(pair: Pair, mode: str) -> None:
    one, other = results(pair, "ddp_modes")
    assert same_bits(one[mode]["registered"]["weights"], other[mode]["registered"]["weights"])


@each_mode
@pytest.mark.parametrize("how", ["registered", "unregistered"])
@pytest.mark.parametrize("plan", ["", ", two", ", overlapped"])
def test_early_sending_changes_no_bits(pair: Pair, mode: str, how: str, plan: str) -> None:
    for ran in results(pair, "ddp_modes"):
        assert same_bits(ran[mode][how + plan]["weights"], ran[mode]["cpu"]["weights"])


@pytest.mark.parametrize("mode", SENT_ONCE)
def test_registered_each_gradient_is_sent_once_and_early(pair: Pair, mode: str) -> None:
    for ran in results(pair, "ddp_modes"):
        run = ran[mode]["registered"]
        assert run["early"] == [0] + [run["one"]] * 3
        assert run["all"] == [run["one"]] * 4


@each_mode
def test_registered_nothing_is_found_changed(pair: Pair, mode: str) -> None:
    for ran in results(pair, "ddp_modes"):
        assert ran[mode]["registered"]["warnings"] == []


@pytest.mark.parametrize("mode", [m for m in MODES if "unused" not in MODES[m]])
def test_unregistered_early_sending_pauses(pair: Pair, mode: str) -> None:
    for ran in results(pair, "ddp_modes"):
        run = ran[mode]["unregistered"]
        assert run["early"][2:] == [0, 0]
        assert run["all"][2:] == [run["one"]] * 2


def test_unregistered_a_warning_names_the_remedy_once(pair: Pair) -> None:
    for ran in results(pair, "ddp_modes"):
        (warning,) = ran["plain"]["unregistered"]["warnings"]
        assert "dos.register_ddp" in warning


def test_the_users_communication_hook_runs(pair: Pair) -> None:
    for hooked, ran in zip(results(pair, "ddp_hook"), results(pair, "ddp_modes"), strict=True):
        run = hooked["registered"]
        assert same_bits(run["weights"], hooked["cpu"]["weights"])
        assert not same_bits(run["weights"], ran["plain"]["cpu"]["weights"])
        assert run["early"][1:] == [run["one"]] * 3


def test_a_hook_is_registered_only_where_something_is_sent(pair: Pair) -> None:
    assert all("can only be called once" in error for error in results(pair, "ddp_on_the_host"))


def test_another_model_is_refused() -> None:
    with pytest.raises(dos.ConfigError, match="Linear is no DistributedDataParallel"):
        dos.register_ddp(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_released_gradients_need_the_registration(pair: Pair) -> None:
    for ran in results(pair, "ddp_released"):
        assert "dos.register_ddp" in ran["error"]
        assert same_bits(ran["registered"]["weights"], ran["cpu"]["weights"])


def test_two_optimizers_of_one_model_share_the_hook(pair: Pair) -> None:
    for ran in results(pair, "ddp_two_optimizers"):
        assert same_bits(ran["registered"]["weights"], ran["cpu"]["weights"])
        assert all(n_bytes > 0 for n_bytes in ran["registered"]["early"])
