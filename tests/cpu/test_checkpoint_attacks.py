"""Files that somebody made up, checksums and all: refused by the rule that they break."""

from __future__ import annotations

import json
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import dos
import dos.checkpoint
from dos.checkpoint.format import (
    BLOCK_BYTES,
    INDEX,
    Entry,
    FileId,
    header_digest,
    header_draft,
    index_bytes,
    seal,
    sealed_header,
)
from dos.checkpoint.manifest import FileRecord, manifest_bytes
from tests.cpu.checkpoint_cases import data_file

FILE_ID = FileId("attack", 0, 0)
_PREFIX = b'{"__metadata__":{"header_digest":"'


def forge(
    folder: Path,
    tree: Any = None,
    *,
    entries: dict[str, Entry] | None = None,
    change: Callable[[dict[str, Any]], None] = lambda header: None,
    data: bytes = bytes(BLOCK_BYTES),
    raw_index: bytes | None = None,
    pieces: dict[str, Any] | None = None,
) -> Path:
    """A file all of whose checksums are right."""
    entries = entries or {"w": Entry("U8", (BLOCK_BYTES,), 0, BLOCK_BYTES)}
    said = {"tree": {"w": []} if tree is None else tree, "pieces": pieces or {}}
    text = json.dumps(said).encode()
    chunk_bytes = 4 << 20
    for _ in range(2):  # the header's length must be known for the seeds
        size = 16 + len(text) + 16
        index_at = len(data)
        all_entries = {**entries, INDEX: Entry("U8", (size,), index_at, index_at + size)}
        draft = header_draft(FILE_ID, all_entries, chunk_bytes)
        begin = len(draft)
        digest = xxhash.xxh3_128_digest(data, seed=FILE_ID.seed(begin))
        index = index_bytes(text, [digest]) if raw_index is None else raw_index
    seed = FILE_ID.seed(begin + index_at)
    header = sealed_header(draft, xxhash.xxh3_128_hexdigest(index, seed=seed), FILE_ID)
    told = json.loads(header[8:])
    told["__metadata__"]["header_digest"] = "0" * 32
    change(told)
    changed = json.dumps(told, separators=(",", ":")).encode().ljust(len(header) - 8)
    header = seal(header[:8] + changed, 8, _PREFIX, FILE_ID)
    path = folder / "saved"
    path.mkdir()
    (path / FILE_ID.name).write_bytes(header + data + index)
    record = FileRecord(
        FILE_ID,
        len(header) + len(data) + len(index),
        len(header),
        header_digest(header, FILE_ID) or "",
    )
    (path / "manifest.json").write_bytes(manifest_bytes([record]))
    return path


def test_the_forgery_itself_is_accepted(tmp_path: Path) -> None:
    back = dos.checkpoint.load(forge(tmp_path))
    assert torch.equal(back["w"], torch.zeros(BLOCK_BYTES, dtype=torch.uint8))


def offsets(name: str, begin: int, end: int) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        header[name]["data_offsets"] = [begin, end]

    return change


def entry(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["w"].update(fields)


def metadata(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["__metadata__"].update(fields)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (offsets("w", 0, BLOCK_BYTES - 1), "another size"),
        (offsets("w", 8, BLOCK_BYTES + 8), "hole"),
        (offsets(INDEX, BLOCK_BYTES - 100, BLOCK_BYTES), "malformed|overlaps"),
        (entry(shape=[1 << 62, 4]), "another size"),
        (entry(shape=[-BLOCK_BYTES]), "malformed"),
        (entry(shape=[BLOCK_BYTES, 1.0]), "malformed"),
        (entry(shape=[True, BLOCK_BYTES]), "malformed"),
        (entry(dtype="F4"), "malformed"),
        (entry(dtype=["U8"]), "malformed"),
        (entry(more=1), "malformed"),
        (lambda header: header.update(w=None), "malformed"),
        (lambda header: header.update(x=dict(header["w"])), "overlaps"),
        (lambda header: header.pop(INDEX), "ends? at|index"),
        (metadata(version="2"), "newer deep-optimizer-states"),
        (metadata(version="x"), "malformed"),
        (metadata(format="other"), "no checkpoint"),
        (metadata(rank="1"), "of another file"),
        (metadata(id="other"), "of another file"),
        (metadata(chunk_bytes="0"), "chunks of 0"),
        (metadata(chunk_bytes="4097"), "chunks of 4097"),
        (metadata(chunk_bytes=str(1 << 27)), "chunks of 134217728"),
        (metadata(version=1), "malformed"),
        (metadata(more=None), "malformed"),
        (metadata(index_begin="0"), "where the index is"),
    ],
)
def test_a_header_that_breaks_a_rule_is_refused(
    change: Callable[[dict[str, Any]], None], says: str, tmp_path: Path
) -> None:
    with pytest.raises(dos.FormatError, match=says):
        dos.checkpoint.load(forge(tmp_path, change=change))


