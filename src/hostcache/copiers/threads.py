"""Copies pages between a device pool in main memory and slabs, on threads outside the GIL. Decides nothing but order.

Knows addresses and sizes; not what a page means, who waits for it, or when a copy is too late.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hostcache.clock import Clock
from hostcache.copiers.faults import Delay, Fail, Fault, Hold
from hostcache.copiers.slabs import Slabs
from hostcache.errors import ConfigError
from hostcache.tier.copying import CopyDone, CopyJob, Direction

_FIRST = (Direction.RESTORE, Direction.STORE)
_Move = tuple[int, int, int]
"""(host address, device address, bytes)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectionStats:
    """Since the copier's start. `busy_s` is time inside copies, summed over the threads; `jobs` counts reported ends
    including `failed`; `submissions` counts copy calls."""

    jobs: int
    failed: int
    submissions: int
    copied_bytes: int
    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CopierStats:
    """`in_flight` = jobs submitted and not yet polled or cancelled, of which `queued` have not started and `held` are
    under an injected fault. `broken` names what killed a worker; every job fails from then on."""

    store: DirectionStats
    restore: DirectionStats
    cancelled: int
    in_flight: int
    queued: int
    held: int
    broken: str | None


@dataclass(slots=True)
class _Counters:
    jobs: int = 0
    failed: int = 0
    submissions: int = 0
    copied_bytes: int = 0
    busy_s: float = 0.0

    def frozen(self) -> DirectionStats:
        return DirectionStats(
            jobs=self.jobs,
            failed=self.failed,
            submissions=self.submissions,
            copied_bytes=self.copied_bytes,
            busy_s=self.busy_s,
        )


