"""The backends: pace and poison of the virtual device, the simulated clock, the choice of one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dos import ConfigError, DOSOptimizer, VirtualDevice
from dos.execute import worker
from dos.execute.accelerator import AcceleratorBackend, DeviceStream
from dos.execute.backend import Backend, Device
from dos.execute.devices import choose_backend
from dos.execute.interpreter import Interpreter
from dos.execute.record import StepRecord
from dos.execute.simulated import SimulatedBackend
from dos.execute.virtual import VirtualBackend
from dos.execute.worker import HostBackend
from dos.plan import Op, SubgroupSize, UpdatePlan, build
from perfmodel.profile import H100_NODE, NodeProfile
from perfmodel.timeline import simulate

# Every op takes 1 to 3 ms: 0.5 ms of launch and the rest for its bytes or parameters.
SLOW = NodeProfile(
    name="a slow node",
    h2d_bytes_per_s=1.0e6,
    d2h_bytes_per_s=0.8e6,
    host_params_per_s=50e3,
    device_params_per_s=100e3,
    launch_s=0.5e-3,
    source="made up",
)
# Powers of two: the sums below are exact.
UNIT = NodeProfile(
    name="a unit node",
    h2d_bytes_per_s=4.0,
    d2h_bytes_per_s=2.0,
    host_params_per_s=1.0,
    device_params_per_s=16.0,
    launch_s=0.5,
    source="made up",
)
CLOCK_ERROR_S = 1e-9  # a perf_counter of an hour, 3600 s, has 5e-13 s to the last bit


def nothing(op: Op) -> Callable[[], None]:
    return lambda: None


def run(
    plan: UpdatePlan,
    backend: Backend,
    work: Callable[[Op], Callable[[], None]] = nothing,
) -> StepRecord:
    with closing(backend), closing(Interpreter(backend)) as interpreter:
        return interpreter.run(plan, work)


def slots_s(plan: UpdatePlan, pace: NodeProfile) -> list[float]:
    return [
        pace.op_s(
            op.kind.lane.value,
            numel=plan.sizes[op.subgroup].numel,
            link_bytes=plan.link_bytes(op),
        )
        for op in plan.ops
    ]


# The virtual device.


@pytest.mark.parametrize("time_scale", [1.0, 2.5])
def test_a_paced_op_lasts_at_least_its_slot(time_scale: float) -> None:
    plan = build([SubgroupSize(100, 200, 200)] * 6, stride=2)
    record = run(plan, VirtualBackend(VirtualDevice(pace=SLOW, time_scale=time_scale)))
    short = [
        span
        for span, slot_s in zip(record.spans(), slots_s(plan, SLOW), strict=True)
        if span.end_s - span.start_s < slot_s - CLOCK_ERROR_S
    ]
    assert short == []


@pytest.mark.parametrize("time_scale", [1.0, 4.0])
def test_times_are_divided_by_the_time_scale(time_scale: float) -> None:
    """All ops in a row take at least their slots, and wall_s is in the same unit."""
    plan = build([SubgroupSize(100, 200, 200)], stride=1)
    record = run(plan, VirtualBackend(VirtualDevice(pace=SLOW, time_scale=time_scale)))
    assert record.wall_s >= sum(slots_s(plan, SLOW)) - CLOCK_ERROR_S


class Clock:
    """A time that passes only in sleeps: no busy machine can make an op overrun."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    substitute = SimpleNamespace(perf_counter=made.perf_counter, sleep=made.sleep)
    monkeypatch.setattr(worker, "time", substitute)
    return made


def host_plan(count: int) -> UpdatePlan:
    return build([SubgroupSize(1, 2, 2)] * count, stride="host", host_parameters=True)


def test_overran_counts_the_ops_whose_work_exceeds_their_slot(clock: Clock) -> None:
    # A slot is 1.5 s.
    record = run(
        host_plan(5),
        VirtualBackend(VirtualDevice(pace=UNIT)),
        lambda op: lambda: clock.sleep(2.0 if op.subgroup in (1, 3) else 1.0),
    )
    assert record.overran == 2


def test_the_time_scale_makes_room_for_the_work(clock: Clock) -> None:
    record = run(
        host_plan(5),
        VirtualBackend(VirtualDevice(pace=UNIT, time_scale=2.0)),
        lambda op: lambda: clock.sleep(2.0),
    )
    assert record.overran == 0


def test_an_op_that_overruns_is_not_prolonged(clock: Clock) -> None:
    run(
        host_plan(1),
        VirtualBackend(VirtualDevice(pace=UNIT)),
        lambda op: lambda: clock.sleep(2.0),
    )
    assert clock.now_s == 2.0


