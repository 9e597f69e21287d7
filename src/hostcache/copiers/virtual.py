"""A copier that only takes time: the queues, speeds and faults of a real one, on whatever clock it is given.

Knows pages and seconds. What a page holds is its mover's business; what a copy is for, the caller's.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Protocol

from hostcache.clock import Clock
from hostcache.copiers.faults import Delay, Fail, Fault, FaultAction, Hold, Late, Twice, Wedge
from hostcache.copiers.threads import CopierStats, DirectionStats
from hostcache.errors import ConfigError
from hostcache.tier.copying import CopyDone, CopyJob, Direction


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySpeed:
    """How long a copy takes: a fixed cost a job and an extent, and its bytes. `jitter` j multiplies each job's time by
    a uniform number in 1 - j to 1 + j."""

    store_bytes_per_s: float
    restore_bytes_per_s: float
    submission_s: float = 0.0
    extent_s: float = 0.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for rate in (self.store_bytes_per_s, self.restore_bytes_per_s):
            if not rate > 0.0:
                raise ConfigError(f"a copy speed of {rate} bytes/s; give more than 0")
        for cost in (self.submission_s, self.extent_s):
            if not 0.0 <= cost < math.inf:
                raise ConfigError(f"a fixed copy cost of {cost} s; give a finite time of at least 0")
        if not 0.0 <= self.jitter < 1.0:
            raise ConfigError(f"copy jitter {self.jitter}; give at least 0 and less than 1")

    def seconds(self, direction: Direction, bytes_: int, extents: int) -> float:
        """Without jitter: what a driver may expect."""
        rate = self.restore_bytes_per_s if direction is Direction.RESTORE else self.store_bytes_per_s
        return self.submission_s + extents * self.extent_s + bytes_ / rate


class Mover(Protocol):
    """The memory behind a virtual copier. What it raises passes through the copier's calls: the drill is over."""

    def begin(self, job: CopyJob) -> None:
        """The first byte moves: whatever the destination held is gone."""
        ...

    def finish(self, job: CopyJob, pages: int) -> None:
        """The last byte has moved: the job's first `pages` pages are what their sources hold now."""
        ...


@dataclass(slots=True, eq=False)
class _Task:
    """A job's life: *queued* → (its lane is free) *started* → (after a Delay) *moving* → *ended* → (after a Late)
    reported.

    queued → (`cancel`, `close`) gone; started → (Hold) *held*, its lane free → (release) first in the lane → moving.
    `expected_s` is what it should take, `takes_s` what it will.
    """

    job: CopyJob
    pages: int
    submissions: int
    submitted_s: float
    expected_s: float
    takes_s: float = 0.0
    started_s: float = 0.0
    released_s: float = 0.0
    action: FaultAction | None = None
    error: str | None = None


@dataclass(slots=True, eq=False)
class _Side:
    """One direction: its queue, the expected seconds in it, and what was done."""

    lane: _Lane
    queue: OrderedDict[int, _Task] = field(default_factory=OrderedDict)
    queued_s: float = 0.0
    jobs: int = 0
    failed: int = 0
    submissions: int = 0
    copied_bytes: int = 0
    busy_s: float = 0.0

    def leave(self, task: _Task) -> None:
        """It is out of the queue. An empty queue forgets what rounding left."""
        self.queued_s = self.queued_s - task.expected_s if self.queue else 0.0

    def stats(self) -> DirectionStats:
        return DirectionStats(
            jobs=self.jobs,
            failed=self.failed,
            submissions=self.submissions,
            copied_bytes=self.copied_bytes,
            busy_s=self.busy_s,
        )


@dataclass(slots=True, eq=False)
class _Lane:
    """One job at a time. `due_s`: when it next starts, moves or ends one; infinity when it never will by itself."""

    sides: list[_Side] = field(default_factory=list)
    released: deque[_Task] = field(default_factory=deque)
    task: _Task | None = None
    moving: bool = False
    due_s: float = math.inf
    expected_end_s: float = -math.inf

    def take(self, at_s: float) -> _Task | None:
        """What starts then: a held one released by then, else the oldest job of the first side that has one."""
        if self.released and self.released[0].released_s <= at_s:
            return self.released.popleft()
        for side in self.sides:
            if side.queue:
                _, task = side.queue.popitem(last=False)
                side.leave(task)
                return task
        return None


