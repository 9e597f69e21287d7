from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostcache.copiers import Slabs
from hostcache.errors import ConfigError

SRC = Path(__file__).resolve().parents[2] / "src"


@settings(deadline=None)
@given(
    total_bytes=st.integers(0, 200_000),
    page_bytes=st.sampled_from([1, 3, 1000, 1024, 4096, 5000, 46_080]),
    slab_bytes=st.integers(3_000, 100_000),
)
def test_frames_lie_side_by_side_without_overlap_and_never_above_the_quota(
    total_bytes: int, page_bytes: int, slab_bytes: int
) -> None:
    slabs = Slabs(total_bytes, page_bytes, slab_bytes=slab_bytes)
    assert slabs.frames == total_bytes // page_bytes
    assert slabs.total_bytes <= total_bytes
    sample = range(0, slabs.frames, max(1, slabs.frames // 50))
    places = sorted(slabs.address(frame) for frame in sample)
    assert all(b - a >= page_bytes for a, b in itertools.pairwise(places))
    if slabs.frames:
        pieces = slabs.run(0, slabs.frames)
        assert sum(pages for _, pages in pieces) == slabs.frames
        assert len(pieces) == -(-slabs.frames // slabs.frames_per_slab)
        assert all(slabs.address(i * slabs.frames_per_slab) == at for i, (at, _) in enumerate(pieces[:20]))
    slabs.close()


def test_slabs_of_whole_machine_pages_map_no_more_than_the_quota() -> None:
    slabs = Slabs(1 << 20, 1024, slab_bytes=10_000)
    slabs.run(0, slabs.frames)
    assert slabs.mapped_bytes == 1 << 20
    slabs.close()


def test_a_run_is_cut_only_where_it_crosses_a_slab() -> None:
    slabs = Slabs(10 * 4096, 4096, slab_bytes=4 * 4096)
    assert [pages for _, pages in slabs.run(0, 4)] == [4]
    assert [pages for _, pages in slabs.run(2, 8)] == [2, 4, 2]
    assert slabs.run(5, 2) == [(slabs.address(5), 2)]
    slabs.close()


def test_slabs_are_mapped_when_first_asked_for() -> None:
    slabs = Slabs(1 << 40, 1 << 20, slab_bytes=1 << 30)
    assert slabs.frames == 1 << 20
    assert slabs.mapped_bytes == 0
    slabs.address(1 << 19)
    assert slabs.mapped_bytes == 1 << 30
    slabs.close()
    assert slabs.mapped_bytes == 0


def test_a_view_shows_what_is_written_at_the_address_and_cannot_write() -> None:
    slabs = Slabs(8 * 100, 100, slab_bytes=300)
    ctypes.memmove(slabs.address(4), b"x" * 100, 100)
    view = slabs.view(4)
    assert bytes(view) == b"x" * 100
    assert view.readonly
    assert bytes(slabs.view(3)) == bytes(100)
    del view
    slabs.close()


def test_after_close_no_frame_has_bytes_and_a_view_still_held_reads_zeros() -> None:
    slabs = Slabs(1 << 20, 4096)
    ctypes.memset(slabs.address(0), 7, 4096)
    view = slabs.view(0)
    slabs.close()
    slabs.close()
    assert bytes(view) == bytes(4096)
    with pytest.raises(ValueError, match="closed"):
        slabs.address(0)


@pytest.mark.parametrize(("frame", "pages"), [(-1, 1), (10, 1), (9, 2), (0, 11), (0, 0), (3, -1)])
def test_out_of_range_is_refused_with_the_numbers(frame: int, pages: int) -> None:
    slabs = Slabs(10 * 4096, 4096)
    with pytest.raises(ValueError, match="there are 0 to 9"):
        slabs.run(frame, pages)
    slabs.close()


def test_nonsense_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="pages of 0"):
        Slabs(4096, 0)


RSS_SCRIPT = """
import ctypes, sys
from pathlib import Path
from hostcache.copiers.slabs import Slabs

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

quota = 96 << 20
slabs = Slabs(quota, 1_474_560, slab_bytes=32 << 20)
slabs.run(0, slabs.frames)
start = status("VmRSS:")
ctypes.memset(slabs.address(3), 1, slabs.page_bytes)
one = status("VmRSS:") - start
for frame in range(slabs.frames):
    ctypes.memset(slabs.address(frame), 1, slabs.page_bytes)
peak = status("VmHWM:") - start
slabs.close()
print(start, one, peak / quota, (status("VmRSS:") - start) / quota)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_resident_memory_grows_with_use_stays_within_the_quota_and_is_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RSS_SCRIPT], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(SRC)}
    )
    start, one, peak_share, left_share = (float(field) for field in done.stdout.split())
    assert start < 64 << 20, "mapping alone made memory resident"
    assert one <= 8 << 20, "one frame made more than its own huge pages resident"
    assert 0.9 < peak_share <= 1.05
    assert left_share < 0.05
