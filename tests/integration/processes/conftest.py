"""One pair of processes for all tests of this folder that need two."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import distributed

from tests.integration.processes.pair import run_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of all scenarios; `results` reads them."""
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    folder = tmp_path_factory.mktemp("pair")
    names = ("fsdp", "dtensor", "ddp")
    run_pair(folder, *(f"tests.integration.processes.{name}_scenarios" for name in names))
    return folder
