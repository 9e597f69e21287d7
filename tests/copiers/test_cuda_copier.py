"""The CUDA copier and the real driver runtime on a device made of main memory. What only a GPU can show: tests/gpu."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.copiers.cuda_plants import (
    ComputeDoesNotWait,
    RecordsWhenItIsIssued,
    RestoresDoNotWait,
    StoresDoNotWait,
    WaitsOnTheHost,
)
from tests.copiers.fake_cuda import (
    BATCH_FORMS,
    CAPTURE_UNSUPPORTED,
    DEFAULT_STREAM,
    ILLEGAL_ADDRESS,
    INVALID_VALUE,
    LOWEST_PRIORITY,
    NOT_SUPPORTED,
    CudaRig,
    FakeDriver,
    FakeGpu,
)
from tests.gpu.__main__ import main, why_not

from hostcache.clock import VirtualClock
from hostcache.copiers.cuda import CudaCopier
from hostcache.copiers.cuda_runtime import CudaError, DriverRuntime, driver_symbols
from hostcache.copiers.layout import PageLayout
from hostcache.copiers.slabs import Slabs
from hostcache.errors import ConfigError, MissingDependency
from hostcache.testing import check_copier
from hostcache.tier.copying import CopyDone, CopyJob, Direction, extents

PATIENCE_S = 30.0
LAYOUTS = ["page-major", "by layer", "block first", "padded"]


def job(job_id: int, direction: Direction, pages: list[int], frames: list[int]) -> CopyJob:
    return CopyJob(job_id=job_id, direction=direction, extents=extents(pages, frames))


def store(job_id: int, pages: list[int], frames: list[int]) -> CopyJob:
    return job(job_id, Direction.STORE, pages, frames)


def restore(job_id: int, pages: list[int], frames: list[int]) -> CopyJob:
    return job(job_id, Direction.RESTORE, pages, frames)


def drain(copier: CudaCopier) -> dict[int, CopyDone]:
    told: dict[int, CopyDone] = {}
    while copier.in_flight:
        assert copier.wait(PATIENCE_S), f"{copier.in_flight} in flight and nothing came"
        for done in copier.poll():
            assert done.job_id not in told
            told[done.job_id] = done
    return told


def page(rig: CudaRig, value: int) -> bytes:
    return bytes([value]) * rig.page_bytes


@pytest.fixture
def rig() -> Iterator[CudaRig]:
    made = CudaRig()
    yield made
    made.close()


# The contract


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batches", [*BATCH_FORMS, None])
@pytest.mark.parametrize("window_jobs", [1, 3])
def test_the_cuda_copier_keeps_the_copier_contract(layout: str, batches: str | None, window_jobs: int) -> None:
    report = check_copier(lambda: CudaRig(layout=layout, batches=batches, window_jobs=window_jobs))
    assert not report.skipped
    assert len(report.passed) == 19


@pytest.mark.parametrize("layout", ["page-major", "by layer"])
def test_it_keeps_the_contract_where_nothing_may_be_pinned(layout: str) -> None:
    report = check_copier(lambda: CudaRig(layout=layout, pinnable=0))
    assert not report.skipped
    assert len(report.passed) == 19


# Order between copies and compute (A1)


def a_store_takes_what_the_last_writer_left(rig: CudaRig) -> None:
    rig.write_device(3, page(rig, 1))
    rig.gpu.launch(0.01, lambda: rig.write_device(3, page(rig, 2)))
    rig.copier.submit(store(1, [3], [5]))
    drain(rig.copier)
    assert rig.read_host(5) == page(rig, 2), "stored before the last writer had finished"


def a_restore_leaves_the_last_reader_its_bytes(rig: CudaRig) -> None:
    rig.write_device(3, page(rig, 1))
    rig.write_host(5, page(rig, 2))
    seen: list[bytes] = []
    rig.gpu.launch(0.01, lambda: seen.append(rig.read_device(3)))
    rig.copier.submit(restore(1, [3], [5]))
    drain(rig.copier)
    rig.gpu.settle()
    assert seen == [page(rig, 1)], "restored over what a kernel still read"
    assert rig.read_device(3) == page(rig, 2)


def a_reader_launched_before_the_report_gets_the_restored_bytes(rig: CudaRig) -> None:
    rig.write_device(3, page(rig, 1))
    rig.write_host(5, page(rig, 2))
    seen: list[bytes] = []
    rig.copier.submit(restore(1, [3], [5]))
    assert rig.copier.compute_waits_for(1)
    rig.gpu.launch(0.0, lambda: seen.append(rig.read_device(3)))
    rig.gpu.settle()
    assert seen == [page(rig, 2)], "a reader did not wait for the restore"


def a_writer_launched_before_the_report_leaves_the_store_its_bytes(rig: CudaRig) -> None:
    rig.write_device(3, page(rig, 1))
    rig.copier.submit(store(1, [3], [5]))
    assert rig.copier.compute_waits_for(1)
    rig.gpu.launch(0.0, lambda: rig.write_device(3, page(rig, 2)))
    rig.gpu.settle()
    assert rig.read_host(5) == page(rig, 1), "a writer did not wait for the store"


def a_job_that_had_to_queue_keeps_the_place_it_had_at_submit(rig: CudaRig) -> None:
    """Behind what was launched before its submit, and not behind what came later."""
    rig.gpu.stall()
    rig.copier.submit(store(1, [0], [0]))
    rig.write_device(3, page(rig, 1))
    rig.gpu.launch(0.01, lambda: rig.write_device(3, page(rig, 2)))
    rig.copier.submit(store(2, [3], [5]))  # the window is full: it waits on the host
    assert rig.copier.stats().queued == 1
    rig.gpu.launch(1.0, lambda: None)
    rig.gpu.resume()
    told = drain(rig.copier)
    assert rig.read_host(5) == page(rig, 2)
    assert told[2].finished_s < 100.5, "a store waited for a kernel that came after it"


def the_host_does_not_wait(rig: CudaRig) -> None:
    rig.gpu.launch(0.01, lambda: None)
    before_s = rig.clock.now()
    rig.copier.submit(store(1, [3], [5]))
    rig.copier.submit(restore(2, [4], [6]))
    rig.copier.submit(store(3, [7], [8]))
    rig.copier.compute_waits_for(1)
    rig.copier.poll()
    rig.copier.cancel(3)
    assert rig.clock.now() == before_s
    assert rig.gpu.blocked == []
    drain(rig.copier)


ORDERING = (
    a_store_takes_what_the_last_writer_left,
    a_restore_leaves_the_last_reader_its_bytes,
    a_reader_launched_before_the_report_gets_the_restored_bytes,
    a_writer_launched_before_the_report_leaves_the_store_its_bytes,
    a_job_that_had_to_queue_keeps_the_place_it_had_at_submit,
    the_host_does_not_wait,
)


def broken_by(copier: type[CudaCopier], *, layout: str = "page-major") -> list[str]:
    """Which of the ordering checks fail."""
    failed = []
    for check in ORDERING:
        rig = CudaRig(copier=copier, layout=layout)
        try:
            check(rig)
        except AssertionError:
            failed.append(check.__name__)
        finally:
            rig.close()
    return failed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_and_compute_keep_their_order(layout: str) -> None:
    assert broken_by(CudaCopier, layout=layout) == []


@pytest.mark.parametrize(
    ("copier", "caught"),
    [
        (
            StoresDoNotWait,
            [
                "a_store_takes_what_the_last_writer_left",
                "a_job_that_had_to_queue_keeps_the_place_it_had_at_submit",
            ],
        ),
        (RestoresDoNotWait, ["a_restore_leaves_the_last_reader_its_bytes"]),
        (
            ComputeDoesNotWait,
            [
                "a_reader_launched_before_the_report_gets_the_restored_bytes",
                "a_writer_launched_before_the_report_leaves_the_store_its_bytes",
            ],
        ),
        (RecordsWhenItIsIssued, ["a_job_that_had_to_queue_keeps_the_place_it_had_at_submit"]),
    ],
)
def test_each_wait_that_is_taken_out_is_caught(copier: type[CudaCopier], caught: list[str]) -> None:
    assert broken_by(copier) == caught


def test_a_wait_on_the_host_is_caught() -> None:
    assert "the_host_does_not_wait" in broken_by(WaitsOnTheHost)


OPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("read"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("store"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("restore"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("poll"), st.integers(0, 3), st.integers(0, 3)),
    ),
    max_size=24,
)
"""(what, device page, frame or milliseconds)"""


@settings(max_examples=150, deadline=None)
@given(
    ops=OPS,
    layout=st.sampled_from(LAYOUTS),
    window_jobs=st.integers(1, 4),
    copy_s=st.sampled_from([1e-4, 1e-3, 5e-3]),
)
def test_any_mix_of_kernels_and_copies_leaves_what_one_after_the_other_would_leave(
    ops: list[tuple[str, int, int]], layout: str, window_jobs: int, copy_s: float
) -> None:
    rig = CudaRig(layout=layout, window_jobs=window_jobs, copy_s=copy_s, page_bytes=30)
    device, host = dict.fromkeys(range(4), 0), dict.fromkeys(range(4), 100)
    expected: list[bytes] = []
    seen: list[bytes] = []
    busy: dict[int, tuple[Direction, int, int]] = {}

    def reported(but_not: Callable[[tuple[Direction, int, int]], bool]) -> None:
        """Wait until no job is in flight of which that is true: what the tier's pins are there for."""
        while any(but_not(entry) for entry in busy.values()):
            assert rig.copier.wait(PATIENCE_S)
            take()

    def take() -> None:
        for done in rig.copier.poll():
            assert done.error is None
            del busy[done.job_id]

    def compute_after(jobs: list[int]) -> None:
        for job_id in jobs:
            if not rig.copier.compute_waits_for(job_id):
                reported(lambda entry, job_id=job_id: busy.get(job_id) is entry)  # type: ignore[misc]

    def write(number: int, value: int) -> Callable[[], None]:
        return lambda: rig.write_device(number, page(rig, value))

    def read(number: int) -> Callable[[], None]:
        return lambda: seen.append(rig.read_device(number))

    try:
        for number in range(4):
            rig.write_device(number, page(rig, 0))
            rig.write_host(number, page(rig, 100))
        for count, (what, at, other) in enumerate(ops):
            match what:
                case "write":
                    compute_after([n for n, entry in busy.items() if entry[1] == at])
                    rig.gpu.launch(1e-3 * other, write(at, count + 1))
                    device[at] = count + 1
                case "read":
                    compute_after([n for n, (way, p, _) in busy.items() if p == at and way is Direction.RESTORE])
                    rig.gpu.launch(1e-3 * other, read(at))
                    expected.append(page(rig, device[at]))
                case "store" | "restore":
                    reported(lambda entry, at=at, other=other: entry[1] == at or entry[2] == other)  # type: ignore[misc]
                    way = Direction(what)
                    rig.copier.submit(job(count, way, [at], [other]))
                    busy[count] = (way, at, other)
                    if way is Direction.STORE:
                        host[other] = device[at]
                    else:
                        device[at] = host[other]
                case _:
                    rig.clock.sleep(5e-4 * other)
                    take()
        reported(lambda _: True)
        rig.gpu.settle()
        assert seen == expected
        assert [rig.read_device(n) for n in range(4)] == [page(rig, device[n]) for n in range(4)]
        assert [rig.read_host(n) for n in range(4)] == [page(rig, host[n]) for n in range(4)]
        assert rig.guards_intact()
    finally:
        rig.close()


