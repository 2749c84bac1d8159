"""What a Checkpointer restores into: models however wrapped, and what does not fit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dos
from dos.checkpoint import Checkpointer
from tests.cpu.checkpoint_cases import in_memory
from tests.cpu.checkpointer_cases import Training


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with in_memory() as folder:
        yield Path(folder)


def test_generators_are_restored_last(tmp_path: Path) -> None:
    class Noisy(torch.nn.Linear):
        def _load_from_state_dict(self, *arguments: Any) -> None:
            random.random()
            super()._load_from_state_dict(*arguments)

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model=Noisy(2, 2))
        expected = random.random()
        checkpointer.restore(model=Noisy(2, 2))
        assert random.random() == expected


class Wrapped(torch.nn.Module):
    """A model with a module that is called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(3, 2)


def test_names_do_not_tell_how_a_model_was_wrapped(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        model = Wrapped()
        checkpointer.save(1, model=torch.compile(model))
        bare = Wrapped()
        checkpointer.restore(model=bare)
        assert torch.equal(bare.module.weight, model.module.weight)
        parallel = torch.nn.DataParallel(Wrapped())
        checkpointer.restore(model=parallel)
        assert torch.equal(parallel.module.module.weight, model.module.weight)


def test_tensors_are_read_where_they_are(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        model = torch.nn.Linear(3, 2)
        saved_weight = model.weight.detach().clone()
        checkpointer.save(1, model=model)
        checkpointer._background.wait()
        address = model.weight.data_ptr()
        with torch.no_grad():
            model.weight.zero_()
        checkpointer.restore(model=model)
        assert model.weight.data_ptr() == address
        assert torch.equal(model.weight, saved_weight)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (torch.nn.Linear(3, 2, bias=False), "the model lacks 'model/bias'"),
        (torch.nn.Sequential(torch.nn.Linear(3, 2)), "the checkpoint lacks 'model/0.bias'"),
        (torch.nn.Linear(4, 2), r"float32 of shape \[2, 3\] was saved"),
        (torch.nn.Linear(3, 2).to(torch.bfloat16), "the model has bfloat16"),
    ],
    ids=["fewer", "other", "shape", "dtype"],
)
def test_a_model_that_does_not_fit_is_refused_unchanged(
    model: torch.nn.Module, why: str, tmp_path: Path
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model=torch.nn.Linear(3, 2))
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(dos.ConfigError, match=why):
            checkpointer.restore(model=model)
        assert all(map(torch.equal, before, model.parameters()))


def test_not_strictly_a_model_takes_what_there_is(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        model = torch.nn.Linear(3, 2)
        checkpointer.save(1, model=model)
        other = torch.nn.Linear(3, 2, bias=False)
        other.register_buffer("count", torch.ones(()))
        checkpointer.restore(model=other, strict=False)
        assert torch.equal(other.weight, model.weight)
        assert other.get_buffer("count") == 1


class Counting(torch.nn.Module):
    """A module with extra state, of another size each time."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.history = torch.arange(count)

    def get_extra_state(self) -> dict[str, Any]:
        return {"history": self.history}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.history = state["history"]


def test_extra_state_of_modules_is_restored_by_them(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model=torch.nn.Sequential(Counting(5)))
        model = torch.nn.Sequential(Counting(2))
        checkpointer.restore(model=model)
        assert torch.equal(model[0].history, torch.arange(5))


def test_several_models_and_optimizers_are_saved_by_name(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        one, other = Training(None).run(2), Training(None, seed=1).run(3)
        given = {
            "model": {"generator": one.model, "critic": other.model},
            "optimizer": {"generator": one.optimizer, "critic": other.optimizer},
        }
        checkpointer.save(1, **given)
        expected = one.bits()[0], other.bits()[0]
        one.run(4)
        other.run(4)
        checkpointer.restore(**given)
        assert (one.bits()[0], other.bits()[0]) == expected


def test_a_part_that_was_not_saved_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        training = Training(None)
        checkpointer.save(1, model=training.model)
        with pytest.raises(dos.ConfigError, match="no state of an optimizer was saved"):
            checkpointer.restore(**{**training.parts, "extra": None})
        with pytest.raises(dos.ConfigError, match="no state of 'scheduler' was saved"):
            checkpointer.restore(extra=training.parts["extra"])


def test_other_groups_of_an_optimizer_of_torch_are_refused_before_anything_changes(
    tmp_path: Path,
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        training = Training(None).run(1)
        checkpointer.save(1, model=training.model, optimizer=training.optimizer)
        model = Training(None, seed=1).model
        before = model[0].weight.clone()
        groups = [{"params": [parameter]} for parameter in model.parameters()]
        with pytest.raises(dos.ConfigError, match="param groups"):
            checkpointer.restore(model=model, optimizer=torch.optim.AdamW(groups))
        assert torch.equal(model[0].weight, before)


def test_a_step_below_0_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(dos.ConfigError, match="step"):
        checkpointer.save(-1)
