from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostcache.copiers.layout import Moves, PageLayout, Segment, frame_pieces, moves, slabs_of
from hostcache.copiers.slabs import Slabs
from hostcache.errors import ConfigError
from hostcache.tier.copying import CopyJob, Direction, Extent, extents

DEVICE = 1 << 40  # an address that nothing is ever read from


@contextmanager
def slabs_for(layout: PageLayout, frames: int, per_slab: int) -> Iterator[Slabs]:
    slabs = Slabs(frames * layout.frame_bytes, layout.frame_bytes, slab_bytes=per_slab * layout.frame_bytes)
    try:
        yield slabs
    finally:
        slabs.close()


@st.composite
def page_layouts(draw: st.DrawFn) -> PageLayout:
    """One segment, one a layer, interleaved, or with gaps."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    segments, at = [], DEVICE
    match draw(st.sampled_from(["by layer", "block first", "padded"])):
        case "by layer":
            for size in sizes:
                segments.append(Segment(at, size, size))
                at += size * 100
        case "block first":
            for size in sizes:
                segments.append(Segment(at, sum(sizes), size))
                at += size
        case _:
            for size in sizes:
                segments.append(Segment(at, sum(sizes) + 9 * len(sizes), size))
                at += size + draw(st.integers(0, 9))
    return PageLayout(segments=tuple(segments))


@st.composite
def pairs(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(device page, frame), each side at most once: runs of neighbours in any order."""
    taken: list[tuple[int, int]] = []
    for page, frame, count in draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 9)))):
        for step in range(count):
            if all(page + step != p and frame + step != f for p, f in taken):
                taken.append((page + step, frame + step))
    return draw(st.permutations(taken)) if draw(st.booleans()) else taken


