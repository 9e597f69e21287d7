"""The copier's contract (`tier.copying.Copier`) as a function, for ours and for anybody's. Knows no implementation.

Many small checks, each on a fresh rig; every one runs, and the failures are reported together by name.
Whatever takes time does so in the copier under test or through its rig, so a copier on a virtual clock passes as well.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Protocol

from hostcache.errors import InvariantBroken
from hostcache.tier.copying import Copier, CopyDone, CopyJob, Direction, Extent, extents

_PATIENCE_S = 30.0
"""How long a check waits for what must come. Never waited out by a copier that keeps the contract."""


class CopierRig(Protocol):
    """One fresh copier with the memory on both its sides. At least 24 device pages and 32 frames; where frames lie in
    several extents, at least one border among the first 32.

    `stall`, `until_started`, `resume` and `fail_next` steer the copier from outside; a rig that cannot raises
    NotImplementedError, and the checks that need it are reported as skipped.
    """

    @property
    def copier(self) -> Copier: ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def device_pages(self) -> int: ...

    @property
    def frames(self) -> int: ...

    @property
    def at_once(self) -> int:
        """Jobs that may be started at the same time: 1 for one worker or stream."""
        ...

    def read_device(self, page: int) -> bytes: ...

    def write_device(self, page: int, data: bytes) -> None: ...

    def read_host(self, frame: int) -> bytes: ...

    def write_host(self, frame: int, data: bytes) -> None: ...

    def guards_intact(self) -> bool:
        """Whether the bytes before and after the device memory, and whatever else no job names, are as they were."""
        ...

    def stall(self) -> None:
        """From now on a job that starts stays there, without end, until `resume`."""
        ...

    def until_started(self, jobs: int, timeout_s: float) -> bool:
        """Wait until so many jobs have started since `stall`; False when they did not."""
        ...

    def resume(self) -> None: ...

    def fail_next(self) -> None:
        """The next job to start ends with an error."""
        ...

    def close(self) -> None:
        """End of a check, whatever state it left: resume what is stalled, stop the copier, give memory back."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractReport:
    """Names of the checks that held and of those that the rig could not stage."""

    passed: tuple[str, ...]
    skipped: tuple[str, ...]


class ContractBroken(InvariantBroken):
    """`failures`: check name → what it raised. The message names each; tracebacks are in the notes."""

    def __init__(self, subject: str, failures: Mapping[str, BaseException], checks: int) -> None:
        self.failures = dict(failures)
        told = "; ".join(f"{name} ({_first_line(error)})" for name, error in failures.items())
        super().__init__(f"{subject} breaks {len(failures)} of {checks} checks of its contract: {told}")
        for name, error in failures.items():
            self.add_note(f"--- {name}\n" + "".join(traceback.format_exception(error)))


def check_copier(make: Callable[[], CopierRig]) -> ContractReport:
    """Run every check, each on a rig of its own from `make`. Raises ContractBroken with all that failed."""
    passed: list[str] = []
    skipped: list[str] = []
    failures: dict[str, BaseException] = {}
    for check in COPIER_CHECKS:
        name = check.__name__.removeprefix("_")
        try:
            with _rig(make) as rig:
                check(rig)
        except NotImplementedError:
            skipped.append(name)
        except Exception as error:
            failures[name] = error
        else:
            passed.append(name)
    if failures:
        raise ContractBroken("the copier", failures, len(COPIER_CHECKS))
    return ContractReport(passed=tuple(passed), skipped=tuple(skipped))


@contextmanager
def _rig(make: Callable[[], CopierRig]) -> Iterator[CopierRig]:
    rig = make()
    try:
        yield rig
    finally:
        rig.close()


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


# Checks


def _a_scattered_store_puts_each_page_in_its_frame(rig: CopierRig) -> None:
    pages, frames = _scatter(rig)
    _fill(rig)
    done = _run(rig, 1, Direction.STORE, pages, frames)
    _that(done.error is None, f"a plain store ended with {done.error!r}")
    for page, frame in zip(pages, frames, strict=True):
        _that(rig.read_host(frame) == rig.read_device(page), f"frame {frame} is not device page {page}")


def _a_scattered_restore_puts_each_frame_in_its_page(rig: CopierRig) -> None:
    pages, frames = _scatter(rig)
    _fill(rig)
    done = _run(rig, 1, Direction.RESTORE, pages, frames)
    _that(done.error is None, f"a plain restore ended with {done.error!r}")
    for page, frame in zip(pages, frames, strict=True):
        _that(rig.read_device(page) == rig.read_host(frame), f"device page {page} is not frame {frame}")


