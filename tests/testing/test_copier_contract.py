"""The contract is worth what it catches: a synchronous toy copier passes it, and each of its spoiled twins is named."""

from __future__ import annotations

from collections import deque

import pytest

from hostcache.testing import ContractBroken, check_copier
from hostcache.tier.copying import CopyDone, CopyJob, Direction

PAGE = 16
PAGES = 24
FRAMES = 32


class ToyCopier:
    """Bytearrays and two queues; a job starts and ends inside `wait` or `poll`. Time is a counter."""

    def __init__(self) -> None:
        self.device = bytearray(PAGES * PAGE)
        self.host = bytearray(FRAMES * PAGE)
        self.queues: dict[Direction, deque[CopyJob]] = {Direction.RESTORE: deque(), Direction.STORE: deque()}
        self.running: CopyJob | None = None
        self.done: list[CopyDone] = []
        self.started: dict[int, int] = {}
        self.ticks = 0
        self.stalled = False
        self.fail_next = False
        self.closed = False

    def in_range(self, job: CopyJob) -> bool:
        return all(
            e.pages > 0 and 0 <= e.device_page <= PAGES - e.pages and 0 <= e.frame <= FRAMES - e.pages
            for e in job.extents
        )

    def submit(self, job: CopyJob) -> None:
        if self.closed or not self.in_range(job):
            raise ValueError(f"no: {job}")
        self.queues[job.direction].append(job)

    def start(self) -> None:
        for direction in (Direction.RESTORE, Direction.STORE):
            if self.running is None and self.queues[direction]:
                self.running = self.queues[direction].popleft()
                self.ticks += 1
                self.started[self.running.job_id] = self.ticks

    def move(self, job: CopyJob) -> None:
        for e in job.extents:
            device = slice(e.device_page * PAGE, (e.device_page + e.pages) * PAGE)
            host = slice(e.frame * PAGE, (e.frame + e.pages) * PAGE)
            if job.direction is Direction.STORE:
                self.host[host] = self.device[device]
            else:
                self.device[device] = self.host[host]

    def step(self) -> None:
        self.start()
        while self.running is not None and not self.stalled:
            job, self.running = self.running, None
            error = "toy failure" if self.fail_next else None
            self.fail_next = False
            if error is None:
                self.move(job)
            self.ticks += 1
            self.report(
                CopyDone(
                    job_id=job.job_id,
                    direction=job.direction,
                    error=error,
                    copied_bytes=job.pages * PAGE,
                    submissions=len(job.extents),
                    submitted_s=0.0,
                    started_s=self.started[job.job_id],
                    finished_s=self.ticks,
                )
            )
            self.start()

    def report(self, done: CopyDone) -> None:
        self.done.append(done)

    def poll(self) -> list[CopyDone]:
        done, self.done = self.done, []
        return done

    def wait(self, timeout_s: float) -> bool:
        self.step()
        return bool(self.done)

    def cancel(self, job_id: int) -> bool:
        for queue in self.queues.values():
            for job in queue:
                if job.job_id == job_id:
                    queue.remove(job)
                    return True
        return False

    @property
    def in_flight(self) -> int:
        return sum(len(q) for q in self.queues.values()) + (self.running is not None) + len(self.done)

    def close(self, timeout_s: float) -> bool:
        self.closed = True
        for queue in self.queues.values():
            queue.clear()
        self.step()
        return self.running is None


class ToyRig:
    page_bytes = PAGE
    device_pages = PAGES
    frames = FRAMES
    at_once = 1

    def __init__(self, copier: ToyCopier) -> None:
        self.copier = copier

    def read_device(self, page: int) -> bytes:
        return bytes(self.copier.device[page * PAGE : (page + 1) * PAGE])

    def write_device(self, page: int, data: bytes) -> None:
        self.copier.device[page * PAGE : (page + 1) * PAGE] = data

    def read_host(self, frame: int) -> bytes:
        return bytes(self.copier.host[frame * PAGE : (frame + 1) * PAGE])

    def write_host(self, frame: int, data: bytes) -> None:
        self.copier.host[frame * PAGE : (frame + 1) * PAGE] = data

    def guards_intact(self) -> bool:
        return len(self.copier.device) == PAGES * PAGE and len(self.copier.host) == FRAMES * PAGE

    def stall(self) -> None:
        self.copier.stalled = True

    def until_started(self, jobs: int, timeout_s: float) -> bool:
        self.copier.start()
        return self.copier.running is not None

    def resume(self) -> None:
        self.copier.stalled = False

    def fail_next(self) -> None:
        self.copier.fail_next = True

    def close(self) -> None:
        self.copier.close(0.0)


