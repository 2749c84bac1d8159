"""A change of stride between steps: no bit of training changes, no gradient is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dos
from dos.execute.virtual import VirtualBackend
from dos.plan import Placement
from perfmodel.profile import H100_NODE

STEPS = 7
SHAPES = [(5, 3), (11,), (16, 4), (7, 2), (33,)]
STRIDES = [1, 1.25, 2, 3, 7, "host"]
Change = Callable[[dos.DOSOptimizer, int], None]
Bits = list[bytes]


class Model:
    """Parameters in fp32 and bf16 whose gradients backward makes."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        dtypes = [torch.float32, torch.bfloat16]
        self.parameters = [
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtypes[index % 2]))
            for index, shape in enumerate(SHAPES)
        ]

    def backward(self, step: int) -> None:
        for index, parameter in enumerate(self.parameters):
            ((parameter.float() - 0.1 * step) ** 2).sum().mul(1 + index).backward()


def trained(
    change: Change = lambda optimizer, step: None, backwards: int = 1, **options: object
) -> Bits:
    """Weights and state after `STEPS` steps, before each of which `change` is called."""
    model = Model()
    options = {"subgroup_size": 16, "stride": "auto", **options}
    wrapped = torch.optim.AdamW(model.parameters, lr=1e-2, weight_decay=0.1)
    with closing(dos.DOSOptimizer(wrapped, **options)) as optimizer:
        for step in range(STEPS):
            change(optimizer, step)
            for _ in range(backwards):
                model.backward(step)
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        kept = [tensor for p in model.parameters for tensor in (p, *optimizer.state[p].values())]
        return [t.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for t in kept]


def change_stride(optimizer: dos.DOSOptimizer, stride: float | str) -> None:
    optimizer._engine.change_stride(stride)  # type: ignore[arg-type]


def by(strides: list[float | str]) -> Change:
    return lambda optimizer, step: change_stride(optimizer, strides[step % len(strides)])


@pytest.fixture(scope="module")
def on_the_host() -> dict[int, Bits]:
    """By the number of backwards per step."""
    return {count: trained(device="cpu", backwards=count) for count in (1, 2)}


@settings(max_examples=25)
@given(
    strides=st.lists(st.sampled_from(STRIDES), min_size=2, max_size=STEPS),
    ratio=st.sampled_from([0.0, 0.4]),
    slots=st.sampled_from([1, 2]),
    size=st.sampled_from([4, 13, 100]),
    release=st.booleans(),
    wire=st.sampled_from(["native", "fp32"]),
    backwards=st.sampled_from([1, 2]),
    seed=st.none() | st.integers(0, 3),
)
def test_changes_of_stride_give_the_bits_of_the_host(
    on_the_host: dict[int, Bits],
    strides: list[float | str],
    ratio: float,
    slots: int,
    size: int,
    release: bool,
    wire: str,
    backwards: int,
    seed: int | None,
) -> None:
    after = trained(
        by(strides),
        backwards,
        device=dos.VirtualDevice(poison=True, jitter_seed=seed),
        resident_ratio=ratio,
        device_slots=slots,
        subgroup_size=size,
        release_grads=release and backwards == 1,
        wire=wire,
    )
    assert after == on_the_host[backwards]


def test_after_a_change_every_gradient_of_the_host_is_sent_during_backward() -> None:
    strides = [2, "host", 1.25, 3, 1, "host", 2]

    def check(optimizer: dos.DOSOptimizer, step: int) -> None:
        if step > 1:  # the first step learns how many backwards there are
            assert optimizer.last_step is not None
            homes = optimizer._engine.state.subgroups
            placed = zip(optimizer.last_step.plan.placement, homes, strict=True)
            on_host = [home for at, home in placed if at is Placement.HOST]
            expected = sum(piece.grad_bytes for home in on_host for piece in home.pieces)
            assert optimizer.last_step.early_grad_bytes == expected
        change_stride(optimizer, strides[step])

    trained(check, device="virtual")


def test_the_plan_that_runs_is_that_of_the_new_stride() -> None:
    ran = []

    def change(optimizer: dos.DOSOptimizer, step: int) -> None:
        ran.append(optimizer.last_step.stride if optimizer.last_step else None)
        change_stride(optimizer, STRIDES[step % len(STRIDES)])

    trained(change, device="virtual")
    assert ran == [None, "1", "1.25", "2", "3", "7", "host"]