def _a_round_trip_over_every_frame_keeps_every_byte(rig: CopierRig) -> None:
    """One run of neighbours over all the frames a rig promises: it crosses every border there is."""
    _fill(rig)
    count = min(rig.device_pages, rig.frames)
    before = [rig.read_device(page) for page in range(count)]
    first = rig.frames - count
    for start in dict.fromkeys((0, first)):
        _run(rig, start * 2 + 1, Direction.STORE, range(count), range(start, start + count))
        for page in range(count):
            rig.write_device(page, bytes(rig.page_bytes))
        _run(rig, start * 2 + 2, Direction.RESTORE, range(count), range(start, start + count))
        after = [rig.read_device(page) for page in range(count)]
        _that(after == before, f"frames from {start} gave back other bytes than they were given")


def _neighbours_and_guards_are_untouched(rig: CopierRig) -> None:
    _fill(rig)
    pages, frames = [3, 4, 9], [5, 6, 1]
    device = {page: rig.read_device(page) for page in range(rig.device_pages)}
    host = {frame: rig.read_host(frame) for frame in range(rig.frames)}
    _run(rig, 1, Direction.STORE, pages, frames)
    for page, data in device.items():
        _that(rig.read_device(page) == data, f"a store changed device page {page}")
    for frame in host.keys() - set(frames):
        _that(rig.read_host(frame) == host[frame], f"a store changed frame {frame}, which it did not name")
    host = {frame: rig.read_host(frame) for frame in range(rig.frames)}
    _run(rig, 2, Direction.RESTORE, [12, 13], [7, 8])
    for page in device.keys() - {12, 13}:
        _that(rig.read_device(page) == device[page], f"a restore changed device page {page}, which it did not name")
    for frame, data in host.items():
        _that(rig.read_host(frame) == data, f"a restore changed frame {frame}")
    _that(rig.guards_intact(), "bytes outside the device memory changed")


def _a_completion_says_what_was_done(rig: CopierRig) -> None:
    done = _run(rig, 41, Direction.STORE, [2, 3, 7], [0, 1, 5])
    _that(done.job_id == 41 and done.direction is Direction.STORE, f"another job's name: {done}")
    _that(done.copied_bytes == 3 * rig.page_bytes, f"{done.copied_bytes} bytes for three pages of {rig.page_bytes}")
    _that(done.submissions >= 2, f"{done.submissions} submissions for two extents")
    _that(done.submitted_s <= done.started_s <= done.finished_s, f"times out of order: {done}")


def _every_job_is_reported_exactly_once(rig: CopierRig) -> None:
    jobs = [_job(n, Direction.STORE if n % 3 else Direction.RESTORE, [n % 8], [n % 16]) for n in range(1, 41)]
    for job in jobs:
        rig.copier.submit(job)
    told = [done.job_id for done in _all(rig)]
    _that(sorted(told) == [job.job_id for job in jobs], f"reported {sorted(told)} of jobs 1 to 40")
    _that(rig.copier.poll() == [], "a second poll reported again")
    _that(not rig.copier.wait(0.0), "wait promised news after everything was reported")


def _poll_and_wait_answer_at_once_when_there_is_nothing(rig: CopierRig) -> None:
    _that(rig.copier.poll() == [], "poll reported a job that never was")
    _that(not rig.copier.wait(0.0), "wait promised news of nothing")
    _that(not rig.copier.wait(0.01), "wait promised news of nothing")
    _that(rig.copier.in_flight == 0, f"{rig.copier.in_flight} in flight on a fresh copier")


def _an_empty_job_ends_like_any_other(rig: CopierRig) -> None:
    rig.copier.submit(_job(1, Direction.STORE, [], []))
    (done,) = _all(rig)
    _that(done.error is None and done.copied_bytes == 0, f"nothing to copy, but {done}")


def _in_flight_counts_until_the_report(rig: CopierRig) -> None:
    for n in range(1, 6):
        rig.copier.submit(_job(n, Direction.STORE, [n], [n]))
        _that(rig.copier.in_flight == n, f"{rig.copier.in_flight} in flight after {n} submits without a poll")
    left = 5
    while left:
        _that(rig.copier.wait(_PATIENCE_S), f"{left} jobs in flight and nothing came")
        left -= len(rig.copier.poll())
        _that(rig.copier.in_flight == left, f"{rig.copier.in_flight} in flight, {left} not reported")


