"""What users may rely on is what the record says."""

from __future__ import annotations

import difflib

import pytest

from scripts import public_api


def test_the_public_surface_is_the_recorded_one() -> None:
    pytest.importorskip("deepspeed", reason="a public module builds on it")
    was = public_api.RECORD.read_text().split("\n")
    changes = list(difflib.unified_diff(was, list(public_api.surface()), "recorded", "now", n=0))
    assert not changes, (
        "the public surface has changed:\n\n"
        + "\n".join(changes)
        + "\n\nWhere that is meant, keep docs/stability.md's promise (what is removed or renamed "
        "warns for one minor version first), tell users in CHANGELOG.md, and renew the record:\n"
        "    python -m scripts.public_api"
    )


def test_every_name_that_importing_dos_offers_is_there() -> None:
    import dos

    assert [name for name in dos.__all__ if not hasattr(dos, name)] == []
