"""State that is held: what a slow capture reads is what the step left, whatever comes after."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dos
from dos.memory.pieces import Pieces
from tests.cpu.forked import in_child
from tests.cpu.held_cases import PLACES, SlowCapture, assert_equal, now, snapshot
from tests.cpu.overlap_cases import backward, batch, make_model, make_optimizer
from tests.cpu.state_cases import adamw, copied, make_parameters, take_steps, words

each_place = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
HALF = torch.bfloat16


def trained(
    place: dict[str, Any], dtype: torch.dtype = HALF, **options: Any
) -> tuple[list[torch.nn.Parameter], dos.DOSOptimizer]:
    parameters = make_parameters(dtype)
    optimizer = dos.DOSOptimizer(adamw(parameters), **place, **options)
    take_steps(optimizer, parameters, range(2))
    return parameters, optimizer


# --- what is held --------------------------------------------------------------------------------


@each_place
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_the_tree_is_the_state(place: dict[str, Any], dtype: torch.dtype) -> None:
    _, optimizer = trained(place, dtype)
    assert_equal(snapshot(optimizer.hold_state().tree), now(optimizer))


@each_place
def test_the_tree_is_live(place: dict[str, Any]) -> None:
    parameters, optimizer = trained(place)
    held = optimizer.hold_state()
    held.abandon()
    take_steps(optimizer, parameters[:1], range(5, 6))
    leaf = held.tree["master"]["0.0"]
    parts = [leaf.flatten()] if isinstance(leaf, torch.Tensor) else leaf.parts.values()
    state = optimizer.state[parameters[0]]["master"].flatten()
    assert torch.equal(torch.cat(list(parts)), state)


def test_weights_are_held_with_the_state() -> None:
    parameters, optimizer = trained({"device": "cpu"}, torch.float32)
    held = optimizer.hold_state()
    for parameter in parameters:
        begin, end = parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes
        inside = [h for h in held.holds if begin <= h.begin and h.end <= end]
        assert sum(h.end - h.begin for h in inside) == parameter.nbytes


def test_never_stepped_and_frozen_parameters_are_left_out() -> None:
    parameters = make_parameters()
    parameters[1].requires_grad_(False)
    optimizer = dos.DOSOptimizer(adamw(parameters), device="cpu")
    take_steps(optimizer, parameters[:1], range(2))
    held = optimizer.hold_state()
    assert held.tree["steps"] == {"0.0": 2}
    assert held.tree["exp_avg"].keys() == {"0.0"}
    assert [group["params"] for group in held.tree["param_groups"]] == [
        ["0.0", "0.1"],
        ["1.0", "1.1", "1.2"],
    ]


def test_names_are_those_that_are_given() -> None:
    parameters, optimizer = trained({"device": "cpu"})
    names: dict[torch.Tensor, str] = {p: f"layer.{i}" for i, p in enumerate(parameters)}
    held = optimizer.hold_state(names)
    assert list(held.tree["exp_avg"]) == list(names.values())


def test_a_parameter_without_a_name_is_refused_and_nothing_is_held() -> None:
    parameters, optimizer = trained({"device": "cpu"})
    with pytest.raises(dos.ConfigError, match=r"^parameter 0.1: it has no name"):
        optimizer.hold_state({parameters[0]: "one"})
    optimizer.close()


def test_a_name_that_is_given_twice_is_refused() -> None:
    parameters, optimizer = trained({"device": "cpu"})
    with pytest.raises(dos.ConfigError, match=r"^parameter 0.1: its name 'one' is another one's"):
        optimizer.hold_state(dict.fromkeys(parameters, "one"))


def test_what_adjoins_in_host_memory_is_one_tensor_in_the_parameters_order() -> None:
    parameters, optimizer = trained({"device": "cpu", "subgroup_size": 1024})
    tree = optimizer.hold_state().tree
    assert tree["exp_avg"]["0.0"].shape == parameters[0].shape
    assert tree["exp_avg"]["1.2"].stride() == parameters[4].stride()


def test_residents_are_told_in_pieces() -> None:
    _, optimizer = trained(PLACES["residents"])
    leaf = optimizer.hold_state().tree["exp_avg"]["0.0"]
    assert isinstance(leaf, Pieces)
    assert sorted(leaf.parts) == [0, 1024, 2048]


def test_a_forked_child_is_refused() -> None:
    _, optimizer = trained({"device": "cpu"})
    assert "PoolError" in in_child(optimizer.hold_state)


def test_a_closed_optimizer_is_refused() -> None:
    _, optimizer = trained({"device": "cpu"})
    optimizer.close()
    with pytest.raises(dos.ConfigError, match=r"^hold_state: the optimizer was closed"):
        optimizer.hold_state()


def test_held_memory_outlives_its_optimizer() -> None:
    _, optimizer = trained({"device": "cpu"})
    expected, held = now(optimizer), optimizer.hold_state()
    del optimizer
    gc.collect()
    assert_equal(snapshot(held.tree), expected)


# --- what is captured ----------------------------------------------------------------------------


@settings(max_examples=12)
@given(st.sampled_from(list(PLACES)), st.sampled_from([torch.float32, HALF]), st.integers(0, 99))
def test_a_capture_is_of_one_step(place: str, dtype: torch.dtype, seed: int) -> None:
    options = dict(PLACES[place])
    if options["device"] == "virtual":
        options["device"] = dos.VirtualDevice(jitter_seed=seed, poison=True)
    parameters, optimizer = trained(options, dtype)
    weights, expected = copied(parameters), now(optimizer)
    capture = SlowCapture(optimizer.hold_state(), seed)
    take_steps(optimizer, parameters, range(10, 13))
    capture.join()
    assert_equal(capture.state(), expected)
    for parameter, weight in zip(parameters, weights, strict=True):
        captured = capture.of(parameter).as_strided(parameter.shape, parameter.stride())
        assert torch.equal(words(captured), words(weight))
    optimizer.close()


@settings(max_examples=6)
@given(st.sampled_from([{"device": "cpu"}, {"device": "virtual", "stride": 2}]), st.integers(0, 99))
def test_a_capture_of_a_step_that_runs_on_is_of_what_it_leaves(
    place: dict[str, Any], seed: int
) -> None:
    alone, model = make_model(HALF), make_model(HALF)
    reference = make_optimizer(alone, device="cpu", overlap_forward=False)
    optimizer = make_optimizer(model, **place)
    for step in range(3):
        backward(alone, step)
        reference.step()
        reference.zero_grad()
        backward(model, step)
        optimizer.step()
        capture = SlowCapture(optimizer.hold_state(), seed)
        optimizer.zero_grad()
        if step < 2:
            capture.join()
    backward(model, 3)
    optimizer.step()
    model(batch(4).to(HALF))
    capture.join()
    assert_equal(capture.state(), now(reference))
    optimizer.close()
    reference.close()


def test_two_captures_without_a_step_between_are_the_same() -> None:
    parameters, optimizer = trained(PLACES["stride 2"])
    expected = now(optimizer)
    captures = [SlowCapture(optimizer.hold_state(), seed) for seed in range(2)]
    take_steps(optimizer, parameters, range(10, 12))
    for capture in captures:
        capture.join()
        assert_equal(capture.state(), expected)


# --- who waits -----------------------------------------------------------------------------------


def calls(parameters: list[torch.nn.Parameter], optimizer: dos.DOSOptimizer) -> dict[str, Any]:
    saved = optimizer.state_dict()

    def change_weights() -> None:
        with torch.no_grad():
            parameters[0].add_(1.0)
        take_steps(optimizer, parameters, range(9, 10))

    def refresh() -> None:
        parameters[0].data.add_(1.0)
        optimizer.refresh_master_weights()

    return {
        "step": lambda: take_steps(optimizer, parameters, range(9, 10)),
        "load_state_dict": lambda: optimizer.load_state_dict(saved),
        "add_param_group": lambda: optimizer.add_param_group(
            {"params": [torch.nn.Parameter(torch.ones(3, dtype=HALF))]}
        ),
        "refresh_master_weights": refresh,
        "masters of changed weights": change_weights,
        "restore_target": lambda: optimizer.restore_target(
            {"steps": {}, "param_groups": optimizer.hold_state().tree["param_groups"]}
        ),
        "close": optimizer.close,
    }


CALLS = (
    "step",
    "load_state_dict",
    "add_param_group",
    "refresh_master_weights",
    "masters of changed weights",
    "restore_target",
    "close",
)


@pytest.mark.parametrize("call", CALLS)
def test_who_changes_state_waits_for_captures(call: str) -> None:
    parameters, optimizer = trained(PLACES["stride 2"])
    expected = now(optimizer)
    capture = SlowCapture(optimizer.hold_state(), 0, pause_s=0.02)
    calls(parameters, optimizer)[call]()
    capture.join()
    assert_equal(capture.state(), expected)


@pytest.mark.parametrize("call", CALLS)
def test_a_capture_that_never_ends_is_an_error_of_who_waits(call: str) -> None:
    parameters, optimizer = trained(PLACES["stride 2"])
    optimizer._engine.state.gates.timeout_s = 0.01
    held = optimizer.hold_state(what="checkpoint 7")
    made = calls(parameters, optimizer)
    with pytest.raises(dos.PoolError, match=f"^{call}: .*captured for checkpoint 7"):
        made[call]()
    held.abandon()


def test_a_step_that_never_began_leaves_the_optimizer_whole() -> None:
    parameters, optimizer = trained(PLACES["stride 2"])
    expected, held = now(optimizer), optimizer.hold_state()
    optimizer._engine.state.gates.timeout_s = 0.01
    with pytest.raises(dos.PoolError):
        take_steps(optimizer, parameters, range(9, 10))
    held.abandon()
    assert_equal(now(optimizer), expected)
    take_steps(optimizer, parameters, range(9, 10))
    others, reference = trained(PLACES["stride 2"])
    take_steps(reference, others, range(9, 10))
    assert_equal(now(optimizer), now(reference))


def test_a_step_that_began_and_was_held_up_for_ever_is_torn() -> None:
    parameters, optimizer = trained({"device": "cpu", "subgroup_size": 1024})
    held = optimizer.hold_state()
    held.release(0)
    optimizer._engine.state.gates.timeout_s = 0.01
    with pytest.raises(dos.PoolError):
        take_steps(optimizer, parameters, range(9, 10))
    held.abandon()
    with pytest.raises(dos.ConfigError, match="an earlier step failed half-way"):
        optimizer.step()


def test_a_step_without_gradients_does_not_wait() -> None:
    parameters, optimizer = trained({"device": "cpu"})
    optimizer._engine.state.gates.timeout_s = 0.0
    held = optimizer.hold_state()
    for parameter in parameters:
        parameter.grad = None
    optimizer.step()
    held.abandon()


def test_a_step_that_is_skipped_for_an_overflow_does_not_wait() -> None:
    parameters, optimizer = trained({"device": "cpu"}, torch.float32)
    optimizer._engine.state.gates.timeout_s = 0.0
    scaler = torch.amp.GradScaler("cpu")
    held = optimizer.hold_state()
    scaler.scale(torch.ones(()))
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, float("inf"))
    scaler.step(optimizer)
    scaler.update()
    held.abandon()
    assert set(optimizer.hold_state().tree["steps"].values()) == {2}


def test_metrics_tell_how_long_a_step_waited() -> None:
    parameters, optimizer = trained(PLACES["stride 2"])
    capture = SlowCapture(optimizer.hold_state(), 0, pause_s=0.05)
    take_steps(optimizer, parameters, range(9, 10))
    capture.join()
    assert optimizer.metrics()["waited_s"] > 0
