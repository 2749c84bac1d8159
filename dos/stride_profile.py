"""Which profile `stride="auto"` goes by."""

from __future__ import annotations

import logging
import time
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from dos.config import DOSConfig, VirtualDevice
from dos.errors import ConfigError, DOSError
from dos.kernels.thread_pool import ThreadPool
from dos.stride import AutoStride, StrideWatch
from perfmodel.cache import read_cache, write_cache
from perfmodel.calibrate import quick_profile
from perfmodel.machine import machine_of
from perfmodel.profile import H100_NODE, NodeProfile

logger = logging.getLogger("dos")


def auto_stride(config: DOSConfig, device: torch.device, pool: ThreadPool) -> AutoStride:
    """The profile that the options name, else the virtual device's pace, the cache, a measurement.

    A virtual device that is not paced like a node goes by a built-in profile, and its times say
    nothing of one. What is measured (in seconds, after the first step) is kept in the cache.

    Args:
        config: options.
        device: where the parameters lie.
        pool: threads of the host update, for the measurement.

    Raises:
        ConfigError: the profile of the options cannot be read, or is of a node without a device.
    """
    given = None if config.profile is None else _read(config.profile)
    if isinstance(config.device, VirtualDevice) or config.device == "virtual":
        pace = config.device.pace if isinstance(config.device, VirtualDevice) else None
        paced = isinstance(pace, NodeProfile)
        return AutoStride(
            given or (pace if isinstance(pace, NodeProfile) else H100_NODE),
            watch=StrideWatch() if paced else None,
        )
    known = given or read_cache(machine_of(device))
    if known is not None:
        return AutoStride(_at_threads(known, pool.threads), watch=StrideWatch())
    return AutoStride(H100_NODE, measure=lambda: _measured(device, pool), watch=StrideWatch())


def _read(profile: object) -> NodeProfile:
    if isinstance(profile, (str, Path)):
        return NodeProfile.load(profile)
    if isinstance(profile, NodeProfile):
        return profile
    raise ConfigError(
        f"{profile!r} is no perfmodel.profile.NodeProfile",
        where="DOSConfig.profile",
        fix="give one, or the path of a file that `python -m perfmodel calibrate` wrote",
    )


def _at_threads(profile: NodeProfile, threads: int) -> NodeProfile:
    """With the host's rates of another number of threads, if the profile knows that one."""
    alone = profile.host_params_per_s_by_threads.get(str(threads))
    if alone is None or profile.threads in (None, threads):
        return profile
    beside = profile.host_params_per_s_beside_copies
    scale = alone / profile.host_params_per_s
    return replace(
        profile,
        host_params_per_s=alone,
        host_params_per_s_beside_copies=None if beside is None else scale * beside,
        threads=threads,
    )


def _measured(device: torch.device, pool: ThreadPool) -> NodeProfile:
    """What this machine does, measured now; the built-in profile if that fails."""
    started_s = time.perf_counter()
    try:
        profile = quick_profile(device, pool)
    except (DOSError, RuntimeError) as error:  # no memory left, for one: training goes on
        warnings.warn(
            f'the machine could not be measured for stride="auto", which goes by a built-in '
            f"profile instead: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return H100_NODE
    took_s = time.perf_counter() - started_s
    path = write_cache(profile)
    kept = f"kept in {path}" if path else "not kept: the cache cannot be written"
    logger.info("the machine was measured in %.1f s, %s", took_s, kept)
    return profile


def warn_without_effect(config: DOSConfig) -> None:
    """Say that a stride or residents were asked for where parameters are in host memory."""
    if config.stride not in ("auto", "host") or config.resident_ratio:
        warnings.warn(
            f"the parameters are in host memory, so stride={config.stride} and "
            f"resident_ratio={config.resident_ratio} have no effect",
            stacklevel=5,
        )
