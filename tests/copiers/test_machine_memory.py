from __future__ import annotations

from pathlib import Path

import pytest

from hostcache.copiers import MachineMemory, available_bytes, check_quota, memory_limit, read_memory
from hostcache.errors import MemoryRefused
from hostcache.sizes import parse_size

GIB = 1 << 30


def machine(root: Path, *, total: int = 64 * GIB, available: int = 48 * GIB, cgroup: str = "0::/\n") -> Path:
    lines = f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\nHugePages_Total: 0\n"
    write(root / "proc/meminfo", lines)
    write(root / "proc/self/cgroup", cgroup)
    return root


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def v2(group: Path, *, limit: int | str, used: int = 0, cache: int = 0) -> None:
    write(group / "memory.max", f"{limit}\n")
    write(group / "memory.current", f"{used}\n")
    write(group / "memory.stat", f"anon 1\ninactive_file {cache}\n")


def v1(group: Path, *, limit: int, used: int = 0, cache: int = 0) -> None:
    write(group / "memory.limit_in_bytes", f"{limit}\n")
    write(group / "memory.usage_in_bytes", f"{used}\n")
    write(group / "memory.stat", f"cache 1\ninactive_file 0\ntotal_inactive_file {cache}\n")


def test_without_a_cgroup_the_machine_is_the_limit(tmp_path: Path) -> None:
    root = machine(tmp_path)
    assert memory_limit(root) == 64 * GIB
    assert available_bytes(root) == 48 * GIB
    assert read_memory(root).limit_bytes is None


def test_cgroup_v2_leaves_its_limit_less_what_cannot_be_dropped(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/user/box\n")
    v2(root / "sys/fs/cgroup/user/box", limit=8 * GIB, used=5 * GIB, cache=2 * GIB)
    memory = read_memory(root)
    assert memory.limit_bytes == 8 * GIB
    assert memory.available_bytes == 5 * GIB
    assert memory.limited_by == "/sys/fs/cgroup/user/box/memory.max"


def test_the_tightest_group_on_the_way_up_decides(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/slice/pod/box\n")
    v2(root / "sys/fs/cgroup/slice/pod/box", limit="max", used=GIB)
    v2(root / "sys/fs/cgroup/slice/pod", limit=20 * GIB, used=19 * GIB)
    v2(root / "sys/fs/cgroup/slice", limit=10 * GIB, used=2 * GIB)
    memory = read_memory(root)
    assert memory.available_bytes == GIB
    assert memory.limited_by == "/sys/fs/cgroup/slice/pod/memory.max"
    assert memory_limit(root) == 10 * GIB


def test_inside_a_container_the_top_is_read_when_the_named_path_is_not_there(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/../../docker/abc\n")
    v2(root / "sys/fs/cgroup", limit=6 * GIB, used=GIB)
    assert available_bytes(root) == 5 * GIB
    assert memory_limit(root) == 6 * GIB


def test_cgroup_v1_is_read_beside_a_unified_one_without_memory(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n")
    v1(root / "sys/fs/cgroup/memory/docker/abc", limit=4 * GIB, used=3 * GIB, cache=GIB)
    v1(root / "sys/fs/cgroup/memory", limit=0x7FFFFFFFFFFFF000)
    memory = read_memory(root)
    assert memory.limit_bytes == 4 * GIB
    assert memory.available_bytes == 2 * GIB


def test_unlimited_groups_limit_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="4:memory:/\n0::/\n")
    v1(root / "sys/fs/cgroup/memory", limit=0x7FFFFFFFFFFFF000)
    v2(root / "sys/fs/cgroup", limit="max")
    assert read_memory(root).limit_bytes is None
    assert available_bytes(root) == 48 * GIB


def test_a_group_over_its_limit_leaves_nothing_rather_than_less(tmp_path: Path) -> None:
    root = machine(tmp_path)
    v2(root / "sys/fs/cgroup", limit=GIB, used=2 * GIB)
    assert available_bytes(root) == 0


def test_a_machine_without_proc_is_taken_by_its_total(tmp_path: Path) -> None:
    memory = read_memory(tmp_path)
    assert memory.total_bytes == memory.available_bytes > 0


def test_this_machine_can_be_read() -> None:
    memory = read_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes
    assert 0 < memory_limit() <= memory.total_bytes


def room(available: int, limit: int | None = None) -> MachineMemory:
    return MachineMemory(total_bytes=64 * GIB, available_bytes=available, limit_bytes=limit, limited_by="/a/memory.max")


def test_a_quota_that_fits_exactly_passes_and_one_byte_more_does_not() -> None:
    check_quota(5 * GIB, 3 * GIB, memory=room(8 * GIB))
    with pytest.raises(MemoryRefused):
        check_quota(5 * GIB + 1, 3 * GIB, memory=room(8 * GIB))


def test_a_quota_of_zero_always_passes() -> None:
    check_quota(0, 99 * GIB, memory=room(0))


def test_the_refusal_is_one_line_with_the_numbers_and_a_size_that_would_do() -> None:
    with pytest.raises(MemoryRefused) as caught:
        check_quota(24 * GIB, 3 * GIB, memory=room(8 * GIB, limit=10 * GIB))
    text = str(caught.value)
    assert "\n" not in text
    for piece in ("host_cache_bytes is 24.0 GiB", "3.0 GiB for the model", "8.0 GiB are available", "/a/memory.max"):
        assert piece in text
    advised = parse_size(text.partition("at most ")[2].partition(" ")[0])
    check_quota(advised, 3 * GIB, memory=room(8 * GIB))
    assert caught.value.exit_code == 5


def test_where_nothing_fits_the_way_out_is_to_turn_the_tier_off() -> None:
    with pytest.raises(MemoryRefused, match=r"set host_cache_bytes to 0 \(tier off\)"):
        check_quota(GIB, 9 * GIB, memory=room(8 * GIB))
