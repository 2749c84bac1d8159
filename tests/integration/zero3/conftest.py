"""Tests name a scenario and how many ranks run it; all of a session run in one set of processes."""

from __future__ import annotations

import importlib.util

import pytest

from tests.integration.worlds import Outcome, run_world


@pytest.fixture(scope="session")
def worlds() -> dict[int, dict[str, Outcome | str]]:
    """What has been run, by the number of ranks and the name of the scenario."""
    return {}


@pytest.fixture
def outcome(request: pytest.FixtureRequest, worlds: dict[int, dict[str, Outcome | str]]) -> Outcome:
    """What the scenario of this test returned on each rank; see `scenario.py`."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed: pip install deep-optimizer-states[deepspeed]")
    name, world = request.param
    if world not in worlds:
        asked = [
            item.callspec.params["outcome"]
            for item in request.session.items
            if "outcome" in getattr(getattr(item, "callspec", None), "params", {})
        ]
        names = dict.fromkeys(its for its, ranks in asked if ranks == world)
        worlds[world] = run_world(list(names), world, DS_ACCELERATOR="cpu")
    found = worlds[world][name]
    if isinstance(found, str):
        pytest.fail(found, pytrace=False)
    return found
