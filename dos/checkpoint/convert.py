"""Checkpoints from and to the files of others."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from dos.checkpoint.dtypes import header_name
from dos.checkpoint.manifest import MANIFEST
from dos.checkpoint.reader import load
from dos.checkpoint.saving import save
from dos.errors import CheckpointError, ConfigError, DOSError, FormatError, first_line

Form = Literal["dos", "pt", "safetensors", "dcp"]
_SHARD_BYTES = 5_000_000_000
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def form_of(path: Path) -> Form:
    """Which form of checkpoint is at a path. FormatError: none that is known."""
    if path.is_dir():
        if (path / MANIFEST).exists() or (path / "latest").exists():
            return "dos"
        if (path / ".metadata").exists():
            return "dcp"
        if any(path.glob("*.safetensors")):
            return "safetensors"
    elif path.suffix == ".safetensors":
        return "safetensors"
    elif path.suffix in _TORCH_SUFFIXES and path.exists():
        return "pt"
    raise FormatError(
        "no checkpoint of a known form",
        where=str(path),
        fix="give a directory of this library, of DCP or of .safetensors files, or a .pt file",
    )


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: Form,
    *,
    only: str | None = None,
    part: str | None = None,
    trusted: bool = False,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write a checkpoint in another form; the form of the source is seen from its files.

    Args:
        source: a checkpoint of this library, a torch file, safetensors, or a DCP directory.
        target: what to write; must not exist, except for a checkpoint of this library.
        to: the form: "dos", "pt", "safetensors" (a directory that `from_pretrained` takes) or
            "dcp".
        only: as of `load`, where the source is a checkpoint of this library.
        part: keys joined by `.` that lead to the part of the state to write.
        trusted: unpickle; DCP's metadata is a pickle, and so may a torch file be.
        shard_bytes: largest file of safetensors, if its tensors are not larger.

    Raises:
        FormatError: a form that is not known, a file that is damaged, or a state that the form
            cannot hold. Of other objects than tensors and arrays safetensors has none.
        CheckpointError: the target cannot be written.
        ConfigError: the target exists.
    """
    here, there = Path(source), Path(target)
    if to != "dos" and there.exists():
        raise ConfigError("it exists", where=str(there), fix="name another target")
    form = form_of(here)
    try:
        read = _READERS[form](here, only, trusted)
    except (DOSError, MemoryError):
        raise
    except Exception as error:  # what the libraries of other forms raise for a damaged file
        raise FormatError(
            f"it cannot be read as {form}: {first_line(error)}", where=str(here)
        ) from error
    state = _part(read, part)
    if to == "dos":
        save(state, there).result()
    elif to == "pt":
        atomically(there, lambda new: torch.save(state, new))
    elif to == "safetensors":
        atomically(there, lambda new: _write_shards(state, new, shard_bytes))
    else:
        atomically(there, lambda new: _write_dcp(state, new))


def _read_own(path: Path, only: str | None, trusted: bool) -> Any:
    return load(path, only=only, trusted=trusted)


def read_torch(path: Path, allow: Iterable[type], trusted: bool) -> Any:
    """The state of a torch file, mapped where that can be.

    Raises:
        FormatError: it holds classes that are neither known to torch nor in `allow`.
    """
    with torch.serialization.safe_globals(list(allow)):
        try:
            return torch.load(path, map_location="cpu", weights_only=not trusted, mmap=True)
        except RuntimeError:  # of the form before zip files, which cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=not trusted)
        except Exception as error:
            if trusted or "WeightsUnpickler error" not in str(error):
                raise
            raise FormatError(
                f"it holds more than tensors: {first_line(error)}",
                where=str(path),
                fix="pass trusted=True if you trust who wrote it",
            ) from error


def _read_safetensors(path: Path, only: str | None, trusted: bool) -> Any:
    safetensors_torch = _safetensors()
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {name: t for file in files for name, t in safetensors_torch.load_file(file).items()}


