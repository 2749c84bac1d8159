"""What every test shares: reproducible property tests; GPU tests skipped where there is no GPU."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
from hypothesis import settings

# No deadline: on a shared machine time says nothing about correctness. In CI the examples are
# the same in every run, so that a red check is the change's doing.
settings.register_profile("local", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# Whether Triton's own library runs in its interpreter is decided at its first import, which any
# module of the tests may cause.
if find_spec("torch") and find_spec("triton"):
    import torch

    if not torch.cuda.is_available():
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("TRITON_INTERPRET", "1")
            import triton.language  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked gpu on a machine without an accelerator."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_accelerator():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator; torch finds none"))


def _has_accelerator() -> bool:
    import torch  # here, because a run without GPU tests may have no use for torch

    return torch.accelerator.is_available()
