"""Names of what lies in a saved tree: escaped components joined by `/`, and globs over them.

Every leaf has a name of its own, whatever the keys are: `{"a/b": x}` and `{"a": {"b": x}}`
differ, and so do the keys `1` and `"1"`. The path of the tree itself is "".
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable

from dos.errors import ConfigError

_SPECIAL = re.compile("[~/#\ud800-\udfff]")
_ESCAPES = {"~": "~0", "/": "~1", "#": "~2"}
_MARKS = (*_ESCAPES, "\n__", "\n\n")
RESERVED = "__dos__/"
"""Begins the names of entries that are no tensor of the saved tree."""
ROOT_ENTRY = "~r"
"""Name of the entry of a tree that is one tensor."""


def component(text: str) -> str:
    """The component of a key that is a string, or of a field's name."""
    if _SPECIAL.search(text):
        text = _SPECIAL.sub(_escape, text)
    if text.startswith("__"):  # `__metadata__` and `__dos__` have a meaning of their own
        return "~_" + text[1:]
    return text or "~e"


def components(texts: Collection[str]) -> Collection[str]:
    """The components of many keys."""
    # Looked for in all at once: hardly a state has a key that is not its own component.
    lines = "\n".join(("", *texts, ""))
    if lines.isascii() and not any(mark in lines for mark in _MARKS):
        return texts
    return [component(text) for text in texts]


def key_component(encoded: str) -> str:
    """The component of any other key, from its encoding as text."""
    return "~k" + component(encoded)


def join(parent: str, last: str) -> str:
    """The path of a child."""
    return f"{parent}/{last}" if parent else last


def text_of(path: str) -> str:
    """A path for a message."""
    return path or "the state itself"


class Globs:
    """Which leaves are wanted: those that a pattern matches, or whose ancestor it matches.

    Args:
        patterns: of `fnmatch`, where `*` matches `/` too; None: everything is wanted.
    """

    def __init__(self, patterns: str | Iterable[str] | None) -> None:
        given = [patterns] if isinstance(patterns, str) else patterns
        self._everything = given is None
        self._unused = set(given or ())
        self._compiled = [
            (one, re.compile(f"{fnmatch.translate(one)}|{fnmatch.translate(one + '/*')}"))
            for one in self._unused
        ]

    def wants(self, path: str) -> bool:
        """Is the leaf of this path wanted?"""
        if self._everything:
            return True
        wanted = False
        for pattern, compiled in self._compiled:
            if compiled.match(path):
                self._unused.discard(pattern)
                wanted = True
        return wanted

    def check_used(self, where: str) -> None:
        """Raise ConfigError for a pattern that matched nothing."""
        if self._unused:
            raise ConfigError(
                f"only={min(self._unused)!r} matches nothing in the checkpoint",
                where=where,
                fix="`dos inspect` lists the names; `*` matches `/` too",
            )


def _escape(match: re.Match[str]) -> str:
    char = match.group()
    return _ESCAPES.get(char) or f"~u{ord(char):04x}"
