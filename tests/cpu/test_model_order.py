"""What the model simulates and what the virtual device runs: the same ops, in the same order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dos
from dos.execute.record import StepRecord
from dos.trace import Span
from perfmodel.comparison import compare
from perfmodel.profile import H100_NODE
from perfmodel.timeline import simulate


def virtual_step(stride: float | str, residents: float, slots: int, path: str = "") -> StepRecord:
    parameter = torch.nn.Parameter(torch.zeros(9 * 1024, dtype=torch.bfloat16))
    optimizer = dos.DOSOptimizer(
        torch.optim.AdamW([parameter]),
        stride=stride,
        subgroup_size=1024,
        resident_ratio=residents,
        device_slots=slots,
        device=dos.VirtualDevice(jitter_seed=1),
    )
    if path:
        optimizer.record_trace(path, steps=1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    step = optimizer.last_step
    optimizer.close()
    assert step is not None
    return step


def order(spans: list[Span]) -> dict[str, list[str]]:
    lanes: dict[str, list[str]] = {}
    for span in sorted(spans, key=lambda each: (each.start_s, each.args["op"])):
        lanes.setdefault(span.lane, []).append(span.name)
    return lanes


CASES = [("host", 0.0, 2), (1, 0.0, 1), (1.5, 0.2, 2), (2, 0.0, 3), (3, 0.5, 1)]


@pytest.mark.parametrize(("stride", "residents", "slots"), CASES)
def test_lanes_run_the_same_ops_in_the_same_order(
    stride: float | str, residents: float, slots: int
) -> None:
    step = virtual_step(stride, residents, slots)
    assert order(simulate(step.plan, H100_NODE)) == order(step.spans())


@pytest.mark.parametrize(("stride", "residents", "slots"), CASES)
def test_both_keep_the_dependencies_of_the_plan(
    stride: float | str, residents: float, slots: int
) -> None:
    step = virtual_step(stride, residents, slots)
    for spans in (simulate(step.plan, H100_NODE), step.spans()):
        for op in step.plan.ops:
            assert all(spans[o].end_s <= spans[op.index].start_s for o in op.waits)


def test_a_recorded_step_is_compared_op_by_op(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    step = virtual_step(1.5, 0.2, 2, str(path))
    found = compare(H100_NODE, path)
    assert [s.name for s in found.measured] == [s.name for s in found.predicted]
    assert len(found.measured) == len(step.plan.ops)
