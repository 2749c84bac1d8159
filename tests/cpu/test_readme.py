"""The README says what is true; tests/docs runs its code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_readme_begins_with_the_two_commands() -> None:
    commands = re.findall(r"^(make \w+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert commands[:2] == ["make demo", "make test"]


def test_the_option_table_lists_exactly_the_options() -> None:
    from dos import DOSConfig

    page = (ROOT / "docs" / "pytorch.md").read_text()
    table = page[page.index("| option |") :].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, flags=re.MULTILINE)) == set(DOSConfig.model_fields)