def _out_of_range_is_refused_and_queues_nothing(rig: CopierRig) -> None:
    _fill(rig)
    host = [rig.read_host(frame) for frame in range(rig.frames)]
    good = Extent(device_page=0, frame=0, pages=1)
    for bad in (
        Extent(device_page=rig.device_pages, frame=0, pages=1),
        Extent(device_page=rig.device_pages - 1, frame=0, pages=2),
        Extent(device_page=0, frame=rig.frames, pages=1),
        Extent(device_page=0, frame=rig.frames - 1, pages=2),
        Extent(device_page=-1, frame=0, pages=1),
        Extent(device_page=0, frame=-1, pages=1),
        Extent(device_page=0, frame=0, pages=0),
    ):
        try:
            rig.copier.submit(CopyJob(job_id=1, direction=Direction.STORE, extents=(good, bad)))
        except ValueError:
            pass
        else:
            raise AssertionError(f"{bad} was taken; there are {rig.device_pages} pages and {rig.frames} frames")
        _that(rig.copier.in_flight == 0, f"{bad} was refused and is in flight all the same")
    _that([rig.read_host(frame) for frame in range(rig.frames)] == host, "a refused job moved bytes")


def _a_restore_overtakes_stores_that_have_not_started(rig: CopierRig) -> None:
    _occupy(rig, first_id=1)
    for n in range(100, 103):
        rig.copier.submit(_job(n, Direction.STORE, [n - 100], [n - 90]))
    for n in range(200, 203):
        rig.copier.submit(_job(n, Direction.RESTORE, [n - 190], [n - 200]))
    rig.resume()
    order = sorted(_all(rig), key=lambda done: done.started_s)
    queued = [done for done in order if done.job_id >= 100]
    last_restore = max(done.started_s for done in queued if done.direction is Direction.RESTORE)
    first_store = min(done.started_s for done in queued if done.direction is Direction.STORE)
    _that(last_restore <= first_store, f"a store started before a waiting restore: {[d.job_id for d in order]}")


def _jobs_of_one_direction_start_in_order(rig: CopierRig) -> None:
    _occupy(rig, first_id=1)
    for n in range(100, 108):
        rig.copier.submit(_job(n, Direction.STORE, [n - 100], [n - 100]))
    rig.resume()
    started = {done.job_id: done.started_s for done in _all(rig)}
    order = [started[n] for n in range(100, 108)]
    _that(order == sorted(order), f"stores started out of order: {order}")


def _a_cancelled_job_neither_runs_nor_reports(rig: CopierRig) -> None:
    _fill(rig)
    before = rig.read_host(20)
    blockers = _occupy(rig, first_id=1)
    rig.copier.submit(_job(100, Direction.STORE, [6], [20]))
    rig.copier.submit(_job(101, Direction.STORE, [7], [21]))
    _that(rig.copier.cancel(100), "a job that had not started was not cancelled")
    _that(not rig.copier.cancel(100), "the same job was cancelled twice")
    _that(rig.copier.in_flight == blockers + 1, f"{rig.copier.in_flight} in flight, {blockers + 1} not cancelled")
    rig.resume()
    told = sorted(done.job_id for done in _all(rig))
    _that(told == [*range(1, blockers + 1), 101], f"reported {told}; job 100 was cancelled")
    _that(rig.read_host(20) == before, "the cancelled job moved bytes")
    _that(rig.read_host(21) == rig.read_device(7), "the job beside the cancelled one did not run")


def _cancel_is_too_late_for_what_runs_ended_or_never_was(rig: CopierRig) -> None:
    blockers = _occupy(rig, first_id=1)
    _that(not rig.copier.cancel(1), "a running job was cancelled")
    _that(not rig.copier.cancel(999), "an unknown job was cancelled")
    _that(rig.copier.in_flight == blockers, "a refused cancel changed what is in flight")
    rig.resume()
    told = sorted(done.job_id for done in _all(rig))
    _that(told == list(range(1, blockers + 1)), f"reported {told} after refused cancels")
    _that(not rig.copier.cancel(1), "a reported job was cancelled")


def _wait_gives_up_on_a_copy_that_does_not_end(rig: CopierRig) -> None:
    _occupy(rig, first_id=1)
    _that(not rig.copier.wait(0.01), "wait promised news of a copy that does not end")
    _that(rig.copier.poll() == [], "a copy that does not end was reported")
    rig.resume()
    _all(rig)


def _an_error_is_reported_and_the_next_job_runs(rig: CopierRig) -> None:
    _fill(rig)
    rig.fail_next()
    failed = _run(rig, 1, Direction.STORE, [1], [2])
    _that(bool(failed.error), "a copy that failed was reported without an error")
    _that("\n" not in (failed.error or ""), f"an error of several lines: {failed.error!r}")
    fine = _run(rig, 2, Direction.STORE, [1], [2])
    _that(fine.error is None, f"the job after a failed one ended with {fine.error!r}")
    _that(rig.read_host(2) == rig.read_device(1), "the job after a failed one did not copy")


def _no_byte_moves_after_the_report(rig: CopierRig) -> None:
    _fill(rig)
    for n in range(1, 21):
        _run(rig, n, Direction.STORE, range(8), range(8))
        for frame in range(8):
            rig.write_host(frame, bytes([n]) * rig.page_bytes)
        for frame in range(8):
            _that(rig.read_host(frame) == bytes([n]) * rig.page_bytes, f"frame {frame} changed after the report")


