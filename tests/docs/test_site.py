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
    shown = re.findall(r"^::: (\S+)\.(\w+)$", page, flags=re.MULTILINE)
    told = [getattr(importlib.import_module(module), name) for module, name in shown]
    missing = []
    for module, names in SURFACE.items():
        home = importlib.import_module(module)
        for name in names or home.__all__:
            public = getattr(home, name)
            # By what it is, since some have two names.
            if public not in told and sys.modules[public.__module__] not in told:
                missing.append(f"{module}.{name}")
    assert missing == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "experiments/README.md"])
def test_links_of_other_pages_lead_to_files(page: str) -> None:
    # mkdocs knows those below docs/ only.
    path = ROOT / page
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []
