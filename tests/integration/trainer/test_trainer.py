"""Hugging Face's Trainer trains with this optimizer: evaluates, saves, resumes, clips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs deep-optimizer-states[transformers]")
pytest.importorskip("accelerate", reason="needs deep-optimizer-states[transformers]")

from accelerate import Accelerator
from transformers import Trainer, TrainerCallback

import dos
from dos.plan import Placement
from tests.cpu.tolerances import AFTER_STEPS_OF_A_MODEL
from tests.integration.trainer.llama import PLANS, STEPS, bits, inner, make_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:gradients were changed after"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
]
RESUMED_AT = 2
CLIPPED = {"max_grad_norm": 0.5}  # so that it acts: the norms here are below the default


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered for one test: what is patched goes back after it."""
    monkeypatch.setattr(Accelerator, "clip_grad_norm_", Accelerator.clip_grad_norm_)
    dos.register_transformers()


class Sent(TrainerCallback):  # type: ignore[misc]
    """Bytes of gradients that each step sent to the host, and those of them during backward."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        record = inner(kwargs["optimizer"]).last_step
        assert record is not None
        self.sent.append((record.grad_bytes, record.early_grad_bytes))


def run(folder: Path, plan: dict[str, Any], **options: Any) -> Trainer:
    trainer = make_trainer(folder, plan, **{**CLIPPED, **options})
    trainer.train()
    return trainer


def run_of_torch(folder: Path) -> Trainer:
    trainer = make_trainer(folder, {"device": "cpu"}, dtype=torch.float32, **CLIPPED)
    trainer.optimizer = torch.optim.AdamW(trainer.optimizer.param_groups, lr=1e-3)
    trainer.train()
    return trainer


def assert_near(one: torch.nn.Module, other: torch.nn.Module) -> None:
    """The same weights, as far as arithmetic in another order lets them be."""
    allowed = AFTER_STEPS_OF_A_MODEL
    for mine, its in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=allowed.relative, atol=allowed.absolute)


def host_grad_bytes(optimizer: dos.DOSOptimizer) -> int:
    """The bytes of one bf16 gradient of everything that the host updates."""
    plan = optimizer.plan
    placed = zip(plan.sizes, plan.placement, strict=True)
    return sum(2 * size.numel for size, at in placed if at is Placement.HOST)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_trainer_gives_the_same_bits_with_every_stride(
    plan: dict[str, Any], tmp_path: Path
) -> None:
    trainer = run(tmp_path / "one", plan)
    reference = run(tmp_path / "other", {"device": "cpu", "subgroup_size": 10_000})
    assert bits(trainer.model) == bits(reference.model)


def test_a_trainer_that_is_not_registered_gives_the_same_bits_with_every_stride(
    tmp_path: Path,
) -> None:
    first, *others = (bits(run(tmp_path / name, PLANS[name]).model) for name in PLANS)
    assert all(other == first for other in others)


def test_a_trainer_trains_as_with_the_optimizer_of_torch(tmp_path: Path) -> None:
    trainer = run(tmp_path / "one", PLANS["k=1.5"], dtype=torch.float32)
    twin = run_of_torch(tmp_path / "other")
    assert_near(trainer.model, twin.model)


@pytest.mark.usefixtures("registered")
def test_registered_or_not_the_results_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_it = run(tmp_path / "one", PLANS["k=1.5"], dtype=torch.float32)
    monkeypatch.undo()
    without = run(tmp_path / "other", PLANS["k=1.5"], dtype=torch.float32)
    assert_near(with_it.model, without.model)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("other", ["cpu", "k=1"])
def test_a_resumed_run_is_the_uninterrupted_one(other: str, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", PLANS["k=1.5"], save_strategy="steps", save_steps=RESUMED_AT)
    checkpoint = tmp_path / "whole" / f"checkpoint-{RESUMED_AT}"
    resumed = make_trainer(tmp_path / "resumed", PLANS[other], **CLIPPED)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert bits(resumed.model) == bits(whole.model)


def test_evaluation_between_steps_changes_nothing(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", PLANS["k=1.5"])
    evaluated = run(tmp_path / "evaluated", PLANS["k=1.5"], eval_strategy="steps", eval_steps=2)
    assert [row for row in evaluated.state.log_history if "eval_loss" in row]
    assert bits(evaluated.model) == bits(plain.model)


@pytest.mark.usefixtures("registered")
def test_a_registered_trainer_sends_each_gradient_once(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, PLANS["k=1.5"])
    seen = Sent()
    trainer.add_callback(seen)
    trainer.train()
    once = host_grad_bytes(inner(trainer.optimizer))
    # The first step learns how many backwards a step takes.
    assert [total for total, _ in seen.sent] == [once] * STEPS
    assert [early for _, early in seen.sent] == [0, *[once] * (STEPS - 1)]


def test_early_sending_pauses_in_a_trainer_that_is_not_registered(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, PLANS["k=1.5"], max_grad_norm=1e-2)
    seen = Sent()
    trainer.add_callback(seen)
    trainer.train()
    once = host_grad_bytes(inner(trainer.optimizer))
    assert seen.sent == [(once, 0), (2 * once, once), *[(once, 0)] * (STEPS - 2)]


@pytest.mark.usefixtures("registered")
def test_a_trainer_reports_the_norm_of_the_gradients(tmp_path: Path) -> None:
    trainer = run(tmp_path / "one", PLANS["k=1.5"], dtype=torch.float32)
    twin = run_of_torch(tmp_path / "other")

    def norms(trainer: Trainer) -> list[float]:
        return [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]

    assert norms(trainer) == pytest.approx(norms(twin), rel=1e-3)


@pytest.mark.usefixtures("registered")
def test_a_trainer_without_clipping_sends_each_gradient_once(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, PLANS["k=1.5"], max_grad_norm=0.0)
    seen = Sent()
    trainer.add_callback(seen)
    trainer.train()
    assert seen.sent[-1][0] == host_grad_bytes(inner(trainer.optimizer))


@pytest.mark.usefixtures("registered")
def test_registering_twice_changes_nothing() -> None:
    once = Accelerator.clip_grad_norm_
    dos.register_transformers()
    assert Accelerator.clip_grad_norm_ is once


def test_without_accelerate_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dos.integrations.transformers.find_spec", lambda name: None)
    with pytest.raises(dos.ConfigError, match=r"pip install .*transformers"):
        dos.register_transformers()
