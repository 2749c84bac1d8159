"""The native tests on another machine than this one; `make sanitize` runs them here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import native_tests

ROOT = Path(__file__).parents[2]
NO_ARM = "needs g++-aarch64-linux-gnu and qemu-user-static: make test-arm"


@pytest.mark.skipif(native_tests.arm_emulator() is None, reason=NO_ARM)
def test_neon_kernels_and_the_pool_on_an_emulated_arm() -> None:
    command = [sys.executable, "-m", "scripts.native_tests", "arm"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
