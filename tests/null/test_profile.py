"""Node profiles as files: what is kept, and what is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dos.errors import ConfigError
from perfmodel.profile import H100_NODE, NodeProfile, PublishedCode

PUBLISHED = PublishedCode(1e9, 36.0, 1e-10, 1e-3, casts=True, streams=3, tail="never")
FULL = replace(
    H100_NODE,
    link_bytes_per_s=90e9,
    host_memory_bytes_per_s=80e9,
    host_params_per_s_by_threads={"1": 0.2e9, "16": 1.69e9},
    threads=16,
    machine={"cpu": "a processor", "cores": 16},
    published=PUBLISHED,
)
HOST_ONLY = replace(
    FULL,
    h2d_bytes_per_s=None,
    d2h_bytes_per_s=None,
    device_params_per_s=None,
    link_bytes_per_s=None,
)


@pytest.mark.parametrize(
    "profile", [H100_NODE, FULL, HOST_ONLY], ids=["plain", "full", "host only"]
)
def test_a_saved_profile_loads_as_it_was(profile: NodeProfile, tmp_path: Path) -> None:
    profile.save(tmp_path / "node.json")
    assert NodeProfile.load(tmp_path / "node.json") == profile


def test_what_the_machine_lacks_is_left_out_of_the_file() -> None:
    assert "h2d_bytes_per_s" not in json.loads(HOST_ONLY.to_json())


def test_a_rate_that_is_missing_is_named_when_it_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"NodeProfile\.h2d_bytes_per_s"):
        HOST_ONLY.op_s("h2d", numel=1, link_bytes=1)


def test_half_a_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"NodeProfile\.d2h_bytes_per_s"):
        replace(H100_NODE, d2h_bytes_per_s=None)


def test_a_link_cannot_carry_more_both_ways_than_each_way_alone() -> None:
    with pytest.raises(ConfigError, match=r"NodeProfile\.link_bytes_per_s"):
        replace(H100_NODE, link_bytes_per_s=120e9)


@pytest.mark.parametrize("lane", ["h2d", "d2h", "device", "host"])
def test_an_op_without_work_costs_its_launch(lane: str) -> None:
    assert H100_NODE.op_s(lane, numel=0, link_bytes=0) == H100_NODE.launch_s


@pytest.mark.parametrize("value", [0.0, -1.0, 0.5, 1e300, math.inf, math.nan])
def test_an_impossible_rate_is_refused_by_name(value: float) -> None:
    with pytest.raises(ConfigError, match=r"NodeProfile\.h2d_bytes_per_s"):
        replace(H100_NODE, h2d_bytes_per_s=value)


Damage = Callable[[dict[str, Any]], object]
DAMAGES: dict[str, tuple[Damage, str, str]] = {
    "empty": (lambda c: c.clear(), "the whole file", "empty profile"),
    "other schema": (lambda c: c.update(schema_version=2), "schema_version", "2 cannot be"),
    "no schema": (lambda c: c.pop("schema_version"), "schema_version", "None cannot be"),
    "typo": (lambda c: c.update(h2d_byte_per_s=1.0), "h2d_byte_per_s", "'h2d_bytes_per_s'"),
    "text": (lambda c: c.update(launch_s="fast"), "launch_s", "give a number"),
    "truth": (lambda c: c.update(launch_s=True), "launch_s", "give a number"),
    "null": (lambda c: c.update(launch_s=None), "launch_s", "give a number"),
    "list": (lambda c: c.update(machine=[]), "machine", "give an object"),
    "missing": (lambda c: c.pop("host_params_per_s"), "host_params_per_s", "missing"),
    "negative": (lambda c: c.update(host_params_per_s=-1.0), "host_params_per_s", "not a rate"),
    "infinite": (lambda c: c.update(d2h_bytes_per_s=math.inf), "d2h_bytes_per_s", "not a rate"),
    "in a table": (
        lambda c: c["host_params_per_s_by_threads"].update({"2": 0}),
        "host_params_per_s_by_threads[2]",
        "not a rate",
    ),
    "text in a table": (
        lambda c: c["host_params_per_s_by_threads"].update({"2": "x"}),
        "host_params_per_s_by_threads",
        "give a number",
    ),
    "published": (lambda c: c.update(published=3), "published", "give an object"),
    "published typo": (lambda c: c["published"].update(tial="x"), "published.tial", "'tail'"),
    "published tail": (lambda c: c["published"].update(tail="x"), "published.tail", "if_ragged"),
}


@pytest.mark.parametrize(("damage", "field", "says"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_refused_by_the_name_of_the_field(
    damage: Damage, field: str, says: str, tmp_path: Path
) -> None:
    content = json.loads(FULL.to_json())
    damage(content)
    path = tmp_path / "node.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        NodeProfile.load(path)
    text = str(caught.value)
    assert (str(path) in text, field in text, says in text) == (True, True, True)


@pytest.mark.parametrize("text", ["", "{", "\xff"])
def test_what_is_no_json_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "node.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match="no JSON"):
        NodeProfile.load(tmp_path / "node.json")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"node\.json"):
        NodeProfile.load(tmp_path / "node.json")