def test_a_queued_job_gives_the_compute_stream_nothing_to_wait_for_and_can_be_cancelled(rig: CudaRig) -> None:
    rig.stall()
    rig.copier.submit(store(1, [0], [0]))
    rig.copier.submit(store(2, [1], [1]))
    waits = rig.gpu.calls("cuStreamWaitEvent")
    assert not rig.copier.compute_waits_for(2)
    assert rig.gpu.calls("cuStreamWaitEvent") == waits
    assert rig.copier.cancel(2)
    assert rig.copier.compute_waits_for(2)
    rig.resume()
    assert list(drain(rig.copier)) == [1]
    assert rig.copier.compute_waits_for(1)


def test_the_streams_are_two_of_the_lowest_priority_that_do_not_wait_for_the_default_stream(rig: CudaRig) -> None:
    made = [stream for handle, stream in rig.gpu.streams.items() if handle != DEFAULT_STREAM]
    assert [(stream.priority, stream.flags) for stream in made] == [(LOWEST_PRIORITY, 1)] * 2


def test_a_restore_does_not_wait_for_a_store_that_takes_long() -> None:
    rig = CudaRig(copy_s=0.01)
    try:
        rig.copier.submit(store(1, [0, 2, 4, 6, 8, 10], [0, 2, 4, 6, 8, 10]))
        rig.copier.submit(restore(2, [20], [20]))
        assert rig.copier.wait(PATIENCE_S)
        assert [done.job_id for done in rig.copier.poll()] == [2]
        assert list(drain(rig.copier)) == [1]
    finally:
        rig.close()


