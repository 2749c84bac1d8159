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


@pytest.mark.slow  # it compiles the extension anew
def test_a_wheel_holds_the_kernels_inside_dos(tmp_path: Path) -> None:
    source = tmp_path / "source"
    # A copy, because the build leaves folders behind and a built extension would hide a fault.
    litter = shutil.ignore_patterns(".git", ".venv", "build", "*.so", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=litter)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    built = subprocess.run(
        [*command, "--wheel-dir", str(tmp_path), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("deep_optimizer_states-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    # setup.py lists the packages one by one, so a new one can be forgotten.
    library = [*(source / "dos").rglob("*.py"), *(source / "perfmodel").rglob("*.py")]
    expected = {str(path.relative_to(source)) for path in library}
    expected |= {f"dos/{path.relative_to(source)}" for path in (source / "kernels").rglob("*.py")}
    assert "dos/kernels/adam.py" in expected
    assert not expected - names
    assert [name for name in names if name.startswith("dos/kernels/_native.") and ".so" in name]
    assert not [name for name in names if name.startswith(("kernels/", "tests/"))]
