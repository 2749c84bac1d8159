"""Mixed precision as torch has it: `torch.autocast` and `torch.amp.GradScaler`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dos
from dos.plan import Placement
from tests.cpu.tolerances import AFTER_STEPS_OF_A_MODEL

WIDTH = 32  # so that every piece is a whole number of cache lines, without padding
STEPS = 5
INFINITE_AT = 2
DEVICES: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu"},
    "virtual": {
        "device": dos.VirtualDevice(poison=True, jitter_seed=0),
        "stride": 2,
        "subgroup_size": 256,
    },
}
every_device = pytest.mark.parametrize("options", DEVICES.values(), ids=DEVICES)
pytestmark = pytest.mark.filterwarnings("ignore:gradients were changed after")

BeforeStep = Callable[[torch.amp.GradScaler, torch.optim.Optimizer], None]


def make_model(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    return torch.nn.Sequential(*layers).to(dtype)


def make_scaler(init_scale: float = 2.0**10) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)


def loss_of(model: torch.nn.Module, step: int, autocast: torch.dtype | None) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        return model(x).float().square().mean()


def nothing(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    pass


def unscale(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)


def unscale_and_clip(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)
    clip(optimizer, 1e-2)


def clip_scaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Clipping without unscaling: to a norm of gradients times the scale."""
    clip(optimizer, 1.0)


def clip(optimizer: torch.optim.Optimizer, max_norm: float) -> None:
    if isinstance(optimizer, dos.DOSOptimizer):
        optimizer.clip_grad_norm_(max_norm)
    else:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)


WAYS = [nothing, unscale, unscale_and_clip, clip_scaled]
FP16_WAYS = [nothing, clip_scaled]  # torch does not unscale fp16 gradients
every_way = pytest.mark.parametrize("before_step", WAYS)


def take_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    step: int,
    *,
    autocast: torch.dtype | None = None,
    before_step: BeforeStep = nothing,
    bad: float | None = None,
    by_model: bool = False,
) -> None:
    """One step; `bad` is put into a gradient, `by_model` resets gradients past the optimizer."""
    (model if by_model else optimizer).zero_grad()
    scaler.scale(loss_of(model, step, autocast)).backward()
    if bad is not None:
        grad = list(model.parameters())[3].grad
        assert grad is not None
        grad[1] = bad
    before_step(scaler, optimizer)
    scaler.step(optimizer)
    scaler.update()


def train(
    optimizer_of: Callable[[torch.nn.Module], torch.optim.Optimizer],
    *,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    before_step: BeforeStep = nothing,
    infinite_at: int | None = INFINITE_AT,
) -> tuple[list[torch.Tensor], dict[str, Any], Any]:
    """Weights, the scaler's state and the optimizer after `STEPS` steps."""
    model = make_model(dtype)
    optimizer, scaler = optimizer_of(model), make_scaler()
    for step in range(STEPS):
        how: dict[str, Any] = {"autocast": autocast, "before_step": before_step}
        bad = math.inf if step == infinite_at else None
        take_step(model, optimizer, scaler, step, bad=bad, **how)
    return weights_of(model), scaler.state_dict(), optimizer


def weights_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def same(mine: list[torch.Tensor], its: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(mine, its, strict=True))


def ours(options: dict[str, Any]) -> Callable[[torch.nn.Module], dos.DOSOptimizer]:
    return lambda model: dos.DOSOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), **options)


def theirs(fused: bool) -> Callable[[torch.nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)


def assert_near(mine: list[torch.Tensor], its: list[torch.Tensor]) -> None:
    allowed = AFTER_STEPS_OF_A_MODEL
    for one, other in zip(mine, its, strict=True):
        torch.testing.assert_close(one, other, rtol=allowed.relative, atol=allowed.absolute)


def everything(model: torch.nn.Module, optimizer: dos.DOSOptimizer) -> list[bytes]:
    """The bits of all weights, states and counts."""
    tensors = weights_of(model)
    for parameter in model.parameters():
        tensors += optimizer.state[parameter].values()
    return [t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def host_grad_bytes(optimizer: dos.DOSOptimizer, itemsize: int = 4) -> int:
    """The bytes of one gradient of everything that the host updates."""
    plan = optimizer.plan
    placed = zip(plan.sizes, plan.placement, strict=True)
    return sum(itemsize * size.numel for size, at in placed if at is Placement.HOST)


# ---------------------------------------------------------------- against torch


@every_device
@pytest.mark.parametrize("fused", [False, True], ids=["for-loop", "fused"])
@every_way
def test_a_scaler_trains_fp32_weights_as_with_torch(
    options: dict[str, Any], before_step: BeforeStep, fused: bool
) -> None:
    mine, scaler, _ = train(ours(options), before_step=before_step)
    its, its_scaler, _ = train(theirs(fused), before_step=before_step)
    assert_near(mine, its)
    assert scaler == its_scaler


@every_device
@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16])
@every_way
def test_training_under_autocast_gives_the_bits_of_the_host(
    options: dict[str, Any], before_step: BeforeStep, autocast: torch.dtype
) -> None:
    mine, _, _ = train(ours(options), before_step=before_step, autocast=autocast)
    on_host, _, _ = train(ours(DEVICES["cpu"]), before_step=before_step, autocast=autocast)
    assert same(mine, on_host)