# What the device is told


def test_a_run_of_pages_in_page_major_memory_is_one_copy_in_one_call() -> None:
    rig = CudaRig(frames_per_slab=32, longest_copy_bytes=1 << 20)
    try:
        rig.copier.submit(store(1, list(range(4, 20)), list(range(2, 18))))
        done = drain(rig.copier)[1]
        assert (done.submissions, rig.copier.driver_calls) == (1, 1)
        assert done.copied_bytes == 16 * rig.page_bytes
    finally:
        rig.close()


def test_a_run_of_pages_that_lie_by_layer_is_one_copy_a_layer_in_one_call() -> None:
    rig = CudaRig(layout="by layer", frames_per_slab=32, longest_copy_bytes=1 << 20)
    try:
        rig.copier.submit(restore(1, list(range(4, 20)), list(range(2, 18))))
        done = drain(rig.copier)[1]
        assert (done.submissions, rig.copier.driver_calls) == (3, 1)
    finally:
        rig.close()


def test_long_copies_are_cut_and_long_batches_are_parted() -> None:
    rig = CudaRig(frames_per_slab=32, longest_copy_bytes=300, batch_copies=4)
    try:
        rig.copier.submit(store(1, [0, 1, 2], [0, 1, 2]))
        done = drain(rig.copier)[1]
        assert (done.submissions, rig.copier.driver_calls) == (10, 3)
    finally:
        rig.close()


