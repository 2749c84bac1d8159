"""Runs pages, each in a process and an empty folder of its own: `run_page.py FOLDER PAGE...`.

The processes are forked from this one, which has imported what takes long and done nothing else.
Commands run in the process of their page. Prints a JSON object: by page what it said when it
failed, empty where it did not. With `--slow` the slow blocks run, too.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from tests.docs.pages import PROGRAMS, ROOT, Block, blocks, commands, compile_block

PRELOADED = (
    "torch",
    "torch._dynamo",
    "matplotlib.pyplot",
    "dos.optimizer",
    "dos.checkpoint.saving",
)


def run(page: Path, slow: bool) -> None:
    """All blocks that are to run, in their order."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.mark == "not run" or (block.mark == "slow" and not slow):
            continue
        if block.language == "python":
            exec(compile_block(block), namespace)
        elif block.language == "sh":
            for words in commands(block):
                command(block, words)


def command(block: Block, words: list[str]) -> None:
    """One of this library's, as if it were typed.

    Raises:
        ValueError: it is another program's.
        SystemExit: it failed.
    """
    try:
        if words[0] in PROGRAMS:
            sys.argv = words
            import_module(PROGRAMS[words[0]]).main()
        elif words[:2] == ["python", "-m"]:
            sys.argv = words[2:]
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        else:
            raise ValueError(f"{block}: {words[0]} is not run here; say why: <!-- not run: ... -->")
    except SystemExit as end:
        if end.code:
            print(f"{block}: {' '.join(words)}: exit code {end.code}", file=sys.stderr)
            raise


def run_apart(page: Path, folder: Path, slow: bool) -> str:
    """In a child process; what it said if it failed."""
    folder.mkdir()
    (folder / "experiments").symlink_to(ROOT / "experiments")
    child = os.fork()
    if not child:
        status = 1
        try:
            os.chdir(folder)
            os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
            said = os.open("said", os.O_WRONLY | os.O_CREAT)
            os.dup2(said, 1)
            os.dup2(said, 2)
            run(page, slow)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return (folder / "said").read_text()[-4000:] or "it died" if status else ""


def main() -> None:
    """Run the pages of the command line."""
    slow = "--slow" in sys.argv
    folder, *pages = (Path(word) for word in sys.argv[1:] if word != "--slow")
    for name in PRELOADED:
        with suppress(ImportError):
            import_module(name)
    failures = {str(page): run_apart(page, folder / page.stem, slow) for page in pages}
    print(json.dumps(failures))


if __name__ == "__main__":
    main()
