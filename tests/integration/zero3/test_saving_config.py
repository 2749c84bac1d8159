"""What of a DeepSpeed configuration switches our checkpoints on."""

from __future__ import annotations

from typing import Any

import pytest

from dos.errors import ConfigError
from dos.integrations.deepspeed_options import read_checkpoint
from dos.integrations.zero3_config import read_section

ON: dict[str, Any] = {"deep_optimizer_states": {"checkpoint": {}}}


@pytest.mark.parametrize("config", [{}, {"datastates_ckpt": False}])
def test_without_a_section_upstream_saves(config: dict[str, Any]) -> None:
    assert read_checkpoint(config) is None


def test_a_section_that_is_off_switches_no_checkpoints_on() -> None:
    off = {"deep_optimizer_states": {"enabled": False, "checkpoint": {}}}
    assert read_checkpoint(off) is None
    assert read_checkpoint({**off, "datastates_ckpt": {}}) is not None


def test_checkpoints_alone_leave_the_optimizer_to_upstream() -> None:
    assert read_checkpoint({**ON, "zero_optimization": {"stage": 1}}) is not None
    assert read_section({**ON, "zero_optimization": {"stage": 1}}) is None


def test_the_section_may_stand_inside_offload_optimizer() -> None:
    offload = {"device": "cpu", "deep_optimizer_states": {"checkpoint": {"trusted": True}}}
    found = read_checkpoint({"zero_optimization": {"stage": 3, "offload_optimizer": offload}})
    assert found is not None
    assert found.trusted


def test_the_drop_in_gives_the_ring_its_size_in_gib() -> None:
    found = read_checkpoint({"datastates_ckpt": {"host_cache_size": 1.5}})
    assert found is not None
    assert found.ring_bytes == 3 << 29


def test_the_drop_in_warns_of_what_it_does_not_know() -> None:
    with pytest.warns(UserWarning, match="parser_threads"):
        read_checkpoint({"datastates_ckpt": {"parser_threads": 8}})


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"deep_optimizer_states": {"checkpoint": {"ringbytes": 1}}}, "ring_bytes"),
        ({"deep_optimizer_states": {"checkpoint": {"ring_bytes": 1}}}, "ring_bytes"),
        ({"deep_optimizer_states": {"checkpoint": True}}, "no section"),
        ({"datastates_ckpt": {"host_cache_size": "2"}}, "host_cache_size"),
        ({"datastates_ckpt": {"host_cache_size": float("inf")}}, "host_cache_size"),
        ({"datastates_ckpt": {"host_cache_size": 1e-6}}, "^datastates_ckpt.host_cache_size: in"),
        ({**ON, "datastates_ckpt": {}}, "remove datastates_ckpt"),
        ({**ON, "checkpoint": {"writer": {"type": "fast"}}}, "checkpoint.writer"),
        ({**ON, "checkpoint": {"use_node_local_storage": True}}, "use_node_local_storage"),
        ({**ON, "nebula": {"enabled": True}}, "nebula"),
        ({**ON, "zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_param"),
        ({**ON, "zero_optimization": {"offload_optimizer": {"super_offload": True}}}, "SuperOff"),
        ({**ON, "zero_optimization": {"zenflow": {}}}, "ZenFlow"),
    ],
)
def test_what_cannot_be_is_refused_by_name(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_checkpoint(config)
