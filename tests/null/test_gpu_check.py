"""`make gpu-check` where there is no GPU, and what it makes of packages and test reports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import gpu_check

ROOT = Path(__file__).parents[2]
REPORT = """<testsuites><testsuite>
<testcase classname="tests.gpu.a" name="passes"/>
<testcase classname="tests.gpu.a" name="fails"><failure message="no"/></testcase>
<testcase classname="tests.gpu.a" name="breaks"><error message="no"/></testcase>
<testcase classname="tests.gpu.b" name="skips"><skipped message="no"/></testcase>
</testsuite></testsuites>"""


def test_without_a_gpu_it_prints_one_json_object_and_fails() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.gpu_check", "check"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert done.returncode != 0
    assert (found["device"], found["ok"], found["tests"]) == (None, False, None)
    assert found["reason"]


def test_a_report_gives_numbers_and_the_names_of_failures() -> None:
    assert gpu_check.counted(REPORT) == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "failures": ["tests.gpu.a::fails", "tests.gpu.a::breaks"],
    }


def all_there() -> dict[str, str | None]:
    return dict.fromkeys(gpu_check.everything(), "1000")


def test_nothing_is_carried_to_a_machine_that_has_all() -> None:
    assert gpu_check.missing(all_there()) == []


@pytest.mark.parametrize("version", [None, "7.4.3"])
def test_what_is_missing_or_too_old_is_carried_with_its_needs(version: str | None) -> None:
    taken = gpu_check.missing({**all_there(), "pytest": version})
    assert taken == sorted(["pytest", *gpu_check.PYTEST_NEEDS])


@pytest.mark.parametrize(
    ("version", "as_numbers"),
    [("2.11.0+cu130", (2, 11, 0)), ("77.0.3", (77, 0, 3)), ("8", (8,)), ("9.0rc1", (9, 0, 1))],
)
def test_versions_compare_by_their_numbers(version: str, as_numbers: tuple[int, ...]) -> None:
    assert gpu_check.numbers(version) == as_numbers


def test_all_that_is_carried_is_pinned() -> None:
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert gpu_check.everything() - pinned == set()
