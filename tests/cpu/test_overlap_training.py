"""With `overlap_forward` training is exact, and the forward does not wait for all of the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import dos
from tests.cpu.overlap_cases import (
    DEVICES,
    LAYERS,
    WIDTH,
    Gate,
    backward,
    batch,
    bits,
    make_model,
    make_optimizer,
    pending,
    trained,
)

every_device = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)


# --- training is exact ---------------------------------------------------------------------------


@every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_has_the_bits_of_steps_that_do_not_overlap(
    device: dict[str, Any], dtype: torch.dtype
) -> None:
    model, optimizer = trained(6, device, dtype=dtype)
    optimizer.synchronize()
    twin, _ = trained(6, {"device": "cpu"}, dtype=dtype, overlap_forward=False)
    assert bits(model) == bits(twin)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stride", ["host", 1, 1.5, 3])
def test_random_delays_change_no_bit(seed: int, stride: float | str) -> None:
    device = dos.VirtualDevice(jitter_seed=seed, poison=True)
    plan = {"device": device, "stride": stride, "resident_ratio": 0.2}
    released = {"release_grads": seed % 2 == 1}
    model, optimizer = trained(6, plan, subgroup_size=300, **released)
    optimizer.synchronize()
    twin, _ = trained(6, {"device": "cpu"}, overlap_forward=False)
    assert bits(model) == bits(twin)


@every_device
def test_accumulated_gradients_change_no_bit(device: dict[str, Any]) -> None:
    model, optimizer = trained(4, device, micro_steps=3)
    optimizer.synchronize()
    twin, _ = trained(4, {"device": "cpu"}, micro_steps=3, overlap_forward=False)
    assert bits(model) == bits(twin)


@every_device
def test_a_gradient_scaler_and_clipping_change_no_bit(device: dict[str, Any]) -> None:
    def run(**options: Any) -> list[bytes]:
        model = make_model()
        optimizer = make_optimizer(model, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(5):
            loss = model(batch(step)).square().mean()
            if step == 2:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        optimizer.synchronize()
        return bits(model)

    assert run(**device) == run(device="cpu", overlap_forward=False)


@every_device
def test_gradients_may_stay_and_grow_over_steps(device: dict[str, Any]) -> None:
    model, optimizer = trained(4, device, zero=False)
    optimizer.synchronize()
    twin, _ = trained(4, {"device": "cpu"}, zero=False, overlap_forward=False)
    assert bits(model) == bits(twin)


class Attention(torch.nn.Module):
    """A parent that reads the weight of a child which is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.last = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.attention(x[None], x[None], x[None])[0][0])


class Tied(torch.nn.Module):
    """One weight in two modules, the second of which reads it by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.middle = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.middle(self.first(x)) @ self.first.weight


class Gain(torch.nn.Module):
    """A parameter of a module that has children."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.gain = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.gain


class Scripted(torch.nn.Module):
    """A child in TorchScript, which takes no hooks on its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(torch.nn.Linear(WIDTH, WIDTH))
        self.last = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x))


class TiedByHand(torch.nn.Module):
    """An embedding whose weight the output reads, without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WIDTH, WIDTH)
        self.middle = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.embed(torch.arange(len(x))) + x)
        return torch.nn.functional.linear(hidden, self.embed.weight)


