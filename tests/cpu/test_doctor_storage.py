"""`dos doctor` on disks and their engines: what it looks at, and its answer to each fact."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from dos.checkpoint import linux
from dos.doctor import disks, storage_findings
from dos.doctor.disks import Disk

GOOD = Disk("ext4", "/", (512, 512), (512, 512), True, 1 << 40)


@pytest.mark.parametrize(("limit", "status"), [(None, "ok"), (1 << 33, "ok"), (8 << 20, "note")])
def test_little_lockable_memory_is_noted(limit: int | None, status: str) -> None:
    assert storage_findings.memlock(limit).status == status


def test_the_fix_of_a_small_limit_is_the_line_of_limits_conf() -> None:
    assert "`* - memlock unlimited` in /etc/security/limits.conf" in (
        storage_findings.memlock(8 << 20).fix
    )


def test_an_io_uring_that_works_is_well() -> None:
    assert storage_findings.io_uring("").status == "ok"


@pytest.mark.parametrize(
    ("refusal", "disabled", "fix"),
    [
        ("this build is without liburing", 0, "liburing-dev"),
        ("no compiled extension (x)", 0, "g++"),
        ("Operation not permitted", 2, "kernel.io_uring_disabled=0"),
        ("Operation not permitted", 0, "seccomp"),
        ("Function not implemented", 0, "seccomp"),
        ("Cannot allocate memory", 0, "memlock"),
    ],
)
def test_a_refused_io_uring_is_noted_with_the_fix_of_its_cause(
    refusal: str, disabled: int, fix: str
) -> None:
    found = storage_findings.io_uring(refusal, disabled)
    assert (found.status, found.value, fix in found.fix) == ("note", refusal, True)


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, "ok"),
        ({"told_aligns_bytes": None}, "ok"),
        ({"direct_aligns_bytes": None}, "warning"),
        ({"file_system": "tmpfs"}, "warning"),
        ({"exchanges": False}, "note"),
    ],
)
def test_a_directory_is_judged_by_what_its_file_system_can(
    change: dict[str, object], status: str
) -> None:
    disk = dataclasses.replace(GOOD, **change)  # type: ignore[arg-type]
    assert storage_findings.directory("there", disk).status == status


def test_a_directory_that_cannot_be_used_is_a_warning_with_the_reason() -> None:
    found = storage_findings.no_directory("there", "Permission denied")
    assert (found.status, found.value) == ("warning", "Permission denied")


def test_looking_at_a_directory_leaves_nothing_behind(tmp_path: Path) -> None:
    disks.look_at(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_missing_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        disks.look_at(tmp_path / "missing")


def test_direct_io_is_found_exactly_where_a_transfer_succeeds(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        works = linux.make_direct(file.fileno(), write=True)
    assert disks.look_at(tmp_path).direct_aligns_bytes == works


def test_the_mount_of_shared_memory_is_told() -> None:
    if not os.path.ismount("/dev/shm"):
        pytest.skip("nothing is mounted at /dev/shm")
    assert disks.mount_and_type(Path("/dev/shm")) == ("/dev/shm", "tmpfs")


def test_a_mount_point_with_a_space_is_found_and_the_later_of_two_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    point = str(folder).replace(" ", "\\040")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        f"2 1 8:2 / {point} rw shared:1 - xfs /dev/b rw\n"
        f"3 2 8:3 / {point} rw - btrfs /dev/c rw\n"
    )
    monkeypatch.setattr(disks, "MOUNTS", mounts)
    assert disks.mount_and_type(folder) == (str(folder), "btrfs")
