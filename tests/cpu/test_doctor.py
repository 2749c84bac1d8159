"""`dos doctor`: what each fact is answered with, and the command as a process of its own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dos.doctor import findings, probe
from dos.doctor.findings import STATUSES, Finding
from perfmodel.bench import UPDATE_BYTES

ROOT = Path(__file__).parents[2]
KEYS = {field.name for field in fields(Finding)}
AVX512 = ["avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "f16c"]
TWO_NODES = [[0, 1], [2, 3]]


def doctor(*options: str, before: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"{before}\nfrom dos.cli import main; main()", "doctor", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """The object of a quick run, which takes care of its being the only line."""
    done = doctor("--json", "--quick")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return dict(json.loads(line))


def test_json_is_one_object_of_findings_and_counts(shown: dict[str, Any]) -> None:
    assert set(shown) == {"findings", "counts"}
    assert sum(shown["counts"].values()) == len(shown["findings"])


def test_each_finding_has_all_fields(shown: dict[str, Any]) -> None:
    assert all(set(finding) == KEYS for finding in shown["findings"])


def test_each_finding_has_a_name_of_its_own(shown: dict[str, Any]) -> None:
    names = [finding["name"] for finding in shown["findings"]]
    assert len(set(names)) == len(names)
    assert {"dos", "torch", "extension", "threads", "NUMA", "huge pages", "memlock"} <= set(names)
    assert {"DeepSpeed", "packages", "io_uring", f"directory {os.getcwd()}"} <= set(names)
    assert {"host memory", "accelerator", "pinning", "triton", "update"} <= set(names)


def test_quick_measures_nothing(shown: dict[str, Any]) -> None:
    assert shown["findings"][-1]["figures"] == {}


def test_what_is_not_well_says_what_it_costs_and_how_to_fix_it(shown: dict[str, Any]) -> None:
    lacking = [
        finding["name"]
        for finding in shown["findings"]
        if finding["status"] in ("warning", "broken") and not (finding["costs"] and finding["fix"])
    ]
    assert lacking == []


def test_people_get_a_table() -> None:
    shown = doctor("--quick").stdout
    assert "huge pages" in shown
    assert "{" not in shown


def test_strict_fails_where_there_is_a_warning(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    assert doctor("--quick", "--strict", "--dir", missing).returncode == 1


def test_the_help_tells_the_exit_code() -> None:
    assert "Exit code 1" in doctor("--help").stdout


BREAK = """if True:
    import sys
    class Broken:
        def find_spec(self, name, path, target=None):
            if name == NAME:
                raise ERROR
    sys.meta_path.insert(0, Broken())
