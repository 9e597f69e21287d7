"""How much memory this process may still take, and whether a quota fits. Reads files; allocates and kills nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hostcache.errors import MemoryRefused
from hostcache.sizes import format_size

_MIB = 1 << 20
_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes 'no limit' as a number near 2**63."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMemory:
    """One reading. `available_bytes` is the least of the machine's and of every cgroup above this process: what its
    limit leaves when the page cache is dropped. `limit_bytes` is the tightest limit, None where none is set."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    limited_by: str
    """The file of the limit that leaves the least, or `the machine`."""


def read_memory(root: Path = Path("/")) -> MachineMemory:
    """The machine and the cgroups (v1, v2 or both) of this process. `root` stands in for `/` in tests."""
    total, available = _machine(root)
    limit: int | None = None
    limited_by = "the machine"
    for file, limit_bytes, used_bytes in _cgroup_limits(root):
        left = max(0, limit_bytes - used_bytes)
        limit = limit_bytes if limit is None else min(limit, limit_bytes)
        if left < available:
            available, limited_by = left, "/" + str(file.relative_to(root))
    return MachineMemory(total_bytes=total, available_bytes=available, limit_bytes=limit, limited_by=limited_by)


def available_bytes(root: Path = Path("/")) -> int:
    """What this process can still take before the machine or a cgroup refuses or kills."""
    return read_memory(root).available_bytes


def memory_limit(root: Path = Path("/")) -> int:
    """The most this process could ever have: the tightest cgroup limit, or all memory of the machine."""
    memory = read_memory(root)
    return memory.total_bytes if memory.limit_bytes is None else min(memory.total_bytes, memory.limit_bytes)


def check_quota(
    quota_bytes: int,
    other_bytes: int = 0,
    *,
    memory: MachineMemory | None = None,
    setting: str = "host_cache_bytes",
    other: str = "the model and its pool",
) -> None:
    """Raises MemoryRefused when `quota_bytes` for the host tier do not fit beside `other_bytes` that `other` has still
    to take. What this process already has is not in `other_bytes`: the reading knows of it. A quota of 0 passes."""
    if quota_bytes <= 0:
        return
    have = memory or read_memory()
    room = have.available_bytes - other_bytes
    if quota_bytes <= room:
        return
    limit = "" if have.limit_bytes is None else f", limit {format_size(have.limit_bytes)}"
    beside = f" beside {format_size(other_bytes)} for {other}" if other_bytes else ""
    way_out = f"lower {setting} to at most {room // _MIB}MiB" if room >= _MIB else f"set {setting} to 0 (tier off)"
    raise MemoryRefused(
        f"{setting} is {format_size(quota_bytes)} ({quota_bytes} bytes){beside}, but only "
        f"{format_size(have.available_bytes)} are available (by {have.limited_by}{limit}); "
        f"{way_out} or give it more memory"
    )


def _machine(root: Path) -> tuple[int, int]:
    """(total, available) bytes of the machine. Where there is no /proc the total stands for both."""
    text = _read(root / "proc/meminfo")
    fields = dict(line.split(":", 1) for line in (text or "").splitlines() if ":" in line)
    if "MemTotal" in fields:
        total = _kib(fields["MemTotal"])
        free = fields.get("MemAvailable") or fields.get("MemFree")
        return total, total if free is None else _kib(free)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, total


def _cgroup_limits(root: Path) -> Iterator[tuple[Path, int, int]]:
    """(file, limit, bytes in use that cannot be dropped) of every limited cgroup from this process's own to the top.

    Inside a container the path of /proc/self/cgroup may not exist there; the top, where the container's own limits
    then are, is always read.
    """
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                yield from _limits_up(root / mount, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _limits_up(root / "sys/fs/cgroup/memory", path, *names)


def _limits_up(
    mount: Path, path: str, limit_name: str, used_name: str, cache_name: str
) -> Iterator[tuple[Path, int, int]]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        group = mount.joinpath(*parts[:depth])
        limit = _number(_read(group / limit_name))
        if limit is None or limit >= _UNLIMITED_BYTES:
            continue
        used = _number(_read(group / used_name)) or 0
        stat = dict(line.split(" ", 1) for line in (_read(group / "memory.stat") or "").splitlines() if " " in line)
        yield group / limit_name, limit, max(0, used - (_number(stat.get(cache_name)) or 0))


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    """None for an absent file and for `max`."""
    return int(text) if text is not None and text.strip().isdigit() else None


def _kib(field: str) -> int:
    return int(field.split(maxsplit=1)[0]) * 1024
