"""What of a DeepSpeed configuration switches our checkpoints on, and what rules them out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from dos.config import DeepSpeedCheckpoint
from dos.errors import ConfigError
from dos.integrations.zero3_config import CHECKPOINT, SECTION, find_section

DROP_IN = "datastates_ckpt"
"""The section by which upstream chooses another asynchronous engine, taken as ours."""

_WHERE = f"{SECTION}.{CHECKPOINT}"
_GIB = 1 << 30

Json = Mapping[str, Any]


def read_checkpoint(config: Json) -> DeepSpeedCheckpoint | None:
    """How engines of this configuration save; None: as upstream does.

    Args:
        config: the parsed JSON.

    Raises:
        ConfigError: an option that is not known or not valid, or a setting of DeepSpeed that
            cannot be combined with it.
    """
    section, drop_in = find_section(config), config.get(DROP_IN, False)
    ours = CHECKPOINT in section and section.get("enabled", True)
    if not ours and drop_in is False:
        return None
    if ours and drop_in is not False:
        raise ConfigError(
            f"{_WHERE} and {DROP_IN} both choose how checkpoints are saved",
            where=_WHERE,
            fix=f"remove {DROP_IN}",
        )
    options = section[CHECKPOINT] if ours else _of_drop_in(drop_in)
    if not isinstance(options, Mapping):
        raise ConfigError(f"{options!r} is no section", where=_WHERE, fix="write {} for defaults")
    try:
        made = DeepSpeedCheckpoint(**options)
    except ConfigError as error:
        if not ours:
            what, where = f"in bytes, {error.what}", f"{DROP_IN}.host_cache_size"
            raise ConfigError(what, where=where, fix="give it in GiB") from None
        where = error.where.replace(DeepSpeedCheckpoint.__name__, _WHERE)
        raise ConfigError(error.what, where=where, fix=error.fix) from None
    for where, what, fix in _refused(config):
        raise ConfigError(what, where=where, fix=fix)
    return made


def _of_drop_in(section: object) -> Json:
    """Our options for those of upstream's section; what has no meaning here is warned about."""
    options: Json = section if isinstance(section, Mapping) else {}
    unknown = sorted(options.keys() - {"host_cache_size"})
    if unknown:
        warnings.warn(
            f"{DROP_IN}: {', '.join(map(repr, unknown))} is not known here and does nothing",
            stacklevel=2,
        )
    size_gib = options.get("host_cache_size")
    if size_gib is None:
        return {}
    is_number = isinstance(size_gib, (int, float)) and not isinstance(size_gib, bool)
    if not is_number or not 0 < size_gib < math.inf:
        raise ConfigError(
            f"{size_gib!r} is no size", where=f"{DROP_IN}.host_cache_size", fix="give it in GiB"
        )
    return {"ring_bytes": int(size_gib * _GIB)}


def _refused(config: Json) -> Iterator[tuple[str, str, str]]:
    """Each setting that cannot be combined, why, and what to do."""
    checkpoint = _mapping(config.get("checkpoint"))
    if checkpoint.get("writer") is not None:
        yield "checkpoint.writer", "it chooses another checkpoint engine", "remove it"
    if _mapping(config.get("nebula")).get("enabled"):
        yield "nebula.enabled", "Nebula is another checkpoint engine", "set false"
    if checkpoint.get("use_node_local_storage"):
        yield (
            "checkpoint.use_node_local_storage",
            "a checkpoint is one directory that all ranks see",
            "set false, and save to a file system that all nodes share",
        )
    zero = _mapping(config.get("zero_optimization"))
    if zero.get("zenflow") is not None:
        yield (
            "zero_optimization.zenflow",
            "ZenFlow updates weights beside the steps, where no save can have it wait",
            f"remove it, or {_WHERE}",
        )
    if _mapping(zero.get("offload_optimizer")).get("super_offload"):
        yield (
            "zero_optimization.offload_optimizer.super_offload",
            "SuperOffload updates weights during backward, where no save can have it wait",
            f"set false, or remove {_WHERE}",
        )
    for key in ("offload_optimizer", "offload_param"):
        if _mapping(zero.get(key)).get("device") == "nvme":
            yield (
                f"zero_optimization.{key}.device",
                "upstream copies its files on NVMe past the checkpoint engine",
                f'set "cpu", or remove {_WHERE}',
            )


def _mapping(value: object) -> Json:
    return value if isinstance(value, Mapping) else {}
