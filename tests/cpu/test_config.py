"""Options are checked when they are given, and stay as they were."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import dos


@pytest.mark.parametrize("stride", [1, 1.25, 2, 7.5, 100, "auto", "host"])
def test_stride_is_kept(stride: float | str) -> None:
    assert dos.DOSConfig(stride=stride).stride == stride


def test_whole_stride_is_an_integer() -> None:
    assert isinstance(dos.DOSConfig(stride=2.0).stride, int)


@pytest.mark.parametrize(
    "stride", [0, 0.99, -2, float("nan"), float("inf"), "2", "fast", True, None, [2]], ids=str
)
def test_bad_stride_is_refused(stride: Any) -> None:
    with pytest.raises(dos.ConfigError, match=r"DOSConfig\.stride"):
        dos.DOSConfig(stride=stride)


COUNTS = ["subgroup_size", "device_slots", "host_memory_bytes", "ring_bytes", "threads"]


@pytest.mark.parametrize("option", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 1.5, 2.0, True, "2"], ids=repr)
def test_bad_count_is_refused(option: str, value: Any) -> None:
    with pytest.raises(dos.ConfigError, match=rf"DOSConfig\.{option}"):
        dos.DOSConfig(**{option: value})


@pytest.mark.parametrize("option", COUNTS)
def test_smallest_count_is_kept(option: str) -> None:
    assert getattr(dos.DOSConfig(**{option: 1}), option) == 1


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan"), float("inf"), "much"])
def test_bad_ratio_is_refused(ratio: Any) -> None:
    with pytest.raises(dos.ConfigError, match=r"DOSConfig\.resident_ratio"):
        dos.DOSConfig(resident_ratio=ratio)


@pytest.mark.parametrize("ratio", [0, 0.4, 1])
def test_ratio_is_kept(ratio: float) -> None:
    assert dos.DOSConfig(resident_ratio=ratio).resident_ratio == ratio


@pytest.mark.parametrize("device", ["cpu", dos.VirtualDevice(poison=True), torch.device("cpu")])
def test_device_is_kept(device: Any) -> None:
    assert dos.DOSConfig(device=device).device == device


@pytest.mark.parametrize("device", [None, 3, ["cpu"]], ids=str)
def test_bad_device_is_refused(device: Any) -> None:
    with pytest.raises(dos.ConfigError, match=r"DOSConfig\.device"):
        dos.DOSConfig(device=device)


@pytest.mark.parametrize("option", sorted(dos.DOSConfig.model_fields))
def test_misspelt_option_is_answered_with_the_right_one(option: str) -> None:
    with pytest.raises(dos.ConfigError, match=f"did you mean '{option}'"):
        dos.DOSConfig(**{option[:-1]: 1})


def test_option_like_no_other_is_answered_with_all() -> None:
    with pytest.raises(dos.ConfigError) as caught:
        dos.DOSConfig(zzz=1)
    assert all(name in str(caught.value) for name in dos.DOSConfig.model_fields)


@pytest.mark.parametrize("scale", [0.5, float("nan"), float("inf")])
def test_bad_time_scale_is_refused(scale: float) -> None:
    with pytest.raises(dos.ConfigError, match=r"VirtualDevice\.time_scale"):
        dos.VirtualDevice(time_scale=scale)


def test_misspelt_option_of_the_virtual_device_is_answered_with_the_right_one() -> None:
    with pytest.raises(dos.ConfigError, match="did you mean 'poison'"):
        dos.VirtualDevice(poisn=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", sorted(dos.DOSConfig.model_fields))
def test_option_cannot_be_changed_afterwards(name: str) -> None:
    config = dos.DOSConfig()
    with pytest.raises(ValueError, match="frozen"):
        setattr(config, name, 2)


@pytest.mark.parametrize("name", sorted(dos.DOSConfig.model_fields))
def test_option_has_a_description(name: str) -> None:
    assert dos.DOSConfig.model_fields[name].description


def test_error_survives_pickling() -> None:
    with pytest.raises(dos.ConfigError) as caught:
        dos.DOSConfig(stride=0)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
