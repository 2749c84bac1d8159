"""Who reads weights: modules that are called, saved and loaded, and backward."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle


class Readers:
    """Hooks that let every reader of a weight wait for the update of it.

    - The call of a module waits for its own parameters, also where other tensors stand for them
      (`torch.func.functional_call`); and for those below it that no call of their own module has
      waited for in the last forward (`nn.MultiheadAttention` reads the weight of its `out_proj`).
      It waits for all below it where it is not in training or without gradients, since what
      evaluation calls may be another choice; and where it is what `torch.compile` has returned.
    - The call of a DistributedDataParallel that looks for unused parameters waits for everything.
    - `state_dict` and `load_state_dict` of a module that was called, or lies below one, wait for
      everything, and so does the first gradient of a backward.

    What was called in training since the last step, or with gradients, says two things about the
    next one: which parameters a call will wait for, and in which order they are needed. A parameter
    that no call has waited for is read in another way (by hand, by compiled code), and has to be
    ready when `step()` returns; so has one of a TorchScript module, whose state dict has no hooks.

    Args:
        wait: waits for parameters, given by index.
        synchronize: waits for all.
    """

    def __init__(
        self, wait: Callable[[Iterable[int]], None], synchronize: Callable[[], None]
    ) -> None:
        self._wait, self._synchronize = wait, synchronize
        self._index_of: dict[int, int] = {}  # by id: a tensor's == is no comparison
        self._below: weakref.WeakKeyDictionary[torch.nn.Module, frozenset[int]] = (
            weakref.WeakKeyDictionary()
        )
        self._own: weakref.WeakKeyDictionary[torch.nn.Module, frozenset[int]] = (
            weakref.WeakKeyDictionary()
        )
        self._barriers: weakref.WeakKeyDictionary[torch.nn.Module, list[RemovableHandle]] = (
            weakref.WeakKeyDictionary()
        )
        self._without_barrier: set[int] = set()
        self._own_call: set[int] = set()
        self._own_call_before: set[int] = set()
        self._covered: dict[int, None] = {}  # in the order of first use
        self._names_for: int | None = None  # the thread that takes state dicts unread
        self._handles = [register_module_forward_pre_hook(_forward_hook(self))]

    def extend(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take in further parameters."""
        first = len(self._index_of)
        for index, parameter in enumerate(parameters, first):
            self._index_of[id(parameter)] = index
            self._handles.append(_gradient_hook(self, parameter))
        self._below.clear()

    def close(self) -> None:
        """Remove all hooks; idempotent."""
        for handle in (*self._handles, *chain.from_iterable(self._barriers.values())):
            handle.remove()
        self._handles.clear()
        self._barriers.clear()

    def next_step(self) -> list[int]:
        """The parameters that calls have waited for since the last step, in the order of use."""
        covered, self._covered = self._covered, {}
        self._own_call_before, self._own_call = self._own_call, set()
        return [index for index in covered if index not in self._without_barrier]

    def called(self, module: torch.nn.Module) -> None:
        """A module is about to run."""
        held = self._indices(module._parameters.values())
        below = self._below.get(module)
        if below is not None and not below.issuperset(held):
            self._below.clear()  # a parameter has come to it, and perhaps to others
            below = None
        if below is None:
            below = self._look_below(module)
        if not below:
            return
        own, rest = self._own[module], below
        trains = module.training and torch.is_grad_enabled()
        if trains and "_orig_mod" not in module._modules:  # compiled code calls no hooks below it
            rest = below - self._own_call_before
        if module.training or torch.is_grad_enabled():
            self._own_call.update(own)
            for index in (*sorted(own), *sorted(rest)):
                self._covered.setdefault(index)
        if module.__dict__.get("find_unused_parameters"):
            self._synchronize()  # DistributedDataParallel reduces those before backward begins
        self._wait(own | rest)

    def synchronize(self) -> None:
        """Everything may be read next."""
        self._synchronize()

    @contextmanager
    def unread(self) -> Iterator[None]:
        """State dicts that this thread takes meanwhile wait for nothing: no value is read yet."""
        self._names_for = threading.get_ident()
        try:
            yield
        finally:
            self._names_for = None

    def state_dict_begins(self) -> None:
        """A state dict is about to be taken or loaded."""
        if self._names_for != threading.get_ident():
            self._synchronize()

    def _indices(self, parameters: Iterable[torch.Tensor | None]) -> frozenset[int]:
        index_of = self._index_of
        return frozenset(index_of[id(p)] for p in parameters if id(p) in index_of)

    def _look_below(self, module: torch.nn.Module) -> frozenset[int]:
        """The parameters of a module and of all below it, as they are now or were before."""
        for owner in module.modules():
            held = self._indices(owner._parameters.values())
            self._own[owner] = held | self._own.get(owner, frozenset())
            if isinstance(owner, torch.jit.ScriptModule):
                self._without_barrier |= held
            elif held and owner not in self._barriers:
                barrier = Barrier(self)
                self._barriers[owner] = [
                    owner.register_state_dict_pre_hook(barrier),
                    owner.register_load_state_dict_pre_hook(barrier),
                ]
        below = frozenset().union(*(self._own[owner] for owner in module.modules()))
        self._below[module] = below
        return below


class Barrier:
    """A hook of a module that waits for everything; a copy of it, in a copied module, does not."""

    def __init__(self, readers: Readers | None) -> None:
        self._readers = None if readers is None else weakref.ref(readers)

    def __call__(self, *_: Any) -> None:
        readers = None if self._readers is None else self._readers()
        if readers is not None:
            readers.state_dict_begins()

    def __reduce__(self) -> tuple[Any, ...]:
        return Barrier, (None,)


def _forward_hook(readers: Readers) -> Callable[[torch.nn.Module, Any], None]:
    """The hook of all modules; it does not keep the readers alive."""
    reference = weakref.ref(readers)

    def before(module: torch.nn.Module, inputs: Any) -> None:
        # Inside of compiled code nobody could wait; whoever calls that does, or `step`.
        if torch.compiler.is_compiling():
            return
        alive = reference()
        if alive is not None:
            alive.called(module)

    return before


def _gradient_hook(readers: Readers, parameter: torch.Tensor) -> RemovableHandle:
    """Backward is about to add to a gradient: it, and what it sends, come after the step."""
    reference = weakref.ref(readers)

    def before(grad: torch.Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive.synchronize()

    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)  # torch hooks no other, but keeps the hooks of a frozen one
    hook = torch.utils.hooks.unserializable_hook(_disable_dynamo(before))
    handle: RemovableHandle = parameter.register_hook(hook)
    parameter.requires_grad_(not frozen)
    return handle
