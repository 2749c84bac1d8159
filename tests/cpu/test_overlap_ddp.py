"""DistributedDataParallel reduces unused parameters before backward: by then no step runs on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import dos
from tests.cpu.overlap_cases import Gate, backward, batch, make_model, make_optimizer, pending


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("views", [False, True])
def test_a_model_that_looks_for_unused_parameters_waits_for_all(gate: Gate, views: bool) -> None:
    model = DistributedDataParallel(
        make_model(), find_unused_parameters=True, gradient_as_bucket_view=views
    )
    optimizer = make_optimizer(model, device="virtual", stride="host")
    dos.register_ddp(model, optimizer)
    for step in range(2):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    backward(model, 2)
    gate.close()
    optimizer.step()
    running_on = pending(optimizer)
    model(batch(9))
    assert (running_on, pending(optimizer)) == (True, False)