def test_a_change_moves_no_state() -> None:
    addresses = set()

    def change(optimizer: dos.DOSOptimizer, step: int) -> None:
        addresses.add(tuple(home.exp_avg.data_ptr() for home in optimizer._engine.state.subgroups))
        change_stride(optimizer, STRIDES[step % len(STRIDES)])

    trained(change, device="virtual", resident_ratio=0.4)
    assert len(addresses) == 1


def test_without_streaming_there_are_no_slots() -> None:
    held = []

    def change(optimizer: dos.DOSOptimizer, step: int) -> None:
        change_stride(optimizer, STRIDES[-1 - step % len(STRIDES)])
        held.append(len(optimizer._engine.state.staging.slots))

    trained(change, device="virtual", device_slots=2)
    assert held == [0, 2, 2, 2, 2, 2, 0]


def test_parameters_added_after_a_change_train_to_the_same_bits() -> None:
    def weights(device: str) -> list[bytes]:
        model, late = Model(), torch.nn.Parameter(torch.ones(37))
        wrapped = torch.optim.AdamW(model.parameters, lr=1e-2)
        with closing(dos.DOSOptimizer(wrapped, device=device, subgroup_size=8)) as optimizer:
            for step in range(STEPS):
                if step == 2:
                    optimizer.add_param_group({"params": [late]})
                if device == "virtual":
                    change_stride(optimizer, STRIDES[step % len(STRIDES)])
                model.backward(step)
                (late**3).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().view(torch.uint8).numpy().tobytes() for p in (*model.parameters, late)]

    assert weights("virtual") == weights("cpu")


# ---------------------------------------------------------------- what leads to a change

# Ops last a while, so that their real work, a few microseconds, seldom misses its slot.
SLOW_HOST = replace(H100_NODE, name="slow host", launch_s=5e-3, host_params_per_s=5e3)
SLOW_LINK = replace(H100_NODE, name="slow link", launch_s=5e-3, d2h_bytes_per_s=4e4)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "dos"):
        yield caplog


def test_lanes_that_leave_their_prediction_change_the_stride(
    on_the_host: dict[int, Bits], log: pytest.LogCaptureFixture
) -> None:
    believed = replace(SLOW_HOST, launch_s=1e-5, d2h_bytes_per_s=4e5)
    strides = []
    after = trained(
        lambda optimizer, step: strides.append(optimizer.plan.stride),
        device=dos.VirtualDevice(pace=SLOW_LINK),
        profile=believed,
        subgroup_size=64,
    )
    assert after == on_the_host[1]
    assert "lanes took, over their predicted time: d2h" in log.text
    assert strides[-1] != strides[0]


def test_a_device_short_of_memory_streams_nothing_until_it_has_room(
    on_the_host: dict[int, Bits],
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
) -> None:
    free = {"bytes": -1}
    monkeypatch.setattr(VirtualBackend, "free_bytes", lambda _: free["bytes"])
    strides = []

    def watch(optimizer: dos.DOSOptimizer, step: int) -> None:
        strides.append(optimizer.plan.stride)
        free["bytes"] = -1 if step < 3 else 1 << 40

    after = trained(watch, device=dos.VirtualDevice(pace=SLOW_HOST), subgroup_size=64)
    assert after == on_the_host[1]
    assert [stride == "host" for stride in strides] == [False] * 3 + [True] * 3 + [False]
    assert ["short" in log.text, "has room again" in log.text] == [True, True]


def test_slots_that_cannot_be_had_end_no_training(
    on_the_host: dict[int, Bits],
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
) -> None:
    strides = []

    def change(optimizer: dos.DOSOptimizer, step: int) -> None:
        strides.append(optimizer.plan.stride)
        if step == 0:  # no slots yet
            change_stride(optimizer, "host")
            monkeypatch.setattr(VirtualBackend, "empty", refuse)

    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("the device is full")

    device = dos.VirtualDevice(pace=SLOW_HOST)
    assert trained(change, device=device, subgroup_size=64) == on_the_host[1]
    assert (strides[1:], "out of memory" in log.text) == (["host"] * (STEPS - 1), True)
