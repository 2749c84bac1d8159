"""Real text that every machine has: the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

VOCABULARY = 256
"""Tokens are bytes."""


def standard_library_text(limit_bytes: int) -> torch.Tensor:
    """The first `limit_bytes` of the standard library's sources, files by name; uint8, 1-D."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8).clone()


def unigram_entropy_nats(text: torch.Tensor) -> float:
    """Entropy of single tokens: the loss of the best model that ignores context."""
    share = torch.bincount(text, minlength=VOCABULARY).double() / text.numel()
    share = share[share > 0]
    return float(-(share * share.log()).sum())


def batch(
    text: torch.Tensor, generator: torch.Generator, *, sequences: int, length: int
) -> torch.Tensor:
    """Random windows of the text: int64 [sequences, length + 1]."""
    starts = torch.randint(text.numel() - length - 1, (sequences,), generator=generator)
    return torch.stack([text[start : start + length + 1] for start in starts.tolist()]).long()
