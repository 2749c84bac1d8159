"""Triton's kernels run on the GPU if there is one, else in Triton's interpreter on host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch

HAS_GPU = torch.cuda.is_available()


@contextmanager
def triton_as_it_runs_here() -> Iterator[None]:
    """Triton's interpreter is chosen when a kernel is defined or first run, by the environment."""
    with pytest.MonkeyPatch.context() as environment:
        if not HAS_GPU:
            environment.setenv("TRITON_INTERPRET", "1")
        yield


# Before any test runs: a kernel is decided for where it is defined (Triton's own library, at its
# first import, in tests/conftest.py).
if find_spec("triton"):
    with triton_as_it_runs_here():
        import dos.kernels.gpu.adam
        import dos.kernels.gpu.cast  # noqa: F401


@pytest.fixture(autouse=True, scope="module")
def _triton_runs() -> Iterator[None]:
    with triton_as_it_runs_here():
        yield


@pytest.fixture(autouse=True, scope="session")
def _a_cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """So that stride="auto" measures this machine once, and leaves the user's profile alone."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels' tensors lie."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture
def flushing() -> Iterator[None]:
    """This thread flushes subnormals to zero, as any library may have told it."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush subnormals")
    yield
    torch.set_flush_denormal(False)