class Recomputed(torch.nn.Module):
    """A child that backward calls again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.last = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False))


def by_hand(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x @ model.inner.weight.T + model.inner.bias


def called(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


@pytest.mark.parametrize(
    ("kind", "forward"),
    [
        (Attention, called),
        (Tied, called),
        (TiedByHand, called),
        (Recomputed, called),
        (Scripted, called),
        (Gain, called),
        (Gain, by_hand),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_whoever_reads_a_weight_in_training_gets_the_new_one(
    kind: type[torch.nn.Module], forward: Any, gate: Gate
) -> None:
    def run(overlap_forward: bool) -> list[bytes]:
        torch.manual_seed(0)
        model = kind()
        optimizer = make_optimizer(model, overlap_forward=overlap_forward, **DEVICES["virtual"])
        for step in range(4):
            gate.open()
            forward(model, batch(step)).square().mean().backward()
            gate.close()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return bits(model)

    assert run(True) == run(False)


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("where", ["wrapped", "in place", "a function"])
def test_compiled_code_reads_new_weights(where: str, gate: Gate) -> None:
    def run(overlap_forward: bool) -> list[bytes]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Gain()
        optimizer = make_optimizer(model, overlap_forward=overlap_forward, **DEVICES["virtual"])
        forward: Any = model
        if where == "wrapped":
            forward = torch.compile(model, backend="eager", fullgraph=True)
        elif where == "in place":
            model.compile(backend="eager", fullgraph=True)
        else:
            forward = torch.compile(lambda x: model(x), backend="eager", fullgraph=True)
        for step in range(4):
            forward(batch(step)).square().mean().backward()
            gate.close()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return bits(model)

    assert run(True) == run(False)


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_model_that_is_compiled_in_mid_training_reads_new_weights(gate: Gate) -> None:
    def run(overlap_forward: bool) -> list[bytes]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Gain()
        optimizer = make_optimizer(model, overlap_forward=overlap_forward, **DEVICES["virtual"])
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for step, forward in enumerate([model, model, compiled, compiled]):
            forward(batch(step)).square().mean().backward()
            gate.close()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return bits(model)

    assert run(True) == run(False)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_a_state_dict_with_a_part_in_torchscript_is_new(gate: Gate) -> None:
    def run(overlap_forward: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Scripted()
        optimizer = make_optimizer(model, overlap_forward=overlap_forward, **DEVICES["virtual"])
        for step in range(3):
            model(batch(step)).square().mean().backward()
            gate.close()
            optimizer.step()
            optimizer.zero_grad()
        return [value.clone() for value in model.inner.state_dict().values()]

    assert all(map(torch.equal, run(True), run(False)))


def test_weights_are_saved_anew_after_the_first_call_was_a_functional_one(gate: Gate) -> None:
    def run(overlap_forward: bool) -> list[torch.Tensor]:
        model = make_model()
        optimizer = make_optimizer(model, overlap_forward=overlap_forward, **DEVICES["virtual"])
        others = {name: p.detach() for name, p in model.named_parameters()}
        torch.func.functional_call(model, others, batch(9))
        for step in range(2):
            backward(model, step)
            gate.close()
            optimizer.step()
            optimizer.zero_grad()
        return [value.clone() for value in model.state_dict().values()]

    assert all(map(torch.equal, run(True), run(False)))


def test_a_step_post_hook_sees_new_weights(gate: Gate) -> None:
    model, optimizer = trained(2, DEVICES["virtual"])
    seen: list[list[bytes]] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(bits(model)))
    backward(model, 2)
    gate.close()
    optimizer.step()
    twin, _ = trained(3, DEVICES["virtual"], overlap_forward=False)
    assert seen == [bits(twin)]


# --- it does overlap -----------------------------------------------------------------------------


def test_the_first_layer_runs_while_the_last_is_still_to_be_updated(gate: Gate) -> None:
    model, optimizer = trained(2, {"device": "virtual", "stride": "host"})
    backward(model, 2)
    gate.close(after=2)  # updates, of one layer each
    gate.opens_for_waiters = False
    optimizer.step()
    model[0](batch(9))
    assert pending(optimizer)
    gate.open()


def test_updates_run_in_the_order_in_which_the_forward_needs_them() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    last_first = torch.optim.AdamW(list(model.parameters())[::-1], lr=1e-2)
    optimizer = dos.DOSOptimizer(
        last_first, device="virtual", stride="host", subgroup_size=WIDTH**2, overlap_forward=True
    )
    for step in range(2):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.last_step is not None
    updated = [op.subgroup for op in optimizer.last_step.plan.ops if op.kind.value == "publish"]
    assert updated == [2, 1, 0]


def test_the_record_tells_what_the_caller_was_held_for(gate: Gate) -> None:
    model, optimizer = trained(2, DEVICES["virtual"])
    backward(model, 2)
    gate.close()
    optimizer.step()
    model(batch(9))
    record = optimizer.last_step
    assert record is not None
    names = [span.name for span in record.caller_spans()]
    assert names == ["step", *["wait for step"] * (len(names) - 1)]
    assert len(names) > LAYERS


def test_a_recording_takes_each_overlapped_step_once(tmp_path: Any) -> None:
    model, optimizer = trained(2, DEVICES["virtual"])
    optimizer.record_trace(tmp_path / "trace.json", steps=2)
    for step in range(2, 5):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    text = (tmp_path / "trace.json").read_text()
    assert '"wait for step"' in text
    assert '"step": 1' in text
    assert '"step": 2' not in text
