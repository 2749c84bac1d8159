"""Training with FSDP2 in two processes: `fsdp_scenarios.py` has what they did."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.tolerances import CLIP
from tests.integration.processes.compare import assert_near, same_bits
from tests.integration.processes.fsdp_model import PLANS
from tests.integration.processes.fsdp_scenarios import MAX_NORM
from tests.integration.processes.pair import Pair, results

each_plan = pytest.mark.parametrize("plan", PLANS)
ON_VIRTUAL = [name for name, plan in PLANS.items() if plan["device"] != "cpu"]


@each_plan
@pytest.mark.parametrize("name", ["plain", "a_process_without_elements"])
def test_weights_are_those_of_torch(pair: Pair, name: str, plan: str) -> None:
    for ran in results(pair, name):
        ours, theirs = (ran[which] for which in (plan, "torch"))
        if name == "plain":
            ours, theirs = ours["weights"], theirs["weights"]
        assert_near(ours, theirs)


@each_plan
@pytest.mark.parametrize(
    "name", ["plain", "bf16_weights", "clipped_by_the_optimizer", "a_process_without_elements"]
)
def test_every_plan_gives_the_same_bits(pair: Pair, name: str, plan: str) -> None:
    for ran in results(pair, name):
        if name == "a_process_without_elements":
            assert same_bits(ran[plan], ran["cpu"])
        elif name == "clipped_by_the_optimizer":
            for kind in ("2.0", "inf"):
                one, other = ran[f"{plan}, {kind}"], ran[f"cpu, {kind}"]
                assert same_bits(one["weights"], other["weights"])
                assert one["norms"] == other["norms"]
        else:
            assert same_bits(ran[plan]["weights"], ran["cpu"]["weights"])


@pytest.mark.parametrize("plan", ON_VIRTUAL)
def test_each_gradient_is_sent_once_and_early(pair: Pair, plan: str) -> None:
    for ran in results(pair, "plain"):
        sent = ran[plan]["bytes"]
        assert sent["early"] == sent["all"] <= sent["one"]


def test_all_gradients_are_sent_where_the_host_updates_all(pair: Pair) -> None:
    for ran in results(pair, "plain"):
        sent = ran["host"]["bytes"]
        assert sent["early"] == sent["one"] > 0


def test_mixed_precision_gives_the_bits_of_the_host_and_torchs_weights(pair: Pair) -> None:
    for ran in results(pair, "mixed_precision"):
        for plan in ("host", "two"):
            assert same_bits(ran[plan]["weights"], ran["cpu"]["weights"])
        assert_near(ran["cpu"]["weights"], ran["torch"]["weights"])


def test_mixed_precision_sends_fp32_gradients_once(pair: Pair) -> None:
    for ran in results(pair, "mixed_precision"):
        sent = ran["host"]["bytes"]
        assert sent["early"] == sent["all"] == sent["one"]


def test_the_norm_adds_shards_and_then_processes_in_order(pair: Pair) -> None:
    for ran in results(pair, "norms"):
        assert ran["ours"].item() == ran["in order"]


def test_the_norm_is_that_of_all_gradients(pair: Pair) -> None:
    for ran in results(pair, "norms"):
        assert ran["ours"].item() == pytest.approx(ran["at once"], rel=CLIP.relative)


def test_the_largest_element_is_that_of_all_gradients(pair: Pair) -> None:
    for ran in results(pair, "norms"):
        assert ran["largest"] == ran["largest at once"]


def test_both_processes_have_the_same_norm(pair: Pair) -> None:
    one, other = results(pair, "clipped_by_the_optimizer")
    assert [run["norms"] for run in one.values()] == [run["norms"] for run in other.values()]


def test_a_replica_is_counted_once(pair: Pair) -> None:
    for ran in results(pair, "replicated"):
        assert ran["ours"] == pytest.approx(ran["at once"], rel=CLIP.relative)


def test_clipping_by_the_optimizer_is_that_of_torch(pair: Pair) -> None:
    ours = results(pair, "clipped_by_the_optimizer")
    theirs = results(pair, "clipped_by_torch")
    for our, their in zip(ours, theirs, strict=True):
        assert all(norm > MAX_NORM for norm in our["two, 2.0"]["norms"])
        assert_near(our["two, 2.0"]["weights"], their["torch, foreach=True"]["weights"])


@pytest.mark.parametrize("foreach", [False, True])
def test_torchs_clipping_is_noticed_by_content(pair: Pair, foreach: bool) -> None:
    for ran in results(pair, "clipped_by_torch"):
        run = {plan: ran[f"{plan}, foreach={foreach}"]["weights"] for plan in ("cpu", "two", "all")}
        assert same_bits(run["two"], run["cpu"])
        assert same_bits(run["all"], run["cpu"])
        assert_near(run["cpu"], ran[f"torch, foreach={foreach}"]["weights"])


def test_accumulated_gradients_are_sent_by_the_last_backward(pair: Pair) -> None:
    for ran in results(pair, "accumulated"):
        assert same_bits(ran["host"]["weights"], ran["cpu"]["weights"])
        sent = ran["host"]["bytes"]
        assert sent["early"] == sent["all"] == sent["one"]


def test_a_gradient_that_is_added_to_while_it_travels_is_sent_again(pair: Pair) -> None:
    for ran in results(pair, "more_backwards_than_learned"):
        assert same_bits(ran["late"], ran["cpu"])


def test_weights_that_others_changed_are_taken_up(pair: Pair) -> None:
    for ran in results(pair, "changed_weights"):
        assert same_bits(ran["two"]["weights"], ran["cpu"]["weights"])
        for weight, master in zip(ran["two"]["weights"], ran["two"]["masters"], strict=True):
            assert same_bits([master.to(torch.bfloat16)], [weight])


def test_both_processes_skip_a_step_that_overflows_in_one(pair: Pair) -> None:
    for ran in results(pair, "loss_scaled"):
        assert ran["two"]["scale"] == ran["torch"]["scale"] == 512.0
        assert same_bits(ran["two"]["weights"], ran["cpu"]["weights"])
        assert_near(ran["two"]["weights"], ran["torch"]["weights"])
