"""A file that was written once stays readable, and the specification is enough to read it.

`python -m tests.cpu.test_checkpoint_golden` writes it anew, after the version was raised.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import math
import pathlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

import dos.checkpoint
from dos.memory.pieces import Pieces
from tests.cpu.checkpoint_cases import (
    CLASSES,
    DTYPES,
    Access,
    Color,
    Config,
    Point,
    assert_same,
    bits,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint-1"


def golden_state() -> dict[str, Any]:
    numbers = torch.arange(24, dtype=torch.float32).view(4, 6)
    tied = torch.arange(5)
    words = bytes(range(64))
    state: dict[str, Any] = {
        "dtypes": {str(d): torch.frombuffer(bytearray(words), dtype=d) for d in DTYPES},
        "turned": torch.arange(6.0).view(2, 3).t(),
        "rows": numbers[1:3],
        "columns": numbers[:, ::2],
        "expanded": torch.ones(1).expand(3),
        "tied": [tied, tied, tied[1:]],
        "parameter": torch.nn.Parameter(torch.tensor([1.5])),
        "grad": torch.tensor([2.5], requires_grad=True),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "arrays": [np.arange(3, dtype=">i2"), np.asfortranarray(np.eye(2)), np.arange(4)[::-1]],
        "records": np.zeros(2, dtype=[("x", "<f4"), ("y", "S3"), ("z", "<u2", (2,))]),
        "plain": [None, True, -1, 1 << 70, 0.1, math.inf, 1j, "é\ud800", b"b", bytearray(b"a")],
        "long": bytes(range(256)) * 5,
        "containers": [(1, 2), {3, 1}, frozenset({"x"}), collections.deque([1], maxlen=2)],
        "keys": {1: "int", "1": "str", (1, "a"): "tuple", None: "none", b"x": "bytes"},
        "odd": {"a/b": torch.tensor(1), "~": torch.tensor(2), "__metadata__": torch.tensor(3)},
        "dicts": [
            collections.OrderedDict(a=1),
            collections.defaultdict(list, a=[1]),
            collections.Counter("aab"),
        ],
        "namespace": argparse.Namespace(lr=0.1),
        "times": [
            datetime.datetime(2024, 5, 6, 7, 8, 9, 10, datetime.timezone.utc),
            datetime.date(2024, 5, 6),
            datetime.timedelta(days=1, seconds=2),
        ],
        "paths": [pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath("c:/d")],
        "torch": [torch.Size([1, 2]), torch.bfloat16, torch.device("cuda:1"), torch.strided],
        "numpy": [np.float32(0.5), np.dtype("<M8[s]")],
        "others": [range(1, 9, 2), slice(1, None), ...],
        "classes": [Config(0.5, torch.tensor([9])), Point(1, [2]), Color.RED, Access(3)],
    }
    return state


def test_the_golden_file_is_read() -> None:
    assert_same(golden_state(), dos.checkpoint.load(GOLDEN, allow=CLASSES))


def test_the_same_bytes_are_written_today(tmp_path: Path) -> None:
    write_golden(tmp_path / "again")
    for name in ("manifest.json", "rank-00000.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (GOLDEN / name).read_bytes(), name


def write_golden(path: Path) -> None:
    dos.checkpoint.save(golden_state(), path, checkpoint_id="golden").result()


# --- another implementation, by docs/checkpoint-format.md alone -----------------------------------


def seed(file: dict[str, Any], checkpoint_id: str, offset: int) -> int:
    text = f"{checkpoint_id}/{file['rank']}/{file['file']}/{offset}"
    return xxhash.xxh3_64_intdigest(text.encode())


def zeroed(text: bytes, prefix: bytes) -> tuple[bytes, str]:
    at = text.index(prefix) + len(prefix)
    return text[:at] + b"0" * 32 + text[at + 32 :], text[at : at + 32].decode()


def read_by_the_specification(path: Path) -> tuple[dict[str, Any], dict[str, tuple[str, bytes]]]:
    """The tree, and dtype and bytes by entry; every checksum compared."""
    text = (path / "manifest.json").read_bytes()
    manifest = json.loads(text)
    (file,) = manifest["files"]

    def seeded(offset: int) -> int:
        return seed(file, manifest["id"], offset)

    zeros, digest = zeroed(text, b'{"digest":"')
    assert (
        xxhash.xxh3_128_hexdigest(zeros, seed=seed({"rank": 0, "file": 0}, manifest["id"], 0))
        == digest
    )
    raw = (path / file["name"]).read_bytes()
    assert len(raw) == file["bytes"]
    begin = file["header_bytes"]
    zeros, digest = zeroed(raw[:begin], b'{"__metadata__":{"header_digest":"')
    assert xxhash.xxh3_128_hexdigest(zeros, seed=seeded(0)) == digest == file["header_digest"]
    header = json.loads(raw[8:begin])
    told = header.pop("__metadata__")
    at, n_bytes = int(told["index_begin"]), int(told["index_bytes"])
    data, index = raw[begin:], raw[begin + at : begin + at + n_bytes]
    assert xxhash.xxh3_128_hexdigest(index, seed=seeded(begin + at)) == told["index_digest"]
    text_bytes, n_chunks = struct.unpack_from("<QQ", index)
    step = int(told["chunk_bytes"])
    for k in range(n_chunks):
        chunk = data[k * step : min((k + 1) * step, at)]
        wanted = index[16 + text_bytes + 16 * k :][:16]
        assert xxhash.xxh3_128_digest(chunk, seed=seeded(begin + k * step)) == wanted
    tree = json.loads(index[16 : 16 + text_bytes])["tree"]
    entries = {
        name: (one["dtype"], data[slice(*one["data_offsets"])]) for name, one in header.items()
    }
    return tree, entries


def test_the_specification_is_enough() -> None:
    tree, entries = read_by_the_specification(GOLDEN)
    state = golden_state()
    for name, tensor in state["dtypes"].items():
        assert entries[f"dtypes/{name}"][1] == bits(tensor)
    assert entries["turned"] == ("F32", bits(state["turned"]))
    assert tree["turned"] == ["t", {"order": [4, 12]}]
    assert tree["scalar"] == []
    assert tree["rows"][1]["entry"] == tree["columns"][1]["entry"]
    assert entries["odd/a~1b"] == ("I64", struct.pack("<q", 1))
    offset, n_bytes = tree["long"][1:]
    assert entries["__dos__/objects"][1][offset : offset + n_bytes] == state["long"]
    assert tree["plain"][4] == ["int", hex(1 << 70)]


def test_pieces_are_named_as_specified(tmp_path: Path) -> None:
    state = {"w": Pieces((2, 2), torch.float32, {0: torch.ones(1), 1: torch.zeros(3)})}
    dos.checkpoint.save(state, tmp_path / "saved").result()
    tree, entries = read_by_the_specification(tmp_path / "saved")
    assert tree == {"w": ["t", {"pieces": True}]}
    assert entries["w#1"] == ("F32", bytes(12))


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    write_golden(GOLDEN)
