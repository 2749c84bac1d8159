"""A short training whose every bit is compared, wherever its parameters are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import torch

from dos import DOSOptimizer

NUMELS = (1, 1000, 4097, 20_000, 333)
ALL = sum(NUMELS)
STEPS, BACKWARDS = 4, 2
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def trained(
    home: torch.device,
    dtypes: Sequence[torch.dtype],
    *,
    numels: Sequence[int] = NUMELS,
    **options: object,
) -> dict[str, torch.Tensor]:
    """All weights and state after the steps, as the integers of their bits, on the CPU.

    Parameters take the dtypes by turns. The third has no gradient in the second step. A device
    sends gradients while backward runs from the second step on: nothing is left for the last one.
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
            factors = [random(index) for index in range(len(model))]
            for _ in range(BACKWARDS):
                # The derivative of a product is its other factor, on every device the same bits.
                losses = [(p * f).sum() for p, f in zip(model, factors, strict=True)]
                torch.autograd.backward([x for i, x in enumerate(losses) if (step, i) != (1, 2)])
            optimizer.step()
            optimizer.zero_grad()
        record = optimizer.last_step
        assert record is not None
        assert record.early_grad_bytes == record.grad_bytes
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
