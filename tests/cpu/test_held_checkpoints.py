"""Held state, written while training goes on, is what the step left; loaded, training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dos
from dos.checkpoint import load
from dos.checkpoint.saving import begin_save
from tests.cpu.held_cases import PLACES, assert_equal, now
from tests.cpu.state_cases import adamw, copied, make_parameters, take_steps, words
from tests.cpu.test_restored import restore, set_weights

each_place = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)


@each_place
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_checkpoint_beside_training_is_of_one_step(
    tmp_path: Path, place: dict[str, Any], dtype: torch.dtype
) -> None:
    parameters = make_parameters(dtype)
    optimizer = dos.DOSOptimizer(adamw(parameters), **place)
    take_steps(optimizer, parameters, range(2))
    expected, weights = now(optimizer), copied(parameters)
    held = optimizer.hold_state()
    model = {str(i): p.detach() for i, p in enumerate(parameters)}
    tree = {"model": model, "optimizer": held.tree}
    handle = begin_save(tree, tmp_path / "saved", held=[held])
    take_steps(optimizer, parameters, range(10, 13))
    handle.durable.result(60)
    loaded = load(tmp_path / "saved")
    assert_equal(loaded["optimizer"], expected)
    for index, weight in enumerate(weights):
        assert torch.equal(words(loaded["model"][str(index)]), words(weight))


def test_training_that_goes_on_from_a_checkpoint_ends_with_the_same_bits(tmp_path: Path) -> None:
    parameters = make_parameters(torch.bfloat16)
    optimizer = dos.DOSOptimizer(adamw(parameters), **PLACES["residents"])
    take_steps(optimizer, parameters, range(2))
    weights, held = copied(parameters), optimizer.hold_state()
    handle = begin_save(held.tree, tmp_path / "saved", held=[held])
    take_steps(optimizer, parameters, range(2, 5))
    handle.durable.result(60)
    others = make_parameters(torch.bfloat16)
    other = dos.DOSOptimizer(adamw(others), **PLACES["stride 1.5"])
    set_weights(others, weights)
    restore(other, load(tmp_path / "saved"))
    take_steps(other, others, range(2, 5))
    assert_equal(now(other), now(optimizer))


def test_a_checkpoint_into_the_live_pool_is_what_was_held(tmp_path: Path) -> None:
    parameters = make_parameters(torch.bfloat16)
    optimizer = dos.DOSOptimizer(adamw(parameters), **PLACES["host"])
    take_steps(optimizer, parameters, range(2))
    expected, held = now(optimizer), optimizer.hold_state()
    begin_save(held.tree, tmp_path / "saved", held=[held]).durable.result(60)
    take_steps(optimizer, parameters, range(2, 5))
    counts = load(tmp_path / "saved", only=["steps*", "param_groups*"])
    target = optimizer.restore_target(counts)
    load(tmp_path / "saved", into=target)
    optimizer.restored()
    assert_equal(now(optimizer), expected)
