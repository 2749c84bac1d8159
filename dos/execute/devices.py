"""Which backend a `device=` option means."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dos.config import VirtualDevice
from dos.errors import ConfigError
from dos.execute.accelerator import AcceleratorBackend
from dos.execute.backend import Backend, Device
from dos.execute.virtual import VirtualBackend
from dos.execute.worker import HostBackend


def choose_backend(device: object, parameters: Sequence[torch.Tensor]) -> Backend | Device:
    """The backend for `device`, an option of `dos.DOSConfig`, over these parameters.

    "auto" is the accelerator that the parameters are on, else "cpu". A `HostBackend` has no
    device lane; every other one is a `Device`.

    Raises:
        ConfigError: no such device here, or the parameters lie elsewhere or on several.
    """
    home = parameters[0].device
    for parameter in parameters:
        if parameter.device != home:
            raise ConfigError(
                f"parameters lie on {home} and on {parameter.device}",
                where="optimizer",
                fix="use one DOSOptimizer per device",
            )
    virtual = VirtualDevice() if device == "virtual" else device
    if isinstance(virtual, VirtualDevice):
        _expect(home, "cpu", "a virtual device")
        return VirtualBackend(virtual)
    wanted = home if device == "auto" else _torch_device(device)
    _expect(home, wanted.type, f"device={str(device)!r}")
    if wanted.index not in (None, home.index):
        _expect(home, str(wanted), f"device={str(device)!r}")
    return HostBackend() if home.type == "cpu" else AcceleratorBackend(home)


def _torch_device(device: object) -> torch.device:
    try:
        return torch.device(device)  # type: ignore[call-overload, no-any-return]
    except (RuntimeError, TypeError):
        raise ConfigError(
            f"{device!r} is no device that this torch knows",
            where="DOSConfig.device",
            fix='use "auto", "cpu", "virtual" or a torch device such as "cuda:0"',
        ) from None


def _expect(home: torch.device, wanted: str, what: str) -> None:
    if str(home) != wanted and home.type != wanted:
        raise ConfigError(
            f"{what} needs parameters on {wanted}; they are on {home}",
            where="DOSConfig.device",
            fix=f"move the model to {wanted} before making its optimizer, or use device='auto'",
        )
