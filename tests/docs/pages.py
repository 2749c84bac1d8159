"""The code blocks of the README and the docs, and how a page of them runs.

Blocks stand between fences. `python` blocks run one after the other in one namespace, as a reader
would type them; of `sh` blocks each line must be a command of this library. What stands in comments
is for the tests:

    <!-- setup      Python that the reader has already: his model, his data; up to `-->`
    <!-- slow: why -->      the next block runs with the slow tests only
    <!-- not run: why -->   the next block is only read: compiled, or parsed
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

MARK = re.compile(r"<!-- (slow|not run): (\S.*) -->")
FENCE = re.compile(r"( *)```(\w*)$")
PROGRAMS = {"dos": "dos.cli"}
LANGUAGES = ("python", "sh", "json", "text")
"""`text` is what a program prints, or a formula: nothing to run."""


class Block(NamedTuple):
    """One block of a page; `line` is that of its first line of code, from 1."""

    page: Path
    line: int
    language: str
    code: str
    mark: str
    why: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All of a page in their order, with the setups, which are Python."""
    return list(_blocks(page, page.read_text().split("\n")))


def _blocks(page: Path, lines: list[str]) -> Iterator[Block]:
    mark = why = ""
    numbered = iter(enumerate(lines, start=1))
    for number, line in numbered:
        if found := MARK.fullmatch(line.strip()):
            mark, why = found.groups()
        elif line == "<!-- setup":
            code = _until("-->", numbered)
            yield Block(page, number + 1, "python", "\n".join(code), "", "")
        elif found := FENCE.fullmatch(line):
            indent, language = found.groups()
            code = [one.removeprefix(indent) for one in _until(f"{indent}```", numbered)]
            yield Block(page, number + 1, language, "\n".join(code), mark, why)
            mark = why = ""
        elif line and mark:
            raise ValueError(f"{page}:{number}: no block follows the comment {mark!r}")


def _until(end: str, numbered: Iterator[tuple[int, str]]) -> list[str]:
    code = []
    for _, line in numbered:
        if line == end:
            return code
        code.append(line)
    raise ValueError(f"no line {end!r} ends a block")


def commands(block: Block) -> list[list[str]]:
    """The words of each command, without comments; lines that end in a backslash go on."""
    joined = block.code.replace("\\\n", " ")
    return [words for line in joined.split("\n") if (words := shlex.split(line, comments=True))]


def runs(page: Path, mark: str = "") -> bool:
    """Whether anything runs there that has this mark."""
    return any(one.mark == mark and one.language in ("python", "sh") for one in blocks(page))


def read(block: Block) -> None:
    """Compile Python, parse JSON and shell; an error names the line of the page.

    Raises:
        SyntaxError, ValueError: it is none.
    """
    if block.language == "python":
        compile_block(block)
    elif block.language == "json":
        parse_json(block.code)
    elif block.language == "sh":
        done = subprocess.run(
            ["bash", "-n"], input=block.code, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ValueError(done.stderr)
        wanted = {words[1] for words in commands(block) if words[0] == "make" and words[1:]}
        if unknown := wanted - verbs():
            raise ValueError(f"{block}: the Makefile has no {', '.join(sorted(unknown))}")


def verbs() -> set[str]:
    """What the Makefile makes."""
    text = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z-]+):", text, flags=re.MULTILINE))


def compile_block(block: Block) -> object:
    """Its code, whose lines are those of the page."""
    return compile("\n" * (block.line - 1) + block.code, str(block.page), "exec")


def parse_json(text: str) -> object:
    """An object, or what stands between its braces."""
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(f"{{{text}}}")
