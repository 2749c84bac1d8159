"""What an engine does when a step goes wrong half-way."""

from __future__ import annotations

import pytest
import torch

import dos
from dos.kernels import adam


def broken_update(*_: object, **__: object) -> None:
    raise RuntimeError("a kernel that fails")


@pytest.fixture
def torn(monkeypatch: pytest.MonkeyPatch) -> dos.DOSOptimizer:
    """An optimizer whose first step failed in a kernel."""
    parameter = torch.nn.Parameter(torch.ones(8))
    parameter.grad = torch.ones(8)
    optimizer = dos.DOSOptimizer(torch.optim.AdamW([parameter]), device="virtual", stride=2)
    with monkeypatch.context() as patch:
        patch.setattr(adam, "update", broken_update)
        with pytest.raises(RuntimeError, match="a kernel that fails"):
            optimizer.step()
    return optimizer


def test_a_step_after_a_torn_one_is_refused(torn: dos.DOSOptimizer) -> None:
    with pytest.raises(dos.ConfigError, match="failed half-way"):
        torn.step()


def test_a_torn_step_does_not_count(torn: dos.DOSOptimizer) -> None:
    assert len(torn.state) == 0


@pytest.mark.parametrize("call", ["state_dict", "load_state_dict"])
def test_after_a_torn_step_nothing_is_saved_or_loaded(torn: dos.DOSOptimizer, call: str) -> None:
    with pytest.raises(dos.ConfigError, match=f"^{call}: an earlier step failed half-way"):
        getattr(torn, call)(*([{}] if call == "load_state_dict" else []))
