"""The compiled kernels round every operation as written; no GPU is needed to see it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
UNKNOWN_ROUNDING = re.compile(r"\bfma\.|\bmad\S*\.f\d|\bdiv\.full|\.approx|\.ftz")
# ptxas may contract these into one instruction unless their rounding is spelled out.
ARITHMETIC = re.compile(r"\b(?:add|sub|mul|div|sqrt)\.\S*f(?:16|32|64)\S*")


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.slow)])
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """PTX by name of architecture, kernel and form."""
    folder = tmp_path_factory.mktemp("ptx")
    # In a process of its own: in this one the kernels may be interpreted.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.compile_kernels", request.param, str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {path.stem: path.read_text() for path in folder.glob("*.ptx")}


@pytest.fixture(scope="module")
def kernels(compiled: dict[str, str]) -> dict[str, str]:
    """All but the one that was fused on purpose."""
    return {name: ptx for name, ptx in compiled.items() if name != "fused"}


def loose(ptx: str) -> list[str]:
    """Operations that may not be rounded once each, to nearest even, subnormals kept."""
    unrounded = [op for op in ARITHMETIC.findall(ptx) if ".rn" not in op]
    return UNKNOWN_ROUNDING.findall(ptx) + unrounded


def test_every_form_is_compiled_for_every_architecture(kernels: dict[str, str]) -> None:
    forms = [{n[3:] for n in kernels if n.startswith(arch)} for arch in ("80 ", "90 ")]
    assert forms[0] == forms[1]
    assert len(forms[0]) in (4 + 3 + 2, 30 + 24 + 8)


def test_every_operation_is_rounded_as_written(kernels: dict[str, str]) -> None:
    assert {name: loose(ptx) for name, ptx in kernels.items() if loose(ptx)} == {}


def test_the_check_finds_a_fused_product(compiled: dict[str, str]) -> None:
    assert "fma." in loose(compiled["fused"])


def test_an_update_divides_and_takes_the_root_exactly(kernels: dict[str, str]) -> None:
    updates = {name: ptx for name, ptx in kernels.items() if " update " in name}
    exact = ("div.rn.f32", "sqrt.rn.f32")
    assert [n for n, ptx in updates.items() if any(op not in ptx for op in exact)] == []


def test_squares_are_added_in_float64(kernels: dict[str, str]) -> None:
    examined = {name: ptx for name, ptx in kernels.items() if " examine " in name}
    exact = ("mul.rn.f64", "add.rn.f64")
    assert [n for n, ptx in examined.items() if any(op not in ptx for op in exact)] == []