def test_an_old_driver_gets_the_same_copies_one_by_one() -> None:
    rig = CudaRig(batches=None, frames_per_slab=32, longest_copy_bytes=1 << 20)
    try:
        assert not rig.copier.batched
        rig.copier.submit(store(1, [0, 1, 2, 9, 10], [0, 1, 2, 3, 4]))
        done = drain(rig.copier)[1]
        assert (done.error, done.submissions, rig.copier.driver_calls) == (None, 2, 2)
        assert rig.gpu.calls("cuMemcpyAsync") == 2
    finally:
        rig.close()


def test_a_device_that_cannot_batch_is_asked_once(rig: CudaRig) -> None:
    rig.gpu.refuse("cuMemcpyBatchAsync", NOT_SUPPORTED)
    rig.write_device(1, page(rig, 7))
    for number in range(3):
        rig.copier.submit(store(number, [1], [number]))
    assert {done.error for done in drain(rig.copier).values()} == {None}
    assert [rig.read_host(frame) for frame in range(3)] == [page(rig, 7)] * 3
    assert rig.gpu.calls("cuMemcpyBatchAsync") == 1
    assert not rig.copier.batched


def test_the_window_holds_jobs_back_by_bytes_too_but_never_the_only_one() -> None:
    rig = CudaRig(window_jobs=9, window_bytes=3500)
    try:
        rig.stall()
        for number in range(4):
            rig.copier.submit(store(number, [number], [number]))
        assert rig.copier.stats().queued == 1
        rig.resume()
        drain(rig.copier)
        rig.copier.submit(store(9, list(range(10)), list(range(10))))
        assert rig.copier.stats().queued == 0
        drain(rig.copier)
    finally:
        rig.close()


def test_busy_time_is_the_device_s_own_and_not_that_of_the_polls() -> None:
    rig = CudaRig(copy_s=0.25)
    try:
        rig.gpu.launch(2.0, lambda: None)
        rig.copier.submit(store(1, [0], [0]))
        rig.clock.sleep(50.0)
        (done,) = rig.copier.poll()
        stats = rig.copier.stats().store
        assert stats.busy_s == pytest.approx(0.25)
        assert done.finished_s - done.submitted_s == pytest.approx(50.0)
        assert (stats.jobs, stats.copied_bytes, stats.submissions) == (1, rig.page_bytes, 1)
    finally:
        rig.close()


# Errors


