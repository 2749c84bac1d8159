"""The house rules that a machine can check. One test per rule; it lists every place at fault."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARY = ("dos", "kernels", "perfmodel")  # what users import
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60

SKIPPED_FOLDERS = {".git", ".venv", "build", "dist", "site", "__pycache__", ".gpu-check"}
SKIPPED_FOLDERS |= {".deepspeed"}
CPP = {".cc", ".cpp", ".cu", ".h", ".hpp"}
TEXT = {".py", ".pyi", ".md", ".toml", ".txt", ".sh", ".json", ".jsonl", ".csv", ".yml", *CPP}
TEXT_NAMES = {"Makefile", "run", ".gitignore"}

# Put together here, so that this file does not contain what it forbids.
UNFINISHED = ["TO" + "DO", "FIX" + "ME", "XX" + "X"]
ELSEWHERE = ["../" + "shared", "DES" + "IGN.md"]
MACHINE_PATH = re.compile(
    r"(?<![\w.~}/-])/(?:" + "|".join(["wo" + "rk", "ho" + "me", "ro" + "ot"]) + r")\b"
)

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Place = str  # file:line, and what is wrong there


def project_files() -> list[Path]:
    """Tracked files and those that git would track; without git, all but what the verbs make."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        paths = []
        for folder, folders, names in os.walk(ROOT):
            folders[:] = [n for n in folders if n not in SKIPPED_FOLDERS and "cache" not in n]
            paths += [Path(folder, name) for name in names]
    return sorted(path for path in paths if path.is_file())


FILES = project_files()
PYTHON = [path for path in FILES if path.suffix == ".py"]


def label(path: Path, line: int | None = None) -> str:
    name = str(path.relative_to(ROOT))
    return name if line is None else f"{name}:{line}"


def in_folder(path: Path, *folders: str) -> bool:
    return path.relative_to(ROOT).parts[0] in folders


def parsed(paths: list[Path]) -> Iterator[tuple[Path, ast.Module]]:
    for path in paths:
        yield path, ast.parse(path.read_text())


def text_lines() -> Iterator[tuple[Path, int, str]]:
    for path in FILES:
        if path.suffix in TEXT or path.name in TEXT_NAMES:
            for number, line in enumerate(path.read_text().split("\n"), start=1):
                yield path, number, line


def assert_none(places: list[Place], rule: str) -> None:
    assert not places, f"\n{rule}:\n  " + "\n  ".join(places)


def test_files_are_short() -> None:
    lengths = {p: len(p.read_text().splitlines()) for p in FILES if p.suffix in {".py", *CPP}}
    places = [f"{label(p)}: {n} lines" for p, n in lengths.items() if n > MAX_FILE_LINES]
    assert_none(
        places, f"a source file has at most {MAX_FILE_LINES} lines; split it by what it holds"
    )


def test_functions_are_short() -> None:
    places = []
    for path, tree in parsed([path for path in PYTHON if not in_folder(path, "tests")]):
        for node in ast.walk(tree):
            if isinstance(node, FunctionNode):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    places.append(f"{label(path, node.lineno)}: {node.name} has {length} lines")
    assert_none(
        places, f"a function has at most {MAX_FUNCTION_LINES} lines, its docstring included"
    )


def is_public(name: str) -> bool:
    return not name.startswith("_")


def is_repeat(node: FunctionNode) -> bool:
    """An overload or a setter: the first of its name carries the docstring."""
    names = {getattr(d, "attr", getattr(d, "id", "")) for d in node.decorator_list}
    return bool(names & {"overload", "setter", "deleter"})


def undocumented(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[int, str]]:
    for node in body:
        if not isinstance(node, ast.ClassDef | FunctionNode) or not is_public(node.name):
            continue
        name = prefix + node.name
        is_class = isinstance(node, ast.ClassDef)
        if not ast.get_docstring(node) and (is_class or not is_repeat(node)):
            yield node.lineno, name
        if is_class:
            yield from undocumented(node.body, f"{name}.")


def test_public_names_have_docstrings() -> None:
    places = []
    for path, tree in parsed([path for path in PYTHON if in_folder(path, *LIBRARY)]):
        if not ast.get_docstring(tree):
            places.append(f"{label(path)}: the module")
        places += [f"{label(path, line)}: {name}" for line, name in undocumented(tree.body)]
    assert_none(places, "public modules, classes, functions and methods have a docstring")


def test_no_machine_paths() -> None:
    places = []
    for path, number, line in text_lines():
        found = MACHINE_PATH.search(line)
        words = [word for word in ELSEWHERE if word in line] + ([found.group()] if found else [])
        places += [f"{label(path, number)}: {word}" for word in words]
    assert_none(places, "no file refers to a path of one machine or to a page outside the project")


def test_nothing_is_left_unfinished() -> None:
    pattern = re.compile(r"\b(" + "|".join(UNFINISHED) + r")\b")
    places = [label(path, n) for path, n, line in text_lines() if pattern.search(line)]
    assert_none(places, f"no {', '.join(UNFINISHED)}: do it, or open an issue")


def test_the_library_does_not_print() -> None:
    loud = {"cli.py", "report.py", "__main__.py"}
    quiet = [path for path in PYTHON if in_folder(path, *LIBRARY) and path.name not in loud]
    places = [
        label(path, node.lineno)
        for path, tree in parsed(quiet)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    ]
    assert_none(places, f"print() belongs to {', '.join(sorted(loud))}; a library warns or logs")


def test_no_trailing_whitespace() -> None:
    places = [label(path, n) for path, n, line in text_lines() if line != line.rstrip()]
    assert_none(places, "no whitespace at the end of a line")


def misnamed(name: str) -> str | None:
    """What is wrong with a name that carries a unit, or None.

    Sizes are bytes and times are seconds, and the unit stands last: `free_bytes`, `wait_s`,
    `read_bytes_per_s`.
    """
    other = re.search(r"_(ms|us|ns|sec|secs|seconds|kb|mb|gb|kib|mib|gib)(_per_\w+)?$", name)
    if other:
        return f"{name}: the unit is bytes or s, not {other.group(1)}"
    if re.search(r"(^|_)bytes_(?!per_)", name):
        return f"{name}: the unit stands last"
    return None


def test_units_stand_last_in_a_name() -> None:
    places = []
    for path, tree in parsed([path for path in PYTHON if in_folder(path, *LIBRARY)]):
        for node in ast.walk(tree):
            name = None
            if isinstance(node, ast.arg):
                name = node.arg
            elif isinstance(node, ast.AnnAssign):  # the fields of classes
                name = getattr(node.target, "id", None)
            if name and (wrong := misnamed(name)):
                places.append(f"{label(path, node.lineno)}: {wrong}")
    assert_none(places, "names of arguments and fields end in their unit: _bytes, _s, _per_s")