"""


@pytest.mark.parametrize("module", ["dos.kernels._native", "torch"])
def test_what_does_not_import_is_told_and_exits_with_1(module: str) -> None:
    error = 'ImportError("undefined symbol: x")'
    done = doctor("--json", before=BREAK.replace("NAME", repr(module)).replace("ERROR", error))
    broken = [f for f in json.loads(done.stdout)["findings"] if f["status"] == "broken"]
    assert done.returncode == 1
    assert len(broken) == 1
    assert "undefined symbol: x" in broken[0]["value"]


def test_a_missing_extension_is_no_failure() -> None:
    name = "dos.kernels._native"
    error = f"ModuleNotFoundError(name={name!r})"
    done = doctor("--json", before=BREAK.replace("NAME", repr(name)).replace("ERROR", error))
    found = {finding["name"]: finding["status"] for finding in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0
    assert (found["extension"], found["update"]) == ("warning", "note")


# What each fact is answered with.


@pytest.mark.parametrize("isas", [["avx512", "avx2", "scalar"], ["scalar"]])
def test_the_extension_names_the_instruction_set_that_it_uses(isas: list[str]) -> None:
    found = findings.extension(isas, None)
    assert (found.status, found.figures["chosen"]) == ("ok", isas[0])


@pytest.mark.parametrize("numba", ["0.61", None])
def test_a_missing_extension_is_a_warning(numba: str | None) -> None:
    assert findings.extension([], numba).status == "warning"


def test_numba_takes_the_place_of_a_missing_extension() -> None:
    assert "numba 0.61" in findings.extension([], "0.61").value


def test_a_processor_that_could_do_better_is_noted() -> None:
    found = findings.better_isa(["avx2", "scalar"], AVX512)
    assert found is not None
    assert (found.status, found.figures["could"]) == ("note", "avx512")


@pytest.mark.parametrize(
    ("isas", "flags"),
    [(["avx512", "avx2"], AVX512), (["avx2"], ["avx2", "f16c"]), (["neon"], []), ([], AVX512)],
)
def test_a_build_that_has_the_best_is_not_noted(isas: list[str], flags: list[str]) -> None:
    assert findings.better_isa(isas, flags) is None


@pytest.mark.parametrize(
    ("affinity", "quota", "by"),
    [(8, math.inf, "all CPUs"), (4, math.inf, "affinity"), (8, 2.0, "quota"), (4, 2.0, "quota")],
)
def test_threads_name_what_limits_them(affinity: int, quota: float, by: str) -> None:
    found = findings.threads(min(affinity, 2), affinity, 8, quota)
    assert (found.status, by in found.value) == ("ok", True)


def test_a_broken_quota_is_noted() -> None:
    assert findings.threads(3, 8, 8, 2.5).status == "note"


def test_a_single_thread_is_a_warning() -> None:
    assert findings.threads(1, 1, 8, math.inf).status == "warning"


def test_numa_counts_the_threads_of_each_node() -> None:
    found = findings.numa(TWO_NODES, [[0, 1], [0, 1], [2, 3]])
    assert found.figures == {"nodes": [2, 2], "threads": [2, 1]}


@pytest.mark.parametrize(
    ("setting", "status"),
    [("always", "ok"), ("madvise", "ok"), ("never", "warning"), (None, "warning")],
)
def test_no_huge_pages_are_a_warning(setting: str | None, status: str) -> None:
    assert findings.huge_pages(setting).status == status


@pytest.mark.parametrize(
    ("found", "tested", "status"),
    [("0.19.8", True, "ok"), ("0.12.0", False, "warning"), (None, False, "note")],
)
def test_a_deepspeed_that_is_not_tested_is_a_warning(
    found: str | None, tested: bool, status: str
) -> None:
    assert findings.deepspeed(found, tested).status == status


def test_a_missing_package_says_what_is_off_without_it() -> None:
    found = findings.packages({"numpy": "2.4", "scipy": None})
    assert (found.status, "perfmodel fit" in found.costs) == ("note", True)


def test_unknown_host_memory_is_noted() -> None:
    assert findings.host_memory(None).status == "note"


def test_a_driver_that_refuses_to_pin_is_a_warning_with_its_reason() -> None:
    found = findings.pinning("a GPU", "cudaHostRegister refused")
    assert (found.status, found.value) == ("warning", "cudaHostRegister refused")


def test_an_accelerator_that_fails_is_a_warning() -> None:
    found = findings.accelerator("a GPU", "the driver is too old")
    assert (found.status, "too old" in found.value) == ("warning", True)


def test_nothing_is_pinned_without_an_accelerator() -> None:
    assert findings.pinning(None, "").figures == {"pinned": None}


@pytest.mark.parametrize(("device", "status"), [(None, "ok"), ("a GPU", "warning")])
def test_a_missing_triton_is_a_warning_where_there_is_a_gpu(
    device: str | None, status: str
) -> None:
    assert findings.triton(None, device).status == status


@pytest.mark.parametrize(
    ("ratio", "sweep", "status"),
    [(0.95, 20e9, "ok"), (0.69, 20e9, "warning"), (0.95, 5e9, "warning")],
)
def test_an_update_far_below_the_sweep_is_a_warning(
    ratio: float, sweep: float, status: str
) -> None:
    assert findings.update_probe(ratio * sweep, sweep, ratio, 1000).status == status


@given(st.none() | st.integers(0, 1 << 45))
def test_the_probe_takes_less_than_a_quarter_of_the_memory(available: int | None) -> None:
    params = probe.params_for(available)
    assert 4 * UPDATE_BYTES * params <= (1 << 30 if available is None else available)
    assert params == 0 or probe.FEWEST_PARAMS <= params <= probe.PARAMS


def test_the_probe_finds_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dos.kernels._native", reason="needs the compiled extension")
    monkeypatch.setattr(probe, "PARAMS", 10_000)
    monkeypatch.setattr(probe, "FEWEST_PARAMS", 1)
    figures = probe.update(rounds=1).figures
    assert set(figures) == {"update_bytes_per_s", "sweep_bytes_per_s", "ratio", "params"}
    assert all(float(str(value)) > 0 for value in figures.values())


def test_a_report_counts_each_status() -> None:
    found = [Finding(str(index), "", status) for index, status in enumerate(STATUSES)]
    assert findings.report(found)["counts"] == dict.fromkeys(STATUSES, 1)
