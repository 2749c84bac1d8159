"""State restored in place: into any placement, bit for bit, and whole or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dos
from dos.kernels import adam
from dos.memory.pieces import Pieces
from tests.cpu.forked import in_child
from tests.cpu.held_cases import PLACES, assert_equal, now, snapshot
from tests.cpu.state_cases import adamw, assert_same, copied, make_parameters, take_steps

HALF = torch.bfloat16
HOST = PLACES["host"]
Parameters = list[torch.nn.Parameter]


def trained(
    place: dict[str, Any], dtype: torch.dtype = HALF, seeds: range = range(3)
) -> tuple[Parameters, dos.DOSOptimizer]:
    parameters = make_parameters(dtype)
    optimizer = dos.DOSOptimizer(adamw(parameters), **place)
    take_steps(optimizer, parameters, seeds)
    return parameters, optimizer


def fill(target: dict[str, Any], saved: dict[str, Any]) -> None:
    """Read what was saved into where it belongs."""
    for kind, leaves in target.items():
        for name, leaf in leaves.items():
            source = saved[kind][name]
            if isinstance(leaf, Pieces):
                for start, part in leaf.parts.items():
                    part.copy_(source.contiguous().view(-1)[start : start + part.numel()])
            else:
                leaf.copy_(source)


def restore(optimizer: dos.DOSOptimizer, saved: dict[str, Any]) -> None:
    fill(optimizer.restore_target(saved), saved)
    optimizer.restored()


def set_weights(parameters: Parameters, values: Parameters) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


@pytest.mark.parametrize("there", PLACES)
@pytest.mark.parametrize("here", ["stride 2", "residents"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_what_is_restored_is_what_was_held(here: str, there: str, dtype: torch.dtype) -> None:
    parameters, optimizer = trained(PLACES[here], dtype)
    optimizer.param_groups[1]["lr"] = 0.123
    saved, weights = snapshot(optimizer.hold_state().tree), copied(parameters)
    others, other = trained(PLACES[there], dtype, range(50, 52))
    set_weights(others, weights)
    restore(other, saved)
    assert_equal(now(other), saved)
    for one, its in ((optimizer, parameters), (other, others)):
        take_steps(one, its, range(3, 5))
    assert_same(parameters, others)
    assert_equal(now(other), now(optimizer))


def test_what_was_never_stepped_is_so_again() -> None:
    parameters = make_parameters(HALF)
    optimizer = dos.DOSOptimizer(adamw(parameters), **HOST)
    take_steps(optimizer, parameters[:1], range(2))
    saved, weights = snapshot(optimizer.hold_state().tree), copied(parameters)
    others, other = trained(HOST)
    set_weights(others, weights)
    restore(other, saved)
    assert_equal(now(other), saved)
    for one, its in ((optimizer, parameters), (other, others)):
        take_steps(one, its, range(3, 5))
    assert_equal(now(other), now(optimizer))


def test_state_of_a_frozen_parameter_is_restored() -> None:
    _, optimizer = trained(HOST)
    saved = snapshot(optimizer.hold_state().tree)
    others = make_parameters(HALF)
    others[0].requires_grad_(False)
    other = dos.DOSOptimizer(adamw(others), **HOST)
    restore(other, saved)
    assert_equal(now(other), saved)


def test_masters_that_were_not_saved_are_the_weights() -> None:
    _, optimizer = trained(HOST)
    saved = snapshot(optimizer.hold_state().tree)
    saved["master"] = {}
    others, other = trained(HOST)
    target = other.restore_target(saved)
    assert not target["master"]
    fill(target, saved)
    other.restored()
    for group in other.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    take_steps(other, others, range(1))
    for parameter in others:
        assert torch.equal(other.state[parameter]["master"], parameter.float())


def test_groups_are_matched_by_name_in_any_order() -> None:
    parameters, optimizer = trained(HOST)
    names: dict[torch.Tensor, str] = {p: f"layer.{i}" for i, p in enumerate(parameters)}
    saved = snapshot(optimizer.hold_state(names).tree)
    others, other = trained(HOST, seeds=range(50, 51))
    reordered = dict(saved)
    reordered["param_groups"] = [
        {**group, "params": group["params"][::-1]} for group in saved["param_groups"]
    ]
    target = other.restore_target(reordered, {p: f"layer.{i}" for i, p in enumerate(others)})
    fill(target, saved)
    other.restored()
    assert_equal(now(other), now(optimizer))


# --- between the two -----------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["step", "state_dict", "hold_state"])
def test_half_restored_state_is_not_used(call: str) -> None:
    _, optimizer = trained(HOST)
    optimizer.restore_target(snapshot(optimizer.hold_state().tree))
    with pytest.raises(dos.ConfigError, match=rf"^{call}: a load failed half-way"):
        getattr(optimizer, call)()


def test_after_a_load_that_failed_another_one_counts() -> None:
    _, optimizer = trained(HOST)
    saved = snapshot(optimizer.hold_state().tree)
    for leaf in optimizer.restore_target(saved)["exp_avg"].values():
        assert isinstance(leaf, torch.Tensor)
        leaf.fill_(7.0)
    restore(optimizer, saved)
    assert_equal(now(optimizer), saved)


def test_after_a_load_that_failed_a_state_dict_counts_in_full() -> None:
    _, optimizer = trained(HOST)
    saved = snapshot(optimizer.hold_state().tree)
    others = make_parameters(HALF)
    other = dos.DOSOptimizer(adamw(others), **HOST)
    empty = other.state_dict()
    fill(other.restore_target(saved), saved)
    other.load_state_dict(empty)
    fresh = make_parameters(HALF)
    reference = dos.DOSOptimizer(adamw(fresh), **HOST)
    for one, its in ((reference, fresh), (other, others)):
        take_steps(one, its, range(3, 5))
    assert_equal(now(other), now(reference))


def test_a_load_that_is_abandoned_has_changed_nothing() -> None:
    parameters, optimizer = trained(HOST)
    before = now(optimizer)
    saved = snapshot(optimizer.hold_state().tree)
    saved["param_groups"][0]["lr"] = 0.5
    optimizer.restore_target(saved)
    optimizer.restore_abandoned()
    assert_equal(now(optimizer), before)
    take_steps(optimizer, parameters, range(3, 4))


def test_a_load_that_is_abandoned_after_one_that_failed_leaves_it_torn() -> None:
    _, optimizer = trained(HOST)
    saved = snapshot(optimizer.hold_state().tree)
    optimizer.restore_target(saved)  # the first ends nowhere
    optimizer.restore_target(saved)
    optimizer.restore_abandoned()
    with pytest.raises(dos.ConfigError, match="a load failed half-way"):
        optimizer.step()


@pytest.mark.parametrize("call", ["restored", "restore_abandoned"])
def test_a_load_that_was_not_begun_cannot_end(call: str) -> None:
    _, optimizer = trained(HOST)
    with pytest.raises(dos.ConfigError, match=f"^{call}: no load is under way"):
        getattr(optimizer, call)()


def test_a_torn_optimizer_is_whole_after_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = make_parameters(HALF)
    optimizer = dos.DOSOptimizer(adamw(parameters), **HOST)
    saved, weights = snapshot(optimizer.hold_state().tree), copied(parameters)
    update, calls = adam.update, []

    def breaking(*args: Any, **kwargs: Any) -> None:
        update(*args, **kwargs)
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("a kernel that fails")

    with monkeypatch.context() as patch:
        patch.setattr(adam, "update", breaking)
        with pytest.raises(RuntimeError, match="a kernel that fails"):
            take_steps(optimizer, parameters, range(1))
    set_weights(parameters, weights)
    restore(optimizer, saved)
    take_steps(optimizer, parameters, range(2))
    _, reference = trained(HOST, seeds=range(2))
    assert_equal(now(optimizer), now(reference))


# --- refused -------------------------------------------------------------------------------------


def changed(saved: dict[str, Any], how: str) -> dict[str, Any]:
    groups = saved["param_groups"]
    return {
        "no steps": {"param_groups": groups},
        "no groups": {"steps": {}},
        "a count": {**saved, "steps": {"0.0": -1}},
        "a name": {**saved, "steps": {"9.9": 1}},
        "fewer groups": {**saved, "param_groups": groups[:1]},
        "a member": {**saved, "param_groups": [{**groups[0], "params": ["0.0"]}, groups[1]]},
        "an option": {**saved, "param_groups": [{**groups[0], "lr": float("nan")}, groups[1]]},
    }[how]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no steps", "it has no steps"),
        ("no groups", "it has no param groups"),
        ("a count", "the step of '0.0' is -1"),
        ("a name", "it has state of '9.9', which is no parameter here"),
        ("fewer groups", "it has 1 param groups, the optimizer 2"),
        ("a member", "only this param group 0 has '0.1'"),
        ("an option", "lr is nan"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(how: str, message: str) -> None:
    _, optimizer = trained(HOST)
    before = now(optimizer)
    with pytest.raises(dos.ConfigError, match=message):
        optimizer.restore_target(changed(snapshot(optimizer.hold_state().tree), how))
    assert_equal(now(optimizer), before)
    optimizer.step()


def test_a_forked_child_is_refused() -> None:
    _, optimizer = trained(HOST)
    saved = snapshot(optimizer.hold_state().tree)
    assert "PoolError" in in_child(lambda: optimizer.restore_target(saved))
