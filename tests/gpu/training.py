"""A short training whose every bit is compared, wherever its parameters are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import torch

from dos import DOSOptimizer

NUMELS = (1, 1000, 4097, 20_000, 333)
ALL = sum(NUMELS)
STEPS = 3
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def trained(
    home: torch.device,
    dtypes: Sequence[torch.dtype],
    *,
    numels: Sequence[int] = NUMELS,
    **options: object,
) -> dict[str, torch.Tensor]:
    """All weights and state after the steps, as the integers of their bits, on the CPU.

    Parameters take the dtypes by turns. The third has no gradient in the second step.
    """
    generator = torch.Generator().manual_seed(0)

    def random(index: int) -> torch.Tensor:
        numbers = torch.randn(numels[index], generator=generator)
        return numbers.to(dtypes[index % len(dtypes)]).to(home)

    model = [torch.nn.Parameter(random(index)) for index in range(len(numels))]
    groups = [{"params": model[:2], "lr": 1e-2}, {"params": model[2:], "weight_decay": 0.0}]
    optimizer = DOSOptimizer(torch.optim.AdamW(groups), **options)
    with closing(optimizer):
        for step in range(STEPS):
            for index, parameter in enumerate(model):
                grad = random(index)
                parameter.grad = None if (step, index) == (1, 2) else grad
            optimizer.step()
        found = {f"{index} weight": parameter.detach() for index, parameter in enumerate(model)}
        for index, parameter in enumerate(model):
            for name, value in optimizer.state[parameter].items():
                found[f"{index} {name}"] = value
        return {
            name: value.cpu().clone().view(INTEGERS[value.dtype]) for name, value in found.items()
        }


def differing(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is not the same bits."""
    assert got.keys() == expected.keys()
    return [name for name, bits in expected.items() if not torch.equal(bits, got[name])]
