"""What cannot be used is refused: the error says what, where and how to fix it; nothing changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dos

Made = tuple[list[torch.nn.Parameter], torch.optim.AdamW, dos.DOSOptimizer]


def make_parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (5,)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)


@pytest.fixture
def made() -> Iterator[Made]:
    parameters = make_parameters()
    wrapped = torch.optim.AdamW(parameters)
    optimizer = dos.DOSOptimizer(wrapped, device="virtual", stride=2, subgroup_size=4)
    set_gradients(parameters)
    yield parameters, wrapped, optimizer
    optimizer.close()


def refusal(act: Callable[[], object], kind: type[dos.DOSError] = dos.ConfigError) -> str:
    """The text of the error that `act` raises."""
    with pytest.raises(kind) as caught:
        act()
    return str(caught.value)


def assert_says(text: str, *parts: str) -> None:
    """`text` has all `parts`, and a fix."""
    assert [part for part in (*parts, "\n  fix: ") if part not in text] == []


# ---------------------------------------------------------------- options

BAD_OPTIONS: list[tuple[dict[str, Any], list[str]]] = [
    ({"stride": 0}, ["DOSConfig.stride", "0", ">= 1"]),
    ({"stride": 0.5}, ["DOSConfig.stride", "0.5", ">= 1"]),
    ({"stride": float("nan")}, ["DOSConfig.stride", "nan", ">= 1"]),
    ({"stride": float("inf")}, ["DOSConfig.stride", "inf", ">= 1"]),
    ({"stride": "fast"}, ["DOSConfig.stride", "'fast'", '"host"']),
    ({"stride": True}, ["DOSConfig.stride", "True", ">= 1"]),
    ({"subgroup_size": 0}, ["DOSConfig.subgroup_size", "0", "parameters per subgroup"]),
    ({"subgroup_size": 1.5}, ["DOSConfig.subgroup_size", "1.5", "parameters per subgroup"]),
    ({"device": "warp"}, ["DOSConfig.device", "'warp'", '"virtual"']),
    ({"device": "cuda"}, ["DOSConfig.device", "cuda", "move the model to cuda"]),
    ({"strid": 2}, ["DOSConfig", "unknown option 'strid'", "did you mean 'stride'?"]),
    ({"zzz": 2}, ["DOSConfig", "unknown option 'zzz'", "resident_ratio"]),
    ({"resident_ratio": 1.5}, ["DOSConfig.resident_ratio", "1.5"]),
    ({"device_slots": 0}, ["DOSConfig.device_slots", "0"]),
]


@pytest.mark.parametrize(
    ("options", "parts"), BAD_OPTIONS, ids=[str(options) for options, _ in BAD_OPTIONS]
)
def test_bad_option_is_refused_by_name_with_a_fix(
    options: dict[str, Any], parts: list[str]
) -> None:
    wrapped = torch.optim.AdamW(make_parameters())
    assert_says(refusal(lambda: dos.DOSOptimizer(wrapped, **options)), *parts)


@pytest.mark.parametrize("options", [options for options, _ in BAD_OPTIONS], ids=str)
def test_bad_option_is_a_value_error(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="fix: "):
        dos.DOSOptimizer(torch.optim.AdamW(make_parameters()), **options)


# ---------------------------------------------------------------- memory


def test_small_budget_is_refused_with_every_kind_and_the_needed_size() -> None:
    wrapped = torch.optim.AdamW(make_parameters())
    text = refusal(
        lambda: dos.DOSOptimizer(wrapped, device="virtual", stride=2, host_memory_bytes=10),
        dos.PoolError,
    )
    assert_says(
        text, "host_memory_bytes: ", "state", "gradients", "ring", "raise host_memory_bytes to"
    )


def test_budget_that_the_error_names_is_enough() -> None:
    wrapped = torch.optim.AdamW(make_parameters())
    options: dict[str, Any] = {"device": "virtual", "stride": 2, "subgroup_size": 4}
    text = refusal(
        lambda: dos.DOSOptimizer(wrapped, host_memory_bytes=10, **options), dos.PoolError
    )
    named = int(text.split("raise host_memory_bytes to ")[1].split(",")[0])
    with_it = dos.DOSOptimizer(wrapped, host_memory_bytes=named, **options)
    with_it.close()
    assert with_it.config.host_memory_bytes == named


def test_small_ring_is_refused_with_the_needed_size() -> None:
    wrapped = torch.optim.AdamW(make_parameters())
    text = refusal(
        lambda: dos.DOSOptimizer(wrapped, device="virtual", stride="host", ring_bytes=10),
        dos.PoolError,
    )
    assert_says(text, "ring_bytes: ", "staging buffers", "raise ring_bytes to")


# ---------------------------------------------------------------- the wrapped optimizer


class OwnStep(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return None


def complex_parameter() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))])


def double_parameter() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(3, dtype=torch.float64))])


def expanded_parameter() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(1, 3).expand(4, 3))])


def parameter_with_holes() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(8)[::2])])


def parameter_twice() -> torch.optim.Optimizer:
    parameter = make_parameters()[0]
    with pytest.warns(UserWarning, match="duplicate"):
        return torch.optim.AdamW([parameter, parameter])


def frozen_only() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(3), requires_grad=False)])


def bad_eps() -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(make_parameters())
    optimizer.param_groups[0]["eps"] = float("nan")
    return optimizer


BAD_OPTIMIZERS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "sgd": (lambda: torch.optim.SGD(make_parameters(), lr=1.0), ["SGD", "torch.optim.AdamW"]),
    "nothing": (lambda: None, ["NoneType", "torch.optim.AdamW"]),
    "amsgrad": (lambda: torch.optim.Adam(make_parameters(), amsgrad=True), ["amsgrad=True"]),
    "capturable": (
        lambda: torch.optim.Adam(make_parameters(), capturable=True),
        ["param group 0", "capturable=True"],
    ),
    "differentiable": (
        lambda: torch.optim.Adam(make_parameters(), differentiable=True),
        ["param group 0", "differentiable=True"],
    ),
    "own step": (lambda: OwnStep(make_parameters()), ["OwnStep", "step() of its own"]),
    "complex": (complex_parameter, ["param group 0, parameter 0", "complex", "view_as_real"]),
    "float64": (double_parameter, ["param group 0, parameter 0", "float64", "float32"]),
    "expanded": (expanded_parameter, ["parameter 0", "holes or overlaps", "contiguous()"]),
    "holes": (parameter_with_holes, ["parameter 0", "holes or overlaps", "contiguous()"]),
    "twice": (parameter_twice, ["parameter 1", "listed twice", "once"]),
    "frozen": (frozen_only, ["no parameter requires a gradient", "unfreeze"]),
    "eps": (bad_eps, ["param group 0", "eps is nan", "finite"]),
}


@pytest.mark.parametrize("case", list(BAD_OPTIMIZERS))
def test_optimizer_that_cannot_be_wrapped_is_refused(case: str) -> None:
    make, parts = BAD_OPTIMIZERS[case]
    wrapped: Any = make()
    assert_says(refusal(lambda: dos.DOSOptimizer(wrapped, device="virtual")), *parts)


# ---------------------------------------------------------------- steps


def set_lr(made: Made) -> None:
    made[1].param_groups[0]["lr"] = float("inf")


def set_nan_weight_decay(made: Made) -> None:
    made[1].param_groups[0]["weight_decay"] = float("nan")


def replace(made: Made) -> None:
    made[1].param_groups[0]["params"][1] = torch.nn.Parameter(torch.ones(5))


def retype(made: Made) -> None:
    made[0][1].grad = None
    made[0][1].data = made[0][1].data.half()


def reshape(made: Made) -> None:
    made[0][1].grad = None
    made[0][1].data = torch.ones(6)


def reorder(made: Made) -> None:
    made[0][0].data = made[0][0].data.t().contiguous().t()


def sparsify(made: Made) -> None:
    made[0][1].grad = torch.ones(5).to_sparse()


def close(made: Made) -> None:
    made[2].close()


BAD_STEPS: dict[str, tuple[Callable[[Made], None], list[str]]] = {
    "lr": (set_lr, ["param group 0", "lr is inf", "finite"]),
    "weight decay": (set_nan_weight_decay, ["param group 0", "weight_decay is nan", "finite"]),
    "replaced": (replace, ["parameter 1", "replaced in its param group", "new DOSOptimizer"]),
    "retyped": (retype, ["parameter 1", "dtype was torch.float32 and is torch.float16"]),
    "reshaped": (reshape, ["parameter 1", "shape was (5,) and is (6,)"]),
    "reordered": (reorder, ["parameter 0", "memory order was (3, 1) and is (1, 4)"]),
    "sparse": (sparsify, ["parameter 1", "sparse", "sparse=False"]),
    "closed": (close, ["step", "closed", "make a new one"]),
}


@pytest.mark.parametrize("case", list(BAD_STEPS))
def test_step_that_cannot_be_made_is_refused(made: Made, case: str) -> None:
    change, parts = BAD_STEPS[case]
    change(made)
    assert_says(refusal(made[2].step), *parts)


@pytest.mark.parametrize("case", list(BAD_STEPS))
def test_refused_step_leaves_the_weights_alone(made: Made, case: str) -> None:
    BAD_STEPS[case][0](made)
    before = [parameter.detach().clone() for parameter in made[0]]
    refusal(made[2].step)
    assert all(torch.equal(now, was) for now, was in zip(made[0], before, strict=True))


@pytest.mark.parametrize("case", list(BAD_STEPS))
def test_refused_step_is_not_counted(made: Made, case: str) -> None:
    BAD_STEPS[case][0](made)
    refusal(made[2].step)
    assert len(made[2].state) == 0


def test_sparse_gradient_of_an_embedding_is_refused() -> None:
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    optimizer = dos.DOSOptimizer(torch.optim.AdamW(embedding.parameters()), device="virtual")
    embedding(torch.tensor([1, 2])).sum().backward()
    text = refusal(optimizer.step)
    optimizer.close()
    assert_says(text, "param group 0, parameter 0", "sparse=False in nn.Embedding")


# ---------------------------------------------------------------- without a device


def test_stride_without_a_device_warns_once() -> None:
    wrapped = torch.optim.AdamW(make_parameters())
    with pytest.warns(UserWarning, match="stride=2") as caught:
        dos.DOSOptimizer(wrapped, device="cpu", stride=2).close()
    assert len(caught) == 1


@pytest.mark.filterwarnings("ignore:the parameters are in host memory")
def test_stride_without_a_device_changes_nothing() -> None:
    results = []
    for stride in ("auto", 2):
        parameters = make_parameters()
        optimizer = dos.DOSOptimizer(torch.optim.AdamW(parameters), device="cpu", stride=stride)
        set_gradients(parameters)
        optimizer.step()
        optimizer.close()
        results.append(parameters[0].detach())
    assert torch.equal(*results)


# ---------------------------------------------------------------- after a failed construction

FAILURES: dict[str, dict[str, Any]] = {
    "option": {"stride": 0},
    "device": {"device": "warp"},
    "budget": {"device": "virtual", "host_memory_bytes": 10},
    "ring": {"device": "virtual", "stride": "host", "ring_bytes": 10},
}


def stepped() -> tuple[list[torch.nn.Parameter], torch.optim.AdamW]:
    parameters = make_parameters()
    wrapped = torch.optim.AdamW(parameters)
    set_gradients(parameters)
    wrapped.step()
    return parameters, wrapped


@pytest.mark.parametrize("case", list(FAILURES))
def test_failed_construction_leaves_the_wrapped_optimizer_its_state(case: str) -> None:
    parameters, wrapped = stepped()
    refusal(lambda: dos.DOSOptimizer(wrapped, **FAILURES[case]), dos.DOSError)
    wrapped.step()
    assert [int(wrapped.state[parameter]["step"]) for parameter in parameters] == [2, 2]


@pytest.mark.parametrize("case", list(FAILURES))
def test_failed_construction_leaves_no_thread(case: str) -> None:
    _, wrapped = stepped()
    before = threads()
    refusal(lambda: dos.DOSOptimizer(wrapped, **FAILURES[case]), dos.DOSError)
    assert threads() <= before


def threads() -> set[str]:
    """All threads of this process, Python's and native ones, as text that tells them apart."""
    native = {task.name for task in Path("/proc/self/task").iterdir()}
    return native | {thread.name for thread in threading.enumerate()}
