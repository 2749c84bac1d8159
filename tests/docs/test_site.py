"""The site is built, every link in it leads somewhere, and its API is the public one."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.public_api import SURFACE
from tests.docs.pages import ROOT


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install deep-optimizer-states[docs]")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists()


def test_the_api_page_has_every_public_name() -> None:
    pytest.importorskip("deepspeed", reason="a public module builds on it")
    page = (ROOT / "docs" / "api.md").read_text()
    told = set(re.findall(r"^::: (\S+)$", page, flags=re.MULTILINE))
    missing = []
    for name, names in SURFACE.items():
        module = importlib.import_module(name)
        for public in names or module.__all__:
            if not told & {f"{name}.{public}", getattr(module, public).__module__}:
                missing.append(f"{name}.{public}")
    assert missing == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "experiments/README.md"])
def test_links_of_other_pages_lead_to_files(page: str) -> None:
    # mkdocs knows those below docs/ only.
    path = ROOT / page
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []
