"""Scenarios that two processes run together, and what they returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.integration.worlds import Outcome

Scenario = Callable[[], object]
Pair = dict[str, Outcome | str]

SCENARIOS: list[str] = []
"""Names of all of them, with that of their module."""


def scenario(function: Scenario) -> Scenario:
    """To be run by both processes."""
    SCENARIOS.append(f"{function.__module__}.{function.__name__}")
    return function


def results(pair: Pair, name: str) -> list[Any]:
    """What a scenario returned in process 0 and in process 1."""
    (outcome,) = (its for key, its in pair.items() if key.endswith(f".{name}"))
    assert isinstance(outcome, Outcome), outcome
    return outcome.ranks
