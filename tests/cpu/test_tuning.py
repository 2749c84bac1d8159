"""The requests that a file system is read and written with: kept, found again, measured."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from dos.bench import raw
from dos.bench.tune import trials, tune
from dos.checkpoint.tuning import IoShape, cache_file, keep_shape, mount_of, shape_for
from dos.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_what_was_not_measured_is_as_usual(tmp_path: Path) -> None:
    assert shape_for(str(tmp_path)) == IoShape()


def test_a_kept_shape_is_found_for_every_path_of_its_mount(tmp_path: Path) -> None:
    shape = IoShape(depth=32, queues=1, direct=False)
    keep_shape(str(tmp_path), shape)
    assert shape_for(str(tmp_path / "not" / "there")) == shape


def test_shapes_of_other_mounts_stay(tmp_path: Path) -> None:
    keep_shape("/proc", IoShape(depth=3))
    keep_shape(str(tmp_path), IoShape(depth=5))
    assert (shape_for("/proc").depth, shape_for(str(tmp_path)).depth) == (3, 5)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"%s": {"depth": -1}}'])
def test_a_damaged_cache_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    file = cache_file()
    file.parent.mkdir(parents=True)
    file.write_text(text.replace("%s", mount_of(str(tmp_path))))
    assert shape_for(str(tmp_path)) == IoShape()


def test_tuning_tries_every_shape_and_removes_its_file(tmp_path: Path) -> None:
    told: list[int] = []
    best, figures = tune(str(tmp_path), 1 << 20, 1, lambda done, total: told.append(total - done))
    assert best in [trial.shape for trial in trials(64)]
    assert told[-1] == 0
    assert len(figures) == len(told)
    assert list(tmp_path.iterdir()) == []


def test_without_fio_it_is_said_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="apt-get install fio"):
        raw.write_gib_per_s(str(tmp_path / "file"), 1 << 20, raw.SHAPES[0])


def test_the_bare_disk_is_measured_by_what_fio_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = "fio: a warning\n" + json.dumps({"jobs": [{"job_runtime": 500}]})
    done = subprocess.CompletedProcess([], 0, shown, "")
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("subprocess.run", lambda *arguments, **options: done)
    assert raw.read_gib_per_s("file", 1 << 30, raw.SHAPES[0]) == 2.0
