"""The section of a DeepSpeed configuration that switches this library on, and what rules it out."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from dos.config import DOSConfig
from dos.errors import ConfigError

SECTION = "deep_optimizer_states"
CHECKPOINT = "checkpoint"
"""The key of that section that switches checkpoints on."""

_ZERO, _OFFLOAD = "zero_optimization", "offload_optimizer"
_RIGHT_PLACE = f'the top-level section "{SECTION}", or that section inside {_ZERO}.{_OFFLOAD}'

# Options whose names upstream does not use: found elsewhere, they are meant for us.
_OURS = set(DOSConfig.model_fields) - {"device"}

# What upstream has elsewhere, and where.
_THEIRS = {
    "ratio": "resident_ratio is the share of state that stays on the device",
    "pin_memory": f"it belongs in {_ZERO}.{_OFFLOAD}",
    "sub_group_size": f"it belongs in {_ZERO}; subgroup_size cuts its groups further",
    "gradient_clipping": "it belongs at the top level",
    "offload_optimizer": f"it belongs in {_ZERO}",
}
_WITHOUT_MEANING = {
    "wire": "reduces and moves gradients itself",
    "release_grads": "reduces and moves gradients itself",
    "overlap_forward": "gathers weights itself, ahead of the modules that read them",
}

Json = Mapping[str, Any]


def read_section(config: Json) -> DOSConfig | None:
    """The options of a DeepSpeed configuration; None where the section is absent or off.

    Args:
        config: the parsed JSON.

    Raises:
        ConfigError: a key that is unknown or in the wrong place, or settings of DeepSpeed that
            cannot be combined with it; says where the key belongs, or why they cannot.
    """
    section = find_section(config)
    if not section.get("enabled", False):
        return None
    options = {key: value for key, value in section.items() if key not in ("enabled", CHECKPOINT)}
    made = make_options(options, _mapping(config.get(_ZERO)))
    check_combination(config)
    return made


def find_section(config: Json) -> Json:
    """The section of a DeepSpeed configuration, empty where there is none.

    Raises:
        ConfigError: it, or one of its options, is in the wrong place, is there twice, or does not
            say whether it is on.
    """
    zero = _mapping(config.get(_ZERO))
    offload = _mapping(zero.get(_OFFLOAD))
    places = {"": config, _ZERO: zero, f"{_ZERO}.{_OFFLOAD}": offload}
    _check_places(places)
    for where, section in _sections_below(config):
        if SECTION in section and where not in places:
            raise _misplaced(SECTION, where)
    found = [(where, at[SECTION]) for where, at in places.items() if SECTION in at]
    if not found:
        return {}
    if len(found) > 1:
        raise ConfigError("the section is there twice", where=SECTION, fix="leave one of them")
    section = found[0][1]
    says = _mapping(section).get("enabled", False if CHECKPOINT in _mapping(section) else None)
    if not isinstance(says, bool):
        raise ConfigError(
            f"{section!r} does not say whether it is on",
            where=SECTION,
            fix='write {"enabled": true, ...} or {"enabled": false}',
        )
    for option in (key for at in (config,) for key in at if key in _OURS):
        raise _misplaced(option, "the top level")
    return _mapping(section)


def make_options(options: Json, zero: Json) -> DOSConfig:
    """Options out of the section, with the defaults that they have in ZeRO-3.

    Args:
        options: the section without "enabled".
        zero: DeepSpeed's section zero_optimization.

    Raises:
        ConfigError: an unknown option, or one that has no meaning here.
    """
    for key, meant in _THEIRS.items():
        if key in options:
            raise ConfigError(f"{key!r} is an option of DeepSpeed", where=SECTION, fix=meant)
    for key, why in _WITHOUT_MEANING.items():
        if key in options:
            raise ConfigError(
                f"{key!r} has no meaning in ZeRO-3, which {why}",
                where=SECTION,
                fix=f"remove {key!r}",
            )
    if CHECKPOINT in options:
        raise ConfigError(
            "checkpoints belong to the engine, which is there already",
            where=CHECKPOINT,
            fix=f'put {{"{CHECKPOINT}": {{}}}} into the section {SECTION!r} of its configuration',
        )
    limit = DOSConfig.model_fields["subgroup_size"].default
    sub_group_size = zero.get("sub_group_size", limit)
    if not isinstance(sub_group_size, (int, float)):  # "auto": whoever fills it in takes 1e9
        sub_group_size = limit
    size = max(min(int(sub_group_size), limit), 1024)
    try:
        made = DOSConfig(**{"subgroup_size": size, **options})
    except ConfigError as error:
        where = error.where.replace(DOSConfig.__name__, SECTION)
        raise ConfigError(error.what, where=where, fix=error.fix) from None
    if made.subgroup_size < 1024:
        raise ConfigError(
            f"{made.subgroup_size} elements are less than a page of state",
            where=f"{SECTION}.subgroup_size",
            fix="set 1024 or more",
        )
    return made


def without_section(config: Json) -> dict[str, Any]:
    """A copy for upstream, which refuses our section where it is nested."""
    zero = _mapping(config.get(_ZERO))
    offload = _mapping(zero.get(_OFFLOAD))
    if SECTION not in offload:
        return dict(config)
    rest = {key: value for key, value in offload.items() if key != SECTION}
    return {**config, _ZERO: {**zero, _OFFLOAD: rest}}


def check_combination(config: Json) -> None:
    """Refuse settings of DeepSpeed that cannot work together with this library.

    Raises:
        ConfigError: names the setting, why, and what to set instead.
    """
    for refused, where, what, fix in _combinations(config):
        if refused:
            raise ConfigError(what, where=where, fix=fix)


def _combinations(config: Json) -> Iterator[tuple[bool, str, str, str]]:
    """Whether it is so, the setting, why it cannot work, and what to set instead."""
    zero = _mapping(config.get(_ZERO))
    stage, kind = zero.get("stage", 0), str(_mapping(config.get("optimizer")).get("type", "adamw"))
    yield stage != 3, f"{_ZERO}.stage", f"stage {stage!r}: only ZeRO-3 is supported", "set 3"
    # Upstream leaves out what is "auto" there.
    offload = {key: its for key, its in _mapping(zero.get(_OFFLOAD)).items() if its != "auto"}
    yield from _offload_combinations(offload)
    yield (
        zero.get("zenflow") is not None,
        f"{_ZERO}.zenflow",
        "ZenFlow updates parts of the weights in other steps than the rest",
        "remove it",
    )
    yield (
        _mapping(zero.get("offload_param")).get("device", "none") != "none",
        f"{_ZERO}.offload_param",
        "weights in host memory are not supported yet: the update writes them on the device",
        "remove it",
    )
    yield (
        (zero.get("mics_shard_size") or -1) > 0,
        f"{_ZERO}.mics_shard_size",
        "MiCS replaces the ZeRO-3 optimizer by another class",
        "remove it",
    )
    yield (
        kind.lower() not in ("adam", "adamw"),
        "optimizer.type",
        f"{kind} is no Adam: its update is another one",
        'set "Adam" or "AdamW"',
    )
    yield (
        bool(zero.get("elastic_checkpoint")),
        f"{_ZERO}.elastic_checkpoint",
        "ZeRO-3 cannot save elastic checkpoints",
        "remove it and use universal checkpoints",
    )
    for section, key in (
        ("fp16", "fp16_master_weights_and_grads"),
        ("bf16", "bf16_master_weights_and_grads"),
        ("bf16", "bf16_optimizer_states"),
    ):
        yield (
            bool(_mapping(config.get(section)).get(key)),
            f"{section}.{key}",
            "the update is exact because masters and moments are fp32",
            "set false",
        )


def _offload_combinations(offload: Json) -> Iterator[tuple[bool, str, str, str]]:
    device, where = offload.get("device", "none"), f"{_ZERO}.{_OFFLOAD}"
    yield (
        device == "nvme",
        f"{where}.device",
        "state on NVMe is moved by upstream's swapper, which replaces its memory at every step",
        'set "cpu"',
    )
    yield device != "cpu", f"{where}.device", "the state has to be in host memory", 'set "cpu"'
    yield (
        bool(offload.get("super_offload")),
        f"{where}.super_offload",
        "SuperOffload updates in a process of its own",
        "set false",
    )
    yield (
        offload.get("ratio", 1.0) != 1.0,
        f"{where}.ratio",
        "a share of the state on the device is not chosen here",
        f"remove it and set resident_ratio in {SECTION!r}",
    )


def _check_places(places: Mapping[str, Json]) -> None:
    """Refuse an option of our section where that may be, and names that are nearly its name."""
    if SECTION in places[_ZERO]:
        raise _misplaced(SECTION, _ZERO)
    for where, at in places.items():
        for key in at:
            if where and key in _OURS:
                raise _misplaced(key, where)
            if key != SECTION and difflib.get_close_matches(key, [SECTION], cutoff=0.85):
                raise ConfigError(
                    f"unknown section {key!r}", where=where, fix=f"did you mean {SECTION!r}?"
                )


def _sections_below(config: Json, where: str = "") -> Iterator[tuple[str, Json]]:
    """All sections inside others, each with its keys joined by dots."""
    for key, section in config.items():
        if isinstance(section, Mapping):
            path = f"{where}.{key}" if where else str(key)
            yield path, section
            yield from _sections_below(section, path)


def _misplaced(key: str, where: str) -> ConfigError:
    return ConfigError(
        f"{key!r} is in the wrong place", where=where, fix=f"put it in {_RIGHT_PLACE}"
    )


def _mapping(value: object) -> Json:
    return value if isinstance(value, Mapping) else {}
