"""The tests and the benchmark that need a GPU, on a machine that may have no network.

Run from the root of the tree, as the verbs do:

    python3 -m scripts.gpu_check wheels     # where there is a network: fills wheels/
    python3 -m scripts.gpu_check check      # where there is a GPU: one JSON object

`check` takes the interpreter as it is, with torch, triton and numpy. What else is missing there,
or too old, comes from wheels/ into .gpu-check/site, which nobody else sees; the extension is built
in place. Standard output is one JSON object; all else goes to standard error. Exit code 0 only if
there is a CUDA device, every test passed and the benchmark ran.

Nothing but the standard library is imported here before that.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from dos.stdout import own_stdout

WHEELS, PLACE = Path("wheels"), Path(".gpu-check")
SITE = PLACE / "site"
LARGEST_BYTES = 64 << 20  # of all wheels: they travel with the tree
PYTHON_VERSION = "3.12"
PLATFORMS = ("manylinux_2_17", "manylinux2014", "manylinux_2_28")
WAIT_S = {"install": 300.0, "build": 600.0, "tests": 1200.0, "benchmark": 900.0}

# What may be missing, the oldest version that will do, and what comes with it from wheels/: a
# package and its needs are taken together, since their versions fit together.
PYTEST_NEEDS = ("pluggy", "iniconfig", "packaging", "pygments")
CARRIED: dict[str, tuple[str, tuple[str, ...]]] = {
    "setuptools": ("77.0.3", ()),
    "pybind11": ("2.12", ()),
    "pydantic": (
        "2.5.3",
        ("pydantic-core", "annotated-types", "typing-inspection", "typing-extensions"),
    ),
    "rich": ("13.8", ("markdown-it-py", "mdurl", "pygments")),
    "typer": ("0.12", ("click", "shellingham", "annotated-doc")),
    "pytest": ("8", PYTEST_NEEDS),
    "pytest-timeout": ("2", ()),
    "hypothesis": ("6.100", ("sortedcontainers",)),
}


def main() -> None:
    """Entry point: `wheels` or `check`."""
    if sys.argv[1:] == ["wheels"]:
        fetch_wheels()
    elif sys.argv[1:] == ["check"]:
        with own_stdout() as stdout:
            found = check()
            print(json.dumps(found), file=stdout)
        sys.exit(0 if found["ok"] else 1)
    else:
        sys.exit("usage: python3 -m scripts.gpu_check wheels|check")


def say(text: str) -> None:
    """A word about what is going on."""
    print(f"gpu-check: {text}", file=sys.stderr, flush=True)


# --- where there is a network -----------------------------------------------------------------


def fetch_wheels() -> None:
    """Download what `check` may need into an empty wheels/, in the versions tested together."""
    if sys.version_info < (3, 11):
        # pip reads the markers of constraints.txt for the interpreter that it runs on.
        sys.exit("gpu-check: fetch the wheels with Python 3.11 or newer: PYTHON=python3.12")
    shutil.rmtree(WHEELS, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--constraint", "constraints.txt"]
    command += ["--implementation", "cp", "--python-version", PYTHON_VERSION]
    for name in PLATFORMS:
        command += ["--platform", f"{name}_{platform.machine()}"]
    done = subprocess.run([*command, "--dest", str(WHEELS), *sorted(everything())], check=False)
    if done.returncode:
        sys.exit(f"gpu-check: pip download failed with exit code {done.returncode}")
    sizes = [path.stat().st_size for path in WHEELS.glob("*.whl")]
    say(f"{len(sizes)} wheels, {sum(sizes) / (1 << 20):.1f} MiB in {WHEELS}/")
    if sum(sizes) >= LARGEST_BYTES:
        sys.exit(f"gpu-check: that is more than {LARGEST_BYTES >> 20} MiB")


def everything() -> set[str]:
    """Names of all packages carried along."""
    return {name for lead, (_, needs) in CARRIED.items() for name in (lead, *needs)}


# --- where there is a GPU ---------------------------------------------------------------------


def check() -> dict[str, Any]:
    """Everything that is found, for one JSON object; "ok" says whether all went well."""
    found: dict[str, Any] = {
        "ok": False,
        **device_facts(),
        "python": platform.python_version(),
        "revision": revision(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "extension": None,
        "tests": None,
        "benchmark": None,
    }
    if found["device"] is None:
        say(found["reason"])
        return found
    environment = prepared()
    if environment is None:
        return {**found, "reason": f"no packages from {WHEELS}/: run `make gpu-wheels` first"}
    found["extension"] = build_extension(environment)
    found["tests"] = tests = run_tests(environment)
    found["benchmark"] = run_benchmark(environment)
    if not tests["all_passed"]:
        found["reason"] = "tests/gpu failed, or proved nothing"
    elif found["benchmark"] is None:
        found["reason"] = "the benchmark broke"
    return {**found, "ok": found["reason"] is None}


def device_facts() -> dict[str, Any]:
    """The CUDA device that torch takes and what drives it; "reason" where there is none."""
    facts: dict[str, Any] = dict.fromkeys(("device", "reason", "capability", "memory_bytes"))
    facts |= {"driver": None, "cuda": None, "torch": None, "triton": installed("triton")}
    try:
        import torch
    except (ImportError, OSError) as error:
        return {**facts, "reason": f"torch does not import: {error}"}
    facts |= {"torch": str(torch.__version__), "cuda": torch.version.cuda}
    if not torch.cuda.is_available():
        return {**facts, "reason": "torch finds no CUDA device"}
    properties = torch.cuda.get_device_properties(0)
    return {
        **facts,
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def revision() -> str | None:
    """The commit of the tree, "+" after it if files differ; None where git does not know."""
    commit = said("git", "rev-parse", "HEAD")
    changed = said("git", "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+" if commit and changed else commit


def prepared() -> dict[str, str] | None:
    """The environment of what is run next, with the packages from wheels/; None without them."""
    lacking = missing({name: installed(name) for name in everything()})
    shutil.rmtree(SITE, ignore_errors=True)
    PLACE.mkdir(exist_ok=True)
    if lacking:
        say(f"from {WHEELS}/: {', '.join(lacking)}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        command += ["--disable-pip-version-check", "--find-links", str(WHEELS)]
        if run([*command, "--target", str(SITE), *lacking], dict(os.environ), "install"):
            return None
    path = [str(SITE.resolve()), str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def missing(versions: Mapping[str, str | None]) -> list[str]:
    """What to take from wheels/, given the version of each package that is there already."""
    taken: set[str] = set()
    for lead, (oldest, needs) in CARRIED.items():
        there = versions.get(lead)
        if there is None or numbers(there) < numbers(oldest):
            taken |= {lead, *needs}
    return sorted(taken)


def numbers(version: str) -> tuple[int, ...]:
    """The release part of a version, to compare."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def build_extension(environment: dict[str, str]) -> bool:
    """Build the C++ in place; without a compiler numba or numpy take its place."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    run(command, environment, "build")
    code = "import dos.kernels._native"
    built = not run([sys.executable, "-c", code], environment, "build")
    if not built:
        say("no compiled extension: host updates are slow here, and their figures say nothing")
    return built


def run_tests(environment: dict[str, str]) -> dict[str, Any]:
    """tests/gpu, by whatever pytest there is: the options of pyproject.toml are not asked for."""
    report = PLACE / "tests.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "--import-mode=importlib"]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}", "tests/gpu"]
    code = run(command, environment, "tests")
    counts = counted(report.read_text() if report.exists() else "<testsuites/>")
    # A run in which every test was skipped, or that broke off, has proved nothing.
    all_passed = code == 0 and counts["passed"] > 0 and not counts["failures"]
    return {**counts, "exit_code": code, "all_passed": all_passed}


def counted(junit_xml: str) -> dict[str, Any]:
    """Numbers of tests, and the names of those that failed, out of pytest's report."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures = []
    for case in ElementTree.fromstring(junit_xml).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "passed"
        if "skipped" in kinds:
            outcome = "skipped"
        counts[outcome] += 1
        if outcome == "failed":
            failures.append(f"{case.get('classname')}::{case.get('name')}")
    return {**counts, "failures": failures}


def run_benchmark(environment: dict[str, str]) -> dict[str, Any] | None:
    """Figures of the benchmark; None, and its words on standard error, if it failed."""
    output = PLACE / "benchmark.json"
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "experiments.bench_gpu_update", "--output", str(output)]
    if run(command, environment, "benchmark") or not output.exists():
        return None
    return dict(json.loads(output.read_text()))


def run(command: Iterable[str], environment: dict[str, str], stage: str) -> int:
    """Exit code of a command whose output is on standard error; 124 if it took too long."""
    try:
        return subprocess.run(
            list(command), env=environment, stdout=sys.stderr, timeout=WAIT_S[stage], check=False
        ).returncode
    except subprocess.TimeoutExpired:
        say(f"stopped after {WAIT_S[stage]:.0f} s: {' '.join(command)}")
        return 124


def said(*command: str) -> str | None:
    """The first line that a short command prints; None if there is none."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip().splitlines()[0]
    return None


def installed(package: str) -> str | None:
    """Version of a package of this interpreter."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


if __name__ == "__main__":
    main()
