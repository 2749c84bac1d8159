"""With `overlap_forward`, whoever reads after a step reads what the step made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dos
from tests.cpu.overlap_cases import (
    DEVICES,
    Gate,
    backward,
    batch,
    pending,
    trained,
)

Read = Callable[[torch.nn.Sequential, dos.DOSOptimizer], Any]
every_device = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)


class ReadsByHand(torch.nn.Module):
    """A parent that does not call its child."""

    def __init__(self, child: torch.nn.Sequential) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.child[-1].weight.T


# --- what is protected without a call ------------------------------------------------------------


def call(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    return model(batch(9))


def call_one_layer(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    return model[-1](batch(9))


def evaluate(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    with torch.inference_mode():
        return model.eval()(batch(9)).clone()


def functional_call(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    return torch.func.functional_call(model, dict(model.named_parameters()), batch(9))


def without_gradients(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    """Reads a child by hand, which training calls."""
    by_hand = ReadsByHand(model)
    with torch.no_grad():
        return by_hand(batch(9))


def functional_call_of_others(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    """Other tensors stand for the parameters, in the same memory."""
    others = {name: p.detach() for name, p in model.named_parameters()}
    return torch.func.functional_call(model, others, batch(9))


def gradients_per_sample(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, x[None]).square().mean()

    others = {name: p.detach() for name, p in model.named_parameters()}
    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(others, batch(9))
    return [its.clone() for its in found.values()]


def save_model(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    return [value.clone() for value in model.state_dict().values()]


def save_one_layer(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    return model[-1].state_dict()["weight"].clone()


def save_optimizer(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    return [its["exp_avg"].clone() for its in optimizer.state_dict()["state"].values()]


def read_state(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    return [its[name].clone() for its in optimizer.state.values() for name in ("step", "exp_avg")]


def load_model(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    model.load_state_dict({name: torch.ones_like(p) for name, p in model.state_dict().items()})
    optimizer.synchronize()
    return [p.detach().clone() for p in model.parameters()]


def load_optimizer(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    empty = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
    optimizer.load_state_dict(empty)
    backward(model, 9)
    optimizer.step()
    optimizer.synchronize()
    return [p.detach().clone() for p in model.parameters()]


def step_again(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    optimizer.step()  # with the same gradients
    optimizer.synchronize()
    return [p.detach().clone() for p in model.parameters()]


def zero_in_place(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    optimizer.zero_grad(set_to_none=False)
    optimizer.synchronize()
    return [p.detach().clone() for p in model.parameters()]


def add_group(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(5))]})
    return [p.detach().clone() for p in model.parameters()]


def close(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    optimizer.close()
    return [p.detach().clone() for p in model.parameters()]


def ask_for_the_record(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    assert optimizer.last_step is not None
    assert optimizer.metrics()["exposed_s"] > 0
    return [p.detach().clone() for p in model.parameters()]


def clip(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    backward(model, 9)
    return optimizer.clip_grad_norm_(1.0)


def refresh(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    optimizer.refresh_master_weights()
    return [p.detach().clone() for p in model.parameters()]


# --- what needs the call -------------------------------------------------------------------------


def synchronized(read: Read) -> Read:
    def after_the_call(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
        optimizer.synchronize()
        return read(model, optimizer)

    after_the_call.__name__ = f"synchronize, {read.__name__}"
    return after_the_call


def matmul(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    return batch(9) @ model[-1].weight.detach().T


def parameters(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    return [p.detach().clone() for p in model.parameters()]


def clamp(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    with torch.no_grad():
        return [p.clamp_(-0.05, 0.05).clone() for p in model.parameters()]


def deepcopy(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    return parameters(copy.deepcopy(model), optimizer)


def average(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    return parameters(averaged.module, optimizer)


def zero_the_model_in_place(model: torch.nn.Sequential, optimizer: dos.DOSOptimizer) -> Any:
    model.zero_grad(set_to_none=False)
    return parameters(model, optimizer)


PROTECTED: list[Read] = [
    call,
    call_one_layer,
    evaluate,
    without_gradients,
    functional_call,
    functional_call_of_others,
    gradients_per_sample,
    save_model,
    save_one_layer,
    save_optimizer,
    read_state,
    load_model,
    load_optimizer,
    step_again,
    zero_in_place,
    add_group,
    close,
    ask_for_the_record,
    clip,
    refresh,
]
NEED_THE_CALL: list[Read] = [
    matmul,
    parameters,
    clamp,
    deepcopy,
    average,
    zero_the_model_in_place,
]


@pytest.mark.parametrize(
    "read", [*PROTECTED, *map(synchronized, NEED_THE_CALL)], ids=lambda read: read.__name__
)
@every_device
def test_what_is_read_after_a_step_is_new(device: dict[str, Any], read: Read, gate: Gate) -> None:
    model, optimizer = trained(2, device)
    backward(model, 2)
    gate.close()
    optimizer.step()
    assert pending(optimizer)  # or this shows nothing
    got = read(model, optimizer)
    gate.open()
    assert_same(got, read(*one_step_after(*trained(2, device, overlap_forward=False))))


def one_step_after(
    model: torch.nn.Sequential, optimizer: dos.DOSOptimizer
) -> tuple[torch.nn.Sequential, dos.DOSOptimizer]:
    backward(model, 2)
    optimizer.step()
    return model, optimizer


def assert_same(got: Any, wanted: Any) -> None:
    pairs = zip(got, wanted, strict=True) if isinstance(got, list) else [(got, wanted)]
    for one, other in pairs:
        assert torch.equal(one, other)


@pytest.mark.parametrize("read", NEED_THE_CALL[:2], ids=lambda read: read.__name__)
def test_what_needs_the_call_is_told_apart_by_this_gate(read: Read, gate: Gate) -> None:
    model, optimizer = trained(2, DEVICES["virtual"])
    backward(model, 2)
    gate.close()
    optimizer.step()
    got = read(model, optimizer)
    gate.open()
    twin = trained(2, DEVICES["virtual"], overlap_forward=False)
    wanted = read(*one_step_after(*twin))
    with pytest.raises(AssertionError):
        assert_same(got, wanted)
