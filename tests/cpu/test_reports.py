"""What an optimizer says of its steps: phases, metrics, traces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dos
from dos.errors import ConfigError


@pytest.fixture(params=["cpu", "virtual"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def trained(device: str) -> Iterator[tuple[torch.nn.Module, dos.DOSOptimizer]]:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    options = {"stride": 2, "subgroup_size": 256} if device == "virtual" else {}
    optimizer = dos.DOSOptimizer(torch.optim.AdamW(model.parameters()), device=device, **options)
    train(model, optimizer, 2)
    yield model, optimizer
    optimizer.close()


def train(model: torch.nn.Module, optimizer: dos.DOSOptimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def events_of(path: Path) -> list[dict[str, object]]:
    return [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]


def test_metrics_are_empty_before_the_first_step() -> None:
    model = torch.nn.Linear(2, 2)
    assert dos.DOSOptimizer(torch.optim.AdamW(model.parameters()), device="cpu").metrics() == {}


def test_metrics_are_numbers_in_one_flat_dict(
    trained: tuple[torch.nn.Module, dos.DOSOptimizer],
) -> None:
    assert {type(value) for value in trained[1].metrics().values()} <= {int, float}


def test_metrics_end_in_their_unit(trained: tuple[torch.nn.Module, dos.DOSOptimizer]) -> None:
    assert all(name.endswith(("_s", "_bytes", "_per_s")) for name in trained[1].metrics())


def test_phases_name_every_kind_of_op_and_the_comparison(
    trained: tuple[torch.nn.Module, dos.DOSOptimizer], device: str
) -> None:
    record = trained[1].last_step
    assert record is not None
    kinds = {op.kind.value for op in record.plan.ops}
    assert set(record.phases_s) == kinds | {"compare_gradients"}


def test_a_trace_is_written_after_the_last_of_its_steps(
    trained: tuple[torch.nn.Module, dos.DOSOptimizer], tmp_path: Path
) -> None:
    model, optimizer = trained
    path = tmp_path / "trace.json"
    optimizer.record_trace(path, steps=2)
    train(model, optimizer, 1)
    assert not path.exists()
    train(model, optimizer, 1)
    assert {event["args"]["step"] for event in events_of(path)} == {0, 1}  # type: ignore[index]


def test_a_trace_has_the_spans_of_every_lane_of_backward_and_of_the_caller(
    trained: tuple[torch.nn.Module, dos.DOSOptimizer], device: str, tmp_path: Path
) -> None:
    model, optimizer = trained
    path = tmp_path / "trace.json"
    optimizer.record_trace(path, steps=1)
    train(model, optimizer, 1)
    names = {str(event["name"]).split()[0] for event in events_of(path)}
    expected = {op.kind.value for op in optimizer.plan.ops} | {"step", "wait"}
    assert names == (expected | {"backward"} if device == "virtual" else expected)


def test_steps_follow_one_another_in_a_trace(
    trained: tuple[torch.nn.Module, dos.DOSOptimizer], tmp_path: Path
) -> None:
    model, optimizer = trained
    path = tmp_path / "trace.json"
    optimizer.record_trace(path, steps=3)
    train(model, optimizer, 3)
    updates = [e for e in events_of(path) if str(e["name"]).startswith("update_host")]
    starts = [(e["args"]["step"], e["ts"]) for e in updates]  # type: ignore[index]
    assert starts == sorted(starts)


def test_a_trace_into_no_directory_is_refused(
    trained: tuple[torch.nn.Module, dos.DOSOptimizer], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"no directory {tmp_path / 'none'}"):
        trained[1].record_trace(tmp_path / "none" / "trace.json")


def test_a_trace_that_cannot_be_written_is_said_and_leaves_the_step_alone(
    trained: tuple[torch.nn.Module, dos.DOSOptimizer], tmp_path: Path
) -> None:
    model, optimizer = trained
    optimizer.record_trace(tmp_path, steps=1)  # a directory
    with pytest.warns(UserWarning, match=f"no trace was written: .*{tmp_path}"):
        train(model, optimizer, 1)
    train(model, optimizer, 1)  # silently
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}


def test_a_trace_of_no_steps_is_refused(
    trained: tuple[torch.nn.Module, dos.DOSOptimizer], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        trained[1].record_trace(tmp_path / "trace.json", steps=0)
