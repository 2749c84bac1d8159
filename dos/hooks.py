"""Backward's hooks on a parameter."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Protocol

import torch
from torch._compile import _disable_dynamo


class Watcher(Protocol):
    """Whom the hooks tell, by the parameter's index."""

    def about_to_accumulate(self, index: int) -> None:
        """Backward is about to add to the gradient."""
        ...

    def made(self, index: int) -> None:
        """Backward has added to the gradient."""
        ...


def watch(
    watcher: Watcher, parameter: torch.Tensor, index: int
) -> Iterator[torch.utils.hooks.RemovableHandle]:
    """Both hooks of a parameter; they do not keep the watcher alive."""
    reference = weakref.ref(watcher)

    def before(grad: torch.Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.about_to_accumulate(index)

    def after(parameter: torch.Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.made(index)

    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)  # torch hooks no other, but keeps the hooks of a frozen one
    # A backward inside of a compiled function would have them traced.
    before, after = _disable_dynamo(before), _disable_dynamo(after)
    yield parameter.register_hook(torch.utils.hooks.unserializable_hook(before))
    yield parameter.register_post_accumulate_grad_hook(after)
    parameter.requires_grad_(not frozen)
