"""Fixtures of several files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dos.execute import work
from dos.execute.interpreter import RunningStep
from tests.cpu.overlap_cases import Gate


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Holds up updates until somebody waits for the step."""
    made = Gate(work.adam.update)
    monkeypatch.setattr(work.adam, "update", made)
    for name in ("join", "finish"):
        monkeypatch.setattr(RunningStep, name, made.opened_by(getattr(RunningStep, name)))
    yield made
    made.open()
