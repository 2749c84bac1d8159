"""What a node can do: rates of one rank, and the JSON file that they are kept in."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dos.errors import ConfigError

SCHEMA_VERSION = 1
"""Of the JSON file; raised when an older reader would misread a newer file."""

FUSED_BYTES_PER_PARAM = 28.0
"""Host memory traffic of the fused update: p, m, v read and written, 16-bit gradient and weight."""

_MAY_BE_ZERO = ("launch_s", "cast_s_per_param")
_MOST = 1e18
"""Of any figure; no machine comes near it, and sums stay finite."""

LANE_RATES = {
    "h2d": "h2d_bytes_per_s",
    "d2h": "d2h_bytes_per_s",
    "device": "device_params_per_s",
    "host": "host_params_per_s",
}
"""The field that says how fast each lane is."""


@dataclass(frozen=True, slots=True)
class PublishedCode:
    """What the published Deep Optimizer States code does on this node; see `published.py`.

    Its host update makes several passes where this library's makes one, and its versions
    differ, so these figures stand apart from the node's own.

    Attributes:
        host_params_per_s: its host update with nothing beside it, without the cast.
        host_bytes_per_param: host memory traffic of that update.
        cast_s_per_param: seconds for the 16-bit copy of a host-updated weight and its way to
            the device, in the baseline, where the host waits for both.
        launch_s: fixed cost of a subgroup on the host thread.
        casts: whether interleaved runs make that copy at all, in a thread beside the update.
        streams: one for all copies (1), or one each for p, m and v (3).
        tail: the last flush: "if_ragged" waited for iff k does not divide the number of
            subgroups, else never issued; "never" not waited for.
        device_params_per_s: its update on the device; None if it is the node's.
    """

    host_params_per_s: float
    host_bytes_per_param: float
    cast_s_per_param: float
    launch_s: float
    casts: bool
    streams: int
    tail: str
    device_params_per_s: float | None = None

    def __post_init__(self) -> None:
        _check_rates(self, "published.")
        if self.streams not in (1, 3):
            raise _refusal("published.streams", self.streams, "give 1 or 3")
        if self.tail not in ("if_ragged", "never"):
            raise _refusal("published.tail", self.tail, 'give "if_ragged" or "never"')


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """Rates of one node as one rank sees it, all its ranks being busy alike.

    What the machine lacks, or nobody measured, is None. Rates that stand for one op alone are
    shared by ops that run at once as `perfmodel.model` says.

    Attributes:
        h2d_bytes_per_s, d2h_bytes_per_s: the link from pinned memory, one way busy.
        host_params_per_s: this library's fused host update with nothing beside it.
        device_params_per_s: the update on the device.
        launch_s: fixed cost of one op.
        source: where the numbers come from; every report repeats it.
        link_bytes_per_s: both ways of the link busy, added; None if neither slows the other.
        host_memory_bytes_per_s: this rank's share of host memory traffic, reads and writes
            added; None if it never limits.
        host_bytes_per_param: host memory traffic of the fused update.
        host_params_per_s_beside_copies: the host update while the link is busy both ways.
        host_params_per_s_by_threads: the host update alone, by the number of threads (text).
        pageable_h2d_bytes_per_s, pageable_d2h_bytes_per_s: the link from ordinary memory.
        pageable_link_bytes_per_s: both ways of it busy, added.
        host_cast_params_per_s, device_cast_params_per_s: fp32 rounded to 16 bits.
        device_memory_bytes_per_s: traffic of the device's memory.
        disk_write_bytes_per_s, disk_read_bytes_per_s: direct I/O.
        threads: CPU threads with which the host's rates hold.
        machine: what was measured, in words: processor, device, versions, date.
        published: the published code on this node, where it was fitted.

    Raises:
        ConfigError: a rate that cannot be; `where` names the field.
    """

    name: str
    h2d_bytes_per_s: float | None
    d2h_bytes_per_s: float | None
    host_params_per_s: float
    device_params_per_s: float | None
    launch_s: float
    source: str
    link_bytes_per_s: float | None = None
    host_memory_bytes_per_s: float | None = None
    host_bytes_per_param: float = FUSED_BYTES_PER_PARAM
    host_params_per_s_beside_copies: float | None = None
    host_params_per_s_by_threads: Mapping[str, float] = field(default_factory=dict)
    pageable_h2d_bytes_per_s: float | None = None
    pageable_d2h_bytes_per_s: float | None = None
    pageable_link_bytes_per_s: float | None = None
    host_cast_params_per_s: float | None = None
    device_cast_params_per_s: float | None = None
    device_memory_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    disk_read_bytes_per_s: float | None = None
    threads: int | None = None
    machine: Mapping[str, str | int | float] = field(default_factory=dict)
    published: PublishedCode | None = None

    def __post_init__(self) -> None:
        _check_rates(self)
        ways = (self.h2d_bytes_per_s, self.d2h_bytes_per_s, self.device_params_per_s)
        if None in ways and ways != (None, None, None):
            missing = next(name for lane, name in LANE_RATES.items() if self._get(name) is None)
            raise ConfigError(
                "a device needs its update rate and a link both ways",
                where=f"NodeProfile.{missing}",
                fix="give all three of them, or none where there is no device",
            )
        both = self.link_bytes_per_s
        if both is not None and both > sum(way or 0.0 for way in ways[:2]):
            raise _refusal(
                "link_bytes_per_s", both, "both ways at once carry at most the sum of each alone"
            )

    def _get(self, name: str) -> Any:
        return getattr(self, name)

    @property
    def has_device(self) -> bool:
        """Whether there is a device and a link to it."""
        return self.device_params_per_s is not None

    def rate(self, name: str) -> float:
        """The field of that name, for callers that cannot do without it.

        Raises:
            ConfigError: the profile lacks it.
        """
        value = self._get(name)
        if value is None:
            raise ConfigError(
                f"{self.name} has no such rate",
                where=f"NodeProfile.{name}",
                fix="measure it: python -m perfmodel calibrate, on a machine that has it",
            )
        return float(value)

    def op_s(self, lane: str, *, numel: int, link_bytes: int) -> float:
        """Seconds that an op on `lane` takes when nothing else slows it.

        `lane` is "h2d", "d2h", "device" or "host"; `numel` counts parameters updated,
        `link_bytes` what crosses the link.
        """
        work = link_bytes if lane in ("h2d", "d2h") else numel
        return self.launch_s + work / self.rate(LANE_RATES[lane])

    def to_json(self) -> str:
        """The file's text; what is None is left out."""
        kept = _kept(asdict(self))
        if self.published is not None:
            kept["published"] = _kept(kept["published"])
        return json.dumps({"schema_version": SCHEMA_VERSION, **kept}, indent=2) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the profile to a JSON file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> NodeProfile:
        """Read and check a file that `save` wrote.

        Raises:
            ConfigError: unreadable, no JSON object, another schema version, a field unknown,
                missing, of the wrong type, or a rate that cannot be; names the file and field.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            what = error.strerror or str(error)
            raise ConfigError(what, where=str(path), fix="give a readable file") from None
        except ValueError as error:
            raise ConfigError(
                f"no JSON: {error}",
                where=str(path),
                fix="make the profile anew: python -m perfmodel calibrate",
            ) from None
        try:
            return cls._from(content)
        except ConfigError as error:
            raise ConfigError(error.what, where=f"{path}: {error.where}", fix=error.fix) from None

    @classmethod
    def _from(cls, content: object) -> NodeProfile:
        if not isinstance(content, dict) or not content:
            raise ConfigError(
                "an empty profile" if content in ({}, [], None) else "not a JSON object",
                where="the whole file",
                fix="make one: python -m perfmodel calibrate",
            )
        version = content.pop("schema_version", None)
        if version != SCHEMA_VERSION:
            raise _refusal("schema_version", version, f"this version reads {SCHEMA_VERSION}")
        published = content.get("published")
        if published is not None:
            content["published"] = PublishedCode(**_checked(PublishedCode, published, "published."))
        return cls(**_checked(cls, content, ""))


def _kept(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, {})}


def _refusal(name: str, value: object, fix: str) -> ConfigError:
    return ConfigError(f"{value!r} cannot be", where=f"NodeProfile.{name}", fix=fix)


def _check_rates(made: Any, prefix: str = "") -> None:
    """Every number of a profile is possible: rates are at least 1 per second, costs may be zero."""
    for each in fields(made):
        value = getattr(made, each.name)
        entries = value.items() if isinstance(value, Mapping) else [(None, value)]
        if each.name == "machine":
            continue
        for key, number in entries:
            if isinstance(number, (bool, str, PublishedCode)) or number is None:
                continue
            least = 1.0 if "_per_s" in each.name else 1e-18
            if not (number == 0 and each.name in _MAY_BE_ZERO) and not least <= number <= _MOST:
                raise ConfigError(
                    f"{number!r} is not a rate",
                    where=f"NodeProfile.{prefix}{each.name}" + (f"[{key}]" if key else ""),
                    fix=f"give a positive number, from {least:g} to {_MOST:g}",
                )


_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "a text"),
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "Mapping": ((dict,), "an object"),
    "PublishedCode": ((PublishedCode,), "an object"),
}


def _checked(kind: Any, content: object, prefix: str) -> dict[str, Any]:
    """`content` as keyword arguments of a dataclass: every name known, every type right."""
    if not isinstance(content, dict):
        raise _refusal(prefix.rstrip("."), content, "give an object")
    known = {each.name: str(each.type) for each in fields(kind)}
    for name, value in content.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                "no such field",
                where=f"NodeProfile.{prefix}{name}",
                fix=f"did you mean {near[0]!r}?" if near else f"fields are {', '.join(known)}",
            )
        accepted, called = _TYPES[known[name].split("[")[0].split(" ")[0]]
        values = [value]
        if known[name] == "Mapping[str, float]" and isinstance(value, dict):
            (accepted, called), values = _TYPES["float"], list(value.values())
        for one in values:
            if not isinstance(one, accepted) or (isinstance(one, bool) and bool not in accepted):
                raise _refusal(f"{prefix}{name}", one, f"give {called}")
    required = [f.name for f in fields(kind) if f.default is f.default_factory]
    for name in required:
        if name not in content and not known[name].endswith("| None"):
            raise ConfigError(
                "missing", where=f"NodeProfile.{prefix}{name}", fix="add it, or calibrate anew"
            )
    return dict.fromkeys(required) | content


H100_NODE = NodeProfile(
    name="H100, PCIe 5",
    h2d_bytes_per_s=55.2e9,
    d2h_bytes_per_s=55.2e9,
    host_params_per_s=1.69e9,
    device_params_per_s=80e9,
    launch_s=10e-6,
    source="link peak and host-only step time per rank of a 4x H100 node as published with "
    "Deep Optimizer States (Middleware'24): 3.83e9 parameters in 2.27 s; device rate from "
    "30 bytes per parameter at 2.4 TB/s; launch cost assumed",
)
"""One rank of a 4x H100 node. The built-in estimate where nothing was measured."""
