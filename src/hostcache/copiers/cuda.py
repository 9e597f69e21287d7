"""Copies pages between a CUDA device and slabs, on two streams of its own. Decides nothing but order.

Knows addresses, streams and events; not what a page means, who waits for it, or when a copy is too late.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from hostcache.clock import Clock
from hostcache.copiers.cuda_runtime import CudaError, CudaRuntime, DriverRuntime, driver_symbols
from hostcache.copiers.layout import Moves, PageLayout, moves, slabs_of
from hostcache.copiers.slabs import Slabs
from hostcache.copiers.threads import CopierStats, DirectionStats
from hostcache.errors import ConfigError, MemoryRefused
from hostcache.tier.copying import CopyDone, CopyJob, Direction

_SHORTEST_NAP_S = 20e-6
_LONGEST_NAP_S = 1e-3


class _Pin(Enum):
    UNTRIED = "untried"
    DONE = "done"
    REFUSED = "refused"


@dataclass(slots=True, eq=False)
class _Task:
    """A job's life: *queued* → (room on its stream) *handed over* → *issued*: every call for it was made → (its last
    copy is over) *ended* → reported.

    queued → (`cancel`, `close`) gone. `ready` is recorded on the compute stream at submit. Between handed over and
    issued it belongs to the thread that issues it; `issued` is the last thing that thread writes.
    """

    job: CopyJob
    total_bytes: int
    submitted_s: float
    ready: int = 0
    begin: int = 0
    end: int = 0
    end_recorded: bool = False
    started_s: float = 0.0
    issued: bool = False
    error: str | None = None
    copied_bytes: int = 0
    copies: int = 0
    calls: int = 0


@dataclass(slots=True, eq=False)
class _Lane:
    """One direction: its stream, what waits for it on the host and what it has been handed, in order."""

    direction: Direction
    stream: int = 0
    queued: dict[int, _Task] = field(default_factory=dict)
    handed: deque[_Task] = field(default_factory=deque)
    handed_bytes: int = 0
    jobs: int = 0
    failed: int = 0
    copies: int = 0
    calls: int = 0
    copied_bytes: int = 0
    busy_s: float = 0.0

    def stats(self) -> DirectionStats:
        return DirectionStats(
            jobs=self.jobs,
            failed=self.failed,
            submissions=self.copies,
            copied_bytes=self.copied_bytes,
            busy_s=self.busy_s,
        )


class CudaCopier:
    """The CUDA copier (`tier.copying.Copier`): `device_pages` pages laid out as `layout` says ⇄ slabs.

    *Order.* A store runs after everything that was on the compute stream at its `submit`: the pages' last writer. So
    does a restore: the pages' last reader. Both waits are the device's; the host never waits in `submit`, `poll` or
    `cancel`. In the other direction the caller has the choice: what uses the pages after `poll` has reported the job is
    in order by that; what is launched before needs `compute_waits_for`. Submit from the thread that launches, other
    streams joined to the compute stream, and never while that thread captures a graph.

    *Time.* Each direction has a stream of low priority, and a window on it: up to `window_jobs` jobs and
    `window_bytes` (one job always) are with the device and can no longer be cancelled; the others wait here. A store is
    not handed over while a restore waits. Nothing moves on but in `submit`, `poll` and `wait`.

    *Copies.* A job is one batch: the fewest copies, none longer than `longest_copy_bytes` (behind it another stream's
    copy may have to wait), `batch_copies` a call; copy by copy where the driver has no batches. `CopyDone.submissions`
    counts copies, `driver_calls` the calls. Times in `CopyDone` are when the host knew; `stats().*.busy_s` is the
    device's own time, which is what a rate is to be made from.

    *Pinning.* `pin_next` pins a slab a call; call it until it says False, before serving. A slab that was not is pinned
    at its first job. Where pinning is refused `degraded` says so and those copies go through pageable memory, on a
    thread of their own, since CUDA may hold the caller until such a copy is over.

    *Errors.* A refused call is the job's error, reported once nothing of it moves any more. When the device is lost
    every job ends with that reason, now and later. Only the constructor raises CudaError. `owner` keeps the device
    memory alive until `close` returned True.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        layout: PageLayout,
        device_pages: int,
        slabs: Slabs,
        *,
        clock: Clock,
        owner: object = None,
        window_jobs: int = 32,
        window_bytes: int = 1 << 30,
        longest_copy_bytes: int = 32 << 20,
        batch_copies: int = 4096,
    ) -> None:
        layout.fits(slabs)
        if min(window_jobs, window_bytes, longest_copy_bytes, batch_copies) < 1:
            raise ConfigError(
                f"a window of {window_jobs} jobs and {window_bytes} bytes, copies of {longest_copy_bytes} bytes, "
                f"{batch_copies} a batch; give at least 1 of each"
            )
        self._runtime = runtime
        self._layout = layout
        self._device_pages = device_pages
        self._slabs = slabs
        self._clock = clock
        self._owner = owner
        self._window_jobs = window_jobs
        self._window_bytes = window_bytes
        self._longest_copy_bytes = longest_copy_bytes
        self._batch_copies = batch_copies
        self._batched = runtime.can_batch

        self._restore = _Lane(Direction.RESTORE)
        self._store = _Lane(Direction.STORE)
        self._lanes = (self._restore, self._store)
        with runtime.active():
            for lane in self._lanes:
                lane.stream = runtime.create_stream()
        self._live: dict[int, _Task] = {}  # until reported or cancelled
        self._done: list[CopyDone] = []
        self._cancelled = 0
        self._closing = False
        self._closed = False
        self._broken: str | None = None

        self._pin_lock = threading.Lock()  # two threads may pin; reading the states needs no lock
        self._pins = [_Pin.UNTRIED] * -(-slabs.frames // slabs.frames_per_slab)
        self._pinned_at: list[int] = []
        self._degraded: str | None = None
        self._helper: threading.Thread | None = None
        self._to_helper: queue.SimpleQueue[tuple[_Lane, _Task] | None] = queue.SimpleQueue()

    # The driver's side

    def submit(self, job: CopyJob) -> None:
        """As the protocol says; also ValueError for a job id in flight and for a closed copier."""
        for extent in job.extents:
            if extent.pages < 1 or not 0 <= extent.device_page <= self._device_pages - extent.pages:
                raise ValueError(f"job {job.job_id}: {extent} leaves the device's pages 0 to {self._device_pages - 1}")
            if not 0 <= extent.frame <= self._slabs.frames - extent.pages:
                raise ValueError(f"job {job.job_id}: {extent} leaves the host's frames 0 to {self._slabs.frames - 1}")
        if self._closing:
            raise ValueError(f"job {job.job_id}: the copier is closed; it takes no more jobs")
        if job.job_id in self._live:
            raise ValueError(f"job {job.job_id} is in flight already; ids are unique")
        now_s = self._clock.now()
        task = _Task(job=job, total_bytes=job.pages * self._layout.frame_bytes, submitted_s=now_s, started_s=now_s)
        self._live[job.job_id] = task
        lane = self._lane(job.direction)
        if self._broken is not None:
            self._settle(lane, task, self._broken)
            return
        try:
            with self._runtime.active():
                task.ready = self._runtime.create_event(timed=False)
                self._runtime.record(task.ready, self._runtime.compute_stream())
        except CudaError as refusal:
            self._settle(lane, task, _one_line(refusal))
            if refusal.lost:
                self._lose(refusal)
        else:
            lane.queued[job.job_id] = task
        self._progress()

    def poll(self) -> list[CopyDone]:
        """As the protocol says; of the jobs that ended since the last call, restores come first. Never raises."""
        self._progress()
        ended, self._done = self._done, []
        for done in ended:
            del self._live[done.job_id]
        return ended

    def wait(self, timeout_s: float) -> bool:
        """As the protocol says, in naps of a millisecond at most; returns False at once when nothing is in flight."""
        if not self._live:
            return False
        return self._until(lambda: bool(self._done), timeout_s)

    def cancel(self, job_id: int) -> bool:
        for lane in self._lanes:
            if (task := lane.queued.pop(job_id, None)) is not None:
                self._forget(task)
                return True
        return False

    @property
    def in_flight(self) -> int:
        return len(self._live)

    def compute_waits_for(self, job_id: int) -> bool:
        """Whatever is launched on the compute stream from now on runs after the job's last copy: a reader of restored
        pages, or a writer of pages that are still being stored. The host does not wait.

        False: the job is not with the device yet and nothing was ordered; `cancel` it, or wait for its report. True for
        a job that is over or unknown.
        """
        task = self._live.get(job_id)
        if task is None or any(done.job_id == job_id for done in self._done):
            return True
        if not (task.issued and task.end_recorded):
            return False
        try:
            with self._runtime.active():
                self._runtime.wait(self._runtime.compute_stream(), task.end)
        except CudaError:
            self._progress()  # finds out whether the device is lost
            return False
        return True

    def pin_next(self) -> bool:
        """Pin one more slab, on this thread: as long as touching its memory takes. False: there is none left to pin."""
        with self._pin_lock:
            untried = [number for number, pin in enumerate(self._pins) if pin is _Pin.UNTRIED]
            if not untried or self._closing:
                return False
            self._pin(untried[0])
            return _Pin.UNTRIED in self._pins

    @property
    def degraded(self) -> str | None:
        """Why copies are slower than they could be: in one line, or None."""
        return self._degraded

    @property
    def batched(self) -> bool:
        return self._batched

    @property
    def driver_calls(self) -> int:
        """Copy calls made for the jobs that have ended: a batch is one."""
        return sum(lane.calls for lane in self._lanes)

    def close(self, timeout_s: float) -> bool:
        """As the protocol says; what ended meanwhile can still be polled. On False keep slabs and device memory: bytes
        may still move, and slabs are still pinned. Close the slabs after this returned True."""
        if self._closed:
            return True
        self._closing = True
        for lane in self._lanes:
            for task in lane.queued.values():
                self._forget(task)
            lane.queued.clear()
        if not self._until(lambda: not any(lane.handed for lane in self._lanes), timeout_s):
            return False
        if self._helper is not None:
            self._to_helper.put(None)  # it has nothing left to do: every task it had is over
            self._helper.join()
        with self._pin_lock, contextlib.suppress(CudaError), self._runtime.active():
            for address in self._pinned_at:
                with contextlib.suppress(CudaError):
                    self._runtime.unpin(address)
            for lane in self._lanes:
                with contextlib.suppress(CudaError):
                    self._runtime.destroy_stream(lane.stream)
        self._owner = None
        self._closed = True
        return True

    def stats(self) -> CopierStats:
        """Up to the last `submit`, `poll` or `wait`."""
        return CopierStats(
            store=self._store.stats(),
            restore=self._restore.stats(),
            cancelled=self._cancelled,
            in_flight=len(self._live),
            queued=sum(len(lane.queued) for lane in self._lanes),
            held=0,
            broken=self._broken,
        )

    # From the queue to the stream

    def _lane(self, direction: Direction) -> _Lane:
        return self._restore if direction is Direction.RESTORE else self._store

    def _has_room(self, lane: _Lane, task: _Task) -> bool:
        if not lane.handed:
            return True
        return (
            lane.handed[-1].issued  # the order within a stream is the order of the jobs
            and len(lane.handed) < self._window_jobs
            and lane.handed_bytes + task.total_bytes <= self._window_bytes
        )

    def _hand_over(self) -> None:
        """Restores as far as their window goes, then stores unless a restore still waits. Context active."""
        for lane in self._lanes:
            while lane.queued and (lane is self._restore or not self._restore.queued):
                job_id, task = next(iter(lane.queued.items()))
                if not self._has_room(lane, task):
                    break
                del lane.queued[job_id]
                lane.handed.append(task)
                lane.handed_bytes += task.total_bytes
                task.started_s = self._clock.now()
                if self._pinned(task.job):
                    self._issue(lane, task, pinned=True)
                else:
                    self._give_to_helper(lane, task)

    def _issue(self, lane: _Lane, task: _Task, *, pinned: bool) -> None:
        """Everything the device is told about a job. Context active; on either thread; raises nothing."""
        runtime = self._runtime
        try:
            try:
                todo = moves(task.job, self._slabs, self._layout).cut(self._longest_copy_bytes)
                task.begin = runtime.create_event(timed=True)
                task.end = runtime.create_event(timed=True)
                self._after_compute(lane, task)
                runtime.record(task.begin, lane.stream)
                self._copy(lane, task, todo, pinned=pinned)
            except Exception as failure:  # the end is recorded all the same: copies made before it may still run
                task.error = _one_line(failure)
            runtime.record(task.end, lane.stream)
            task.end_recorded = True
        except Exception as failure:
            task.error = task.error or _one_line(failure)
        finally:
            task.issued = True

    def _after_compute(self, lane: _Lane, task: _Task) -> None:
        """The order that keeps a store behind the last writer and a restore behind the last reader of its pages."""
        self._runtime.wait(lane.stream, task.ready)

    def _copy(self, lane: _Lane, task: _Task, todo: Moves, *, pinned: bool) -> None:
        start = 0
        while start < len(todo):
            if self._batched and pinned:
                part = todo.part(start, start + self._batch_copies)
                try:
                    self._runtime.copy_batch(part, lane.stream)
                except CudaError as refusal:
                    if not refusal.unsupported:
                        raise
                    self._batched = False
                    continue
            else:
                part = todo.part(start, start + 1)
                ((to, source, size),) = part.rows()
                self._runtime.copy(to, source, size, lane.stream)
            start += len(part)
            task.calls += 1
            task.copies += len(part)
            task.copied_bytes += part.total_bytes

    # From the stream to the report

    def _progress(self) -> None:
        if not self._live:
            return
        try:
            with self._runtime.active():
                self._collect()
                self._hand_over()
        except CudaError as error:
            if not error.passing:
                self._lose(error)
        if self._broken is not None:
            self._end_all()

    def _collect(self) -> None:
        """What is over leaves its stream. Raises CudaError when asking fails: then something before it went wrong."""
        for lane in self._lanes:
            while lane.handed and lane.handed[0].issued:
                task = lane.handed[0]
                over = self._runtime.over(task.end) if task.end_recorded else self._runtime.stream_idle(lane.stream)
                if not over:
                    break
                self._leave(lane, task.error)

    def _leave(self, lane: _Lane, error: str | None) -> None:
        task = lane.handed.popleft()
        lane.handed_bytes -= task.total_bytes
        self._settle(lane, task, error)

    def _settle(self, lane: _Lane, task: _Task, error: str | None) -> None:
        now_s = self._clock.now()
        lane.jobs += 1
        lane.failed += error is not None
        lane.copies += task.copies
        lane.calls += task.calls
        lane.copied_bytes += task.copied_bytes
        if error is None:
            try:
                lane.busy_s += self._runtime.elapsed_s(task.begin, task.end)
            except CudaError:
                lane.busy_s += now_s - task.started_s
        self._drop_events(task)
        self._done.append(
            CopyDone(
                job_id=task.job.job_id,
                direction=task.job.direction,
                error=error,
                copied_bytes=task.copied_bytes,
                submissions=task.copies,
                submitted_s=task.submitted_s,
                started_s=task.started_s,
                finished_s=now_s,
            )
        )

    def _forget(self, task: _Task) -> None:
        del self._live[task.job.job_id]
        self._cancelled += 1
        self._drop_events(task)

    def _drop_events(self, task: _Task) -> None:
        with contextlib.suppress(CudaError), self._runtime.active():
            for event in (task.ready, task.begin, task.end):
                if event:
                    with contextlib.suppress(CudaError):
                        self._runtime.destroy_event(event)

    def _until(self, enough: Callable[[], bool], timeout_s: float) -> bool:
        deadline_s = self._clock.now() + max(0.0, timeout_s)
        nap_s = _SHORTEST_NAP_S
        while True:
            self._progress()
            if enough():
                return True
            left_s = deadline_s - self._clock.now()
            if left_s <= 0.0:
                return False
            self._clock.sleep(min(nap_s, left_s))
            nap_s = min(2.0 * nap_s, _LONGEST_NAP_S)

    # A device that is gone

    def _lose(self, error: CudaError) -> None:
        if self._broken is None:
            self._broken = f"the CUDA device is lost: {_one_line(error)}; restart to copy again"

    def _end_all(self) -> None:
        """Nothing moves any more, but for what the helper has in its hands: that ends with its call."""
        for lane in self._lanes:
            while lane.handed and lane.handed[0].issued:
                self._leave(lane, self._broken)
            for task in lane.queued.values():
                self._settle(lane, task, self._broken)
            lane.queued.clear()

    # Pinning, and the slow way

    def _pinned(self, job: CopyJob) -> bool:
        return all(self._pins[slab] is _Pin.DONE for slab in slabs_of(job, self._slabs))

    def _pin(self, slab: int) -> None:
        """Under the pin lock. The first refusal ends it: what the system refused once it is not asked again."""
        first = slab * self._slabs.frames_per_slab
        frames = min(self._slabs.frames_per_slab, self._slabs.frames - first)
        try:
            address = self._slabs.address(first)
            with self._runtime.active():
                self._runtime.pin(address, frames * self._slabs.page_bytes)
        except (CudaError, MemoryRefused) as refusal:
            self._pins = [_Pin.REFUSED if pin is _Pin.UNTRIED else pin for pin in self._pins]
            self._degraded = (
                f"{self._pins.count(_Pin.DONE)} of {len(self._pins)} host slabs are pinned, the others were refused "
                f"({_one_line(refusal)}); their copies are slower"
            )
        else:
            self._pinned_at.append(address)
            self._pins[slab] = _Pin.DONE

    def _give_to_helper(self, lane: _Lane, task: _Task) -> None:
        if self._helper is None:
            self._helper = threading.Thread(target=self._help, name="hostcache-cuda-unpinned", daemon=True)
            self._helper.start()
        self._to_helper.put((lane, task))

    def _help(self) -> None:
        """The helper thread: pins what a job needs and may have, then issues it; CUDA may hold it for as long."""
        while (work := self._to_helper.get()) is not None:
            lane, task = work
            try:
                for slab in slabs_of(task.job, self._slabs):
                    with self._pin_lock:
                        if self._pins[slab] is _Pin.UNTRIED:
                            self._pin(slab)
                with self._runtime.active():
                    self._issue(lane, task, pinned=self._pinned(task.job))
            except BaseException as failure:
                task.error = _one_line(failure)
            finally:
                task.issued = True


def torch_runtime(device: int) -> DriverRuntime:
    """The device as torch counts it, ordered after what torch launches on the current stream of the calling thread."""
    import torch

    def current_stream() -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)

    return DriverRuntime(driver_symbols(), device=device, compute_stream=current_stream)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, CudaError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
