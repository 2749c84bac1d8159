"""The bytes of a checkpoint's file besides its data: header, index and their checksums.

docs/checkpoint-format.md is the specification.
"""

from __future__ import annotations

import functools
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any, NamedTuple

import xxhash

from dos.checkpoint.dtypes import ITEM_BYTES
from dos.checkpoint.paths import RESERVED
from dos.checkpoint.storage import REQUEST_LIMIT_BYTES
from dos.checkpoint.strides import DIMENSIONS
from dos.errors import FormatError, IntegrityError, RefusedError

FORMAT = "dos-checkpoint"
VERSION = 1
BLOCK_BYTES = 4096
"""Large extents, the data and the index begin at multiples of it."""
CHUNK_BYTES = 4 << 20
"""What one checksum covers."""
HEADER_LIMIT_BYTES = 100_000_000
"""Of the length that safetensors accepts."""
INDEX, OBJECTS, PADDING = RESERVED + "index", RESERVED + "objects", RESERVED + "pad/"

_HEADER_PREFIX = b'{"__metadata__":{"header_digest":"'
_DIGEST_BYTES, _DIGEST_CHARS = 16, 32
_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")

FILE_NAME = re.compile(r"rank-[0-9]{5,}(-[0-9]+)?\.safetensors")
"""What a file of a checkpoint is called."""


class Entry(NamedTuple):
    """A name in the header: its element type, its shape, and its bytes in the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class FileId:
    """Which file of which checkpoint; every checksum is bound to it."""

    checkpoint_id: str
    rank: int
    number: int

    @property
    def name(self) -> str:
        """What the file is called in the checkpoint's directory."""
        further = f"-{self.number}" if self.number else ""
        return f"rank-{self.rank:05d}{further}.safetensors"

    def seed(self, offset_bytes: int) -> int:
        """Of the checksum of the bytes from this offset of the file on."""
        text = f"{self.checkpoint_id}/{self.rank}/{self.number}/{offset_bytes}"
        return xxhash.xxh3_64_intdigest(text.encode())


def check_id(checkpoint_id: str) -> str:
    """The id itself. FormatError if it cannot be one."""
    if not isinstance(checkpoint_id, str) or not _ID.fullmatch(checkpoint_id):
        raise FormatError(
            f"{checkpoint_id!r} is no checkpoint id",
            where="checkpoint_id",
            fix="use 1 to 64 letters, digits, `-` and `_`",
        )
    return checkpoint_id


@dataclass(frozen=True)
class Header:
    """What a file's header tells.

    Attributes:
        file_id: which file it is.
        entries: by name, in the order of their bytes.
        data_begin: offset of the data in the file.
        chunk_bytes: what one checksum covers.
        index_digest: of the index.
    """

    file_id: FileId
    entries: Mapping[str, Entry]
    data_begin: int
    chunk_bytes: int
    index_digest: str

    @property
    def chunked_bytes(self) -> int:
        """Data before the index, which chunks cover."""
        return self.entries[INDEX].begin


