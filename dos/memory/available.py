"""How much host memory this process may still take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# Each hierarchy: its mount, then the files of limit and use, then the key in memory.stat of
# cached file pages, which count as used although the kernel gives them back on demand.
_V2 = (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file")
_V1 = (
    Path("/sys/fs/cgroup/memory"),
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)


def available_host_bytes() -> int | None:
    """Bytes that can be taken without swapping or being killed; None where nothing says.

    The smallest of the machine's ``MemAvailable`` and of what each enclosing control group
    (version 1 or 2) leaves.
    """
    machine = _field(Path("/proc/meminfo"), "MemAvailable:")
    rooms = [*_control_group_rooms(), *([] if machine is None else [machine * 1024])]
    return min(rooms, default=None)


def _control_group_rooms() -> Iterator[int]:
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, own_path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, limit_file, use_file, cache_key = _V1 if controllers else _V2
        own = mount / own_path.lstrip("/")
        # A limit binds everything below it. In a container the path may be the host's and not
        # exist here; its ancestors still end at the mount, which then is the container's own.
        for group in (own, *own.parents):
            if not group.is_relative_to(mount):
                break
            limit, used = _text(group / limit_file).strip(), _text(group / use_file).strip()
            if limit.isdigit() and used.isdigit():
                cached = _field(group / "memory.stat", cache_key) or 0
                yield max(0, int(limit) - int(used) + cached)


def _field(path: Path, key: str) -> int | None:
    for line in _text(path).splitlines():
        words = line.split()
        if words and words[0] == key:
            return int(words[1])
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
