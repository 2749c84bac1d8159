"""Which kernels a device gets, and that nobody loads Triton in vain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dos.kernels import device, torch_adam, torch_cast
from dos.kernels.device import DeviceKernels, device_kernels

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda:0")
TORCH = DeviceKernels(torch_adam.update, torch_cast.examine)


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """An NVIDIA GPU that runs what the tests of the compiled code have seen, and Triton."""
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(device, "find_spec", lambda name: True)


@pytest.mark.usefixtures("ampere")
def test_a_gpu_gets_tritons_kernels() -> None:
    gpu_adam = pytest.importorskip("dos.kernels.gpu.adam", exc_type=ImportError)
    gpu_cast = pytest.importorskip("dos.kernels.gpu.cast", exc_type=ImportError)
    assert device_kernels(CUDA) == DeviceKernels(gpu_adam.update, gpu_cast.examine)


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (device, "find_spec", lambda name: None),
        (torch.cuda, "get_device_capability", lambda device: (7, 5)),
        (torch.version, "cuda", None),
    ],
    ids=["no Triton", "an older GPU", "ROCm"],
)
def test_torch_operations_stand_in(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, value: object
) -> None:
    monkeypatch.setattr(owner, name, value)
    assert device_kernels(CUDA) == TORCH


@pytest.mark.usefixtures("ampere")
def test_another_accelerator_gets_torch_operations() -> None:
    assert device_kernels(torch.device("xpu")) == TORCH


def test_the_optimizer_does_not_import_triton() -> None:
    code = "import sys, dos.optimizer; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
