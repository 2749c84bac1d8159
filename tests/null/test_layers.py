"""Imports point down: the rooms of the project, and a check of every import against them.

All imports count, also those inside functions and under TYPE_CHECKING: an arrow that is hidden
from the interpreter still ties two rooms together for the reader.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

# Top to bottom. A room may import its own modules, and what stands on a lower line. `|` parts
# rooms of one line that may not know each other; modules parted by a space share a room. A name
# covers what is below it, and the longest name wins.
TABLE = """
experiments
dos.__init__ dos.run dos.cli dos.cli_checkpoint dos.bench dos.doctor perfmodel.__main__ perfmodel.report perfmodel.planned perfmodel.prediction perfmodel.comparison perfmodel.fit perfmodel.published_runs perfmodel.options perfmodel.predict_cli perfmodel.solve_cli perfmodel.fit_cli perfmodel.calibrate_cli
dos.integrations dos.ddp
dos.optimizer dos.checkpointed dos.engine dos.planning dos.stride dos.stride_profile dos.trained dos.wrapped dos.grad_scale dos.state_dict | dos.checkpoint
dos.state dos.live_state dos.wholeness dos.host_memory dos.state_views dos.saved_state dos.masters dos.gradients dos.sending dos.sent dos.hooks dos.released dos.shards dos.readers dos.tail perfmodel.calibrate perfmodel.stages perfmodel.bench perfmodel.timing perfmodel.disk perfmodel.machine perfmodel.cache
dos.execute
dos.plan | dos.memory
dos.kernels | perfmodel.__init__ perfmodel.profile perfmodel.model perfmodel.timeline perfmodel.solve perfmodel.closed_form perfmodel.published perfmodel.at_scale perfmodel.checkpoint_interval
dos.errors dos.config dos.trace dos.stdout
"""  # noqa: E501

# The core of perfmodel stays usable alone: of dos it may know these only.
CORE = {
    f"perfmodel.{name}"
    for name in (
        "__init__",
        "profile",
        "model",
        "timeline",
        "solve",
        "closed_form",
        "published",
        "at_scale",
        "checkpoint_interval",
    )
}
CORE_MAY_IMPORT = ("dos.errors", "dos.trace")

# dos/__init__ names its public objects by string, so that importing it loads nothing; what it
# says to a type checker is no arrow.
EXEMPT_IMPORTERS = {"dos.__init__"}


class Room(NamedTuple):
    level: int  # 0 is the top
    side: int  # of the `|`
    text: str


class Arrow(NamedTuple):
    importer: str
    imported: str
    where: str  # file:line


def rooms(table: str) -> dict[str, Room]:
    found = {}
    for level, line in enumerate(table.split("\n")[1:-1]):
        for side, text in enumerate(line.split("|")):
            found.update({name: Room(level, side, text.strip()) for name in text.split()})
    return found


def modules(root: Path) -> dict[str, Path]:
    """Every module of the project by dotted name; kernels/ bears the name that it is imported by.

    A package is called `package.__init__`, to tell it from the prefix of its modules.
    """
    found = {}
    for top, name in (
        ("dos", "dos"),
        ("kernels", "dos.kernels"),
        ("perfmodel", "perfmodel"),
        ("experiments", "experiments"),
    ):
        for folder, _, files in os.walk(root / top):  # does not follow the link dos/kernels
            parts = [name, *Path(folder).relative_to(root / top).parts]
            for file in files:
                if file.endswith(".py"):
                    found[".".join([*parts, file[:-3]])] = Path(folder, file)
    return found


def imported_names(tree: ast.AST, importer: str) -> Iterator[tuple[str, int]]:
    """The dotted names that a module asks for, with their lines; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = importer.split(".")[: -node.level] if node.level else []
            base += [node.module] if node.module else []
            yield from ((".".join([*base, alias.name]), node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            first = node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield str(first.value), node.lineno


def resolve(name: str, known: dict[str, Path]) -> str | None:
    """The module of the project that holds a dotted name, or None for somebody else's."""
    parts = name.split(".")
    if parts[0] not in ("dos", "perfmodel", "experiments"):
        return None
    if len(parts) == 2 and parts[1].startswith("__") and parts[1] != "__main__":
        return None  # dos.__version__ and the like
    for end in range(len(parts), 0, -1):
        prefix = ".".join(parts[:end])
        for module in (prefix, f"{prefix}.__init__"):
            if module in known:
                return module
        if prefix == "dos.kernels":  # a folder without __init__, or the compiled module in it
            return prefix
    return name


def arrows(root: Path) -> list[Arrow]:
    known = modules(root)
    found = []
    for importer, path in sorted(known.items()):
        if importer in EXEMPT_IMPORTERS:
            continue
        for name, line in imported_names(ast.parse(path.read_text()), importer):
            where = f"{path.relative_to(root)}:{line}"
            imported = name if name.split(".")[0] == "kernels" else resolve(name, known)
            if imported not in (None, importer):
                found.append(Arrow(importer, str(imported), where))
    return found


def room_of(module: str, table: dict[str, Room]) -> Room | None:
    parts = module.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((table[prefix] for prefix in prefixes if prefix in table), None)


def fault(arrow: Arrow, table: dict[str, Room]) -> str | None:
    """Why an arrow is wrong, or None."""
    says = f"{arrow.where}: {arrow.importer} imports {arrow.imported}"
    if arrow.imported.split(".")[0] == "kernels":
        return f"{says}: a top-level `kernels` is Hugging Face's; it is called dos.kernels here"
    above, below = room_of(arrow.importer, table), room_of(arrow.imported, table)
    if above is None or below is None:
        return None  # test_every_module_has_a_room tells
    in_dos = arrow.imported.startswith("dos.")
    if arrow.importer in CORE and in_dos and not arrow.imported.startswith(CORE_MAY_IMPORT):
        return f"{says}: the core of perfmodel may know only {' and '.join(CORE_MAY_IMPORT)} of dos"
    if above.level > below.level:
        return f"{says}: that points up, from [{above.text}] to [{below.text}]"
    if above.level == below.level and above.side != below.side:
        return f"{says}: [{above.text}] and [{below.text}] stand side by side, parted by `|`"
    return None


def cycle(edges: dict[str, set[str]]) -> list[str] | None:
    """One circle of imports, first module repeated at the end, or None. Depth first."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str] | None:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        found = (visit(target, [*path, module]) for target in sorted(edges.get(module, ())))
        circle = next((one for one in found if one), None)
        done.add(module)
        return circle

    return next((one for one in (visit(module, []) for module in sorted(edges)) if one), None)


def edges_of(root: Path) -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {}
    for arrow in arrows(root):
        edges.setdefault(arrow.importer, set()).add(arrow.imported)
    return edges


def test_every_module_has_a_room() -> None:
    table = rooms(TABLE)
    known = modules(ROOT)
    assert known, f"no module found under {ROOT}"
    homeless = [
        f"{path.relative_to(ROOT)} ({name}) is in no room: add it to TABLE in {__file__}"
        for name, path in sorted(known.items())
        if room_of(name, table) is None
    ]
    assert not homeless, "\n".join(homeless)


def test_every_import_points_down() -> None:
    table = rooms(TABLE)
    faults = [text for arrow in arrows(ROOT) if (text := fault(arrow, table))]
    assert not faults, "\n" + "\n".join(faults)


def test_no_import_circle() -> None:
    circle = cycle(edges_of(ROOT))
    assert circle is None, "modules import each other in a circle: " + " -> ".join(circle or [])


# --- the check itself: a check that cannot fail proves nothing ----------------------------------


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("file", "line", "reason"),
    [
        ("dos/plan/ops.py", "from dos.execute import run", "points up"),
        ("dos/plan/ops.py", "from ..execute.run import go", "points up"),
        ("dos/plan/ops.py", "def f():\n    import dos.execute.run", "points up"),
        ("dos/plan/ops.py", "from dos import DOSOptimizer", "points up"),
        ("dos/plan/ops.py", "importlib.import_module('dos.execute')", "points up"),
        ("dos/plan/ops.py", "import dos.memory.pool", "side by side"),
        ("kernels/adam.py", "import perfmodel.solve", "side by side"),
        ("kernels/adam.py", "from .gpu import go\nfrom dos.plan import ops", "points up"),
        ("perfmodel/solve.py", "from dos.config import DOSConfig", "may know only"),
        ("dos/state.py", "from kernels import adam", "Hugging Face"),
        ("dos/plan/ops.py", "from dos.errors import PlanError", None),
        ("dos/plan/ops.py", "from dos import __version__", None),
        ("dos/execute/run.py", "from dos.plan import ops\nfrom dos.kernels import adam", None),
        ("dos/optimizer.py", "import torch\nfrom perfmodel.solve import solve", None),
        ("dos/cli.py", "from dos import DOSOptimizer", None),
        ("dos/__init__.py", "from dos.optimizer import DOSOptimizer", None),
    ],
)
def test_the_check_judges_an_import(
    tmp_path: Path, file: str, line: str, reason: str | None
) -> None:
    dos = ("__init__", "errors", "config", "optimizer", "plan/__init__", "plan/ops", "execute/run")
    write_tree(tmp_path, {f"dos/{name}.py": "" for name in (*dos, "memory/pool")})
    write_tree(tmp_path, {"kernels/adam.py": "", "perfmodel/solve.py": "", file: line})
    faults = [text for arrow in arrows(tmp_path) if (text := fault(arrow, rooms(TABLE)))]
    assert len(faults) == (0 if reason is None else 1)
    assert reason is None or reason in faults[0]


def test_the_check_finds_a_circle(tmp_path: Path) -> None:
    files = {"dos/plan/a.py": "from dos.plan.b import x", "dos/plan/b.py": "from . import a"}
    write_tree(tmp_path, files)
    assert cycle(edges_of(tmp_path)) == ["dos.plan.a", "dos.plan.b", "dos.plan.a"]