def json_of(text: bytes) -> Any:
    """What a JSON text says. ValueError for what only some readers take: NaN, UTF-16."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text.decode(), parse_constant=refuse)


def header_draft(file_id: FileId, entries: Mapping[str, Entry], chunk_bytes: int) -> bytes:
    """The header with its length in front and spaces behind, a whole number of blocks.

    Its digests are zeros until `sealed_header`.

    Raises:
        FormatError: safetensors would refuse it for its length.
    """
    index = entries[INDEX]
    metadata = {
        "header_digest": "0" * _DIGEST_CHARS,
        "format": FORMAT,
        "version": str(VERSION),
        "id": file_id.checkpoint_id,
        "rank": str(file_id.rank),
        "file": str(file_id.number),
        "chunk_bytes": str(chunk_bytes),
        "index_begin": str(index.begin),
        "index_bytes": str(index.end - index.begin),
        "index_digest": "0" * _DIGEST_CHARS,
    }
    parts = [f'{{"__metadata__":{json.dumps(metadata, separators=(",", ":"))}']
    # Put together here, because a state may have tens of thousands, each of a few known parts.
    for name, (dtype, shape, begin, end) in entries.items():
        parts.append(
            f'{encode_basestring(name)}:{{"dtype":"{dtype}","shape":{_lengths(shape)},'
            f'"data_offsets":[{begin},{end}]}}'
        )
    text = (",".join(parts) + "}").encode()
    n_bytes = -(-(8 + len(text)) // BLOCK_BYTES) * BLOCK_BYTES - 8
    if n_bytes > HEADER_LIMIT_BYTES:
        raise FormatError(
            f"a header of {n_bytes:,} bytes, above safetensors' limit of {HEADER_LIMIT_BYTES:,}",
            where="state",
            fix="stack small tensors into larger ones, or save the state in parts",
        )
    return struct.pack("<Q", n_bytes) + text.ljust(n_bytes)


@functools.lru_cache(1024)  # most shapes of a model are there many times
def _lengths(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"


def sealed_header(draft: bytes, index_digest: str, file_id: FileId) -> bytes:
    """A header with the digests of the index and of itself."""
    before = b'"index_digest":"'
    at = draft.index(before) + len(before)  # of the metadata, which comes before all names
    with_index = draft[:at] + index_digest.encode() + draft[at + _DIGEST_CHARS :]
    return seal(with_index, 8, _HEADER_PREFIX, file_id)


def seal(unsealed: bytes, offset: int, prefix: bytes, file_id: FileId) -> bytes:
    """The text with its digest in place of the zeros that follow `prefix` at `offset`."""
    at = offset + len(prefix)
    digest = xxhash.xxh3_128_hexdigest(unsealed, seed=file_id.seed(0)).encode()
    return unsealed[:at] + digest + unsealed[at + _DIGEST_CHARS :]


def sealed_digest(text: bytes, offset: int, prefix: bytes, file_id: FileId) -> str | None:
    """The digest that a sealed text bears; None: it is not the text's."""
    at = offset + len(prefix)
    digest = text[at : at + _DIGEST_CHARS]
    zeroed = text[:at] + b"0" * _DIGEST_CHARS + text[at + _DIGEST_CHARS :]
    true = xxhash.xxh3_128_hexdigest(zeroed, seed=file_id.seed(0)).encode()
    return true.decode() if digest == true and text[offset:at] == prefix else None


def header_digest(text: bytes, file_id: FileId) -> str | None:
    """The digest that a header with its length bears; None: it is damaged."""
    return sealed_digest(text, 8, _HEADER_PREFIX, file_id)


def parse_header(text: bytes, file_id: FileId, file_bytes: int) -> Header:
    """Check a header, whose digest was found true, and all that it says.

    Args:
        text: with its length in front.
        file_id: which file it must be.
        file_bytes: size of the file.

    Raises:
        FormatError: it breaks a rule of the format.
    """
    try:
        said = json_of(text[8:])
        metadata = said.pop("__metadata__")
        if not all(type(value) is str for value in metadata.values()):
            raise TypeError("metadata are strings")
        told = {key: metadata[key] for key in ("format", "id", "rank", "file")}
        version, chunk_bytes = int(metadata["version"]), int(metadata["chunk_bytes"])
        index = int(metadata["index_begin"]), int(metadata["index_bytes"])
        digest = metadata["index_digest"]
        found = sorted(((name, _entry(entry)) for name, entry in said.items()), key=_place)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(f"malformed header: {error!r}", where=file_id.name) from error
    check_version(told["format"], version, file_id.name)
    if (told["id"], told["rank"], told["file"]) != (
        file_id.checkpoint_id,
        str(file_id.rank),
        str(file_id.number),
    ):
        raise FormatError("the header is of another file", where=file_id.name)
    if chunk_bytes % BLOCK_BYTES or not 0 < chunk_bytes <= REQUEST_LIMIT_BYTES:
        raise FormatError(f"chunks of {chunk_bytes} bytes", where=file_id.name)
    _check_entries(found, file_bytes - len(text), file_id.name)
    entries = dict(found)
    last = entries.get(INDEX)
    if last is None or (last.begin, last.end - last.begin) != index or len(digest) != 32:
        raise FormatError("the header does not tell where the index is", where=file_id.name)
    return Header(file_id, entries, len(text), chunk_bytes, digest)


