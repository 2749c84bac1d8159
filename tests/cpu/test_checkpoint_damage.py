"""Bytes that changed are found before they are used, and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dos
import dos.checkpoint
from tests.cpu.checkpoint_cases import data_file

CHUNK_BYTES = 4 << 20


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = {
        "large": torch.full((5 << 20,), 7, dtype=torch.uint8),
        "small": [torch.full((11,), 5, dtype=torch.uint8), torch.full((3,), 6, dtype=torch.uint8)],
        "text": b"blob" * 1000,
    }
    folder = tmp_path_factory.mktemp("whole")
    dos.checkpoint.save(state, folder / "saved", checkpoint_id="whole").result()
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole / "saved", tmp_path / "saved")
    return tmp_path


def places(raw: bytes) -> dict[str, tuple[int, str]]:
    """Offset of a byte of each kind, and what an error must say of it."""
    header_end = 8 + int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8:header_end])

    def begin(name: str) -> int:
        return header_end + int(entries[name]["data_offsets"][0])

    index = begin("__dos__/index")
    return {
        "length of the header": (0, "header"),
        "header": (100, "header"),
        "header's padding": (header_end - 1, "header"),
        "digest of the header": (8 + 40, "header"),
        "large tensor": (begin("large") + 17, rf"{header_end} .*'large'"),
        "its second chunk": (begin("large") + CHUNK_BYTES + 3, rf"{header_end + CHUNK_BYTES} .*"),
        "small tensor": (begin("small/0"), "'small/0'"),
        "object": (begin("__dos__/objects") + 5, "small"),
        "padding": (index - 1, "damaged"),
        "length in the index": (index, "index"),
        "tree": (index + 20, "index"),
        "checksum": (len(raw) - 1, "index"),
    }


KINDS = [
    "length of the header",
    "header",
    "header's padding",
    "digest of the header",
    "large tensor",
    "its second chunk",
    "small tensor",
    "object",
    "padding",
    "length in the index",
    "tree",
    "checksum",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_is_named(kind: str, bit: int, copy: Path) -> None:
    file = data_file(copy)
    raw = bytearray(file.read_bytes())
    at, says = places(raw)[kind]
    raw[at] ^= 1 << bit
    file.write_bytes(raw)
    with pytest.raises(dos.IntegrityError, match=rf"(?s)rank-00000.safetensors.*{says}"):
        dos.checkpoint.load(copy / "saved")


def test_no_kind_of_place_is_forgotten(whole: Path) -> None:
    assert list(places(data_file(whole).read_bytes())) == KINDS


@pytest.mark.parametrize("at", [3, 40, 120, -3])
def test_a_flipped_bit_of_the_manifest_is_found(at: int, copy: Path) -> None:
    file = copy / "saved" / "manifest.json"
    raw = bytearray(file.read_bytes())
    raw[at] ^= 2
    file.write_bytes(raw)
    with pytest.raises((dos.IntegrityError, dos.FormatError), match="manifest"):
        dos.checkpoint.load(copy / "saved")


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.3, 0.99])
def test_truncation_is_told_with_both_sizes(keep: float, copy: Path) -> None:
    raw = data_file(copy).read_bytes()
    data_file(copy).write_bytes(raw[: int(keep * len(raw))])
    with pytest.raises(dos.IntegrityError, match=rf"truncated.*instead of {len(raw)}"):
        dos.checkpoint.load(copy / "saved")


def test_bytes_behind_the_end_are_told(copy: Path) -> None:
    with data_file(copy).open("ab") as file:
        file.write(b"\0")
    with pytest.raises(dos.IntegrityError, match="longer"):
        dos.checkpoint.load(copy / "saved")


def test_a_missing_file_is_named(copy: Path) -> None:
    data_file(copy).unlink()
    with pytest.raises(dos.IntegrityError, match=r"rank-00000.safetensors.*No such file"):
        dos.checkpoint.load(copy / "saved")


def test_without_a_manifest_there_is_no_checkpoint(copy: Path) -> None:
    (copy / "saved" / "manifest.json").unlink()
    with pytest.raises(dos.FormatError, match="no checkpoint"):
        dos.checkpoint.load(copy / "saved")


def save_other(folder: Path, fill: int, checkpoint_id: str) -> bytes:
    state = {"large": torch.full((9 << 20,), fill, dtype=torch.uint8)}
    dos.checkpoint.save(state, folder / "other", checkpoint_id=checkpoint_id).result()
    return (folder / "other" / "rank-00000.safetensors").read_bytes()


def test_a_file_of_another_checkpoint_is_found(tmp_path: Path) -> None:
    stale = save_other(tmp_path, 1, "one")
    save_other(tmp_path, 1, "two")
    (tmp_path / "other" / "rank-00000.safetensors").write_bytes(stale)
    with pytest.raises(dos.IntegrityError, match="of another file"):
        dos.checkpoint.load(tmp_path / "other")


@pytest.mark.parametrize("origin", ["another checkpoint", "another place"])
def test_a_chunk_that_belongs_elsewhere_is_found(origin: str, tmp_path: Path) -> None:
    """The bytes are right, yet not at this offset of this checkpoint."""
    stale = save_other(tmp_path, 1, "one")
    raw = bytearray(save_other(tmp_path, 1 if origin == "another place" else 2, "two"))
    begin = 8 + int.from_bytes(raw[:8], "little")
    chunk = slice(begin, begin + CHUNK_BYTES)
    if origin == "another checkpoint":
        raw[chunk] = stale[chunk]
    else:
        raw[begin + 5] = 3
        raw[begin : begin + 2 * CHUNK_BYTES] = (
            raw[begin + CHUNK_BYTES : begin + 2 * CHUNK_BYTES] + raw[chunk]
        )
    (tmp_path / "other" / "rank-00000.safetensors").write_bytes(raw)
    with pytest.raises(dos.IntegrityError, match="'large'"):
        dos.checkpoint.load(tmp_path / "other")


def test_verify_lists_every_damaged_place(copy: Path) -> None:
    raw = bytearray(data_file(copy).read_bytes())
    for kind in ("large tensor", "its second chunk"):
        raw[places(raw)[kind][0]] ^= 1
    data_file(copy).write_bytes(raw)
    assert len(dos.checkpoint.verify(copy / "saved")) == 2


def test_the_undamaged_part_can_be_loaded(copy: Path) -> None:
    raw = bytearray(data_file(copy).read_bytes())
    raw[places(raw)["large tensor"][0]] ^= 1
    data_file(copy).write_bytes(raw)
    back = dos.checkpoint.load(copy / "saved", only="small/0")
    assert torch.equal(back["small"][0], torch.full((11,), 5, dtype=torch.uint8))


def shorter(raw: bytes) -> bytes:
    return raw[:-1]


@pytest.mark.parametrize(
    "damage", [shorter, lambda raw: b"", lambda raw: b"[]", lambda raw: raw[:20]]
)
def test_a_torn_manifest_is_no_manifest(damage: Callable[[bytes], bytes], copy: Path) -> None:
    file = copy / "saved" / "manifest.json"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises((dos.IntegrityError, dos.FormatError)):
        dos.checkpoint.load(copy / "saved")
