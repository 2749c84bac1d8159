"""What a checkpoint holds, without reading a tensor and without unpickling."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from dos.checkpoint.encode import key_path
from dos.checkpoint.objects import Node
from dos.checkpoint.opened import Opened
from dos.checkpoint.paths import component, join
from dos.checkpoint.reader import resolve
from dos.checkpoint.specs import Spec, make_spec
from dos.checkpoint.storage import Storage, make_storage
from dos.checkpoint.wholes import find_wholes
from dos.errors import DOSError, FormatError

# Where in a node its children stand.
_MAPPINGS = {
    "dict": 1,
    "OrderedDict": 1,
    "Counter": 1,
    "Namespace": 1,
    "SimpleNamespace": 1,
    "defaultdict": 2,
    "dataclass": 2,
    "namedtuple": 2,
}
_SEQUENCES = {"list": 1, "tuple": 1, "deque": 2}
_SHOWN_CHARS = 60


def inspect(path: str | os.PathLike[str], *, storage: Storage | None = None) -> dict[str, Any]:
    """What is in a checkpoint.

    Returns:
        "path", "id"; "files": name, rank, bytes; "tensors": name, file, type (of a numpy dtype
        for arrays), shape, bytes, "view_of" for one that lies in another's bytes, and "pieces",
        how many, for one that is put together (of its files only the first is named); "objects":
        name, type, and the value of those that have a short one.

    Raises:
        FormatError, IntegrityError: as `dos.checkpoint.load`, but for data.
    """
    storage = storage or make_storage()
    with Opened(resolve(path, storage), storage) as opened:
        wholes = find_wholes(opened.files)
        tensors: list[dict[str, Any]] = []
        objects: list[dict[str, Any]] = []
        in_pieces: set[str] = set()
        for file in opened.files:
            try:
                for at, node in _walk(file.index.said["tree"], ""):
                    if at in in_pieces or (node is None and file is not opened.files[0]):
                        continue  # listed already, or it only keeps a place of a sequence
                    listed = {"name": at, "file": file.name}
                    if isinstance(node, list) and (not node or node[0] == "t"):
                        told = node[1] if node else {}
                        spec = make_spec(at, told, file.header.entries, wholes)
                        if spec.whole is not None:
                            in_pieces.add(at)
                        tensors.append({**listed, **_tensor(spec, told)})
                    else:
                        objects.append({**listed, **_described(node)})
            except DOSError:
                raise
            except Exception as error:  # a tree may say anything
                raise FormatError(f"malformed tree: {error!r:.200}", where=file.name) from error
        files = [
            {
                "name": file.name,
                "rank": file.header.file_id.rank,
                "bytes": file.header.data_begin + list(file.header.entries.values())[-1].end,
            }
            for file in opened.files
        ]
        return {
            "path": opened.path,
            "id": opened.checkpoint_id,
            "files": files,
            "tensors": tensors,
            "objects": objects,
        }


def _walk(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    """Paths and nodes of all that has no children."""
    body = None
    if isinstance(node, dict):
        body = node
    elif isinstance(node, list) and node:
        if node[0] in _MAPPINGS:
            body = node[_MAPPINGS[node[0]]]
        elif node[0] in _SEQUENCES:
            body = {str(i): child for i, child in enumerate(node[_SEQUENCES[node[0]] :])}
    if not body:
        yield path, node
    elif isinstance(body, dict):
        for key, child in body.items():
            yield from _walk(child, join(path, component(key)))
    else:
        for key, child in body:
            yield from _walk(child, join(path, key_path(key)))


def _tensor(spec: Spec, told: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": str(spec.dtype).removeprefix("torch."),
        "shape": list(spec.shape),
        "bytes": spec.n_bytes,
        **({"view_of": spec.name} if "entry" in told else {}),
        **({"pieces": len(spec.whole.parts)} if spec.whole is not None else {}),
    }


def _described(node: Node) -> dict[str, Any]:
    if isinstance(node, dict):
        return {"type": "dict"}
    if not isinstance(node, list):
        value = node[:_SHOWN_CHARS] if isinstance(node, str) else node
        return {"type": type(node).__name__, "value": value}
    tag, arguments = node[0], node[1:]
    if tag == "pickle":
        return {"type": f"pickled {arguments[0]}", "bytes": arguments[2]}
    if tag in ("enum", "dataclass", "namedtuple"):
        return {"type": f"{tag} {arguments[0]}"}
    text = ", ".join(map(str, arguments))
    shown = {"value": text} if text and len(text) <= _SHOWN_CHARS else {}
    return {"type": tag, **shown}