@pytest.mark.parametrize("batches", ["cuMemcpyBatchAsync", None])
@pytest.mark.parametrize("after", range(8))
@pytest.mark.parametrize(
    "call",
    [
        "cuEventCreate", "cuEventRecord", "cuStreamWaitEvent", "cuMemcpyBatchAsync", "cuMemcpyAsync",
        "cuEventElapsedTime", "cuEventDestroy_v2",
    ],
)  # fmt: skip
def test_a_refused_call_is_one_job_s_error_or_nobody_s(call: str, after: int, batches: str | None) -> None:
    rig = CudaRig(window_jobs=2, batch_copies=1, batches=batches)
    try:
        for number in range(6):
            rig.write_device(number, page(rig, 1))
            rig.gpu.launch(0.005, lambda number=number: rig.write_device(number, page(rig, 2)))  # type: ignore[misc]
        rig.gpu.refuse(call, INVALID_VALUE, after=after)
        for number in range(3):
            rig.copier.submit(store(number, [2 * number, 2 * number + 1], [2 * number, 2 * number + 8]))
        told = drain(rig.copier)
        assert sorted(told) == [0, 1, 2]
        failed = [n for n, done in told.items() if done.error is not None]
        assert len(failed) <= 1
        for number, done in told.items():
            if done.error is None:
                assert rig.read_host(2 * number) == rig.read_host(2 * number + 8) == page(rig, 2)
            else:
                assert call in done.error
                assert "CUDA_ERROR_INVALID_VALUE (1)" in done.error
            # What is reported does not move any more, whatever was refused.
            for frame in (2 * number, 2 * number + 8):
                rig.write_host(frame, page(rig, 9))
        rig.gpu.forgive()
        rig.gpu.settle()
        assert {rig.read_host(frame) for n in range(3) for frame in (2 * n, 2 * n + 8)} == {page(rig, 9)}
        rig.copier.submit(store(7, [0], [0]))
        assert drain(rig.copier)[7].error is None
    finally:
        if call == "cuEventDestroy_v2":
            rig.gpu.events.clear()  # the one that could not be destroyed
        rig.close()


def test_a_job_that_was_refused_half_way_is_reported_when_its_first_half_is_over() -> None:
    rig = CudaRig(batches=None, copy_s=5.0)
    try:
        rig.gpu.refuse("cuMemcpyAsync", INVALID_VALUE, after=2)
        rig.copier.submit(store(1, [0, 2, 4, 6], [0, 2, 4, 6]))
        assert rig.copier.poll() == []
        rig.clock.sleep(9.0)
        assert rig.copier.poll() == []
        rig.clock.sleep(2.0)
        (done,) = rig.copier.poll()
        assert "cuMemcpyAsync: CUDA_ERROR_INVALID_VALUE (1)" in (done.error or "")
        assert (done.copied_bytes, done.submissions) == (2 * rig.page_bytes, 2)
    finally:
        rig.close()


def test_a_job_whose_end_cannot_be_recorded_is_reported_when_its_stream_is_empty(rig: CudaRig) -> None:
    rig.gpu.refuse("cuEventRecord", INVALID_VALUE, after=2)  # ready, begin, end
    rig.gpu.launch(3.0, lambda: None)
    rig.copier.submit(store(1, [0], [0]))
    assert not rig.copier.compute_waits_for(1)
    assert rig.copier.poll() == []
    rig.clock.sleep(4.0)
    (done,) = rig.copier.poll()
    assert "cuEventRecord" in (done.error or "")


@pytest.mark.parametrize("call", ["cuEventQuery", "cuCtxPushCurrent_v2", "cuThreadExchangeStreamCaptureMode"])
def test_a_refusal_for_a_capture_s_sake_passes(rig: CudaRig, call: str) -> None:
    rig.copier.submit(store(1, [0], [0]))
    rig.clock.sleep(1.0)
    rig.gpu.refuse(call, CAPTURE_UNSUPPORTED)
    assert rig.copier.poll() == []
    assert [done.error for done in rig.copier.poll()] == [None]


@pytest.mark.parametrize("started", [0, 1, 3])
def test_a_lost_device_ends_every_job_with_that_reason_now_and_later(started: int) -> None:
    rig = CudaRig(window_jobs=2, copy_s=0.01)
    try:
        rig.gpu.launch(0.05, lambda: None)
        for number in range(started):
            rig.copier.submit(store(number, [number], [number]))
        rig.gpu.lose()
        for number in range(started, 5):
            rig.copier.submit(job(number, list(Direction)[number % 2], [number], [number]))
        told = drain(rig.copier)
        assert sorted(told) == list(range(5))
        assert all("ILLEGAL_ADDRESS (700)" in (done.error or "") for done in told.values())
        assert "restart" in (rig.copier.stats().broken or "")
        rig.copier.submit(store(9, [0], [0]))
        assert not rig.copier.cancel(9)
        assert "ILLEGAL_ADDRESS" in (drain(rig.copier)[9].error or "")
        assert rig.copier.poll() == []
    finally:
        rig.close()


