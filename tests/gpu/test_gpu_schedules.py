"""On CUDA, no order of events is a matter of luck: random delays on all lanes, NaN behind each use.

A lane that does not wait for what it needs reads NaN, or what was there before, and its bits tell.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import closing

import pytest
import torch

from dos import DOSOptimizer
from dos.execute import devices
from dos.execute.accelerator import AcceleratorBackend, DeviceEvent, DeviceStream
from dos.execute.worker import WorkerStream
from dos.plan import Op
from tests.gpu.training import ALL, NUMELS, differing, trained

pytestmark = pytest.mark.gpu

MIXED = (torch.bfloat16, torch.float32, torch.float16)
LONGEST_DELAY_CYCLES = 800_000  # about half a millisecond: several times what a small op takes
NAN_BYTE = 0xFF  # all ones is NaN in fp32, bf16 and fp16 alike
LARGE = tuple(200 * numel for numel in NUMELS)  # copies that last longer than a launch


class DelayedStream(DeviceStream):
    """A lane of the device that idles for a random time before each op."""

    def __init__(self, device: torch.device, seed: str) -> None:
        super().__init__(device)
        self._random = random.Random(seed)

    def run(self, op: Op, link_bytes: int, numel: int, work: Callable[[], None]) -> DeviceEvent:
        def delayed() -> None:
            torch.cuda._sleep(self._random.randrange(LONGEST_DELAY_CYCLES))
            work()

        return super().run(op, link_bytes, numel, delayed)


class RoughAccelerator(AcceleratorBackend):
    """The accelerator with delays on every lane and NaN in all memory that nobody uses."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._host.close()
        self._host = WorkerStream("dos-host", jitter_seed="host")
        self._device_streams = {
            lane: DelayedStream(device, lane.value) for lane in self._device_streams
        }

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        memory = super().empty(numel, dtype)
        self.release([memory])
        return memory

    def release(self, slot: Sequence[torch.Tensor]) -> None:
        for memory in slot:
            n_bytes = memory.numel() * memory.element_size()
            nan = torch.full((n_bytes,), NAN_BYTE, dtype=torch.uint8, device=self._device)
            # On the lane, after the op that used it: a buffer of the host is still being read.
            memory.view(torch.uint8).copy_(nan, non_blocking=True)


@pytest.fixture(autouse=True)
def _rough(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("only CUDA can be told to idle")
    monkeypatch.setattr(devices, "AcceleratorBackend", RoughAccelerator)


@pytest.fixture(scope="module")
def on_the_host() -> dict[str, torch.Tensor]:
    return trained(torch.device("cpu"), MIXED, device="cpu")


@pytest.mark.parametrize("subgroup_size", [997, 3000, ALL])
@pytest.mark.parametrize("device_slots", [1, 2])
@pytest.mark.parametrize("resident_ratio", [0.0, 0.4])
@pytest.mark.parametrize("stride", ["host", 1, 1.5, 2, 7])
def test_any_order_of_events_trains_the_same_bits(
    on_the_host: dict[str, torch.Tensor],
    stride: float | str,
    resident_ratio: float,
    device_slots: int,
    subgroup_size: int,
) -> None:
    got = trained(
        torch.device("cuda"),
        MIXED,
        stride=stride,
        resident_ratio=resident_ratio,
        device_slots=device_slots,
        subgroup_size=subgroup_size,
    )
    assert differing(got, on_the_host) == []


@pytest.mark.parametrize("stride", ["host", 1, 1.5, 2])
def test_long_copies_train_the_same_bits(stride: float | str) -> None:
    options = {"numels": LARGE, "subgroup_size": sum(LARGE) // 12}
    got = trained(torch.device("cuda"), MIXED, stride=stride, **options)
    assert differing(got, trained(torch.device("cpu"), MIXED, device="cpu", **options)) == []


@pytest.mark.parametrize("wire", ["native", "fp32"])
@pytest.mark.parametrize("stride", ["host", 2])
def test_gradients_freed_while_backward_runs_train_the_same_bits(
    stride: float | str, wire: str
) -> None:
    # What is freed too early is written over by the gradients that backward makes next.
    options = {"numels": LARGE, "subgroup_size": sum(LARGE) // 12}
    got = trained(
        torch.device("cuda"), MIXED, stride=stride, wire=wire, release_grads=True, **options
    )
    assert differing(got, trained(torch.device("cpu"), MIXED, device="cpu", **options)) == []


# The check itself: one that cannot fail proves nothing.


@pytest.mark.parametrize(("stride", "kind"), [(1, "slots"), ("host", "stages")])
def test_nan_is_left_where_nobody_reads(stride: float | str, kind: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(4096, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    wrapped = torch.optim.AdamW([parameter])
    with closing(DOSOptimizer(wrapped, stride=stride, subgroup_size=1024)) as optimizer:
        optimizer.step()
        torch.cuda.synchronize()
        staging = optimizer._engine.state.staging
        slots = [memory for slot in staging.slots for memory in slot]
        left = slots if kind == "slots" else [s.view(torch.float32) for s in staging.stages]
        assert left
        assert all(memory.isnan().all() for memory in left)


def test_a_lane_that_waits_for_nothing_is_noticed(
    on_the_host: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DelayedStream, "wait", lambda self, event: None)
    got = trained(torch.device("cuda"), MIXED, stride=1, subgroup_size=997)
    assert differing(got, on_the_host) != []
