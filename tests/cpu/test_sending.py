"""Gradients sent during backward: it never waits, each is sent once, and edits are noticed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import dos
from dos.plan import Placement
from tests.cpu.forked import in_child
from tests.cpu.tolerances import AFTER_100_STEPS

WIDTH = 32  # so that every piece is a whole number of cache lines, without padding
Edit = Callable[[list[torch.nn.Parameter]], None]


@dataclass(frozen=True)
class SlowLink:
    """A pace whose transfers to the host last a while."""

    transfer_s: float
    name: str = "slow link"

    def op_s(self, lane: str, *, numel: int, link_bytes: int) -> float:
        return self.transfer_s if lane == "d2h" else 0.0


def make_model(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    return torch.nn.Sequential(*layers).to(dtype)


def make_optimizer(model: torch.nn.Module, **options: object) -> dos.DOSOptimizer:
    options = {"device": "virtual", "stride": 2, "subgroup_size": 256, **options}
    return dos.DOSOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), **options)


def backward(model: torch.nn.Module, step: int) -> None:
    dtype = next(model.parameters()).dtype
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
    model(x).square().mean().backward()


def host_grad_bytes(optimizer: dos.DOSOptimizer, itemsize: int = 4) -> int:
    """The bytes of one gradient of everything that the host updates."""
    plan = optimizer.plan
    placed = zip(plan.sizes, plan.placement, strict=True)
    return sum(itemsize * size.numel for size, at in placed if at is Placement.HOST)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="gradients were changed after")
        warnings.filterwarnings("ignore", message="the parameters are in host memory")
        yield


def weights(model: torch.nn.Module) -> list[bytes]:
    return [p.detach().view(torch.uint8).numpy().tobytes() for p in model.parameters()]


def trained(steps: int = 4, dtype: torch.dtype = torch.float32, **options: object) -> list[bytes]:
    model = make_model(dtype)
    optimizer = make_optimizer(model, **options)
    for step in range(steps):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return weights(model)


def test_the_first_step_sends_nothing_early() -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    backward(model, 0)
    optimizer.step()
    assert optimizer.last_step is not None
    assert optimizer.last_step.backward.transfers == ()


def test_from_the_second_step_on_each_gradient_is_sent_once_and_early() -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    for step in range(3):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    record = optimizer.last_step
    assert record is not None
    early_bytes = sum(transfer.n_bytes for transfer in record.backward.transfers)
    assert early_bytes == record.grad_bytes == host_grad_bytes(optimizer)


@pytest.mark.parametrize("wire", ["native", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("release_grads", [False, True])
def test_early_sending_gives_the_bits_of_the_host(
    dtype: torch.dtype, wire: str, release_grads: bool
) -> None:
    device = dos.VirtualDevice(poison=True, jitter_seed=1)
    got = trained(dtype=dtype, device=device, wire=wire, release_grads=release_grads)
    assert got == trained(dtype=dtype, device="cpu")


def test_the_fp32_wire_sends_four_bytes_per_element_of_16_bit_gradients() -> None:
    model = make_model(torch.bfloat16)
    optimizer = make_optimizer(model, wire="fp32")
    for step in range(2):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.last_step is not None
    assert optimizer.last_step.grad_bytes == host_grad_bytes(optimizer)


@pytest.mark.parametrize("micro_steps", [2, 4])
def test_with_accumulation_only_the_last_micro_step_is_sent(micro_steps: int) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    sent = []
    for step in range(3):
        for micro in range(micro_steps):
            backward(model, 10 * step + micro)
        optimizer.step()
        assert optimizer.last_step is not None
        sent.append(optimizer.last_step.grad_bytes)
        optimizer.zero_grad()
    assert sent == [host_grad_bytes(optimizer)] * 3


def test_transfers_run_while_backward_goes_on() -> None:
    model = make_model()
    optimizer = make_optimizer(model, stride="host")
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    # Backward of the first layer, the last to run, waits until another's gradient has arrived.
    seen = threading.Event()

    def wait(grad: torch.Tensor) -> None:
        sender = optimizer._engine.sender
        assert sender is not None
        for sent in list(sender._sent.values()):
            for transfer in sent.transfers:
                transfer.event.wait()
        seen.set()

    x = torch.randn(8, WIDTH)
    hidden = model[0](x)
    hidden.register_hook(wait)
    model[2](model[1](hidden)).sum().backward()
    optimizer.step()
    record = optimizer.last_step
    assert record is not None
    assert seen.is_set()
    in_backward = [span for span in record.backward_spans() if span.end_s < 0]
    assert len(in_backward) >= 4  # both parameters of two layers at least


def gradients_under_way(link: SlowLink) -> tuple[torch.nn.Sequential, dos.DOSOptimizer]:
    """After a backward that has given all its gradients to a slow link."""
    model = make_model()
    device = dos.VirtualDevice(pace=link, time_scale=1.0)
    optimizer = make_optimizer(model, device=device, stride="host")
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 1)
    return model, optimizer


def test_backward_does_not_wait_for_a_slow_link() -> None:
    _, optimizer = gradients_under_way(SlowLink(0.2))
    sender = optimizer._engine.sender
    assert sender is not None
    under_way = [t for sent in sender._sent.values() for t in sent.transfers if not t.event.done()]
    assert under_way
    optimizer.close()


def test_a_step_lets_go_of_gradients_that_were_still_under_way() -> None:
    model, optimizer = gradients_under_way(SlowLink(0.05))
    memories = [
        StorageWeakRef(p.grad.untyped_storage()) for p in model.parameters() if p.grad is not None
    ]
    optimizer.step()
    model.zero_grad()
    assert all(memory.expired() for memory in memories)
    optimizer.close()


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_copies_to_zero_its_gradients() -> None:
    _, optimizer = gradients_under_way(SlowLink(0.2))
    text = in_child(lambda: (optimizer.zero_grad(), "zeroed")[1])
    optimizer.close()
    assert text == "zeroed"


@pytest.mark.filterwarnings("error")
def test_a_hooked_model_goes_to_another_process_without_a_warning() -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    assert ForkingPickler.dumps(model)
    optimizer.close()


def unscale(parameters: list[torch.nn.Parameter]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(torch.optim.SGD(parameters))


def edit_data(parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.data.mul_(0.5)


def write_by_numpy(parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.numpy()[...] *= 0.5


def replace_gradients(parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5


def clip_norm(parameters: list[torch.nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 1e-3)


def clip_values(parameters: list[torch.nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_value_(parameters, 1e-6)


def clip_to_infinity(parameters: list[torch.nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, float("inf"))


def edit_one(parameters: list[torch.nn.Parameter]) -> None:
    parameter = parameters[2]
    assert parameter.grad is not None
    parameter.grad.add_(1.0)


def nothing(parameters: list[torch.nn.Parameter]) -> None:
    pass


def run(edit: Edit, optimizer_of: Callable[[torch.nn.Module], torch.optim.Optimizer]) -> tuple:  # type: ignore[type-arg]
    """Two ordinary steps, then one with an edit after its backward."""
    model = make_model()
    optimizer = optimizer_of(model)
    for step in range(3):
        backward(model, step)
        if step == 2:
            edit(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


CHANGES = [unscale, edit_data, write_by_numpy, replace_gradients, clip_norm, clip_values]
HARMLESS = [nothing, clip_to_infinity]


@pytest.mark.parametrize("edit", [*CHANGES, *HARMLESS, edit_one])
def test_the_step_is_that_of_torch_whatever_happens_to_gradients(edit: Edit) -> None:
    model, _ = run(edit, make_optimizer)
    twin, _ = run(edit, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2))
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        allowed = AFTER_100_STEPS["p"]
        torch.testing.assert_close(mine, its, rtol=allowed.relative, atol=allowed.absolute)


@pytest.mark.parametrize("edit", CHANGES)
def test_changed_gradients_are_sent_again(edit: Edit) -> None:
    _, optimizer = run(edit, make_optimizer)
    assert optimizer.last_step.grad_bytes == 2 * host_grad_bytes(optimizer)


@pytest.mark.parametrize("edit", HARMLESS)
def test_what_leaves_the_bits_alone_costs_no_transfer(edit: Edit) -> None:
    _, optimizer = run(edit, make_optimizer)
    assert optimizer.last_step.grad_bytes == host_grad_bytes(optimizer)


def test_one_changed_gradient_is_sent_again_alone() -> None:
    model, optimizer = run(edit_one, make_optimizer)
    again = optimizer.last_step.grad_bytes - host_grad_bytes(optimizer)
    assert 0 < again <= 4 * list(model.parameters())[2].numel()


def test_after_a_change_two_clean_steps_bring_early_sending_back() -> None:
    model, optimizer = run(edit_data, make_optimizer)
    early = []
    for step in range(4):
        backward(model, step)
        optimizer.step()
        early.append(bool(optimizer.last_step.backward.transfers))
        optimizer.zero_grad()
    assert early == [False, False, True, True]


def test_a_change_is_warned_of_once_with_what_to_call_instead() -> None:
    with pytest.warns(UserWarning, match="clip_grad_norm_") as caught:
        run(edit_data, make_optimizer)
    assert len(caught) == 1
