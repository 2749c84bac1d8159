"""PyTorch Lightning's Trainer trains with this optimizer: clips, saves, resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dos
from tests.cpu.state_cases import PLANS, each_plan

lightning = pytest.importorskip(
    "pytorch_lightning", reason="needs Lightning: pip install pytorch-lightning"
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:gradients were changed after"),
    pytest.mark.filterwarnings("ignore:.*num_workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]
WIDTH = 16


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """A small model whose optimizer clips its gradients itself."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.plan = plan

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return dos.DOSOptimizer(torch.optim.AdamW(self.parameters(), lr=1e-2), **self.plan)

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        getattr(optimizer, "optimizer", optimizer).clip_grad_norm_(gradient_clip_val)


def run(folder: Path, plan: dict[str, Any], epochs: int, **options: Any) -> Module:
    data = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    module = Module(plan)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        accumulate_grad_batches=2,
        gradient_clip_val=1e-2,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, **options)
    return module


def bits(module: torch.nn.Module) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in module.parameters()]


@each_plan
def test_lightning_gives_the_bits_of_the_host(plan: dict[str, Any], tmp_path: Path) -> None:
    got = bits(run(tmp_path / "one", plan, epochs=2))
    assert got == bits(run(tmp_path / "other", PLANS[0], epochs=2))


def test_lightning_resumes_to_the_same_bits(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", PLANS[4], epochs=2)
    run(tmp_path / "half", PLANS[4], epochs=1)
    (checkpoint,) = (tmp_path / "half").rglob("*.ckpt")
    resumed = run(tmp_path / "resumed", PLANS[0], epochs=2, ckpt_path=str(checkpoint))
    assert bits(resumed) == bits(whole)


def test_lightning_with_overlapped_steps_gives_the_same_bits(tmp_path: Path) -> None:
    plan = {**PLANS[4], "overlap_forward": True}
    module = run(tmp_path / "one", plan, epochs=2)
    optimizer = module.optimizers()
    getattr(optimizer, "optimizer", optimizer).synchronize()
    assert bits(module) == bits(run(tmp_path / "other", PLANS[0], epochs=2))