class StoresFirst(ToyCopier):
    def __init__(self) -> None:
        super().__init__()
        self.queues = {Direction.STORE: deque(), Direction.RESTORE: deque()}

    def start(self) -> None:
        for direction in (Direction.STORE, Direction.RESTORE):
            if self.running is None and self.queues[direction]:
                self.running = self.queues[direction].popleft()
                self.ticks += 1
                self.started[self.running.job_id] = self.ticks


class TellsTwice(ToyCopier):
    def report(self, done: CopyDone) -> None:
        self.done += [done, done]


class ForgetsEveryTenth(ToyCopier):
    def report(self, done: CopyDone) -> None:
        if done.job_id % 10:
            self.done.append(done)


class CopiesOnePageTooMany(ToyCopier):
    def move(self, job: CopyJob) -> None:
        super().move(job)
        for e in job.extents:
            at = (e.frame + e.pages) * PAGE
            self.host[at : min(at + PAGE, len(self.host))] = bytes(min(PAGE, len(self.host) - at))


class SkipsTheLastPage(ToyCopier):
    def move(self, job: CopyJob) -> None:
        for e in job.extents:
            for i in range(max(1, e.pages - 1)):
                d, h = (e.device_page + i) * PAGE, (e.frame + i) * PAGE
                if job.direction is Direction.STORE:
                    self.host[h : h + PAGE] = self.device[d : d + PAGE]
                else:
                    self.device[d : d + PAGE] = self.host[h : h + PAGE]


class TakesAnything(ToyCopier):
    def in_range(self, job: CopyJob) -> bool:
        return True


class CancelsWhatRuns(ToyCopier):
    def cancel(self, job_id: int) -> bool:
        if self.running is not None and self.running.job_id == job_id:
            return True
        return super().cancel(job_id)


class CancelsInNameOnly(ToyCopier):
    def cancel(self, job_id: int) -> bool:
        return any(job.job_id == job_id for queue in self.queues.values() for job in queue)


class HidesErrors(ToyCopier):
    def step(self) -> None:
        self.fail_next = False
        super().step()


class ClosesOverARunningCopy(ToyCopier):
    def close(self, timeout_s: float) -> bool:
        super().close(timeout_s)
        return True


class StaysOpen(ToyCopier):
    def close(self, timeout_s: float) -> bool:
        super().close(timeout_s)
        self.closed = False
        return self.running is None


class LastInFirstOut(ToyCopier):
    def submit(self, job: CopyJob) -> None:
        super().submit(job)
        self.queues[job.direction].rotate(1)


def test_a_copier_that_keeps_the_contract_passes_every_check() -> None:
    report = check_copier(lambda: ToyRig(ToyCopier()))
    assert len(report.passed) == 19
    assert report.skipped == ()


@pytest.mark.parametrize(
    ("spoiled", "check"),
    [
        (StoresFirst, "a_restore_overtakes_stores_that_have_not_started"),
        (TellsTwice, "every_job_is_reported_exactly_once"),
        (ForgetsEveryTenth, "every_job_is_reported_exactly_once"),
        (CopiesOnePageTooMany, "neighbours_and_guards_are_untouched"),
        (SkipsTheLastPage, "a_round_trip_over_every_frame_keeps_every_byte"),
        (TakesAnything, "out_of_range_is_refused_and_queues_nothing"),
        (CancelsWhatRuns, "cancel_is_too_late_for_what_runs_ended_or_never_was"),
        (CancelsInNameOnly, "a_cancelled_job_neither_runs_nor_reports"),
        (HidesErrors, "an_error_is_reported_and_the_next_job_runs"),
        (ClosesOverARunningCopy, "close_ends_what_runs_and_drops_the_rest"),
        (StaysOpen, "a_closed_copier_takes_nothing"),
        (LastInFirstOut, "jobs_of_one_direction_start_in_order"),
    ],
)
def test_a_spoiled_copier_is_caught_by_the_check_that_names_its_fault(spoiled: type[ToyCopier], check: str) -> None:
    with pytest.raises(ContractBroken) as caught:
        check_copier(lambda: ToyRig(spoiled()))
    assert check in caught.value.failures
    assert check in str(caught.value)
    assert "\n" not in str(caught.value)


def test_checks_that_a_rig_cannot_stage_are_reported_as_skipped() -> None:
    class Unsteered(ToyRig):
        def stall(self) -> None:
            raise NotImplementedError

    report = check_copier(lambda: Unsteered(ToyCopier()))
    assert "a_restore_overtakes_stores_that_have_not_started" in report.skipped
    assert len(report.passed) + len(report.skipped) == 19