class VirtualCopier:
    """A copier (`tier.copying.Copier`) that is a queueing model: two lanes, one a direction, as two streams; or one, in
    which restores overtake the stores that have not started.

    Every start and end has its exact time, whenever it is asked for. What happens at one instant is settled by `poll`
    and `wait` at that instant: jobs submitted in it compete by direction, and can be cancelled in it. The mover hears
    of starts and ends in the order of their times, before any later call is answered. Jitter is the only use of `rng`.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        device_pages: int,
        frames: int,
        page_bytes: int,
        speed: CopySpeed,
        rng: Random,
        mover: Mover,
        lanes: int = 2,
        fault: Fault | None = None,
    ) -> None:
        if lanes not in (1, 2):
            raise ConfigError(f"{lanes} copy lanes; give 1, or 2 for one a direction")
        self._clock = clock
        self._device_pages = device_pages
        self._frames = frames
        self._page_bytes = page_bytes
        self._speed = speed
        self._rng = rng
        self._mover = mover
        self._fault = fault
        first = _Lane()
        self._restore = _Side(lane=first)
        self._store = _Side(lane=first if lanes == 1 else _Lane())
        for side in (self._restore, self._store):
            side.lane.sides.append(side)
        self._live: set[int] = set()  # submitted and not yet reported or cancelled
        self._done: list[CopyDone] = []
        self._later: list[tuple[float, int, CopyDone]] = []  # a heap of reports that faults put off, by time and number
        self._put_off = 0
        self._cancelled = 0
        self._held = 0
        self._closed = False

    def submit(self, job: CopyJob) -> None:
        """As the protocol says; also ValueError for a job id in flight and for a closed copier."""
        pages = 0
        for extent in job.extents:
            here = extent.pages
            if here < 1 or not 0 <= extent.device_page <= self._device_pages - here:
                raise ValueError(f"job {job.job_id}: {extent} leaves the device's pages 0 to {self._device_pages - 1}")
            if not 0 <= extent.frame <= self._frames - here:
                raise ValueError(f"job {job.job_id}: {extent} leaves the host's frames 0 to {self._frames - 1}")
            pages += here
        if self._closed:
            raise ValueError(f"job {job.job_id}: the copier is closed; it takes no more jobs")
        if job.job_id in self._live:
            raise ValueError(f"job {job.job_id} is in flight already; ids are unique")
        now_s = self._catch_up()
        extents = len(job.extents)
        expected_s = self._speed.seconds(job.direction, pages * self._page_bytes, extents)
        side = self._side(job.direction)
        side.queue[job.job_id] = _Task(job, pages, extents, now_s, expected_s)
        side.queued_s += expected_s
        self._live.add(job.job_id)
        if side.lane.due_s > now_s and side.lane.task is None:
            side.lane.due_s = now_s

    def poll(self) -> list[CopyDone]:
        self._advance(self._clock.now())
        if not self._done:
            return []
        ended, self._done = self._done, []
        for done in ended:
            self._live.discard(done.job_id)
        return ended

    def wait(self, timeout_s: float) -> bool:
        """As the protocol says; the clock is what waits. Returns False at once when there is nothing to wait for."""
        self._let_pass(timeout_s, lambda: bool(self._done) or not (self._live or self._later))
        return bool(self._done)

    def cancel(self, job_id: int) -> bool:
        self._catch_up()
        for side in (self._restore, self._store):
            if (task := side.queue.pop(job_id, None)) is not None:
                side.leave(task)
                self._forget(task)
                self._rest(side.lane)
                return True
        return False

    @property
    def in_flight(self) -> int:
        return len(self._live)

    @property
    def next_due_s(self) -> float | None:
        """When `poll` next has something to do: a job to start or end, or a report. None: never, unless something is
        submitted or released."""
        if self._done:
            return self._clock.now()
        due_s = self._next_s()
        return None if due_s == math.inf else due_s

    def backlog_s(self, direction: Direction) -> float:
        """Expected seconds until a job submitted now would start: nothing is known of jitter and faults to come."""
        now_s = self._clock.now()
        lane = self._side(direction).lane
        free_s = min(now_s, lane.due_s)
        if lane.task is not None:
            free_s = max(free_s, lane.expected_end_s)
        for side in lane.sides:
            free_s += side.queued_s
            if side is self._side(direction):
                break
        return max(0.0, free_s - now_s)

    def close(self, timeout_s: float) -> bool:
        """As the protocol says; what ended meanwhile can still be polled, a report that a fault put off in its time."""
        self._closed = True
        self._catch_up()
        for side in (self._restore, self._store):
            for task in side.queue.values():
                self._forget(task)
            side.queue.clear()
            side.queued_s = 0.0
            self._rest(side.lane)
        self._let_pass(timeout_s, lambda: not self._running())
        return not self._running()

    def stats(self) -> CopierStats:
        """Up to the last call that let time in. `busy_s` is the time in which bytes moved."""
        return CopierStats(
            store=self._store.stats(),
            restore=self._restore.stats(),
            cancelled=self._cancelled,
            in_flight=len(self._live),
            queued=len(self._store.queue) + len(self._restore.queue),
            held=self._held,
            broken=None,
        )

    # The queue

    def _side(self, direction: Direction) -> _Side:
        return self._restore if direction is Direction.RESTORE else self._store

    def _running(self) -> bool:
        lanes = (self._restore.lane, self._store.lane)
        return self._held > 0 or any(lane.task is not None or lane.released for lane in lanes)

    def _next_s(self) -> float:
        due_s = min(self._restore.lane.due_s, self._store.lane.due_s)
        return min(due_s, self._later[0][0]) if self._later else due_s

    def _forget(self, task: _Task) -> None:
        self._live.discard(task.job.job_id)
        self._cancelled += 1

    def _rest(self, lane: _Lane) -> None:
        if lane.task is None and not lane.released and not any(side.queue for side in lane.sides):
            lane.due_s = math.inf

    def _catch_up(self) -> float:
        """Everything due before now, which is returned; what is due now is left to `poll`."""
        now_s = self._clock.now()
        self._advance(math.nextafter(now_s, -math.inf))
        return now_s

    def _let_pass(self, timeout_s: float, enough: Callable[[], bool]) -> None:
        now_s = self._clock.now()
        limit_s = now_s + max(0.0, timeout_s)
        self._advance(now_s)
        while now_s < limit_s and not enough():
            self._clock.sleep(min(self._next_s(), limit_s) - now_s)
            now_s = self._clock.now()
            self._advance(now_s)

    def _advance(self, until_s: float) -> None:
        """Everything due by `until_s`, in the order of its time; restores, then stores, then reports within one."""
        first, second, later = self._restore.lane, self._store.lane, self._later
        while True:
            lane = first if first.due_s <= second.due_s else second
            if later and later[0][0] < lane.due_s:
                if later[0][0] > until_s:
                    return
                self._done.append(heappop(later)[2])
                continue
            if lane.due_s > until_s or lane.due_s == math.inf:
                return
            if lane.task is None:
                self._start_next(lane, lane.due_s)
            elif lane.moving:
                self._end(lane, lane.task, lane.due_s)
            else:
                self._move(lane, lane.task, lane.due_s)

    def _start_next(self, lane: _Lane, at_s: float) -> None:
        task = lane.take(at_s)
        if task is None:
            lane.due_s = lane.released[0].released_s if lane.released else math.inf
            return
        if isinstance(task.action, Hold):  # released
            self._move(lane, task, at_s)
            return
        task.started_s = at_s
        try:
            action = self._fault(task.job) if self._fault is not None else None
        except Exception as error:
            action = Fail(error=" ".join(f"{type(error).__name__}: {error}".split()))
        if isinstance(action, Hold | Wedge) and action.released:
            action = None
        if isinstance(action, Fail):
            task.error = action.error
            task.pages = min(task.pages, action.after_pages)
            task.submissions = _extents_of(task.job, task.pages)
        task.action = action
        speed = self._speed
        task.takes_s = speed.seconds(task.job.direction, task.pages * self._page_bytes, task.submissions)
        if speed.jitter:
            task.takes_s *= self._rng.uniform(1.0 - speed.jitter, 1.0 + speed.jitter)
        if isinstance(action, Hold):
            self._held += 1
            action.then(lambda: self._release_held(lane, task))
        elif isinstance(action, Delay):
            lane.task, lane.moving = task, False
            lane.due_s, lane.expected_end_s = at_s + action.seconds, at_s + task.expected_s
        else:
            self._move(lane, task, at_s)

    def _move(self, lane: _Lane, task: _Task, at_s: float) -> None:
        self._mover.begin(task.job)
        lane.task, lane.moving = task, True
        lane.due_s, lane.expected_end_s = at_s + task.takes_s, at_s + task.expected_s
        if isinstance(task.action, Wedge):
            lane.due_s += math.inf if task.action.seconds is None else task.action.seconds
            task.action.then(lambda: self._release_wedged(lane, task))

    def _end(self, lane: _Lane, task: _Task, at_s: float) -> None:
        job, action = task.job, task.action
        self._mover.finish(job, task.pages)
        lane.task = None
        copied_bytes = task.pages * self._page_bytes
        side = self._side(job.direction)
        side.jobs += 1
        side.failed += task.error is not None
        side.submissions += task.submissions
        side.copied_bytes += copied_bytes
        side.busy_s += task.takes_s
        done = CopyDone(
            job_id=job.job_id,
            direction=job.direction,
            error=task.error,
            copied_bytes=copied_bytes,
            submissions=task.submissions,
            submitted_s=task.submitted_s,
            started_s=task.started_s,
            finished_s=at_s,
        )
        if isinstance(action, Late):
            self._put_off_report(at_s + action.seconds, done)
            return
        self._done.append(done)
        if isinstance(action, Twice):
            self._put_off_report(at_s + action.after_s, done)

    def _put_off_report(self, due_s: float, done: CopyDone) -> None:
        self._put_off += 1
        heappush(self._later, (due_s, self._put_off, done))

    def _release_held(self, lane: _Lane, task: _Task) -> None:
        self._held -= 1
        task.released_s = self._clock.now()
        lane.released.append(task)
        if lane.task is None:
            lane.due_s = min(lane.due_s, task.released_s)

    def _release_wedged(self, lane: _Lane, task: _Task) -> None:
        if lane.task is task:
            lane.due_s = min(lane.due_s, self._clock.now() + task.takes_s)


def _extents_of(job: CopyJob, pages: int) -> int:
    """How many of its extents the first `pages` pages reach into."""
    reached = 0
    for extent in job.extents:
        if pages <= 0:
            break
        pages -= extent.pages
        reached += 1
    return reached
