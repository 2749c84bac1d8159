"""One pair of processes for all tests of this folder that need two."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch import distributed

from tests.integration.processes.pair import SCENARIOS, Pair
from tests.integration.worlds import run_world


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the pair saves."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def pair(checkpoints: Path) -> Pair:
    """What all scenarios returned; `results` reads it."""
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    with_trainer = ("trainer",) if find_spec("transformers") and find_spec("accelerate") else ()
    for name in ("fsdp", "dtensor", "ddp", "held", "checkpointer", *with_trainer):
        import_module(f"tests.integration.processes.{name}_scenarios")
    return run_world(SCENARIOS, 2, CHECKPOINTS=str(checkpoints))
