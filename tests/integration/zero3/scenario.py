"""How a test asks for a scenario."""

from __future__ import annotations

import pytest


def scenario(name: str, *ranks: int) -> pytest.MarkDecorator:
    """Give a test the `outcome` of `MODULE.FUNCTION`, once per number of ranks."""
    full = f"tests.integration.zero3.{name}"
    params = [pytest.param((full, count), id=f"{count} ranks") for count in ranks]
    return pytest.mark.parametrize("outcome", params, indirect=True)
