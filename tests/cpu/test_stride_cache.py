"""Which profile `stride="auto"` goes by: options, cache, measurement, in that order."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dos
from dos import stride_profile
from dos.config import DOSConfig
from dos.errors import ConfigError
from dos.kernels import adam
from dos.kernels.thread_pool import ThreadPool
from dos.plan import SubgroupSize, UpdatePlan, build
from dos.stride import DeviceMemory, fastest_stride
from perfmodel.cache import cache_path, read_cache, write_cache
from perfmodel.machine import machine_of
from perfmodel.profile import H100_NODE, NodeProfile

DEVICE = torch.device("meta")  # plays an accelerator: it has a name, and cannot be measured
HERE = replace(
    H100_NODE,
    name="here",
    host_params_per_s=0.4e9,
    machine=machine_of(DEVICE),
    threads=8,
    host_params_per_s_by_threads={"1": 0.1e9, "8": 0.4e9},
)
FITS = DeviceMemory(needed_bytes=0, held_bytes=0, free_bytes=None)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache_path()
    assert path is not None
    return path


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    with closing(adam.make_pool(8)) as made:
        yield made


def first_strides(pool: ThreadPool, **options: object) -> tuple[object, object]:
    """The stride to begin with, and that after the first step."""
    auto = stride_profile.auto_stride(DOSConfig(**options), DEVICE, pool)
    return auto.first(planner), auto.after_step(None, FITS, planner)  # type: ignore[arg-type]


def planner(stride: float | str) -> UpdatePlan:
    return build([SubgroupSize(10**8, 0, 2 * 10**8)] * 40, stride=stride)


def stride_of(profile: NodeProfile) -> object:
    return fastest_stride(profile, planner)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by each measurement, all of which find `HERE`."""
    calls: list[str] = []

    def measure(device: torch.device, pool: ThreadPool) -> NodeProfile:
        calls.append(device.type)
        return HERE

    monkeypatch.setattr(stride_profile, "quick_profile", measure)
    return calls


# ---------------------------------------------------------------- the file


def test_what_is_kept_is_found_again() -> None:
    assert write_cache(HERE) == cache_path()
    assert read_cache(machine_of(DEVICE)) == HERE


def test_the_cache_lies_in_the_users_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_path() == tmp_path / ".cache" / "dos" / "node.json"


def test_without_a_file_nothing_is_found() -> None:
    assert read_cache(machine_of(DEVICE)) is None


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert (write_cache(HERE), read_cache(machine_of(DEVICE))) == (None, None)


@pytest.mark.parametrize("key", ["processor", "cpus", "device"])
def test_a_profile_of_another_machine_is_passed_over(key: str) -> None:
    write_cache(replace(HERE, machine={**HERE.machine, key: "other"}))
    assert read_cache(machine_of(DEVICE)) is None


def test_a_new_version_or_day_makes_no_other_machine() -> None:
    write_cache(replace(HERE, machine={**HERE.machine, "torch": "1.0", "date": "1999-01-01"}))
    assert read_cache(machine_of(DEVICE)) is not None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": 0}'])
def test_a_corrupt_file_is_passed_over_with_a_warning(cache: Path, text: str) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    with pytest.warns(RuntimeWarning, match=r"node\.json"):
        assert read_cache(machine_of(DEVICE)) is None


def test_a_folder_in_its_place_is_passed_over_with_a_warning(cache: Path) -> None:
    cache.mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match=r"node\.json"):
        assert read_cache(machine_of(DEVICE)) is None


def test_where_nothing_can_be_written_nothing_is_kept(cache: Path) -> None:
    cache.parent.write_text("a file where the folder would be")
    assert not write_cache(HERE)


def test_writing_leaves_the_file_alone(cache: Path) -> None:
    write_cache(HERE)
    assert list(cache.parent.iterdir()) == [cache]


def test_what_cannot_be_put_in_place_leaves_nothing(cache: Path) -> None:
    (cache / "taken").mkdir(parents=True)
    assert write_cache(HERE) is None
    assert list(cache.parent.iterdir()) == [cache]


