from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.copiers.rigs import ThreadRig

from hostcache.clock import VirtualClock, WallClock
from hostcache.copiers import Delay, Fail, FaultAction, Hold, Slabs, ThreadCopier, fault_at
from hostcache.errors import ConfigError
from hostcache.testing import check_copier
from hostcache.tier.copying import CopyDone, CopyJob, Direction, Extent, extents

PATIENCE_S = 30.0


def job(job_id: int, direction: Direction, pages: list[int], frames: list[int]) -> CopyJob:
    return CopyJob(job_id=job_id, direction=direction, extents=extents(pages, frames))


def drain(copier: ThreadCopier) -> dict[int, CopyDone]:
    told: dict[int, CopyDone] = {}
    while copier.in_flight:
        assert copier.wait(PATIENCE_S), f"{copier.in_flight} in flight and nothing came"
        for done in copier.poll():
            assert done.job_id not in told
            told[done.job_id] = done
    return told


@pytest.fixture
def rig() -> Iterator[ThreadRig]:
    made = ThreadRig()
    yield made
    made.close()


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("chunk_bytes", [130, 1700, 1 << 20])
def test_the_thread_copier_keeps_the_copier_contract(threads: int, chunk_bytes: int, segments: int) -> None:
    report = check_copier(lambda: ThreadRig(threads=threads, chunk_bytes=chunk_bytes, segments=segments))
    assert not report.skipped
    assert len(report.passed) == 19