def test_unpaced_ops_never_overrun() -> None:
    record = run(host_plan(2), VirtualBackend(VirtualDevice()), lambda op: lambda: time.sleep(1e-3))
    assert record.overran == 0


def test_tiny_slots_are_all_overrun() -> None:
    pace = NodeProfile("a fast node", 1e15, 1e15, 1e15, 1e15, 0.0, "made up")
    plan = build([SubgroupSize(100, 200, 200)] * 4, stride=2)
    record = run(
        plan, VirtualBackend(VirtualDevice(pace=pace)), lambda op: lambda: time.sleep(1e-3)
    )
    assert record.overran == len(plan.ops)


def test_the_label_names_the_pace() -> None:
    with closing(VirtualBackend(VirtualDevice(pace=SLOW))) as backend:
        assert backend.label == "virtual device paced like a slow node"


def staging_after_a_step(stride: float | str, *, poison: bool, name: str) -> list[torch.Tensor]:
    """fp32 copies of the slots or the stages after one step."""
    parameter = torch.nn.Parameter(torch.ones(4096))
    parameter.grad = torch.ones(4096)
    optimizer = DOSOptimizer(
        torch.optim.AdamW([parameter]),
        device=VirtualDevice(poison=poison),
        stride=stride,
        subgroup_size=1024,
        threads=1,
    )
    with closing(optimizer):
        optimizer.step()
        staging = optimizer._engine.state.staging
        if name == "stages":
            return [stage.view(torch.float32).clone() for stage in staging.stages]
        return [memory.clone() for slot in staging.slots for memory in slot]


def test_poison_fills_a_slot_with_nan_after_its_flush() -> None:
    slots = staging_after_a_step(1, poison=True, name="slots")
    assert all(slot.isnan().all() for slot in slots)


def test_poison_fills_a_stage_with_nan_after_its_publish() -> None:
    stages = staging_after_a_step("host", poison=True, name="stages")
    assert all(stage.isnan().all() for stage in stages)