@dataclass(slots=True, eq=False)
class _Task:
    """A job's life: *queued* → (a worker begins it) *begun* → *open* while moves are left → *done*.

    queued → (`cancel`, `close`) gone; begun → (Hold) *held* → open. `hands` counts the workers that touch it now:
    it is done when there are neither moves nor hands left, so no byte moves after its report.
    """

    job: CopyJob
    submitted_s: float
    unit_bytes: int
    """A move is cut at multiples of this only; `segments` are how many pieces of the device lie side by side in it."""
    segments: int
    started_s: float | None = None
    moves: deque[_Move] = field(default_factory=deque)
    bite_bytes: int = 0
    hands: int = 0
    error: str | None = None
    error_at_end: str | None = None
    copied_bytes: int = 0
    submissions: int = 0
    done: bool = False

    def bite(self) -> list[_Move]:
        """The next moves, about `bite_bytes` in all; the last one is cut where it would be too long."""
        taken: list[_Move] = []
        room = self.bite_bytes
        while self.moves and room > 0:
            host, device, size = self.moves.popleft()
            here = min(size, max(1, room // self.unit_bytes) * self.unit_bytes)
            if here < size:
                self.moves.appendleft((host + here, device + here // self.segments, size - here))
            taken.append((host, device, here))
            room -= here
        return taken


class ThreadCopier:
    """The CPU copier (`tier.copying.Copier`): main memory ⇄ slabs by `threads` daemon threads.

    `device_address` is the first byte of `device_pages` pages of `page_bytes` in one extent; `owner` is whatever keeps
    that memory alive (a tensor, an array), held until `close` returned True. A page may lie in several `segments`
    (one a layer, say) of equal size, each `segment_stride_bytes` behind the one before: then segment s of page p starts
    at device_address + s * segment_stride_bytes + p * (page_bytes // segments), and a frame holds them side by side.

    Restores go first: between two bites of at most `chunk_bytes` a running store makes way for a restore that has come.
    A restore is not cut for one thread (a copy call an extent and slab), and into one share a thread for several.
    A page in segments is never cut.
    What was written before `submit` on the calling thread is what a store copies; a device that computes on its own
    needs a copier that waits for its events.
    """

    def __init__(
        self,
        device_address: int,
        device_pages: int,
        page_bytes: int,
        slabs: Slabs,
        *,
        clock: Clock,
        owner: object = None,
        threads: int = 1,
        chunk_bytes: int = 8 << 20,
        segments: int = 1,
        segment_stride_bytes: int = 0,
        fault: Fault | None = None,
    ) -> None:
        if page_bytes != slabs.page_bytes:
            raise ConfigError(f"device pages of {page_bytes} bytes but frames of {slabs.page_bytes}; make them equal")
        if threads < 1 or chunk_bytes < 1:
            raise ConfigError(f"{threads} copy threads with chunks of {chunk_bytes} bytes; give at least 1 of each")
        if segments < 1 or page_bytes % segments:
            raise ConfigError(f"pages of {page_bytes} bytes in {segments} segments; give a number that divides them")
        if segments > 1 and segment_stride_bytes < device_pages * (page_bytes // segments):
            raise ConfigError(
                f"segments {segment_stride_bytes} bytes apart overlap: each holds {device_pages} pieces of "
                f"{page_bytes // segments}; give the distance between the first bytes of two segments"
            )
        self._device_address = device_address
        self._device_pages = device_pages
        self._page_bytes = page_bytes
        self._slabs = slabs
        self._clock = clock
        self._owner = owner
        self._threads = threads
        self._chunk_bytes = chunk_bytes
        self._segments = segments
        self._segment_stride_bytes = segment_stride_bytes
        self._fault = fault

        self._news = threading.Condition()  # guards everything below; told of every change
        self._live: dict[int, _Task] = {}  # until reported or cancelled
        self._queued: dict[Direction, dict[int, _Task]] = {Direction.RESTORE: {}, Direction.STORE: {}}
        self._open: dict[Direction, deque[_Task]] = {Direction.RESTORE: deque(), Direction.STORE: deque()}
        self._held: set[_Task] = set()
        self._done: list[CopyDone] = []
        self._counters = {Direction.RESTORE: _Counters(), Direction.STORE: _Counters()}
        self._cancelled = 0
        self._closing = False
        self._broken: str | None = None
        self._workers_alive = threads
        for number in range(threads):
            threading.Thread(target=self._work, name=f"hostcache-copy-{number}", daemon=True).start()

    # The driver's side

    def submit(self, job: CopyJob) -> None:
        """As the protocol says; also ValueError for a job id in flight and for a closed copier."""
        for extent in job.extents:
            if extent.pages < 1 or not 0 <= extent.device_page <= self._device_pages - extent.pages:
                raise ValueError(f"job {job.job_id}: {extent} leaves the device's pages 0 to {self._device_pages - 1}")
            if not 0 <= extent.frame <= self._slabs.frames - extent.pages:
                raise ValueError(f"job {job.job_id}: {extent} leaves the host's frames 0 to {self._slabs.frames - 1}")
        with self._news:
            if self._closing:
                raise ValueError(f"job {job.job_id}: the copier is closed; it takes no more jobs")
            if job.job_id in self._live:
                raise ValueError(f"job {job.job_id} is in flight already; ids are unique")
            task = self._live[job.job_id] = _Task(
                job=job,
                submitted_s=self._clock.now(),
                unit_bytes=1 if self._segments == 1 else self._page_bytes,
                segments=self._segments,
            )
            if self._broken is not None:
                task.started_s = task.submitted_s
                task.error = self._broken
                self._finish(task)
                return
            self._queued[job.direction][job.job_id] = task
            self._news.notify_all()

    def poll(self) -> list[CopyDone]:
        with self._news:
            ended, self._done = self._done, []
            for done in ended:
                del self._live[done.job_id]
        return ended

    def wait(self, timeout_s: float) -> bool:
        """As the protocol says; returns False at once when nothing is in flight. Waits in real time."""
        with self._news:
            if not self._live:
                return False
            return self._news.wait_for(lambda: bool(self._done), timeout=max(0.0, timeout_s))

    def cancel(self, job_id: int) -> bool:
        with self._news:
            for queue in self._queued.values():
                if queue.pop(job_id, None) is not None:
                    del self._live[job_id]
                    self._cancelled += 1
                    return True
        return False

    @property
    def in_flight(self) -> int:
        return len(self._live)

    def close(self, timeout_s: float) -> bool:
        """As the protocol says; what ended meanwhile can still be polled. On False keep slabs and device memory: bytes
        may still move."""
        with self._news:
            self._closing = True
            for queue in self._queued.values():
                for job_id in queue:
                    del self._live[job_id]
                self._cancelled += len(queue)
                queue.clear()
            self._news.notify_all()
            over = self._news.wait_for(lambda: self._workers_alive == 0, timeout=max(0.0, timeout_s))
            if over:
                self._owner = None
            return over

    def stats(self) -> CopierStats:
        with self._news:
            return CopierStats(
                store=self._counters[Direction.STORE].frozen(),
                restore=self._counters[Direction.RESTORE].frozen(),
                cancelled=self._cancelled,
                in_flight=len(self._live),
                queued=sum(len(queue) for queue in self._queued.values()),
                held=len(self._held),
                broken=self._broken,
            )

    # The workers' side

    def _work(self) -> None:
        task: _Task | None = None
        try:
            while (turn := self._next_turn()) is not None:
                task, moves = turn
                if moves is None:
                    self._begin(task)
                else:
                    self._copy(task, moves)
                task = None
        except BaseException as death:
            # Nothing is lost in silence: whatever ended this thread ends every job with that reason.
            self._bury(task, death)
        finally:
            with self._news:
                self._workers_alive -= 1
                self._news.notify_all()

    def _next_turn(self) -> tuple[_Task, list[_Move] | None] | None:
        """Blocks. A task to begin (None for its moves), a bite of an open one, or None: closed and all done."""
        with self._news:
            while True:
                for direction in _FIRST:
                    opened, queued = self._open[direction], self._queued[direction]
                    if opened:
                        task = opened[0]
                        task.hands += 1
                        bite = task.bite()
                        if not task.moves:
                            opened.popleft()
                        return task, bite
                    if queued:
                        task = queued.pop(next(iter(queued)))
                        task.hands += 1
                        return task, None
                if self._broken is not None or (self._closing and not self._unfinished()):
                    return None
                self._news.wait()

    def _unfinished(self) -> bool:
        return any(not task.done for task in self._live.values())

    def _begin(self, task: _Task) -> None:
        task.started_s = self._clock.now()
        hold: Hold | None = None
        try:
            action = self._fault(task.job) if self._fault is not None else None
            if isinstance(action, Delay):
                self._clock.sleep(action.seconds)
            elif isinstance(action, Hold):
                hold = action
            elif action is not None and not isinstance(action, Fail):
                raise ValueError(f"a ThreadCopier cannot act out {type(action).__name__}; give it Fail, Delay or Hold")
            task.moves = self._moves(task.job, action.after_pages if isinstance(action, Fail) else task.job.pages)
            task.error_at_end = action.error if isinstance(action, Fail) else None
        except Exception as error:
            task.moves.clear()
            task.error = _one_line(error)
            hold = None
        total = sum(size for _, _, size in task.moves)
        if task.job.direction is Direction.STORE:
            task.bite_bytes = self._chunk_bytes
        elif self._threads > 1:
            task.bite_bytes = max(self._chunk_bytes, -(-total // self._threads))
        else:
            task.bite_bytes = total
        if hold is None:
            self._go_on(task)
            return
        with self._news:
            self._held.add(task)
            task.hands -= 1
        hold.then(lambda: self._released(task))

    def _released(self, task: _Task) -> None:
        with self._news:
            if task not in self._held:
                return
            self._held.discard(task)
            task.hands += 1
        self._go_on(task)

    def _go_on(self, task: _Task) -> None:
        """begun or held → open, or done where there is nothing to move."""
        with self._news:
            task.hands -= 1
            if self._broken is not None:
                self._void(task, self._broken)
            elif task.moves:
                self._open[task.job.direction].append(task)
                self._news.notify_all()
            else:
                self._finish(task)

    def _moves(self, job: CopyJob, pages_left: int) -> deque[_Move]:
        """The job's first `pages_left` pages as moves: one an extent, cut where its frames cross a slab."""
        moves: deque[_Move] = deque()
        for extent in job.extents:
            pages = min(extent.pages, pages_left)
            if pages < 1:
                break
            pages_left -= pages
            piece = self._page_bytes // self._segments
            device = self._device_address + extent.device_page * piece
            for host, here in self._slabs.run(extent.frame, pages):
                moves.append((host, device, here * self._page_bytes))
                device += here * piece
        return moves

    def _copy(self, task: _Task, moves: list[_Move]) -> None:
        began_s = self._clock.now()
        copied = calls = 0
        error: str | None = None
        try:
            for host, device, size in moves:
                store = task.job.direction is Direction.STORE
                if self._segments > 1:
                    one, other = self._side_by_side(host, size), self._apart(device, size)
                    np.copyto(one, other) if store else np.copyto(other, one)  # without the GIL, all segments at once
                else:
                    # Without the GIL too, as fast as numpy.copyto, and nothing to set up.
                    ctypes.memmove(*((host, device) if store else (device, host)), size)
                calls += 1
                copied += size
        except Exception as failure:
            error = _one_line(failure)
        spent_s = self._clock.now() - began_s
        with self._news:
            counters = self._counters[task.job.direction]
            counters.submissions += calls
            counters.copied_bytes += copied
            counters.busy_s += spent_s
            task.submissions += calls
            task.copied_bytes += copied
            task.hands -= 1
            if error is not None:
                self._void(task, error)
            elif not task.moves and not task.hands:
                self._finish(task)

    def _side_by_side(self, host: int, size: int) -> npt.NDArray[np.uint8]:
        """The frames at this address, (pages, segments, bytes)."""
        piece = self._page_bytes // self._segments
        memory = memoryview((ctypes.c_ubyte * size).from_address(host))
        return np.frombuffer(memory, dtype=np.uint8).reshape(-1, self._segments, piece)

    def _apart(self, device: int, size: int) -> npt.NDArray[np.uint8]:
        """The device's pages from this address of the first segment on, in the same shape."""
        piece, stride = self._page_bytes // self._segments, self._segment_stride_bytes
        pages = size // self._page_bytes
        span = (self._segments - 1) * stride + pages * piece
        flat = np.frombuffer(memoryview((ctypes.c_ubyte * span).from_address(device)), dtype=np.uint8)
        return np.ndarray((pages, self._segments, piece), dtype=np.uint8, buffer=flat, strides=(piece, stride, 1))

    def _bury(self, in_hand: _Task | None, death: BaseException) -> None:
        with self._news:
            self._broken = f"a copy worker died: {_one_line(death)}; restart to copy again"
            if in_hand is not None:
                in_hand.hands -= 1
            for queue in self._queued.values():
                queue.clear()
            self._held.clear()
            for task in [task for task in self._live.values() if not task.done]:
                self._void(task, self._broken)
            self._news.notify_all()

    # Under the lock

    def _void(self, task: _Task, error: str) -> None:
        """Nothing more of it starts; it ends with the last hand that touches it."""
        task.error = task.error or error
        task.moves.clear()
        if task in self._open[task.job.direction]:
            self._open[task.job.direction].remove(task)
        if not task.hands:
            self._finish(task)

    def _finish(self, task: _Task) -> None:
        if task.done:
            return
        task.done = True
        error = task.error or task.error_at_end
        counters = self._counters[task.job.direction]
        counters.jobs += 1
        counters.failed += error is not None
        now_s = self._clock.now()
        self._done.append(
            CopyDone(
                job_id=task.job.job_id,
                direction=task.job.direction,
                error=error,
                copied_bytes=task.copied_bytes,
                submissions=task.submissions,
                submitted_s=task.submitted_s,
                started_s=now_s if task.started_s is None else task.started_s,
                finished_s=now_s,
            )
        )
        self._news.notify_all()


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
