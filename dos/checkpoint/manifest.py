"""The manifest: without it, valid and whole, a directory is no checkpoint."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dos.checkpoint.format import (
    BLOCK_BYTES,
    FORMAT,
    HEADER_LIMIT_BYTES,
    VERSION,
    FileId,
    check_id,
    check_version,
    json_of,
    seal,
    sealed_digest,
)
from dos.errors import FormatError, IntegrityError

MANIFEST = "manifest.json"
_PREFIX = b'{"digest":"'
_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of a file.

    Attributes:
        file_id: which file it is; its name follows.
        file_bytes: its size.
        header_bytes: offset of its data.
        header_digest: of its header, 32 hexadecimal digits.
    """

    file_id: FileId
    file_bytes: int
    header_bytes: int
    header_digest: str


def manifest_bytes(records: Sequence[FileRecord]) -> bytes:
    """The text of a manifest of one checkpoint's files."""
    checkpoint_id = records[0].file_id.checkpoint_id
    assert all(record.file_id.checkpoint_id == checkpoint_id for record in records)
    said = {
        "digest": "0" * 32,
        "format": FORMAT,
        "version": VERSION,
        "id": checkpoint_id,
        "files": [record_fields(record) for record in records],
    }
    text = json.dumps(said, separators=(",", ":")).encode()
    return seal(text, 0, _PREFIX, FileId(checkpoint_id, 0, 0))


def record_fields(record: FileRecord) -> dict[str, Any]:
    """What the manifest says of a file; `parse_record` reads it."""
    return {
        "name": record.file_id.name,
        "rank": record.file_id.rank,
        "file": record.file_id.number,
        "bytes": record.file_bytes,
        "header_bytes": record.header_bytes,
        "header_digest": record.header_digest,
    }


def parse_manifest(text: bytes, where: str) -> list[FileRecord]:
    """The files of a checkpoint, in the order of ranks and numbers.

    Raises:
        IntegrityError: the manifest is damaged.
        FormatError: it is none, or one of a newer version.
    """
    try:
        said: Any = json_of(text) if len(text) <= _LIMIT_BYTES else None
        if said["format"] == FORMAT and type(said["version"]) is int and said["version"] > VERSION:
            check_version(FORMAT, said["version"], where)
        checkpoint_id = check_id(said["id"])
        sound = sealed_digest(text, 0, _PREFIX, FileId(checkpoint_id, 0, 0)) is not None
        if not sound and said["version"] == VERSION:
            raise IntegrityError("the manifest is damaged", where=where)
        check_version(said["format"], said["version"], where)
        records = [parse_record(checkpoint_id, file) for file in said["files"]]
    except (FormatError, IntegrityError):
        raise
    except (ValueError, TypeError, KeyError, RecursionError, struct.error) as error:
        raise IntegrityError(f"the manifest is damaged: {error!r}", where=where) from error
    order = [(record.file_id.rank, record.file_id.number) for record in records]
    if not records or order != sorted(set(order)):
        raise FormatError("the manifest lists no files, or in no order", where=where)
    return records


def parse_record(checkpoint_id: str, said: dict[str, Any]) -> FileRecord:
    """A file from what `record_fields` made of it. FormatError: it is malformed."""
    rank, number, digest = said["rank"], said["file"], said["header_digest"]
    n_bytes, header_bytes = said["bytes"], said["header_bytes"]
    sizes = (rank, number, n_bytes, header_bytes)
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in sizes) or type(digest) is not str:
        raise FormatError(f"the manifest has a malformed record {said!r}")
    if header_bytes % BLOCK_BYTES or not 8 < header_bytes <= min(n_bytes, HEADER_LIMIT_BYTES + 8):
        raise FormatError(f"the manifest tells of a header of {header_bytes} bytes")
    file_id = FileId(checkpoint_id, rank, number)
    if said["name"] != file_id.name:  # so that no name of a file's content is ever opened
        raise FormatError(f"the manifest calls a file {said['name']!r}, not {file_id.name!r}")
    return FileRecord(file_id, n_bytes, header_bytes, digest)