def naive(
    job: CopyJob, slabs: Slabs, layout: PageLayout
) -> list[tuple[int, int, int, int, int]]:
    """(slab, segment, destination, source, bytes) of every page and segment by itself."""
    rows = []
    for extent in job.extents:
        for step in range(extent.pages):
            page, frame = extent.device_page + step, extent.frame + step
            for number, (segment, (host, size)) in enumerate(
                zip(layout.segments, frame_pieces(frame, slabs, layout), strict=True)
            ):
                device = segment.address + page * segment.stride_bytes
                to, source = (host, device) if job.direction is Direction.STORE else (device, host)
                rows.append((frame // slabs.frames_per_slab, number, to, source, size))
    return rows


def joined(rows: list[tuple[int, int, int, int, int]]) -> list[tuple[int, int, int]]:
    """The same with neighbours joined within a slab and a segment, one pair at a time."""
    rows = sorted(rows)
    kept: list[tuple[int, int, int, int, int]] = []
    for slab, segment, to, source, size in rows:
        if kept:
            last = kept[-1]
            if last[:2] == (slab, segment) and last[2] + last[4] == to and last[3] + last[4] == source:
                kept[-1] = (slab, segment, last[2], last[3], last[4] + size)
                continue
        kept.append((slab, segment, to, source, size))
    return sorted(row[2:] for row in kept)


@settings(deadline=None)
@given(layout=page_layouts(), pairs=pairs(), per_slab=st.integers(1, 12), direction=st.sampled_from(Direction))
def test_the_moves_are_the_fewest_that_copy_each_page_of_the_job_and_nothing_else(
    layout: PageLayout, pairs: list[tuple[int, int]], per_slab: int, direction: Direction
) -> None:
    job = CopyJob(job_id=1, direction=direction, extents=extents([p for p, _ in pairs], [f for _, f in pairs]))
    with slabs_for(layout, 40, per_slab) as slabs:
        told = moves(job, slabs, layout)
        assert sorted(told.rows()) == joined(naive(job, slabs, layout))
        assert told.total_bytes == len(pairs) * layout.frame_bytes
        assert slabs_of(job, slabs) == sorted({frame // slabs.frames_per_slab for _, frame in pairs})


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 1 << 47), st.integers(0, 1 << 47), st.integers(1, 500)), max_size=8),
    longest=st.integers(1, 200),
)
def test_cut_moves_are_the_same_bytes_in_pieces_that_are_short_enough(
    rows: list[tuple[int, int, int]], longest: int
) -> None:
    whole = moves_of(rows)
    cut = whole.cut(longest)
    assert all(0 < size <= longest for _, _, size in cut.rows())
    assert len(cut) == sum(-(-size // longest) for _, _, size in rows)
    again: list[tuple[int, int, int]] = []
    pieces = iter(cut.rows())
    for to, source, size in rows:
        done = 0
        while done < size:
            piece = next(pieces)
            assert piece[:2] == (to + done, source + done)
            done += piece[2]
        again.append((to, source, done))
    assert again == rows
    assert next(pieces, None) is None


def moves_of(rows: list[tuple[int, int, int]]) -> Moves:
    import numpy as np

    columns = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return Moves(columns[:, 0], columns[:, 1], columns[:, 2])


@settings(deadline=None)
@given(layout=page_layouts(), frames=st.integers(1, 30), per_slab=st.integers(1, 12))
def test_the_frames_of_all_slabs_share_no_byte_and_leave_none_between(
    layout: PageLayout, frames: int, per_slab: int
) -> None:
    with slabs_for(layout, frames, per_slab) as slabs:
        for first in range(0, frames, slabs.frames_per_slab):
            here = range(first, min(frames, first + slabs.frames_per_slab))
            pieces = sorted(piece for frame in here for piece in frame_pieces(frame, slabs, layout))
            at = slabs.address(first)
            for address, size in pieces:
                assert address == at
                at += size
            assert at == slabs.address(first) + len(here) * layout.frame_bytes


def test_layers_that_lie_side_by_side_in_each_block_are_one_segment_and_a_run_of_blocks_one_move() -> None:
    layers = tuple(Segment(DEVICE + 64 * n, 256, 64) for n in range(4))
    layout = PageLayout(segments=layers)
    assert layout == PageLayout.contiguous(DEVICE, 256)
    with slabs_for(layout, 16, 16) as slabs:
        job = CopyJob(
            job_id=1, direction=Direction.STORE, extents=(Extent(device_page=3, frame=2, pages=5),)
        )
        assert moves(job, slabs, layout).rows() == [(slabs.address(2), DEVICE + 3 * 256, 5 * 256)]


def test_layers_that_lie_apart_are_one_move_a_layer_and_run() -> None:
    layout = PageLayout(segments=tuple(Segment(DEVICE + n * 6400, 64, 64) for n in range(4)))
    with slabs_for(layout, 16, 16) as slabs:
        job = CopyJob(
            job_id=1, direction=Direction.RESTORE, extents=(Extent(device_page=3, frame=2, pages=5),)
        )
        assert [(to, size) for to, _, size in moves(job, slabs, layout).rows()] == [
            (DEVICE + n * 6400 + 3 * 64, 5 * 64) for n in range(4)
        ]


def test_extents_in_the_wrong_order_are_still_one_move() -> None:
    layout = PageLayout.contiguous(DEVICE, 64)
    with slabs_for(layout, 16, 16) as slabs:
        parts = (Extent(device_page=6, frame=4, pages=2), Extent(device_page=4, frame=2, pages=2))
        job = CopyJob(job_id=1, direction=Direction.STORE, extents=parts)
        assert moves(job, slabs, layout).rows() == [(slabs.address(2), DEVICE + 4 * 64, 4 * 64)]


@pytest.mark.parametrize(
    "segments",
    [(), ((DEVICE, 64, 0),), ((DEVICE, 63, 64),), ((-1, 64, 64),)],
)
def test_a_layout_that_is_none_is_refused(segments: tuple[Segment, ...]) -> None:
    with pytest.raises(ConfigError):
        PageLayout(segments=segments)


def test_frames_of_another_size_than_pages_are_refused() -> None:
    with slabs_for(PageLayout.contiguous(0, 64), 4, 4) as slabs, pytest.raises(ConfigError, match="65 bytes"):
        PageLayout.contiguous(0, 65).fits(slabs)
