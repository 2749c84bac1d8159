"""On a real accelerator, the training is that of plain host updates, bit for bit."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from dos import DOSOptimizer

pytestmark = pytest.mark.gpu

NUMELS = (1, 1000, 4097, 20_000, 333)
STEPS = 3
SUBGROUP_SIZE = 3000
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def trained(home: torch.device, dtype: torch.dtype, **options: object) -> dict[str, torch.Tensor]:
    """All weights and state after the steps, as the integers of their bits, on the CPU."""
    generator = torch.Generator().manual_seed(0)

    def random(numel: int) -> torch.Tensor:
        return torch.randn(numel, generator=generator).to(dtype).to(home)

    model = [torch.nn.Parameter(random(numel)) for numel in NUMELS]
    groups = [{"params": model[:2], "lr": 1e-2}, {"params": model[2:], "weight_decay": 0.0}]
    optimizer = DOSOptimizer(torch.optim.AdamW(groups), subgroup_size=SUBGROUP_SIZE, **options)
    with closing(optimizer):
        for step in range(STEPS):
            for index, parameter in enumerate(model):
                grad = random(parameter.numel())
                parameter.grad = None if (step, index) == (1, 2) else grad
            optimizer.step()
        found = {f"{index} weight": parameter.detach() for index, parameter in enumerate(model)}
        for index, parameter in enumerate(model):
            for name, value in optimizer.state[parameter].items():
                found[f"{index} {name}"] = value
        return {
            name: value.cpu().clone().view(INTEGERS[value.dtype]) for name, value in found.items()
        }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("stride", "resident_ratio"),
    [("host", 0.0), (1, 0.0), (1.5, 0.0), (2, 0.0), ("host", 0.4), (1, 0.4), (1.5, 0.4), (2, 0.4)],
)
def test_an_accelerator_trains_the_same_bits(
    dtype: torch.dtype, stride: float | str, resident_ratio: float
) -> None:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    expected = trained(torch.device("cpu"), dtype, device="cpu")
    got = trained(accelerator, dtype, stride=stride, resident_ratio=resident_ratio)
    assert got.keys() == expected.keys()
    assert [name for name, bits in expected.items() if not torch.equal(bits, got[name])] == []
