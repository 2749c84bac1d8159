"""What a calibration measures, what it takes, and what it says of the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dos
from dos.errors import ConfigError, PoolError
from dos.kernels import adam
from perfmodel import timing
from perfmodel.bench import Effort, VirtualAccelerator
from perfmodel.calibrate import FULL, QUICK, Calibration, calibrate, quick_profile
from perfmodel.disk import BLOCK_BYTES, disk_rates
from perfmodel.machine import machine_of
from perfmodel.profile import H100_NODE, NodeProfile
from perfmodel.timing import LEAST_RUNS, MOST_RUNS, Work, rates

ROOT = Path(__file__).parents[2]
TINY = Effort(window_s=0.001, params=5_000, copy_bytes=4_096, disk_bytes=BLOCK_BYTES)
SLOW = replace(
    H100_NODE,
    name="slow",
    h2d_bytes_per_s=4e6,
    d2h_bytes_per_s=2e6,
    host_params_per_s=5e6,
    device_params_per_s=1e6,
    launch_s=1e-4,
)
MEASURED = {
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "link_bytes_per_s",
    "pageable_h2d_bytes_per_s",
    "pageable_d2h_bytes_per_s",
    "pageable_link_bytes_per_s",
    "host_memory_bytes_per_s",
    "host_params_per_s",
    "host_params_per_s_by_threads",
    "host_params_per_s_beside_copies",
    "host_cast_params_per_s",
    "device_params_per_s",
    "device_cast_params_per_s",
    "device_memory_bytes_per_s",
    "launch_s",
    "disk_write_bytes_per_s",
    "disk_read_bytes_per_s",
}
DEVICES = {
    "no device": None,
    "virtual": dos.VirtualDevice(),
    "paced": dos.VirtualDevice(pace=SLOW),
}


def measured(profile: NodeProfile) -> set[str]:
    return {name for name in MEASURED if getattr(profile, name) not in (None, {})}


@pytest.fixture(scope="module")
def paced() -> Calibration:
    return calibrate(DEVICES["paced"], effort=TINY)


# ---------------------------------------------------------------- what is found, what is not


@pytest.mark.parametrize("quick", [True, False], ids=["quick", "in full"])
@pytest.mark.parametrize("directory", [None, Path("does/not/exist")], ids=["none", "missing"])
@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_rate_is_found_or_said_to_be_left_out(
    device: dos.VirtualDevice | None, directory: Path | None, quick: bool
) -> None:
    found = calibrate(device, directory=directory, effort=TINY, quick=quick)
    assert measured(found.profile) ^ set(found.left_out) == MEASURED


def test_what_is_left_out_has_a_reason() -> None:
    assert all(calibrate(None, effort=TINY).left_out.values())


def test_a_profile_that_was_measured_loads_again(paced: Calibration, tmp_path: Path) -> None:
    paced.profile.save(tmp_path / "node.json")
    assert NodeProfile.load(tmp_path / "node.json") == paced.profile


@pytest.mark.parametrize(
    "name",
    ["h2d_bytes_per_s", "d2h_bytes_per_s", "host_params_per_s", "device_params_per_s"],
)
def test_no_rate_exceeds_that_of_the_pace(paced: Calibration, name: str) -> None:
    assert paced.profile.rate(name) <= SLOW.rate(name)


def test_an_op_costs_no_less_than_the_pace_has_it(paced: Calibration) -> None:
    assert paced.profile.launch_s >= SLOW.launch_s


def test_the_time_scale_is_divided_out() -> None:
    found = calibrate(dos.VirtualDevice(pace=SLOW, time_scale=20.0), effort=TINY, quick=True)
    assert found.profile.launch_s < 20 * SLOW.launch_s


def test_a_virtual_device_is_labelled(paced: Calibration) -> None:
    assert paced.profile.machine["device"] == "virtual device paced like slow"


def test_the_machine_is_described_without_a_device() -> None:
    assert {"processor", "cpus", "torch", "date"} <= set(machine_of(None))


def test_each_count_of_threads_up_to_all_is_measured() -> None:
    found = calibrate(None, effort=TINY, threads=3)
    assert list(found.profile.host_params_per_s_by_threads) == ["1", "2", "3"]


def test_progress_goes_from_nothing_to_all() -> None:
    shares: list[float] = []
    calibrate(None, effort=TINY, progress=lambda stage, share: shares.append(share))
    assert (shares[0], shares[-1], shares) == (0.0, 1.0, sorted(shares))


# ---------------------------------------------------------------- what fails


@pytest.fixture
def device_without_memory(monkeypatch: pytest.MonkeyPatch) -> dos.VirtualDevice:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("the device is full")

    monkeypatch.setattr(VirtualAccelerator, "empty", refuse)
    return dos.VirtualDevice()


def test_a_device_that_fails_is_left_out_with_its_reason(
    device_without_memory: dos.VirtualDevice,
) -> None:
    found = calibrate(device_without_memory, effort=TINY)
    assert found.left_out["device_params_per_s"] == "the device is full"


def test_a_profile_for_a_stride_needs_the_device(
    device_without_memory: dos.VirtualDevice,
) -> None:
    with closing(adam.make_pool(1)) as pool, pytest.raises(RuntimeError, match="full"):
        quick_profile(device_without_memory, pool, TINY)


def test_inference_mode_does_not_matter() -> None:
    with torch.inference_mode():
        found = calibrate(DEVICES["virtual"], effort=TINY, quick=True)
    assert found.profile.has_device


# ---------------------------------------------------------------- what it takes


@given(st.sampled_from([QUICK, FULL]), st.none() | st.integers(300_000_000, 1 << 45))
def test_memory_is_less_than_a_quarter_of_what_is_available(
    effort: Effort, available: int | None
) -> None:
    taken = effort.within(available).host_bytes
    assert 4 * taken <= (1 << 30 if available is None else available)


def test_where_memory_abounds_all_of_the_effort_is_made() -> None:
    assert QUICK.within(1 << 45) == QUICK


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(PoolError, match="caches"):
        QUICK.within(100_000_000)


def test_a_quick_calibration_takes_half_a_gigabyte_at_most() -> None:
    assert QUICK.host_bytes <= 1 << 29


def test_runs_are_bounded_where_time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    clock = iter(range(10**9))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock) * 1e-12)
    rates([Work(1, lambda: runs.append(0))], window_s=1.0)
    assert len(runs) == MOST_RUNS + 1  # the first does not count


def test_once_the_window_is_over_a_work_ends_after_its_least_runs() -> None:
    runs = []
    rates([Work(1, lambda: runs.append(0))], window_s=0.0)
    assert len(runs) == LEAST_RUNS + 1


def test_all_go_on_until_the_slowest_has_run_often_enough() -> None:
    runs_of_the_quick = threading.Semaphore(0)
    waits_for = iter([0])  # in the run before all others, for nothing

    def slow() -> None:
        for _ in range(next(waits_for, 50)):
            assert runs_of_the_quick.acquire(timeout=60), "the quick one has ended"

    rates([Work(1, runs_of_the_quick.release), Work(1, slow)], window_s=0.0)


def test_the_first_error_ends_all() -> None:
    def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        rates([Work(1, lambda: None), Work(1, fail)], window_s=60.0)


# ---------------------------------------------------------------- the disk


def test_the_disk_is_measured_where_it_takes_direct_io(tmp_path: Path) -> None:
    try:
        write, read = disk_rates(tmp_path, 2 * BLOCK_BYTES)
    except OSError as error:
        pytest.skip(f"no direct I/O here: {error}")
    assert min(write, read) > 0


def test_nothing_is_left_on_the_disk(tmp_path: Path) -> None:
    calibrate(None, directory=tmp_path, effort=TINY)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- the command


def command(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "perfmodel", "calibrate", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The object of a run, which takes care of its being all that is printed."""
    path = tmp_path_factory.mktemp("calibrate") / "node.json"
    done = command("--device", "virtual", "--quick", "--json", "-o", str(path))
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "loaded": NodeProfile.load(path)}


def test_the_command_prints_the_profile_that_it_writes(shown: dict[str, Any]) -> None:
    assert shown["profile"] == json.loads(shown["loaded"].to_json())


def test_the_command_says_what_is_left_out(shown: dict[str, Any]) -> None:
    assert measured(shown["loaded"]) ^ set(shown["left_out"]) == MEASURED


REFUSED = {
    "no accelerator for the cache": (["--device", "cpu"], "-o node.json"),
    "no such device": (["--device", "warp"], "'warp'"),
    "no such folder": (["--device", "cpu", "-o", "does/not/exist.json"], "cannot be written"),
    "paced CPU": (["--device", "cpu", "--pace", "node.json"], "--device virtual"),
}


@pytest.mark.parametrize(("options", "says"), REFUSED.values(), ids=REFUSED)
def test_the_command_refuses_before_it_measures(options: list[str], says: str) -> None:
    done = command(*options)
    assert (done.returncode, says in done.stderr, done.stdout) == (2, True, "")


def test_a_calibration_needs_a_thread() -> None:
    with pytest.raises(ConfigError, match="threads"):
        calibrate(None, effort=TINY, threads=0)