def test_a_lost_device_tells_the_compute_side_nothing(rig: CudaRig) -> None:
    rig.copier.submit(store(1, [0], [0]))
    rig.gpu.lose()
    assert not rig.copier.compute_waits_for(1)
    assert drain(rig.copier)[1].error


def test_host_memory_that_the_system_refuses_is_the_job_s_error(rig: CudaRig) -> None:
    rig.slabs.close()
    rig.copier.submit(store(1, [0], [0]))
    assert "the slabs are closed" in (drain(rig.copier)[1].error or "")


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="window"):
        CudaRig(window_jobs=0)
    gpu = FakeGpu(VirtualClock())
    driver = FakeDriver(gpu)
    runtime = DriverRuntime(driver.symbol, device=0, compute_stream=lambda: 0)
    with pytest.raises(ConfigError, match="make them equal"):
        CudaCopier(runtime, PageLayout.contiguous(4096, 7), 4, Slabs(80, 8), clock=gpu.clock)


# Pinning


def test_slabs_are_pinned_one_a_call_and_unpinned_at_the_close() -> None:
    rig = CudaRig()
    lengths = list(rig.gpu.pinned.values())
    assert lengths == [7000, 7000, 7000, 7000, 4000]
    assert list(rig.gpu.pinned) == [rig.slabs.address(7 * slab) for slab in range(5)]
    assert not rig.copier.pin_next()
    assert rig.copier.degraded is None
    rig.close()  # asserts that nothing is pinned any more


def test_a_refused_pinning_is_told_and_copies_go_on_without_holding_the_caller() -> None:
    rig = CudaRig(pinnable=0)
    try:
        told = rig.copier.degraded
        assert told is not None
        assert "0 of 5 host slabs" in told
        assert "OUT_OF_MEMORY (2)" in told
        assert "\n" not in told
        for number in range(4):
            rig.write_device(number, page(rig, number + 1))
            rig.copier.submit(store(number, [number], [number]))
        assert {done.error for done in drain(rig.copier).values()} == {None}
        assert [rig.read_host(n) for n in range(4)] == [page(rig, n + 1) for n in range(4)]
        assert rig.gpu.calls("cuMemHostRegister_v2") == 1, "asked again for what was refused"
        assert len(rig.gpu.blocked) == 4
        assert threading.get_ident() not in rig.gpu.blocked
    finally:
        rig.close()


def test_pinning_that_is_refused_half_way_leaves_the_pinned_slabs_as_fast_as_they_are() -> None:
    rig = CudaRig(pinnable=2)
    try:
        assert list(rig.gpu.pinned) == [rig.slabs.address(0), rig.slabs.address(7)]
        assert "2 of 5 host slabs" in (rig.copier.degraded or "")
        rig.copier.submit(store(1, [0], [0]))
        drain(rig.copier)
        assert rig.gpu.blocked == []
        rig.copier.submit(store(2, [0], [31]))
        drain(rig.copier)
        assert len(rig.gpu.blocked) == 1
    finally:
        rig.close()


def test_a_job_in_pinned_memory_waits_its_turn_behind_one_in_pageable_memory() -> None:
    rig = CudaRig(pinnable=2, window_jobs=3)
    try:
        rig.stall()
        rig.copier.submit(store(1, [0], [31]))
        rig.copier.submit(store(2, [0], [0]))
        assert rig.copier.stats().queued == 1
        rig.resume()
        assert list(drain(rig.copier)) == [1, 2]
    finally:
        rig.close()


def test_slabs_that_nobody_pinned_are_pinned_at_their_first_job() -> None:
    rig = CudaRig(pin_ahead=False)
    try:
        assert rig.gpu.pinned == {}
        for number, frame in enumerate((0, 1, 30)):
            rig.copier.submit(store(number, [number], [frame]))
        assert {done.error for done in drain(rig.copier).values()} == {None}
        assert list(rig.gpu.pinned) == [rig.slabs.address(0), rig.slabs.address(28)]
        assert rig.copier.degraded is None
        assert rig.gpu.blocked == []
    finally:
        rig.close()


