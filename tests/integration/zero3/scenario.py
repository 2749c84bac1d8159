"""How a test asks for a scenario."""

from __future__ import annotations

import pytest


def scenario(name: str, *ranks: int) -> pytest.MarkDecorator:
    """Give a test the `outcome` of `MODULE.FUNCTION`, once per number of ranks."""
    return scenarios(*((name, count) for count in ranks))


def scenarios(*asked: tuple[str, int]) -> pytest.MarkDecorator:
    """Give a test the `outcome` of each of these, by a number of ranks."""
    params = [
        pytest.param((f"tests.integration.zero3.{name}", count), id=f"{count} ranks")
        for name, count in asked
    ]
    return pytest.mark.parametrize("outcome", params, indirect=True)
