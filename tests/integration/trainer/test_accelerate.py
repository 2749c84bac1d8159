"""accelerate's loop: prepare, accumulate, clip, with this optimizer inside AcceleratedOptimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="needs deep-optimizer-states[transformers]")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

import dos
from tests.cpu.state_cases import PLANS, each_plan

pytestmark = pytest.mark.filterwarnings("ignore:gradients were changed after")
WIDTH, MICRO_STEPS = 32, 3


@pytest.fixture(autouse=True)
def fresh_accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """accelerate keeps its state for the process; what registering patches goes back."""
    monkeypatch.setattr(Accelerator, "clip_grad_norm_", Accelerator.clip_grad_norm_)
    for kind in (AcceleratorState, GradientState, PartialState):
        kind._reset_state()
    yield
    for kind in (AcceleratorState, GradientState, PartialState):
        kind._reset_state()


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))


def train(plan: dict[str, Any], steps: int = 4, max_norm: float = 1e-2) -> Any:
    """An accelerate loop with accumulation and clipping; the model and its optimizer."""
    model = make_model()
    accelerator = Accelerator(gradient_accumulation_steps=MICRO_STEPS, cpu=True)
    made = dos.DOSOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), **plan)
    model, optimizer = accelerator.prepare(model, made)
    for step in range(steps * MICRO_STEPS):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch(step)).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    return model, made


def bits(model: torch.nn.Module) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in model.parameters()]


@pytest.mark.parametrize("registered", [True, False])
@each_plan
def test_the_loop_gives_the_bits_of_the_host(plan: dict[str, Any], registered: bool) -> None:
    if registered:
        dos.register_transformers()
    model, _ = train(plan)
    reference, _ = train(PLANS[0])
    assert bits(model) == bits(reference)


def test_the_loop_steps_once_per_accumulation() -> None:
    _, optimizer = train(PLANS[0])
    assert {int(its["step"]) for its in optimizer.state.values()} == {4}


def test_registered_clipping_leaves_nothing_to_send_again() -> None:
    dos.register_transformers()
    _, optimizer = train({"device": "virtual", "stride": "host", "subgroup_size": 256})
    record = optimizer.last_step
    assert record is not None
    n_bytes = sum(4 * size.numel for size in optimizer.plan.sizes)
    assert (record.early_grad_bytes, record.grad_bytes) == (n_bytes, n_bytes)


def test_prepare_moves_state_and_keeps_its_bits() -> None:
    model = make_model()
    optimizer = dos.DOSOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), device="cpu")
    model(batch(0)).square().mean().backward()
    optimizer.step()
    before = [its["exp_avg"].clone() for its in optimizer.state.values()]
    Accelerator(cpu=True).prepare(model, optimizer)
    after = [its["exp_avg"] for its in optimizer.state.values()]
    assert all(map(torch.equal, before, after))


def clip_some(accelerator: Accelerator, model: torch.nn.Sequential) -> None:
    accelerator.clip_grad_norm_(model[0].parameters(), 1e-3)


def clip_other_norm(accelerator: Accelerator, model: torch.nn.Sequential) -> None:
    accelerator.clip_grad_norm_(model.parameters(), 1e-3, norm_type=1)


@pytest.mark.parametrize("clip", [clip_some, clip_other_norm])
def test_clipping_that_is_not_the_optimizers_stays_accelerates(clip: Any) -> None:
    dos.register_transformers()
    model = make_model()
    accelerator = Accelerator(cpu=True)
    optimizer = dos.DOSOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), device="cpu")
    accelerator.prepare(model, optimizer)
    model(batch(0)).square().mean().backward()
    clip(accelerator, model)
    assert model[0].weight.grad is not None
    assert float(model[0].weight.grad.norm()) < 2e-3


def test_a_checkpoint_of_accelerate_resumes_to_the_same_bits(tmp_path: Any) -> None:
    def steps(accelerator: Accelerator, model: Any, optimizer: Any, which: range) -> None:
        for step in which:
            accelerator.backward(model(batch(step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    def prepared(plan: dict[str, Any]) -> tuple[Accelerator, Any, Any]:
        model = make_model()
        accelerator = Accelerator(cpu=True)
        optimizer = dos.DOSOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), **plan)
        return accelerator, *accelerator.prepare(model, optimizer)

    whole = prepared(PLANS[4])
    steps(*whole, range(2))
    whole[0].save_state(str(tmp_path))
    steps(*whole, range(2, 4))
    resumed = prepared(PLANS[0])
    resumed[0].load_state(str(tmp_path))
    steps(*resumed, range(2, 4))
    assert bits(resumed[1]) == bits(whole[1])