JOBS = st.tuples(
    st.sampled_from(Direction),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 16), st.integers(1, 6)), max_size=6),
)
"""A job's direction and its (device page, frame, pages)."""


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(JOBS, max_size=8),
    page_bytes=st.sampled_from([1, 37, 512, 4096]),
    frames_per_slab=st.integers(1, 9),
    threads=st.integers(1, 3),
    chunk_bytes=st.sampled_from([1, 700, 8192]),
    segments=st.sampled_from([1, 3]),
)
def test_any_sequence_of_jobs_does_what_it_does_to_two_plain_bytearrays(
    jobs: list[tuple[Direction, list[tuple[int, int, int]]]],
    page_bytes: int,
    frames_per_slab: int,
    threads: int,
    chunk_bytes: int,
    segments: int,
) -> None:
    page_bytes *= segments
    rig = ThreadRig(
        segments=segments,
        page_bytes=page_bytes,
        device_pages=18,
        frames=23,
        frames_per_slab=frames_per_slab,
        threads=threads,
        chunk_bytes=max(chunk_bytes, page_bytes // 64),
    )
    try:
        device, host = bytearray(18 * page_bytes), bytearray(23 * page_bytes)
        for page in range(18):
            data = bytes((page * 7 + i) % 251 for i in range(page_bytes))
            rig.write_device(page, data)
            device[page * page_bytes : (page + 1) * page_bytes] = data
        for number, (direction, moves) in enumerate(jobs):
            pieces: list[Extent] = []
            for page, frame, pages in moves:
                # A job writes no place twice: what two extents leave in one place is nobody's promise.
                to = page if direction is Direction.RESTORE else frame
                taken = {
                    (piece.device_page if direction is Direction.RESTORE else piece.frame) + i
                    for piece in pieces
                    for i in range(piece.pages)
                }
                if taken.isdisjoint(range(to, to + pages)):
                    pieces.append(Extent(device_page=page, frame=frame, pages=pages))
            rig.copier.submit(CopyJob(job_id=number, direction=direction, extents=tuple(pieces)))
            done = drain(rig.copier)[number]
            assert done.error is None
            assert done.copied_bytes == sum(piece.pages for piece in pieces) * page_bytes
            for piece in pieces:
                size = piece.pages * page_bytes
                at_device = slice(piece.device_page * page_bytes, piece.device_page * page_bytes + size)
                at_host = slice(piece.frame * page_bytes, piece.frame * page_bytes + size)
                if direction is Direction.STORE:
                    host[at_host] = device[at_device]
                else:
                    device[at_device] = host[at_host]
        assert rig.pieces.tobytes() == bytes(device)
        assert b"".join(rig.read_host(frame) for frame in range(23)) == bytes(host)
        assert rig.guards_intact()
    finally:
        rig.close()


def test_a_page_in_segments_is_still_one_submission_an_extent_and_lies_side_by_side_in_its_frame() -> None:
    rig = ThreadRig(page_bytes=12, segments=3, chunk_bytes=1 << 20)
    rig.write_device(4, b"aaaabbbbcccc")
    rig.write_device(5, b"ddddeeeeffff")
    rig.copier.submit(job(1, Direction.STORE, [4, 5], [2, 3]))
    assert drain(rig.copier)[1].submissions == 1
    assert (rig.read_host(2), rig.read_host(3)) == (b"aaaabbbbcccc", b"ddddeeeeffff")
    rig.close()


def test_segments_that_do_not_divide_a_page_or_overlap_are_refused() -> None:
    slabs = Slabs(1200, 12)
    for segments, stride, message in ((5, 1000, "divides them"), (3, 4 * 24 - 1, "95 bytes apart overlap")):
        with pytest.raises(ConfigError, match=message):
            ThreadCopier(0, 24, 12, slabs, clock=WallClock(), segments=segments, segment_stride_bytes=stride)


def test_a_restore_of_neighbouring_pages_is_one_submission_and_two_over_a_slab_border(rig: ThreadRig) -> None:
    rig.copier.submit(job(1, Direction.RESTORE, [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6]))
    rig.copier.submit(job(2, Direction.RESTORE, [7, 8, 9, 10], [5, 6, 7, 8]))
    told = drain(rig.copier)
    assert told[1].submissions == 1
    assert told[2].submissions == 2


def test_a_restore_that_comes_amid_a_store_ends_first() -> None:
    """Seen once is proof: a store that did not make way between its chunks could never end after the restore."""
    rig = ThreadRig(page_bytes=64 << 10, device_pages=24, frames=24, frames_per_slab=24, chunk_bytes=64)
    first_byte = rig.slabs.view(0)
    try:
        overtaken = False
        for attempt in range(1, 200):
            rig.pieces[:] = attempt % 251
            rig.copier.submit(job(2 * attempt, Direction.STORE, list(range(20)), list(range(20))))
            while first_byte[0] != attempt % 251:
                assert rig.copier.in_flight  # the store's first bytes are there, its last ones far away
            rig.copier.submit(job(2 * attempt + 1, Direction.RESTORE, [23], [23]))
            overtaken = next(iter(drain(rig.copier))) == 2 * attempt + 1
            if overtaken:
                break
        assert overtaken
    finally:
        del first_byte
        rig.close()


def test_python_goes_on_while_a_copy_runs() -> None:
    """One copy call is seen half done from Python: were the GIL held, only before and after could be seen."""
    page_bytes = 64 << 20
    slabs = Slabs(page_bytes, page_bytes)
    device = np.zeros(page_bytes, dtype=np.uint8)
    host = np.frombuffer(slabs.view(0), dtype=np.uint8)
    copier = ThreadCopier(device.ctypes.data, 1, page_bytes, slabs, clock=WallClock(), owner=device)
    early, late = 1 << 20, page_bytes - (1 << 20)
    try:
        seen_half_done = False
        for attempt in range(1, 200):
            device[:] = attempt % 251
            copier.submit(job(2 * attempt, Direction.STORE, [0], [0]))
            assert drain(copier)[2 * attempt].error is None
            assert host[late] == attempt % 251
            device[:] = 255
            copier.submit(job(2 * attempt + 1, Direction.RESTORE, [0], [0]))
            told: list[CopyDone] = []
            while not told and not seen_half_done:
                # Both readings of one end agree, the other end differs: then it differed at one moment. (The library
                # may copy from either end.)
                before, other, after = int(device[early]), int(device[late]), int(device[early])
                seen_half_done = before == after != other
                told = copier.poll()
            told += drain(copier).values()
            assert told[0].submissions == 1
            if seen_half_done:
                break
        assert seen_half_done
    finally:
        assert copier.close(PATIENCE_S)
        del host
        slabs.close()


def test_a_job_that_is_told_to_fail_reports_it_with_the_bytes_it_moved() -> None:
    rig = ThreadRig(fault=fault_at(1, Fail(error="link down", after_pages=2), direction=Direction.STORE))
    try:
        for page in range(4):
            rig.write_device(page, bytes([page + 1]) * rig.page_bytes)
        rig.copier.submit(job(1, Direction.RESTORE, [9], [9]))
        rig.copier.submit(job(2, Direction.STORE, [0], [0]))
        rig.copier.submit(job(3, Direction.STORE, [0, 1, 2, 3], [4, 5, 6, 7]))
        told = drain(rig.copier)
        assert told[1].error is None
        assert told[2].error is None
        assert told[3].error == "link down"
        assert told[3].copied_bytes == 2 * rig.page_bytes
        assert [rig.read_host(frame)[0] for frame in (4, 5, 6, 7)] == [1, 2, 0, 0]
        stats = rig.copier.stats()
        assert (stats.store.jobs, stats.store.failed, stats.restore.failed) == (2, 1, 0)
    finally:
        rig.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_held_job_never_ends_while_others_pass_and_moves_its_bytes_late_when_released(threads: int) -> None:
    hold = Hold()
    rig = ThreadRig(threads=threads, fault=fault_at(0, hold, direction=Direction.RESTORE))
    try:
        rig.write_host(3, b"\x07" * rig.page_bytes)
        before = rig.read_device(5)
        rig.copier.submit(job(1, Direction.RESTORE, [5], [3]))
        rig.copier.submit(job(2, Direction.RESTORE, [6], [3]))
        assert rig.copier.wait(PATIENCE_S)
        assert [done.job_id for done in rig.copier.poll()] == [2]
        assert not rig.copier.wait(0.0)
        assert not rig.copier.cancel(1)
        assert rig.copier.in_flight == 1
        assert rig.copier.stats().held == 1
        assert rig.read_device(5) == before
        hold.release()
        assert list(drain(rig.copier)) == [1]
        assert rig.read_device(5) == b"\x07" * rig.page_bytes
    finally:
        hold.release()
        rig.close()


def test_a_copier_with_a_held_job_is_not_closed_until_that_is_released() -> None:
    hold = Hold()
    rig = ThreadRig(fault=fault_at(0, hold))
    rig.copier.submit(job(1, Direction.STORE, [0], [0]))
    assert not rig.copier.wait(0.01)
    assert not rig.copier.close(0.01)
    hold.release()
    assert rig.copier.close(PATIENCE_S)
    assert [done.job_id for done in rig.copier.poll()] == [1]
    rig.close()


def test_a_delay_passes_on_the_copiers_own_clock() -> None:
    clock = VirtualClock(100.0)
    slabs = Slabs(4096, 1024)
    device = np.ones(4096, dtype=np.uint8)
    copier = ThreadCopier(device.ctypes.data, 4, 1024, slabs, clock=clock, fault=fault_at(0, Delay(seconds=2.5)))
    copier.submit(job(1, Direction.STORE, [0], [0]))
    done = drain(copier)[1]
    assert (done.submitted_s, done.started_s, done.finished_s) == (100.0, 100.0, 102.5)
    assert copier.close(PATIENCE_S)
    slabs.close()


def test_an_exception_in_the_fault_is_the_jobs_error_in_one_line() -> None:
    def fault(started: CopyJob) -> FaultAction | None:
        if started.job_id == 1:
            raise RuntimeError("two\nlines")
        return None

    rig = ThreadRig(fault=fault)
    try:
        rig.copier.submit(job(1, Direction.STORE, [0], [0]))
        rig.copier.submit(job(2, Direction.STORE, [1], [1]))
        told = drain(rig.copier)
        assert told[1].error == "RuntimeError: two lines"
        assert told[1].copied_bytes == 0
        assert told[2].error is None
    finally:
        rig.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_dead_worker_fails_every_job_and_says_why(threads: int) -> None:
    def fault(started: CopyJob) -> FaultAction | None:
        if started.job_id == 1:
            raise SystemExit("worker killed")
        return None

    rig = ThreadRig(threads=threads, fault=fault)
    try:
        rig.stall()
        for number in range(1, 9):
            rig.copier.submit(job(number, Direction.STORE, [number], [number]))
        assert rig.until_started(1, PATIENCE_S)
        rig.resume()
        told = drain(rig.copier)
        assert sorted(told) == list(range(1, 9))
        assert "worker killed" in (told[1].error or "")
        rig.copier.submit(job(9, Direction.RESTORE, [1], [1]))
        late = drain(rig.copier)[9]
        assert "worker killed" in (late.error or "")
        assert late.copied_bytes == 0
        assert rig.copier.stats().broken is not None
    finally:
        rig.close()


def test_a_slab_the_system_refuses_fails_the_job_and_nothing_else() -> None:
    slabs = Slabs(1 << 62, 1 << 61, slab_bytes=1 << 61)
    copier = ThreadCopier(4096, 2, 1 << 61, slabs, clock=WallClock())
    copier.submit(job(1, Direction.STORE, [0], [0]))
    error = drain(copier)[1].error
    assert error is not None
    assert error.startswith("MemoryRefused: the system gave no")
    assert copier.close(PATIENCE_S)
    slabs.close()


def test_the_statistics_add_up_to_what_was_done(rig: ThreadRig) -> None:
    rig.copier.submit(job(1, Direction.STORE, [0, 1, 2], [0, 1, 2]))
    rig.copier.submit(job(2, Direction.RESTORE, [5, 9], [0, 2]))
    told = drain(rig.copier)
    stats = rig.copier.stats()
    assert (stats.store.jobs, stats.store.copied_bytes) == (1, 3 * rig.page_bytes)
    assert (stats.restore.jobs, stats.restore.copied_bytes) == (1, 2 * rig.page_bytes)
    assert stats.store.submissions == told[1].submissions
    assert stats.restore.submissions == told[2].submissions == 2
    assert stats.store.busy_s > 0
    assert (stats.in_flight, stats.queued, stats.held, stats.broken) == (0, 0, 0, None)


def test_a_job_id_in_flight_is_refused(rig: ThreadRig) -> None:
    rig.copier.submit(job(1, Direction.STORE, [0], [0]))
    with pytest.raises(ValueError, match="job 1 is in flight already"):
        rig.copier.submit(job(1, Direction.STORE, [1], [1]))
    assert list(drain(rig.copier)) == [1]
    rig.copier.submit(job(1, Direction.STORE, [0], [0]))
    assert list(drain(rig.copier)) == [1]


def test_nonsense_at_the_door_is_refused_with_the_value() -> None:
    slabs = Slabs(4096, 1024)
    with pytest.raises(ConfigError, match="2048 bytes but frames of 1024"):
        ThreadCopier(4096, 4, 2048, slabs, clock=WallClock())
    with pytest.raises(ConfigError, match="0 copy threads"):
        ThreadCopier(4096, 4, 1024, slabs, clock=WallClock(), threads=0)


def test_the_device_memory_stays_alive_until_the_copier_is_closed() -> None:
    class Owner:
        pass

    owner = Owner()
    alive = weakref.ref(owner)
    slabs = Slabs(4096, 1024)
    copier = ThreadCopier(4096, 4, 1024, slabs, clock=WallClock(), owner=owner)
    del owner
    gc.collect()
    assert alive() is not None
    assert copier.close(PATIENCE_S)
    gc.collect()
    assert alive() is None
    slabs.close()


def test_closing_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    rig = ThreadRig(threads=3)
    mine = set(threading.enumerate()) - before
    rig.copier.submit(job(1, Direction.STORE, [0], [0]))
    rig.close()
    for thread in mine:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