def check_version(format_name: object, version: object, where: str) -> None:
    """FormatError for another format, RefusedError for a version that is newer than this one."""
    if format_name != FORMAT or not isinstance(version, int) or version < 1:
        raise FormatError(
            f"this is no checkpoint: format {format_name!r}, version {version!r}", where=where
        )
    if version > VERSION:
        raise RefusedError(
            f"version {version} of the format; this library reads up to {VERSION}",
            where=where,
            fix="install a newer deep-optimizer-states",
        )


def _entry(said: dict[str, Any]) -> Entry:
    dtype, shape, (begin, end) = said["dtype"], tuple(said["shape"]), said["data_offsets"]
    if len(said) != 3 or len(shape) > DIMENSIONS:
        raise ValueError(f"entry {str(said)[:200]}")
    for n in (*shape, begin, end):
        if type(n) is not int or not 0 <= n < 1 << 63:
            raise ValueError(f"entry {said!r}")
    if math.prod(shape) * ITEM_BYTES[dtype] != end - begin:
        raise ValueError(f"entry {said!r} has another size than its shape")
    return Entry(dtype, shape, begin, end)


def _place(item: tuple[str, Entry]) -> tuple[int, int]:
    return item[1].begin, item[1].end


def _check_entries(entries: Sequence[tuple[str, Entry]], data_bytes: int, where: str) -> None:
    """Every byte of the data belongs to one entry; they are sorted."""
    end = 0
    for name, entry in entries:
        if entry.begin != end:
            what = "overlaps what is before it" if entry.begin < end else "leaves a hole before it"
            raise FormatError(f"entry {name[:200]!r} {what}, at {entry.begin}", where=where)
        end = entry.end
    if end != data_bytes:
        raise FormatError(f"entries end at {end}, the data at {data_bytes}", where=where)


@dataclass(frozen=True)
class Index:
    """What a file tells at its end.

    Attributes:
        said: the JSON: "tree", and "pieces" where there are any.
        digests: of the chunks, 16 bytes each.
    """

    said: dict[str, Any]
    digests: bytes


def index_text(said: Mapping[str, Any]) -> bytes:
    """The JSON of an index."""
    # ASCII, because a string may have half of a surrogate pair, which UTF-8 cannot say.
    return json.dumps(said, separators=(",", ":"), allow_nan=False).encode("ascii")


def index_bytes(text: bytes, digests: Sequence[bytes]) -> bytes:
    """An index: the lengths of its parts, the JSON, the digests."""
    return struct.pack("<QQ", len(text), len(digests)) + text + b"".join(digests)


def index_size(text: bytes, n_chunks: int) -> int:
    """Bytes of an index, known before the digests are."""
    return 16 + len(text) + _DIGEST_BYTES * n_chunks


def parse_index(data: bytes, header: Header) -> Index:
    """Check an index against its digest, and read it.

    Raises:
        IntegrityError: it is damaged.
        FormatError: it breaks a rule of the format.
    """
    where = header.file_id.name
    begin = header.data_begin + header.chunked_bytes
    if xxhash.xxh3_128_hexdigest(data, seed=header.file_id.seed(begin)) != header.index_digest:
        raise IntegrityError(
            f"the index, {len(data)} bytes from offset {begin}, is damaged", where=where
        )
    if len(data) < 16:
        raise FormatError("the index is too short", where=where)
    text_bytes, n_chunks = struct.unpack_from("<QQ", data)
    expected = -(-header.chunked_bytes // header.chunk_bytes)
    if n_chunks != expected or 16 + text_bytes + _DIGEST_BYTES * n_chunks != len(data):
        raise FormatError("the index has not one checksum for each chunk", where=where)
    try:
        said = json_of(data[16 : 16 + text_bytes])
    except (ValueError, RecursionError) as error:
        raise FormatError(f"malformed index: {error!r}", where=where) from error
    if not isinstance(said, dict) or "tree" not in said:
        raise FormatError("the index has no tree", where=where)
    return Index(said, data[16 + text_bytes :])
