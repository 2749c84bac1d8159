"""The README says what is true."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_every_python_block_of_the_readme_runs() -> None:
    # One after the other in one namespace, as a reader would type them.
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()):
        exec("\n".join(blocks), {})


def test_readme_begins_with_the_two_commands() -> None:
    commands = re.findall(r"^    (make \w+)", README, flags=re.MULTILINE)
    assert commands[:2] == ["make demo", "make test"]


def test_the_option_table_lists_exactly_the_options() -> None:
    from dos import DOSConfig

    table = README[README.index("| option |") :].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, flags=re.MULTILINE)) == set(DOSConfig.model_fields)
