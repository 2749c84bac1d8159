"""Slabs: alignment, storages, and when the memory goes back to the system."""

from __future__ import annotations

import contextlib
import gc
import io
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dos.errors import PoolError
from dos.memory import Slab, pinned

MIB = 1 << 20


def is_mapped(address: int) -> bool:
    """Whether some mapping of this process covers ``address``."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return True
    return False


def resident_bytes() -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line
    )
    return int(line.split()[1]) * 1024


class FakeCudaRuntime:
    """Stands in for the driver, which no machine without a GPU has; records the calls."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.registered: list[tuple[int, int]] = []
        self.mapped_at_unregister: list[bool] = []

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:
        self.registered.append((address, n_bytes))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.mapped_at_unregister.append(is_mapped(address))
        return 0

    def cudaError(self, code: int) -> int:
        return code

    def cudaGetErrorString(self, code: int) -> str:
        return "out of memory"


def fake_cuda(monkeypatch: pytest.MonkeyPatch, code: int = 0) -> FakeCudaRuntime:
    runtime = FakeCudaRuntime(code)
    monkeypatch.setattr(pinned, "_cuda_runtime", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(pinned, "_warned", False)
    return runtime


def test_base_is_aligned_to_two_mebibytes() -> None:
    assert Slab(3 * MIB + 5).address % (2 * MIB) == 0


def test_memory_is_zero_at_first() -> None:
    assert not Slab(3 * MIB).tensor(0, 3 * MIB, torch.uint8).any()


def test_storage_is_exactly_the_tensors_bytes() -> None:
    tensor = Slab(MIB).tensor(64, 100, torch.float32)
    assert tensor.untyped_storage().nbytes() == 400


def test_tensor_lies_at_its_offset() -> None:
    slab = Slab(MIB)
    assert slab.tensor(64, 100, torch.float32).data_ptr() == slab.address + 64


def test_shaped_tensor_is_no_view_of_another() -> None:
    assert not Slab(MIB).tensor(0, 6, torch.float32, (2, 3), (1, 2))._is_view()


def test_strides_are_those_asked_for() -> None:
    assert Slab(MIB).tensor(0, 6, torch.float32, (2, 3), (1, 2)).stride() == (1, 2)


def test_shape_without_strides_is_row_major() -> None:
    assert Slab(MIB).tensor(0, 6, torch.float32, (2, 3)).is_contiguous()


def test_zero_dimensions_hold_one_element() -> None:
    assert Slab(MIB).tensor(0, 1, torch.float32, ()).shape == ()


def test_no_elements_have_an_empty_storage() -> None:
    assert Slab(MIB).tensor(0, 0, torch.float32).untyped_storage().nbytes() == 0


def test_two_tensors_over_one_place_share_it() -> None:
    slab = Slab(MIB)
    slab.tensor(0, 4, torch.float32).fill_(3.0)
    assert slab.tensor(4, 1, torch.float32).item() == 3.0


def test_saving_a_tensor_writes_its_bytes_and_not_the_slab() -> None:
    file = io.BytesIO()
    torch.save(Slab(64 * MIB).tensor(0, 1024, torch.float32), file)
    assert file.tell() < 4096 + 2048


def test_tensor_keeps_its_value_after_close() -> None:
    slab = Slab(MIB)
    tensor = slab.tensor(0, 1024, torch.float32).fill_(7.0)
    slab.close()
    del slab
    gc.collect()
    assert torch.equal(tensor, torch.full((1024,), 7.0))


def test_closed_slab_refuses_tensors() -> None:
    slab = Slab(MIB)
    slab.close()
    slab.close()
    with pytest.raises(PoolError, match="closed"):
        slab.tensor(0, 1, torch.uint8)


def test_memory_returns_once_closed_and_unused() -> None:
    slab = Slab(64 * MIB)
    slab.tensor(0, 64 * MIB, torch.uint8).fill_(1)
    full_bytes = resident_bytes()
    slab.close()
    assert full_bytes - resident_bytes() > 60 * MIB


def test_memory_stays_while_a_tensor_lives() -> None:
    slab = Slab(MIB)
    tensor = slab.tensor(0, 1, torch.uint8)
    slab.close()
    assert is_mapped(tensor.data_ptr())


def test_memory_returns_with_the_last_tensor() -> None:
    slab = Slab(64 * MIB)
    tensor = slab.tensor(0, 64 * MIB, torch.uint8).fill_(1)
    full_bytes = resident_bytes()
    slab.close()
    del tensor
    assert full_bytes - resident_bytes() > 60 * MIB


def test_memory_the_system_refuses_is_a_pool_error() -> None:
    with pytest.raises(PoolError, match="refused"):
        Slab(1 << 56)


def test_slab_without_accelerator_is_quietly_pageable() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        slab = Slab(MIB, device=torch.device("cpu"))
    assert (slab.pinned, slab.why_pageable) == (False, "")


def test_exact_size_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = fake_cuda(monkeypatch)
    slab = Slab(3 * MIB + 4096, device=torch.device("cuda", 0))
    assert runtime.registered == [(slab.address, 3 * MIB + 4096)]


def test_memory_is_unregistered_once_and_before_it_is_unmapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = fake_cuda(monkeypatch)
    slab = Slab(MIB, device=torch.device("cuda", 0))
    slab.close()
    assert runtime.mapped_at_unregister == [True]


def test_memory_stays_registered_while_a_tensor_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = fake_cuda(monkeypatch)
    slab = Slab(MIB, device=torch.device("cuda", 0))
    tensor = slab.tensor(0, 1, torch.uint8)
    slab.close()
    assert (runtime.mapped_at_unregister, tensor.item()) == ([], 0)


def refused_slab(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Slab]:
    fake_cuda(monkeypatch, code=2)
    monkeypatch.setattr(pinned, "_clear_cuda_error", lambda device: None)
    return lambda: Slab(MIB, device=torch.device("cuda", 0))


def test_refused_pinning_falls_back_with_the_drivers_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = refused_slab(monkeypatch)
    with pytest.warns(RuntimeWarning, match="pageable"):
        slab = make()
    assert "out of memory (error 2)" in slab.why_pageable


def test_refused_pinning_warns_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    make = refused_slab(monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
        make()
    assert len(caught) == 1
