from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from hostcache.clock import WallClock
from hostcache.copiers import Slabs
from hostcache.vllm_plugin.prefault import prefault, start_prefault


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def test_all_of_the_memory_is_there_and_no_byte_has_changed() -> None:
    slabs = Slabs(96 << 20, 48 << 10, slab_bytes=40 << 20)
    for frame in (0, 700, slabs.frames - 1):
        ctypes.memset(slabs.address(frame), 1 + frame % 251, slabs.page_bytes)
    before = resident_bytes()
    if not prefault(slabs, WallClock()):
        pytest.skip("this kernel does not populate on request")
    assert resident_bytes() - before > 80 << 20
    for frame in (0, 700, slabs.frames - 1):
        assert set(bytes(slabs.view(frame))) == {1 + frame % 251}
    assert set(bytes(slabs.view(350))) == {0}
    slabs.close()


def test_it_ends_by_itself_when_the_slabs_are_closed() -> None:
    slabs = Slabs(8 << 20, 48 << 10)
    slabs.close()
    assert not prefault(slabs, WallClock())
    start_prefault(slabs, WallClock()).join(30)