@every_device
@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16])
@every_way
def test_steps_under_autocast_are_those_of_torch(
    options: dict[str, Any], before_step: BeforeStep, autocast: torch.dtype
) -> None:
    """Step for step from the same weights: rounding to 16 bits would magnify the last bit."""
    model, twin = make_model(), make_model()
    optimizers = ours(options)(model), theirs(fused=False)(twin)
    scalers = make_scaler(), make_scaler()
    for step in range(STEPS):
        bad = math.inf if step == INFINITE_AT else None
        twin.load_state_dict(model.state_dict())
        for which, each, scaler in zip((model, twin), optimizers, scalers, strict=True):
            take_step(
                which, each, scaler, step, autocast=autocast, before_step=before_step, bad=bad
            )
        assert_near(weights_of(model), weights_of(twin))
    assert scalers[0].state_dict() == scalers[1].state_dict()


# ---------------------------------------------------------------- fp16 weights


@every_device
def test_fp16_weights_under_a_scaler_have_the_bits_of_the_host(options: dict[str, Any]) -> None:
    mine, scaler, _ = train(ours(options), dtype=torch.float16)
    on_host, host_scaler, _ = train(ours(DEVICES["cpu"]), dtype=torch.float16)
    assert same(mine, on_host)
    assert scaler == host_scaler


@every_device
def test_an_fp16_step_under_a_scaler_is_one_of_unscaled_gradients(options: dict[str, Any]) -> None:
    """Up to what a power of two does to fp16 gradients: nothing, but for subnormals."""
    weights = []
    for init_scale in (1.0, 2.0**6):
        model = make_model(torch.float16)
        optimizer = ours(options)(model)
        scaler = make_scaler(init_scale)
        for step in range(STEPS):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            loss = torch.zeros(())
            for parameter in model.parameters():
                gradient = torch.randn(parameter.shape, generator=generator).half()
                loss = loss + (parameter * gradient).float().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update(init_scale)
        weights.append(weights_of(model))
    assert same(*weights)


@every_device
def test_fp16_gradients_are_not_unscaled_as_torch_refuses_it(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Attempting to unscale FP16"):
        train(ours(options), dtype=torch.float16, before_step=unscale)


# ---------------------------------------------------------------- skipped steps


@every_device
@pytest.mark.parametrize(
    ("dtype", "before_step"),
    [*((torch.float32, way) for way in WAYS), *((torch.float16, way) for way in FP16_WAYS)],
)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_skipped_step_leaves_everything_as_it_was(
    options: dict[str, Any], dtype: torch.dtype, before_step: BeforeStep, bad: float
) -> None:
    model = make_model(dtype)
    optimizer, scaler = ours(options)(model), make_scaler(2.0**4)
    for step in range(2):
        take_step(model, optimizer, scaler, step, before_step=before_step)
    before, record, scale = everything(model, optimizer), optimizer.last_step, scaler.get_scale()
    take_step(model, optimizer, scaler, 2, before_step=before_step, bad=bad)
    assert everything(model, optimizer) == before
    assert optimizer.last_step is record
    assert scaler.get_scale() == scale / 2


@every_device
@every_way
def test_the_steps_after_a_skipped_one_are_as_if_it_had_not_been(
    options: dict[str, Any], before_step: BeforeStep
) -> None:
    """With a scale that stays, weights do not tell whether a step was skipped between two."""
    weights = []
    for skips in (False, True):
        model = make_model()
        optimizer, scaler = ours(options)(model), make_scaler()
        for step in range(4):
            if skips and step == 2:
                take_step(model, optimizer, scaler, 9, before_step=before_step, bad=math.inf)
                scaler.update(2.0**10)
            take_step(model, optimizer, scaler, step, before_step=before_step)
            scaler.update(2.0**10)
        weights.append(weights_of(model))
    assert same(*weights)


@every_device
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_clipping_for_a_skipped_step_does_not_reach_the_next(
    options: dict[str, Any], bad: float
) -> None:
    """Also where gradients are reset without the optimizer."""
    models = make_model(), make_model()
    optimizers = ours(options)(models[0]), theirs(fused=False)(models[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        scaler = make_scaler()
        for step in range(4):
            if step == INFINITE_AT:
                way, spoilt = unscale_and_clip, bad
            else:
                way, spoilt = nothing, None
            take_step(model, optimizer, scaler, step, before_step=way, bad=spoilt, by_model=True)
    assert_near(*map(weights_of, models))


# ---------------------------------------------------------------- what is sent


@pytest.mark.parametrize("autocast", [None, torch.float16])
def test_a_scaler_alone_has_each_gradient_sent_once_and_early(autocast: torch.dtype | None) -> None:
    """Though it multiplies all gradients by 1 in place while it looks for infinities."""
    _, _, optimizer = train(ours(DEVICES["virtual"]), autocast=autocast, infinite_at=None)
    record = optimizer.last_step
    assert record.early_grad_bytes == record.grad_bytes == host_grad_bytes(optimizer)


def test_after_a_skipped_step_each_gradient_is_sent_once() -> None:
    model = make_model()
    optimizer, scaler = ours(DEVICES["virtual"])(model), make_scaler()
    for step in range(6):
        take_step(model, optimizer, scaler, step, bad=math.inf if step == INFINITE_AT else None)
    assert optimizer.last_step is not None
    assert optimizer.last_step.grad_bytes == host_grad_bytes(optimizer)


def test_gradients_that_are_always_unscaled_are_sent_once() -> None:
    """Late: what was sent early would be sent again."""
    _, _, optimizer = train(ours(DEVICES["virtual"]), before_step=unscale, infinite_at=None)
    assert optimizer.last_step.grad_bytes == host_grad_bytes(optimizer)


@every_device
def test_with_accumulation_under_a_scaler_the_weights_are_those_of_torch(
    options: dict[str, Any],
) -> None:
    models = make_model(), make_model()
    optimizers = ours(options)(models[0]), theirs(fused=False)(models[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        scaler = make_scaler()
        for step in range(4):
            for micro in range(3):
                scaler.scale(loss_of(model, 10 * step + micro, None)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_near(*map(weights_of, models))
