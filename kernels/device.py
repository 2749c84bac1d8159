"""Front door of the device kernels: which implementation an accelerator gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from dos.kernels import torch_adam, torch_cast
from dos.kernels.torch_cast import DeviceExamined


@dataclass(frozen=True)
class DeviceKernels:
    """What runs on a device, on its current stream; the same bits from each implementation.

    Attributes:
        update: `torch_adam.update`, or one with its arguments.
        examine: `torch_cast.examine`, or one with its arguments.
    """

    update: Callable[..., None]
    examine: Callable[[torch.Tensor], DeviceExamined]


def device_kernels(device: torch.device) -> DeviceKernels:
    """Triton's kernels where their code is known to be exact, else torch operations.

    Triton is imported here and nowhere else, for it is optional and slow to import. What it
    compiles is asserted for NVIDIA's GPUs from Ampere on.
    """
    nvidia = device.type == "cuda" and torch.version.cuda is not None
    if nvidia and find_spec("triton") and torch.cuda.get_device_capability(device) >= (8, 0):
        from dos.kernels.gpu import adam, cast

        return DeviceKernels(adam.update, cast.examine)
    return DeviceKernels(torch_adam.update, torch_cast.examine)
