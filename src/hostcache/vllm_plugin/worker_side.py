"""The bytes of one rank: gives a copier what the scheduler ordered, waits where a forward pass must, and reports.

    a job       ordered → (`submit`) *running* → ended, in the next report
                over its budget: not started → cancelled, ended as late; else *overdue*, and ended whenever it ends
    a load      its request is told to vLLM once: when the copy has ended or is over budget

Never lets a request wait for ever, and never lets go of one whose blocks a copy may still write without saying so.
Decides nothing about what is worth copying; knows blocks and frames, no keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hostcache.clock import Clock
from hostcache.tier import Copier, CopyDone, CopyJob, Direction, extents
from hostcache.vllm_plugin.wire import JobEnd, LoadOrder, Orders, RankReport, StoreOrder

STORE_PATIENCE = 4.0
"""A save that nothing waits for is given up after this many copy budgets: on a busy machine it is only slow."""

NAP_S = 0.005
"""The longest that a step which computes nothing waits for a load. Without it vLLM makes such steps one after the other
and takes the processor from the copy they wait for."""


@dataclass(slots=True, eq=False)
class _Running:
    job_id: int
    deadline_s: float
    request_id: str | None = None
    overdue: bool = False


class WorkerSide:
    """`copier` None: this rank can copy nothing, because of `off`; every order ends at once with that error. `prepare`
    is called once, when the pool fills.

    Call in the order of vLLM's step: `before_forward`, `after_forward`, `finished`, `report`.
    """

    def __init__(self, *, copier: Copier | None, clock: Clock, copy_budget_s: float, off: str | None = None,
                 prepare: Callable[[], object] | None = None) -> None:
        self.copier = copier
        self._clock = clock
        self._copy_budget_s = copy_budget_s
        self._off = off
        self._prepare = prepare
        self._said_off = False
        self._running: dict[int, _Running] = {}
        self._ends: list[JobEnd] = []
        self._overdue: list[int] = []
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._step = 0
        self._idle = self._report_step = False

    # ---- a step

    def before_forward(self, orders: Orders) -> None:
        """Saves first those blocks that the forward pass is about to overwrite. Blocks the caller for a copy budget at
        most; what is not saved by then is given up."""
        self._step, self._idle, self._report_step = orders.step, orders.idle, orders.report_step
        if self._prepare is not None and (orders.prepare or orders.stores):
            self._prepare()
            self._prepare = None
        for order in sorted(orders.stores, key=lambda store: not store.at_once):
            self._store(order)
        awaited = [order.job_id for order in orders.stores if order.at_once]
        awaited += [job_id for job_id in orders.fences if job_id in self._running]
        if awaited:
            self._wait_for(awaited)

    def after_forward(self, loads: Iterable[LoadOrder]) -> None:
        for order in loads:
            self._load(order)

    def finished(self) -> tuple[set[str], set[str]]:
        """Requests whose load is over since the last call, and those of them whose load failed."""
        self._hear()
        if self._idle and self.copier is not None and not self._finished and any(
                job.request_id is not None and not job.overdue for job in self._running.values()):
            self.copier.wait(NAP_S)
            self._hear()
        now_s = self._clock.now()
        for job in [job for job in self._running.values() if now_s >= job.deadline_s and not job.overdue]:
            self._over_budget(job)
        finished, self._finished = self._finished, set()
        failed, self._failed = self._failed, set()
        return finished, failed

    def report(self) -> RankReport | None:
        """What the scheduler must hear; None when there is nothing."""
        off = None if self._said_off else self._off
        if not (self._ends or self._overdue or off or self._report_step):
            return None
        ends, self._ends = tuple(self._ends), []
        overdue, self._overdue = tuple(self._overdue), []
        self._said_off = self._off is not None
        return RankReport(step=self._step, ends=ends, overdue=overdue, off=off)

    def close(self, timeout_s: float) -> bool:
        """False: a copy still runs; keep the memory on both sides."""
        return self.copier is None or self.copier.close(timeout_s)

    # ---- inside

    def _store(self, order: StoreOrder) -> None:
        patience = 1.0 if order.at_once else STORE_PATIENCE
        running = _Running(order.job_id, self._clock.now() + patience * self._copy_budget_s)
        self._submit(running, Direction.STORE, order.blocks, order.frames)

    def _load(self, order: LoadOrder) -> None:
        running = _Running(order.job_id, self._clock.now() + order.budget_s, order.request_id)
        self._submit(running, Direction.RESTORE, order.blocks, order.frames)

    def _submit(self, running: _Running, direction: Direction, blocks: Sequence[int], frames: Sequence[int]) -> None:
        self._running[running.job_id] = running
        if self.copier is None:
            self._ended(running, _no_copy(running.job_id, f"this rank has no host memory: {self._off}"))
            return
        job = CopyJob(job_id=running.job_id, direction=direction, extents=extents(blocks, frames))
        try:
            self.copier.submit(job)
        except Exception as refusal:  # whatever it is, the engine serves on and the request is computed
            self._ended(running, _no_copy(running.job_id, f"{type(refusal).__name__}: {refusal}"))

    def _wait_for(self, job_ids: Sequence[int]) -> None:
        if self.copier is None:
            return
        # A copier whose device can wait for its copies in order need not be waited for on the host.
        ordered: Callable[[int], bool] | None = getattr(self.copier, "compute_waits_for", None)
        left = {i for i in job_ids if ordered is None or not ordered(i)}
        deadline_s = self._clock.now() + self._copy_budget_s
        self._hear()
        while left := {i for i in left if i in self._running and not self._running[i].overdue}:
            remaining_s = deadline_s - self._clock.now()
            if remaining_s <= 0:
                break
            self.copier.wait(remaining_s)
            self._hear()
        for job_id in left:
            self._over_budget(self._running[job_id])

    def _hear(self) -> None:
        if self.copier is None:
            return
        for done in self.copier.poll():
            if (running := self._running.get(done.job_id)) is not None:
                self._ended(running, _end(done))
                if done.error is not None and self._off is None:
                    self._off = _broken(self.copier)

    def _ended(self, running: _Running, end: JobEnd) -> None:
        del self._running[running.job_id]
        self._ends.append(end)
        if not running.overdue:
            self._tell(running, failed=end.error is not None)

    def _over_budget(self, running: _Running) -> None:
        if self.copier is None or self.copier.cancel(running.job_id):
            self._ended(running, _no_copy(running.job_id, "over its budget before it started", late=True))
            return
        running.overdue = True
        self._overdue.append(running.job_id)
        self._tell(running, failed=True)

    def _tell(self, running: _Running, *, failed: bool) -> None:
        if running.request_id is not None:
            self._finished.add(running.request_id)
            if failed:
                self._failed.add(running.request_id)


def _broken(copier: Any) -> str | None:
    """Why it will not copy again, from a copier that can tell."""
    stats = getattr(copier, "stats", None)
    reason: str | None = None if stats is None else stats().broken
    return reason


def _end(done: CopyDone) -> JobEnd:
    return JobEnd(job_id=done.job_id, error=done.error, copied_bytes=done.copied_bytes, submissions=done.submissions,
                  seconds=done.finished_s - done.started_s)


def _no_copy(job_id: int, error: str, *, late: bool = False) -> JobEnd:
    return JobEnd(job_id=job_id, error=error, copied_bytes=0, submissions=0, seconds=0.0, late=late)