DEEP: Any = []
for _ in range(300):
    DEEP = ["list", DEEP]

VIEW = {"entry": "w", "dtype": "float32", "shape": [4]}


@pytest.mark.parametrize(
    "tree",
    [
        {"w": ["t", {"entry": "nosuch"}]},
        {"w": ["t", {**VIEW, "offset": -4}]},
        {"w": ["t", {**VIEW, "offset": BLOCK_BYTES - 8}]},
        {"w": ["t", {**VIEW, "offset": 2}]},
        {"w": ["t", {**VIEW, "offset": 0.0}]},
        {"w": ["t", {**VIEW, "offset": 0, "stride": [1 << 40]}]},
        {"w": ["t", {**VIEW, "offset": 0, "stride": [2]}]},
        {"w": ["t", {**VIEW, "offset": 64, "stride": [-4]}]},
        {"w": ["t", {**VIEW, "offset": 0, "stride": [4, 4]}]},
        {"w": ["t", {**VIEW, "offset": 0, "shape": [1 << 40]}]},
        {"w": ["t", {**VIEW, "offset": 0, "shape": [1] * 65}]},
        {"w": ["t", {**VIEW, "offset": 0, "dtype": "nn"}]},
        {"w": ["t", {**VIEW, "offset": 0, "dtype": "qint8"}]},
        {"w": ["t", {"order": [1 << 40]}]},
        {"w": ["t", {"grad": True}]},
        {"w": ["t", {"dtype": "complex128", "shape": [1 << 50]}]},
        {"w": ["t", {"numpy": "|O", "shape": [512]}]},
        {"w": ["t", {"numpy": "|S1099511627776", "shape": [1]}]},
        {"w": ["t", {"pieces": True}]},
        {"w": ["t"]},
        {"w": ["t", 3]},
        {"w": ["nosuch"]},
        {"w": [[]]},
        {"w": ["dict", [[["list"], 1]]]},
        {"w": ["dict", 3]},
        {"w": ["deque", -2, 1]},
        {"w": ["int", "zz"]},
        {"w": ["float", "00"]},
        {"w": ["bytes", 0, 1 << 40]},
        {"w": ["bytes", "?"]},
        {"w": ["path", "Path", 3]},
        {"w": ["dtype", "save"]},
        {"w": ["dtype", "nosuch"]},
        {"w": ["device", "nosuch"]},
        {"w": ["defaultdict", "eval", {}]},
        {"w": ["datetime", "yesterday", 0]},
        {"w": ["scalar", "<f8", "AAAA"]},
        {"w": ["scalar", "|O", "AAAA"]},
        {"w": ["dataclass", "os.system", {"command": "true"}]},
        {"w": ["namedtuple", "os.system", {}]},
        {"w": ["enum", "os.system", "x"]},
        {"w": ["pickle", "os.system", 0, 0]},
        {"w": ["set", ["list"]]},
        {"w": DEEP},
    ],
    ids=lambda tree: json.dumps(tree)[:60],
)
def test_a_tree_that_breaks_a_rule_is_refused(tree: Any, tmp_path: Path) -> None:
    with pytest.raises(dos.FormatError):
        dos.checkpoint.load(forge(tmp_path, tree))


