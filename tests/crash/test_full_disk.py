"""A disk that fills up while a checkpoint is saved: said, cleaned up, and the old one intact."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dos.checkpoint.storage import ENGINES, make_storage
from dos.errors import ConfigError, DOSError

pytest.importorskip("dos.checkpoint.saving")

from dos.checkpoint import load, save

DISK_BYTES = 16 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(tmp_path)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs the right to mount: {error}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_full_disk_fails_the_save_and_nothing_else(small_disk: Path, engine: str) -> None:
    try:
        storage = make_storage(engine)
    except ConfigError as error:
        pytest.skip(str(error))
    path = str(small_disk / "step")
    save({"w": torch.ones(1 << 20)}, path, storage=storage).result()
    with pytest.raises(DOSError, match="No space left"):
        save({"w": torch.zeros(8 << 20)}, path, storage=storage).result()
    assert os.listdir(small_disk) == ["step"]
    assert torch.equal(load(path, storage=storage)["w"], torch.ones(1 << 20))
    save({"w": torch.zeros(1 << 20)}, path, storage=storage).result()
    assert not load(path, storage=storage)["w"].any()
