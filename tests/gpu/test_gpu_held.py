"""State on a real accelerator, held while training goes on: it is of one step."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.cpu.held_cases import assert_equal, now, snapshot
from tests.gpu.test_gpu_state import PLANS, accelerator, after_three, bits, take_steps

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_capture_beside_training_is_of_one_step(plan: dict[str, Any], overlap: bool) -> None:
    parameters, optimizer = after_three(torch.bfloat16, overlap_forward=overlap, **plan)
    other_parameters, other = after_three(torch.bfloat16, **plan)
    held = optimizer.hold_state()
    captured: dict[str, Any] = {}

    def capture() -> None:
        held.ready()
        torch.accelerator.synchronize()
        captured.update(snapshot(held.tree))
        weights = [parameter.detach().cpu().view(torch.int16).tolist() for parameter in parameters]
        captured["weights"] = weights
        held.abandon()

    thread = threading.Thread(target=capture)
    thread.start()
    take_steps(optimizer, parameters, range(10, 13))
    thread.join()
    assert captured.pop("weights") == bits(other_parameters)
    assert_equal(captured, now(other))


def test_what_lies_on_the_device_is_held_by_its_address_there() -> None:
    parameters, optimizer = after_three(torch.bfloat16, stride=1, resident_ratio=0.5)
    held = optimizer.hold_state()
    places = {hold.place for hold in held.holds}
    held.abandon()
    assert places <= {"cpu", str(parameters[0].device)}
    assert str(parameters[0].device).startswith(accelerator().type)
    assert len(places) == 2