@pytest.mark.parametrize("raw_index", [b"", bytes(15), bytes(16), b"\xff" * 64, bytes(200)])
def test_an_index_that_breaks_a_rule_is_refused(raw_index: bytes, tmp_path: Path) -> None:
    with pytest.raises((dos.FormatError, dos.IntegrityError)):
        dos.checkpoint.load(forge(tmp_path, raw_index=raw_index))


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "rank-00001.safetensors"]
)
def test_a_name_in_the_manifest_is_never_opened(name: str, tmp_path: Path) -> None:
    path = forge(tmp_path)
    said = json.loads((path / "manifest.json").read_text())
    said["files"][0]["name"] = name
    said["digest"] = "0" * 32
    text = json.dumps(said, separators=(",", ":")).encode()
    (path / "manifest.json").write_bytes(seal(text, 0, b'{"digest":"', FILE_ID))
    with pytest.raises(dos.FormatError, match="calls a file"):
        dos.checkpoint.load(path)


def test_latest_names_only_what_is_beside_it(tmp_path: Path) -> None:
    forge(tmp_path)
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "latest").write_text("../saved")
    with pytest.raises(dos.FormatError, match="no checkpoint"):
        dos.checkpoint.load(inner)


class Evil:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('code of the file was run')",))


def test_no_pickle_runs_unless_trusted(tmp_path: Path) -> None:
    saved = dos.checkpoint.save({"evil": Evil(), "w": torch.zeros(3)}, tmp_path / "saved").result()
    with pytest.raises(dos.FormatError, match=r"evil.*Evil"):
        dos.checkpoint.load(saved)
    dos.checkpoint.inspect(saved)
    dos.checkpoint.verify(saved)
    dos.checkpoint.load(saved, only="w")
    with pytest.raises(SystemExit):
        dos.checkpoint.load(saved, trusted=True)


def test_random_damage_never_crashes_hangs_or_takes_memory(tmp_path: Path) -> None:
    """Anything may be changed; what comes is the state itself or one of two errors."""
    state = {"a": torch.arange(2000), "b": [torch.ones(3, 3).t(), b"x" * 2000, {1: "one"}]}
    dos.checkpoint.save(state, tmp_path / "saved").result()
    files = [data_file(tmp_path), tmp_path / "saved" / "manifest.json"]
    originals = [file.read_bytes() for file in files]
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    ends_at_s = time.monotonic() + 3
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    while time.monotonic() < ends_at_s:
        which = rng.randrange(2)
        raw = bytearray(originals[which])
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(raw) + 1)
            kind = rng.randrange(4)
            if kind == 0:
                raw[at : at + 1] = rng.randbytes(1)
            elif kind == 1:
                raw[at : at + rng.randrange(200)] = b""
            elif kind == 2:
                raw[at:at] = rng.randbytes(rng.randrange(20))
            else:
                raw[at : at + 8] = rng.randbytes(8)
        files[which].write_bytes(raw)
        try:
            back = dos.checkpoint.load(tmp_path / "saved")
            assert torch.equal(back["a"], state["a"]), f"seed {seed}"
        except (dos.FormatError, dos.IntegrityError):
            refused += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        files[which].write_bytes(originals[which])
    assert refused
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert grown_kib < 200 << 10, f"seed {seed}"


def test_random_trees_never_crash(tmp_path: Path) -> None:
    """Behind right checksums: nodes shuffled, cut and exchanged."""
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    values = [0, -1, 1 << 62, "", "w", "t", "list", "pickle", None, True, 1.5, [], {}, ["t", {}]]

    def node(depth: int) -> Any:
        if depth == 0 or rng.random() < 0.3:
            return rng.choice(values)
        if rng.random() < 0.4:
            return {str(rng.choice(values)): node(depth - 1) for _ in range(rng.randrange(3))}
        tag = rng.choice(
            ["t", "list", "dict", "deque", "OrderedDict", "defaultdict", "scalar", "slice", "path"]
        )
        return [tag, *(node(depth - 1) for _ in range(rng.randrange(4)))]

    ends_at_s = time.monotonic() + 3
    number = 0
    while time.monotonic() < ends_at_s:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        path = forge(folder, {"w": node(4)})
        try:
            dos.checkpoint.load(path)
            dos.checkpoint.inspect(path)
        except (dos.FormatError, dos.IntegrityError):
            pass
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
