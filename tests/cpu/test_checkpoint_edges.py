"""The edges of what is saved, and what may not be read or read into."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dos
import dos.checkpoint
from dos.checkpoint.encode import DEPTH
from dos.checkpoint.format import BLOCK_BYTES, Entry
from dos.checkpoint.manifest import MANIFEST
from tests.cpu.checkpoint_cases import Config, assert_same, round_trip
from tests.cpu.test_checkpoint_attacks import forge


@pytest.mark.parametrize("strides", [(5, 0), (0, 1), (1, 1), (3, 1), (1, 2), (2, 1)])
def test_elements_that_overlap_though_they_are_as_many_as_their_bytes(
    strides: tuple[int, int], tmp_path: Path
) -> None:
    tensor = torch.arange(16.0).as_strided((2, 3), strides)
    assert_same({"w": tensor}, round_trip({"w": tensor}, tmp_path))


@pytest.mark.parametrize("value", [np.str_(""), np.bytes_(b""), np.void(b"")])
def test_scalars_of_no_size_come_back(value: np.generic, tmp_path: Path) -> None:
    assert_same([value], round_trip([value], tmp_path))


def test_what_has_more_dimensions_than_can_be_read_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(dos.FormatError, match="65 dimensions"):
        dos.checkpoint.save({"w": torch.zeros([1] * 65)}, tmp_path / "saved")


def nested(wrap: Any, levels: int) -> Any:
    made: Any = 1
    for _ in range(levels):
        made = wrap(made)
    return made


@pytest.mark.parametrize(
    "wrap",
    [lambda x: frozenset([x]), lambda x: slice(x, None), lambda x: Config(0.5, x), lambda x: (x,)],
    ids=["frozenset", "slice", "dataclass", "tuple"],
)
def test_no_container_is_saved_deeper_than_it_can_be_loaded(wrap: Any, tmp_path: Path) -> None:
    with pytest.raises(dos.FormatError, match="nested"):
        dos.checkpoint.save(nested(wrap, DEPTH + 2), tmp_path / "deeper")
    round_trip(nested(wrap, DEPTH), tmp_path)


@pytest.mark.parametrize(
    "target",
    [
        torch.ones(1).expand(3),
        torch.ones(3, device="meta"),
        torch.ones(3).to_sparse(),
        np.broadcast_to(np.float32(1), 3),
    ],
    ids=["expanded", "meta", "sparse", "read-only"],
)
def test_a_target_without_memory_of_its_own_is_refused(target: Any, tmp_path: Path) -> None:
    is_array = isinstance(target, np.ndarray)
    state = {"a": torch.zeros(2), "b": np.zeros(3, "f4") if is_array else torch.zeros(3)}
    saved = dos.checkpoint.save(state, tmp_path / "saved").result()
    into = {"a": torch.ones(2), "b": target}
    with pytest.raises(dos.FormatError, match="b: it cannot be read into"):
        dos.checkpoint.load(saved, into=into)
    assert into["a"].all()


def test_a_target_that_the_checkpoint_lacks_is_told(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(3)}, "n": 1}
    saved = dos.checkpoint.save(state, tmp_path / "saved").result()
    into: Any = {"w": torch.zeros(3), "model": {"w": torch.zeros(3)}}
    with pytest.raises(dos.FormatError, match="w: there is nothing in the checkpoint"):
        dos.checkpoint.load(saved, into=into)
    assert not into["model"]["w"].any()
    assert dos.checkpoint.load(saved, into=into, only="model")["model"]["w"] is into["model"]["w"]
    assert into["model"]["w"].all()


def test_an_unknown_way_to_verify_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dos.ConfigError, match="befor"):
        dos.checkpoint.load(tmp_path, verify="befor")  # type: ignore[arg-type]


TAKES_FOR_EVER = [(1 << 62) + 1] * 200_000


@pytest.mark.parametrize(
    "tree",
    [
        ["t"],
        ["t", 3],
        ["pickle"],
        ["enum"],
        [["t"]],
        ["t", {"numpy": [["a", "<f4", [1 << 70]]]}],
        ["t", {"numpy": nested(lambda x: [x], 600)}],
        ["t", {"shape": TAKES_FOR_EVER}],
        ["t", {"order": [2, 0], "shape": [2, 2048]}],
    ],
    ids=lambda tree: json.dumps(tree)[:50],
)
def test_inspect_refuses_what_load_refuses(tree: Any, tmp_path: Path) -> None:
    path = forge(tmp_path, {"w": tree})
    with pytest.raises(dos.FormatError):
        dos.checkpoint.load(path)
    with pytest.raises(dos.FormatError):
        dos.checkpoint.inspect(path)


def test_a_shape_in_the_header_is_not_multiplied_for_ever(tmp_path: Path) -> None:
    entries = {"w": Entry("U8", tuple(TAKES_FOR_EVER), 0, BLOCK_BYTES)}
    with pytest.raises(dos.FormatError, match="malformed header"):
        dos.checkpoint.load(forge(tmp_path, entries=entries))


@pytest.mark.parametrize(
    "piece",
    [
        ["w", 0.5, [BLOCK_BYTES]],
        ["w", True, [BLOCK_BYTES]],
        ["w", "0", [BLOCK_BYTES]],
        [3, 0, [BLOCK_BYTES]],
        ["w", 0, TAKES_FOR_EVER],
        ["w", 0, [-1]],
        3,
    ],
    ids=lambda piece: json.dumps(piece)[:40],
)
def test_pieces_that_say_nonsense_are_refused(piece: Any, tmp_path: Path) -> None:
    path = forge(tmp_path, {"w": ["t", {"pieces": True}]}, pieces={"w": piece})
    for look in (dos.checkpoint.load, dos.checkpoint.inspect, dos.checkpoint.verify):
        with pytest.raises(dos.FormatError, match="malformed pieces"):
            look(path)


@pytest.mark.parametrize("tag", ["bytes", "bytearray"])
def test_bytes_are_not_multiplied(tag: str, tmp_path: Path) -> None:
    entries = {"__dos__/objects": Entry("U8", (BLOCK_BYTES,), 0, BLOCK_BYTES)}
    tree = {str(n): [tag, 0, 3000] for n in range(2)}
    with pytest.raises(dos.FormatError, match="1: malformed value"):
        dos.checkpoint.load(forge(tmp_path, tree, entries=entries))


def test_copies_in_another_order_are_not_multiplied(tmp_path: Path) -> None:
    told = {"entry": "w", "dtype": "complex128", "shape": [2, 128], "order": [16, 32]}
    tree = {"a": ["t", told], "b": ["t", told]}
    with pytest.raises(dos.FormatError, match="b: 'w' is told in two orders"):
        dos.checkpoint.load(forge(tmp_path, tree))
    both = {"a": ["t", told], "b": ["t", {**told, "same": "a"}]}
    (tmp_path / "tied").mkdir()
    back = dos.checkpoint.load(forge(tmp_path / "tied", both))
    assert back["a"] is back["b"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_only_some_readers_take_is_no_json(value: float, tmp_path: Path) -> None:
    with pytest.raises(dos.FormatError, match="is no JSON"):
        dos.checkpoint.load(forge(tmp_path, {"w": value}))


def test_a_newer_version_is_told_whatever_else_it_changed(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"format": "dos-checkpoint", "version": 2, "names": {}}')
    with pytest.raises(dos.FormatError, match="newer deep-optimizer-states"):
        dos.checkpoint.load(tmp_path)


@pytest.mark.parametrize("name", [MANIFEST, "rank-00000.safetensors", "latest"])
@pytest.mark.parametrize("what", ["pipe", "directory", "device", "endless"])
def test_what_is_no_file_is_neither_waited_for_nor_read(
    name: str, what: str, tmp_path: Path
) -> None:
    path = forge(tmp_path)
    if name == "latest":
        path = tmp_path
    (path / name).unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(path / name)
    elif what == "directory":
        (path / name).mkdir()
    elif what == "device":
        (path / name).symlink_to("/dev/zero")
    else:
        with open(path / name, "wb") as file:
            file.truncate(1 << 40)
    for look in (dos.checkpoint.load, dos.checkpoint.inspect):
        with pytest.raises((dos.FormatError, dos.IntegrityError)):
            look(path)
