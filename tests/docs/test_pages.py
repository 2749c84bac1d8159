"""The README and the docs say what is true: every block of code in them runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import pages, run_page
from tests.docs.pages import PAGES, ROOT, Block

RUNNING = [page for page in PAGES if pages.runs(page)]
BLOCKS = [block for page in PAGES for block in pages.blocks(page)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run(folder: Path, *words: str | Path) -> dict[str, str]:
    """What each page of these said that failed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.run_page", folder, *words],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "MPLBACKEND": "agg",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of all pages, run one after the other."""
    return run(tmp_path_factory.mktemp("pages"), *RUNNING)


@pytest.mark.parametrize("page", RUNNING, ids=name_of)
def test_every_block_of_a_page_runs(page: Path, failures: dict[str, str]) -> None:
    assert not failures[str(page)], failures[str(page)]


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if pages.runs(p, "slow")], ids=name_of)
def test_every_block_of_a_page_runs_with_the_slow_ones(page: Path, tmp_path: Path) -> None:
    (said,) = run(tmp_path, page, "--slow").values()
    assert not said, said


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_whole_in_its_language(block: Block) -> None:
    pages.read(block)


def test_deepspeed_configurations_are_such_that_are_taken() -> None:
    from dos.integrations.zero3_config import read_section

    parsed = [pages.parse_json(block.code) for block in BLOCKS if block.language == "json"]
    sections = [
        config for config in parsed if isinstance(config, dict) and "zero_optimization" in config
    ]
    assert sections
    for config in sections:
        read_section(config)


def test_every_block_says_what_it_is() -> None:
    assert [str(block) for block in BLOCKS if block.language not in pages.LANGUAGES] == []


def test_code_stands_between_fences_only() -> None:
    # Four spaces make code, too, but say neither its language nor where it ends.
    indented = []
    for page in PAGES:
        inside = before_is_blank = False
        for number, line in enumerate(page.read_text().split("\n"), start=1):
            inside ^= line.lstrip().startswith(("```", "<!-- setup")) or line == "-->"
            if line.startswith("    ") and before_is_blank and not inside:
                indented.append(f"{name_of(page)}:{number}")
            before_is_blank = not line
    assert indented == []


def test_a_command_of_another_program_has_to_say_why_it_is_not_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\nmake demo\n```\n")
    with pytest.raises(ValueError, match="make is not run here"):
        run_page.run(page, slow=False)


def test_a_block_that_fails_names_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n```python\nx = 1\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as failure:
        run_page.run(page, slow=False)
    assert (str(failure.traceback[-1].path), failure.traceback[-1].lineno + 1) == (str(page), 5)


def test_a_comment_without_a_block_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- not run: no reason at all -->\n\nText.\n")
    with pytest.raises(ValueError, match="no block follows"):
        pages.blocks(page)
