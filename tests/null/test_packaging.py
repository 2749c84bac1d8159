"""What a user meets first: imports that are light and clash with nobody, a command, a wheel."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import setup
from scripts import wheel

ROOT = Path(__file__).parents[2]


def run_python(code: str) -> str:
    """Run code in a fresh interpreter with the tree on its path; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_dos_loads_no_torch() -> None:
    heavy = "{'torch', 'numpy', 'triton', 'numba'}"
    code = f"import sys, dos; print(sorted({heavy} & set(sys.modules)))"
    assert run_python(code).strip() == "[]"


def test_transformers_does_not_take_our_kernels_for_its_own() -> None:
    # Hugging Face has an import package named kernels, and transformers looks for it.
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: pip install deep-optimizer-states[transformers]")
    code = "from transformers import Trainer; print(Trainer.__name__)"
    assert run_python(code).strip() == "Trainer"


def test_kernels_is_a_plain_folder_behind_a_link() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    link = ROOT / "dos" / "kernels"
    assert link.is_symlink()
    assert os.readlink(link) == "../kernels"


def test_the_command_answers() -> None:
    command = Path(sys.executable).with_name("dos")
    if not command.exists():
        pytest.skip(f"the project is not installed in {command.parent}: pip install -e .")
    shown = subprocess.run([command, "--help"], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel; a minute, because the extension is compiled anew."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return wheel.build(tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_the_wheel_holds_the_kernels_inside_dos(made: Path) -> None:
    names = set(zipfile.ZipFile(made).namelist())
    # setup.py lists the packages one by one, so a new one can be forgotten.
    library = [*(ROOT / "dos").rglob("*.py"), *(ROOT / "perfmodel").rglob("*.py")]
    expected = {str(path.relative_to(ROOT)) for path in library}
    expected |= {f"dos/{path.relative_to(ROOT)}" for path in (ROOT / "kernels").rglob("*.py")}
    assert "dos/kernels/adam.py" in expected
    assert not expected - names
    assert [name for name in names if name.startswith("dos/kernels/_native.") and ".so" in name]
    assert not [name for name in names if name.startswith(("kernels/", "tests/"))]


@pytest.mark.slow
def test_the_wheel_brings_no_other_library(made: Path) -> None:
    names = zipfile.ZipFile(made).namelist()
    assert [name for name in names if ".so" in name and "/_native." not in name] == []


@pytest.mark.slow
def test_the_wheel_trains_and_saves_where_there_is_no_compiler(made: Path) -> None:
    wheel.smoke(made)


def test_what_is_needed_is_followed_through_extras_and_markers() -> None:
    names = {one.name.lower() for one in wheel.needed(["hypothesis; python_version < '3'", "rich"])}
    assert {"rich", "pygments"} <= names
    assert "hypothesis" not in names


def test_no_flag_ties_the_extension_to_this_machine() -> None:
    assert "native" not in f"{setup.FLAGS} {setup.ISA_FLAGS}"