def test_without_poison_a_slot_keeps_what_was_flushed() -> None:
    slots = staging_after_a_step(1, poison=False, name="slots")
    assert not any(slot.isnan().any() for slot in slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_poisoned_memory_is_nan_from_the_start(dtype: torch.dtype) -> None:
    with closing(VirtualBackend(VirtualDevice(poison=True))) as backend:
        assert backend.empty(7, dtype).isnan().all()


# The simulated clock.


def makespan_s(plan: UpdatePlan, pace: NodeProfile = UNIT) -> float:
    return max(span.end_s for span in run(plan, SimulatedBackend(pace)).spans())


def test_one_host_subgroup_takes_gradient_and_update_and_publish() -> None:
    plan = build([SubgroupSize(numel=8, grad_bytes=16, weight_bytes=32)], stride="host")
    assert makespan_s(plan) == (0.5 + 16 / 2) + (0.5 + 8 / 1) + (0.5 + 32 / 4)


def test_one_streamed_subgroup_takes_fetch_and_update_and_flush() -> None:
    plan = build([SubgroupSize(numel=8, grad_bytes=16, weight_bytes=32)], stride=1)
    assert makespan_s(plan) == (0.5 + 96 / 4) + (0.5 + 8 / 16) + (0.5 + 96 / 2)


def test_one_resident_subgroup_takes_its_update() -> None:
    plan = build([SubgroupSize(8, 16, 32)], stride="host", resident_ratio=1)
    assert makespan_s(plan) == 0.5 + 8 / 16


def test_host_parameters_take_one_update_after_the_other() -> None:
    assert makespan_s(host_plan(5)) == 5 * (0.5 + 1 / 1)


def test_one_slot_takes_streamed_subgroups_one_by_one() -> None:
    plan = build([SubgroupSize(8, 16, 32)] * 4, stride=1, slots=1)
    assert makespan_s(plan) == 4 * ((0.5 + 96 / 4) + (0.5 + 8 / 16) + (0.5 + 96 / 2))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_two_slots_overlap_flush_and_fetch(count: int) -> None:
    """A slot is busy for fetch, update and flush; the second runs behind it by one flush."""
    level = NodeProfile("a level node", 96.0, 96.0, 1.0, 16.0, 0.0, "made up")
    fetch_s, update_s, flush_s = 1.0, 0.5, 1.0
    plan = build([SubgroupSize(8, 16, 32)] * count, stride=1, slots=2)
    assert makespan_s(plan, level) == count / 2 * (fetch_s + update_s + flush_s) + flush_s


def test_both_ways_of_the_link_and_both_processors_overlap() -> None:
    """With host and device alike, a step of half each lasts less than one on the host."""
    sizes = [SubgroupSize(1000, 2000, 2000)] * 16
    fast_link = NodeProfile("a fast link", 1e6, 1e6, 1e3, 1e3, 0.0, "made up")
    mixed = makespan_s(build(sizes, stride=2), fast_link)
    assert mixed < 0.6 * makespan_s(build(sizes, stride="host"), fast_link)


def test_simulation_is_deterministic() -> None:
    plan = build([SubgroupSize(10 + i, 20, 20) for i in range(12)], stride=2, resident_ratio=0.25)
    spans = [run(plan, SimulatedBackend(H100_NODE)).spans() for _ in range(2)]
    assert spans[0] == spans[1]


@given(
    st.lists(st.integers(10_000, 10_000_000), max_size=12),
    st.sampled_from([1, 1.5, 2, 3, "host"]),
    st.sampled_from([0, 0.25]),
)
def test_a_simulated_run_is_what_the_model_says_of_its_plan(
    numels: list[int], stride: float | str, residents: float
) -> None:
    """Also where ops share what there is: each span, from an interpreter and from the plan."""
    node = replace(H100_NODE, host_memory_bytes_per_s=80e9, link_bytes_per_s=90e9)
    sizes = [SubgroupSize(n, 2 * n, 2 * n) for n in numels]
    plan = build(sizes, stride=stride, resident_ratio=residents)
    ran = [(s.start_s, s.end_s) for s in run(plan, SimulatedBackend(node)).spans()]
    predicted = [(s.start_s, s.end_s) for s in simulate(plan, node)]
    assert ran == [pytest.approx(span) for span in predicted]


def test_every_simulated_step_starts_at_zero() -> None:
    plan = build([SubgroupSize(8, 16, 32)] * 4, stride=2)
    backend = SimulatedBackend(UNIT)
    with closing(Interpreter(backend)) as interpreter:
        first, second = (interpreter.run(plan, nothing).spans() for _ in range(2))
    assert first == second


def test_simulation_runs_no_body() -> None:
    ran: list[int] = []
    run(host_plan(3), SimulatedBackend(UNIT), lambda op: lambda: ran.append(op.index))
    assert ran == []


def test_a_simulation_says_so() -> None:
    assert SimulatedBackend(UNIT).label == "simulation of a unit node"


# The choice.

CPU = [torch.zeros(2), torch.zeros(3)]
META = [torch.zeros(2, device="meta")]


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("auto", HostBackend),
        ("cpu", HostBackend),
        (torch.device("cpu"), HostBackend),
        ("virtual", VirtualBackend),
        (VirtualDevice(), VirtualBackend),
    ],
    ids=str,
)
def test_a_device_means_a_backend(device: object, kind: type[Backend]) -> None:
    with closing(choose_backend(device, CPU)) as backend:
        assert type(backend) is kind


REFUSALS: dict[str, tuple[object, Sequence[torch.Tensor], str, str]] = {
    "no such device": ("gpu0", CPU, "'gpu0' is no device", "cuda:0"),
    "empty": ("", CPU, "'' is no device", '"auto"'),
    "bad index": ("cuda:x", CPU, "'cuda:x' is no device", '"auto"'),
    "parameters elsewhere": ("cuda", CPU, "parameters on cuda; they are on cpu", "move the model"),
    "cpu of meta": ("cpu", META, "parameters on cpu; they are on meta", "move the model"),
    "virtual of meta": ("virtual", META, "a virtual device needs parameters on cpu", "move"),
    "made virtual of meta": (VirtualDevice(), META, "a virtual device needs", "move the model"),
    "two devices": ("auto", [*CPU, *META], "on cpu and on meta", "one DOSOptimizer per device"),
}


@pytest.mark.parametrize(("device", "tensors", "what", "fix"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_says_what_and_how_to_fix_it(
    device: object, tensors: Sequence[torch.Tensor], what: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_backend(device, tensors)
    assert (what in caught.value.what, fix in caught.value.fix) == (True, True)


@pytest.mark.parametrize("name", [n for n in vars(Device) if not n.startswith("_")])
def test_the_accelerator_has_what_a_device_offers(name: str) -> None:
    assert hasattr(AcceleratorBackend, name)


def test_a_device_stream_has_what_a_stream_offers() -> None:
    assert {"wait", "run"} <= set(vars(DeviceStream))