def _close_ends_what_runs_and_drops_the_rest(rig: CopierRig) -> None:
    blockers = _occupy(rig, first_id=1)
    rig.copier.submit(_job(100, Direction.STORE, [6], [20]))
    _that(not rig.copier.close(0.01), "closed, while a copy still ran")
    _that(rig.copier.in_flight == blockers, f"{rig.copier.in_flight} in flight; the queued one should be dropped")
    rig.resume()
    _that(rig.copier.close(_PATIENCE_S), "not closed, although every copy had ended")
    told = sorted(done.job_id for done in rig.copier.poll())
    _that(told == list(range(1, blockers + 1)), f"reported {told} after close; {blockers} jobs ran")
    _that(rig.copier.in_flight == 0, f"{rig.copier.in_flight} in flight after everything was reported")


def _a_closed_copier_takes_nothing(rig: CopierRig) -> None:
    _that(rig.copier.close(_PATIENCE_S), "an idle copier did not close")
    _that(rig.copier.close(_PATIENCE_S), "a closed copier did not close again")
    try:
        rig.copier.submit(_job(1, Direction.STORE, [0], [0]))
    except ValueError:
        pass
    else:
        raise AssertionError("a closed copier took a job")
    _that(rig.copier.in_flight == 0 and rig.copier.poll() == [], "a closed copier has news")


COPIER_CHECKS: tuple[Callable[[CopierRig], None], ...] = (
    _a_scattered_store_puts_each_page_in_its_frame,
    _a_scattered_restore_puts_each_frame_in_its_page,
    _a_round_trip_over_every_frame_keeps_every_byte,
    _neighbours_and_guards_are_untouched,
    _a_completion_says_what_was_done,
    _every_job_is_reported_exactly_once,
    _poll_and_wait_answer_at_once_when_there_is_nothing,
    _an_empty_job_ends_like_any_other,
    _in_flight_counts_until_the_report,
    _out_of_range_is_refused_and_queues_nothing,
    _a_restore_overtakes_stores_that_have_not_started,
    _jobs_of_one_direction_start_in_order,
    _a_cancelled_job_neither_runs_nor_reports,
    _cancel_is_too_late_for_what_runs_ended_or_never_was,
    _wait_gives_up_on_a_copy_that_does_not_end,
    _an_error_is_reported_and_the_next_job_runs,
    _no_byte_moves_after_the_report,
    _close_ends_what_runs_and_drops_the_rest,
    _a_closed_copier_takes_nothing,
)


# What the checks share


def _that(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def _job(job_id: int, direction: Direction, pages: list[int] | range, frames: list[int] | range) -> CopyJob:
    return CopyJob(job_id=job_id, direction=direction, extents=extents(list(pages), list(frames)))


def _run(
    rig: CopierRig, job_id: int, direction: Direction, pages: list[int] | range, frames: list[int] | range
) -> CopyDone:
    rig.copier.submit(_job(job_id, direction, pages, frames))
    (done,) = _all(rig)
    return done


def _all(rig: CopierRig) -> list[CopyDone]:
    """Poll until nothing is in flight; fails when that does not come."""
    told: list[CopyDone] = []
    while rig.copier.in_flight:
        _that(rig.copier.wait(_PATIENCE_S), f"{rig.copier.in_flight} jobs in flight and nothing came")
        told += rig.copier.poll()
    return told


def _occupy(rig: CopierRig, *, first_id: int) -> int:
    """Start as many jobs as can run at once and keep them there; the number. What is submitted next has to queue."""
    rig.stall()
    for n in range(rig.at_once):
        rig.copier.submit(_job(first_id + n, Direction.STORE, [n % rig.device_pages], [rig.frames - 1 - n]))
    _that(rig.until_started(rig.at_once, _PATIENCE_S), "a job on an idle copier did not start")
    return rig.at_once


def _fill(rig: CopierRig) -> None:
    """Every page and frame gets bytes of its own."""
    dice = Random(7)
    for page in range(rig.device_pages):
        rig.write_device(page, dice.randbytes(rig.page_bytes))
    for frame in range(rig.frames):
        rig.write_host(frame, dice.randbytes(rig.page_bytes))


def _scatter(rig: CopierRig) -> tuple[list[int], list[int]]:
    """Pages and frames in an order that gives long and short extents, forwards and backwards."""
    pages = [8, 9, 10, 2, 1, 0, 15, 20, 21, 22, 23, 5]
    frames = [30, 31, 4, 5, 6, 7, 0, 14, 15, 16, 17, 29]
    return pages, frames
