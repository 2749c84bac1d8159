"""With `overlap_forward`, mistakes and errors show, and nothing is left behind."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch

import dos
from dos.tail import Tail
from tests.cpu.forked import in_child
from tests.cpu.overlap_cases import (
    DEVICES,
    Gate,
    backward,
    batch,
    bits,
    pending,
    trained,
)
from tests.cpu.test_overlap_readers import (
    Read,
    call,
    close,
    evaluate,
    save_model,
    save_optimizer,
    step_again,
)

every_device = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)


# --- mistakes and failures -----------------------------------------------------------------------


def test_a_graph_from_before_the_step_cannot_be_used_after_it(gate: Gate) -> None:
    model, optimizer = trained(2, DEVICES["virtual"])
    loss = model(batch(2)).square().mean()
    loss.backward(retain_graph=True)
    gate.close()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_weight_that_was_read_too_early_cannot_be_trained_through(gate: Gate) -> None:
    model, optimizer = trained(2, DEVICES["virtual"])
    backward(model, 2)
    gate.close()
    optimizer.step()
    x = batch(9).requires_grad_()
    loss = (x @ model[-1].weight).sum()
    optimizer.synchronize()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Gathered(torch.nn.Parameter):
    """What sharding makes of a parameter: not a plain one."""


def test_a_parameter_whose_readers_cannot_be_known_is_refused() -> None:
    tail = Tail(overlap=True)
    with pytest.raises(dos.ConfigError, match="overlap_forward=False"):
        tail.check([Gathered(torch.ones(3))])
    tail.close()


class Broken(Exception):
    """Raised by an update."""


@pytest.fixture(params=list(DEVICES))
def broken(request: pytest.FixtureRequest, gate: Gate) -> tuple[Any, Any]:
    """After an overlapped step whose second update fails once somebody waits."""
    model, optimizer = trained(2, DEVICES[request.param])
    backward(model, 2)
    gate.close(after=1)
    gate.error = Broken()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    "read",
    [call, evaluate, save_model, save_optimizer, step_again, close],
    ids=lambda r: r.__name__,
)
def test_an_error_of_the_tail_is_raised_where_somebody_waits(
    read: Read, broken: tuple[Any, Any]
) -> None:
    with pytest.raises(Broken):
        read(*broken)


@pytest.mark.parametrize("read", [save_optimizer, step_again], ids=lambda r: r.__name__)
def test_after_an_error_of_the_tail_the_state_is_refused(
    read: Read, broken: tuple[Any, Any]
) -> None:
    with pytest.raises(Broken):
        broken[1].synchronize()
    with pytest.raises(dos.ConfigError, match="half-way"):
        read(*broken)


def test_after_an_error_of_the_tail_the_optimizer_can_be_closed(broken: tuple[Any, Any]) -> None:
    with pytest.raises(Broken):
        broken[1].synchronize()
    broken[1].close()
    broken[1].close()


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_child_forked_in_the_tail_reads_no_half_of_it(gate: Gate) -> None:
    model, optimizer = trained(2, DEVICES["virtual"])
    backward(model, 2)
    gate.close()
    optimizer.step()
    text = in_child(lambda: model(batch(9)))
    assert "PoolError" in text
    assert "synchronize" in text


# --- it leaves nothing behind --------------------------------------------------------------------


@every_device
def test_an_optimizer_that_is_lost_in_the_tail_ends_its_step(
    device: dict[str, Any], gate: Gate
) -> None:
    model, optimizer = trained(2, device)
    backward(model, 2)
    gate.close()
    optimizer.step()
    del optimizer
    gc.collect()
    gate.open()
    assert bits(model) == bits(trained(3, device, overlap_forward=False)[0])


def test_closing_removes_every_hook() -> None:
    before = len(torch.nn.modules.module._global_forward_pre_hooks)
    model, optimizer = trained(2, DEVICES["virtual"])
    optimizer.close()
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == before
    assert not any(module._state_dict_pre_hooks for module in model.modules())
    assert not any(module._load_state_dict_pre_hooks for module in model.modules())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_hooked_model_can_be_copied(copied: Any) -> None:
    model, optimizer = trained(2, DEVICES["virtual"])
    optimizer.synchronize()
    other = copied(model)
    optimizer.close()
    torch.save(other.state_dict(), io.BytesIO())
    assert bits(other) == bits(model)


def test_without_the_option_nothing_is_hooked_and_nothing_runs_on() -> None:
    before = len(torch.nn.modules.module._global_forward_pre_hooks)
    _, optimizer = trained(2, DEVICES["virtual"], overlap_forward=False)
    assert not pending(optimizer)
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == before