def test_pinning_and_copying_go_on_while_a_graph_is_being_captured_elsewhere(rig: CudaRig) -> None:
    rig.gpu.capturing = True
    rig.copier.submit(store(1, [0], [0]))
    assert drain(rig.copier)[1].error is None
    rig.gpu.capturing = False


def test_the_thread_s_context_and_capture_mode_are_as_they_were(rig: CudaRig) -> None:
    rig.gpu.contexts.append(77)
    rig.copier.submit(store(1, [0], [0]))
    drain(rig.copier)
    assert rig.gpu.contexts == [77]
    assert rig.gpu.mode == 0
    rig.gpu.contexts.clear()


def test_a_wedged_unpinned_copy_does_not_hold_the_close() -> None:
    rig = CudaRig(pinnable=0)
    try:
        rig.stall()
        rig.copier.submit(store(1, [0], [0]))
        assert not rig.copier.compute_waits_for(1)
        assert not rig.copier.close(0.01)
        assert rig.copier.poll() == []
    finally:
        rig.close()


def test_a_device_that_is_lost_under_an_unpinned_copy_ends_it_and_what_waits_behind_it() -> None:
    rig = CudaRig(pinnable=0)
    try:
        rig.stall()
        for number in range(3):
            rig.copier.submit(store(number, [number], [number]))
        rig.gpu.lose()
        told = drain(rig.copier)
        assert sorted(told) == [0, 1, 2]
        assert all("ILLEGAL_ADDRESS" in (done.error or "") for done in told.values())
    finally:
        rig.close()


# The runtime


def test_the_driver_tells_what_it_is() -> None:
    driver = FakeDriver(FakeGpu(VirtualClock()))
    facts = DriverRuntime(driver.symbol, device=1, compute_stream=lambda: 0).facts()
    assert (facts.name, facts.driver_version, facts.copy_engines, facts.can_batch) == ("Fake GPU 1", 13000, 2, True)


def test_a_driver_that_is_missing_or_too_old_is_named() -> None:
    with pytest.raises(MissingDependency, match="libhostcache-none"):
        driver_symbols("libhostcache-none.so.1")
    found = driver_symbols("libc.so.6")  # any library: what a loaded one has and has not
    assert found("memmove")
    assert found("cuInit") is None
    driver = FakeDriver(FakeGpu(VirtualClock()), without=("cuEventQuery",))
    with pytest.raises(MissingDependency, match="cuEventQuery"):
        DriverRuntime(driver.symbol, device=0, compute_stream=lambda: 0)


def test_the_older_form_of_a_batch_names_the_copy_that_was_refused(rig: CudaRig) -> None:
    rig.gpu.device_memory[0] = (rig.gpu.device_memory[0][0], 2 * rig.page_bytes)
    rig.copier.submit(store(1, [0, 4], [0, 9]))
    assert "cuMemcpyBatchAsync, copy 1 of 2: CUDA_ERROR_INVALID_VALUE (1)" in (drain(rig.copier)[1].error or "")


def test_an_error_without_a_name_keeps_its_number() -> None:
    gpu = FakeGpu(VirtualClock())
    driver = FakeDriver(gpu)
    runtime = DriverRuntime(driver.symbol, device=0, compute_stream=lambda: 0)
    gpu.refuse("cuEventCreate", 12345)
    with runtime.active(), pytest.raises(CudaError, match=r"cuEventCreate: .*\(12345\)") as caught:
        runtime.create_event(timed=True)
    assert not caught.value.lost
    gpu.refuse("cuEventCreate", ILLEGAL_ADDRESS)
    with runtime.active(), pytest.raises(CudaError) as caught:
        runtime.create_event(timed=True)
    assert caught.value.lost
    runtime.release()


def test_the_copier_comes_without_torch() -> None:
    script = "import sys; sys.modules['torch'] = None; import hostcache.copiers.cuda"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_gpu_tests_fail_in_one_line_where_there_is_no_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    if why_not() is None:
        pytest.skip("there is one")
    assert main([]) == 1
    told = capfd.readouterr()
    assert told.out == ""
    assert told.err.startswith("test-gpu: ")
    assert told.err.count("\n") == 1