# ---------------------------------------------------------------- who is asked


def test_the_cache_is_used_from_the_beginning(pool: ThreadPool, measured: list[str]) -> None:
    write_cache(HERE)
    assert first_strides(pool) == (stride_of(HERE), stride_of(HERE))
    assert measured == []


def test_without_a_cache_the_first_step_is_followed_by_a_measurement(
    pool: ThreadPool, measured: list[str]
) -> None:
    assert first_strides(pool) == (stride_of(H100_NODE), stride_of(HERE))
    assert measured == [DEVICE.type]


def test_what_was_measured_is_kept(pool: ThreadPool, measured: list[str], cache: Path) -> None:
    first_strides(pool)
    assert NodeProfile.load(cache) == HERE


@pytest.mark.usefixtures("measured")
def test_a_measurement_that_cannot_be_kept_is_used(
    pool: ThreadPool, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.write_text("a file where the folder would be")
    with caplog.at_level(logging.INFO, "dos"):
        assert first_strides(pool)[1] == stride_of(HERE)
    assert "not kept" in caplog.text


def test_a_corrupt_cache_is_measured_anew(
    pool: ThreadPool, measured: list[str], cache: Path
) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("{")
    with pytest.warns(RuntimeWarning, match="measured again"):
        first_strides(pool)
    assert (measured, NodeProfile.load(cache)) == ([DEVICE.type], HERE)


@pytest.mark.filterwarnings("ignore:host memory is pageable")
def test_a_machine_that_cannot_be_measured_goes_by_the_built_in_profile(
    pool: ThreadPool, cache: Path
) -> None:
    with pytest.warns(RuntimeWarning, match="could not be measured"):
        assert first_strides(pool)[1] == stride_of(H100_NODE)
    assert not cache.exists()


@pytest.mark.parametrize("as_file", [True, False], ids=["path", "object"])
def test_the_option_goes_before_the_cache(pool: ThreadPool, tmp_path: Path, as_file: bool) -> None:
    write_cache(H100_NODE)
    HERE.save(tmp_path / "mine.json")
    profile = tmp_path / "mine.json" if as_file else HERE
    assert first_strides(pool, profile=profile)[0] == stride_of(HERE)


def test_the_hosts_rate_is_that_of_the_threads_used(pool: ThreadPool) -> None:
    write_cache(HERE)
    with closing(adam.make_pool(1)) as one:
        assert first_strides(one)[0] == stride_of(replace(HERE, host_params_per_s=0.1e9))


@pytest.mark.parametrize(
    "device", ["virtual", dos.VirtualDevice(pace=HERE)], ids=["plain", "paced"]
)
def test_a_virtual_device_is_not_measured(
    pool: ThreadPool, measured: list[str], device: object
) -> None:
    expected = stride_of(H100_NODE if device == "virtual" else HERE)
    assert first_strides(pool, device=device) == (expected, expected)
    assert measured == []


@pytest.mark.parametrize(
    ("profile", "says"), [("missing.json", "missing.json"), (dos.VirtualDevice, "NodeProfile")]
)
def test_a_profile_that_is_none_is_refused(profile: object, says: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ConfigError, match=says):
        dos.DOSOptimizer(torch.optim.AdamW([parameter]), device="virtual", profile=profile)


def test_a_profile_without_a_device_is_refused_by_the_rate_it_lacks() -> None:
    host_only = replace(HERE, h2d_bytes_per_s=None, d2h_bytes_per_s=None, device_params_per_s=None)
    parameter = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(ConfigError, match="device_params_per_s"):
        dos.DOSOptimizer(torch.optim.AdamW([parameter]), device="virtual", profile=host_only)


def test_on_the_cpu_nothing_is_measured_read_or_said(
    cache: Path, measured: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.ones(4)
    optimizer = dos.DOSOptimizer(torch.optim.AdamW([parameter]), device="cpu")
    with caplog.at_level(logging.DEBUG):
        optimizer.step()
    assert (optimizer.plan.stride, measured, cache.exists(), caplog.text) == ("host", [], False, "")