def _read_dcp(path: Path, only: str | None, trusted: bool) -> Any:
    if not trusted:
        raise FormatError(
            "DCP's metadata is a pickle, which can run any code",
            where=str(path),
            fix="pass trusted=True if you trust who wrote it",
        )
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        file = os.path.join(folder, "state.pt")
        try:
            dcp_to_torch_save(path, file)
        except CheckpointException as error:  # which is no Exception
            raise FormatError(f"DCP cannot read it: {_causes(error)}", where=str(path)) from error
        return torch.load(file, map_location="cpu", weights_only=False)


_READERS: dict[Form, Callable[[Path, str | None, bool], Any]] = {
    "dos": _read_own,
    "pt": lambda path, only, trusted: read_torch(path, (), trusted),
    "safetensors": _read_safetensors,
    "dcp": _read_dcp,
}


def _part(state: Any, part: str | None) -> Any:
    """What keys joined by `.` lead to; a key may hold dots itself."""
    if not part:
        return state
    if isinstance(state, dict):
        for key, child in state.items():
            if part == str(key):
                return child
            if part.startswith(f"{key}."):
                return _part(child, part[len(str(key)) + 1 :])
    raise ConfigError(f"the state has no part {part!r}", where="part", fix="see `dos inspect`")


def _write_dcp(state: Any, folder: Path) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

    if not isinstance(state, dict):
        raise FormatError("DCP holds dicts only", where="state", fix="choose a `part`")
    try:
        save_dcp(state, checkpoint_id=folder)
    except CheckpointException as error:
        raise FormatError(
            f"DCP cannot hold it: {_causes(error)}", where="state", fix="choose a `part`"
        ) from error


def _causes(error: Any) -> str:
    """Of what failed on any rank of DCP."""
    return "; ".join(str(failure[0]) for failure in error.failures.values())


def _write_shards(state: Any, folder: Path, shard_bytes: int) -> None:
    """safetensors files, each tensor whole and apart, with the index that transformers reads."""
    safetensors_torch = _safetensors()
    folder.mkdir()
    shards: list[dict[str, torch.Tensor]] = [{}]
    sizes = [0]
    named: set[str] = set()
    for name, tensor in _named_tensors(state, ""):
        if name in named:
            raise FormatError(
                f"two tensors would be called {name!r}", where="state", fix="rename one of its keys"
            )
        named.add(name)
        if header_name(tensor.dtype) is None:
            raise FormatError(
                f"safetensors has no {tensor.dtype}", where=name, fix="choose a `part` without it"
            )
        if sizes[-1] and sizes[-1] + tensor.nbytes > shard_bytes:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = tensor
        sizes[-1] += tensor.nbytes
    if not shards[0]:
        raise FormatError("there is no tensor to write", where="state", fix="choose another part")
    where = {}
    for number, shard in enumerate(shards, start=1):
        of = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file = f"model{of}.safetensors"
        # Clones: safetensors refuses tensors that share memory.
        apart = {
            name: t.detach().clone(memory_format=torch.contiguous_format)
            for name, t in shard.items()
        }
        safetensors_torch.save_file(apart, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(shard, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _named_tensors(state: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors and arrays by their keys joined with `.`, as a state dict calls them."""
    if isinstance(state, np.ndarray):
        try:
            state = torch.from_numpy(state)
        except (TypeError, ValueError) as error:  # as for another byte order
            raise FormatError(str(error), where=path, fix="choose a `part` without it") from error
    if isinstance(state, torch.Tensor):
        yield path, state
        return
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(state, dict):
        children = state.items()
    elif isinstance(state, (list, tuple)):
        children = enumerate(state)
    for key, child in children:
        yield from _named_tensors(child, f"{path}.{key}" if path else str(key))


def atomically(target: Path, write: Callable[[Path], None]) -> None:
    """Write beside a name, then take it: no half of a file bears it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
            new = Path(folder, target.name)
            write(new)
            os.rename(new, target)
    except OSError as error:
        raise CheckpointError(
            f"it cannot be written: {error.strerror or error}", where=str(target)
        ) from error


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ConfigError(
            "safetensors is not installed", where="convert", fix="pip install safetensors"
        ) from error
    return safetensors.torch
