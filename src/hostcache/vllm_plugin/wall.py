"""Between vLLM and the two sides: no mistake of ours reaches vLLM, and vLLM gets what it was promised. Decides nothing.

vLLM waits for two things without a limit: the end of a load it was told to expect, and a block that somebody holds. So
both are written down here, apart from the code that may fail:

    a load      promised → ordered → ended by every rank; promised and not ordered: *unkept*, the workers say it failed
    its blocks  vLLM's own; while a copy that was given up may still write them, held here too (*late*)

Any exception of a side ends that side for good, with one line. What is under way then is still heard of, and nothing is
found or saved any more. The scheduler's calls are timed here as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hostcache.clock import Clock
from hostcache.tier import Copier
from hostcache.vllm_plugin import stats
from hostcache.vllm_plugin.scheduler_side import SchedulerSide
from hostcache.vllm_plugin.step_times import StepTimes
from hostcache.vllm_plugin.wire import JobEnd, Orders, RankReport
from hostcache.vllm_plugin.worker_side import WorkerSide

STEP_TIMES_EVERY_S = 2.0
"""Quantiles are made at most so often while there are requests."""

STILL_S = 0.5
"""How long a worker waits, once, for running copies when its side has failed."""

T = TypeVar("T")
U = TypeVar("U")


class PoolListener:
    """Sits in the pool's `metrics_collector` seat, the one place that is told of evictions while the block still has
    its hash, and hands everything on to whoever sat there before."""

    def __init__(self, inner: Any, wall: SchedulerWall) -> None:
        self._inner = inner
        self._wall = wall

    def on_block_allocated(self, block: Any) -> None:
        if self._inner is not None:
            self._inner.on_block_allocated(block)

    def on_block_accessed(self, block: Any) -> None:
        self._wall.block_used(block)
        if self._inner is not None:
            self._inner.on_block_accessed(block)

    def on_block_evicted(self, block: Any) -> None:
        if block.block_hash is not None:
            self._wall.block_evicted(block)
        if self._inner is not None:
            self._inner.on_block_evicted(block)

    def reset(self) -> None:
        self._wall.pool_reset()
        if self._inner is not None:
            self._inner.reset()

    def drain_events(self) -> Any:
        return [] if self._inner is None else self._inner.drain_events()


@dataclass(slots=True, eq=False)
class _Load:
    """Ordered of the workers. `left`: ranks that have not ended it. `late`: its blocks are held here."""

    blocks: tuple[int, ...]
    left: int
    late: bool = False


class SchedulerWall:
    """All that vLLM's scheduler calls. `side` None: it failed, and `why_off` says how. `alarm` is called while the
    exception is being handled, so that it can show where it came from."""

    def __init__(self, side: SchedulerSide, *, clock: Clock, say: Callable[[str], None],
                 alarm: Callable[[], None] = lambda: None) -> None:
        self.side: SchedulerSide | None = side
        self.why_off: str | None = None
        self.times = StepTimes()
        self._clock = clock
        self._say = say
        self._alarm = alarm
        self._ranks = side.ranks
        self._pool: Any = None
        self._promised: dict[str, None] = {}
        self._loads: dict[int, _Load] = {}
        self._changes = stats.Changes()
        self._told_s = self._times_told_s = float("-inf")
        self._withdrawn: list[tuple[bool, bytes]] = []

    # ---- the pool

    def bind(self, pool: Any) -> None:
        self._pool = pool
        pool.metrics_collector = PoolListener(pool.metrics_collector, self)
        self._call(lambda side: side.bind(pool), None)

    def block_evicted(self, block: Any) -> None:
        """Called for every block: not timed, and without a detour."""
        try:
            if self.side is not None:
                self.side.block_evicted(block)
        except Exception as mistake:
            self._fail(mistake)

    def block_used(self, block: Any) -> None:
        try:
            if self.side is not None:
                self.side.block_used(block)
        except Exception as mistake:
            self._fail(mistake)

    def pool_reset(self) -> None:
        self._call(lambda side: side.pool_reset(), None)

    def reset(self) -> bool:
        return self._call(lambda side: side.reset(), True)

    # ---- a request

    def match(self, request: Any, local_tokens: int) -> int | None:
        return self._call(lambda side: side.match(request, local_tokens), 0)

    def allocated(self, request: Any, block_ids: Sequence[int], external_tokens: int) -> None:
        if external_tokens:
            self._promised[request.request_id] = None
        self._call(lambda side: side.allocated(request, block_ids, external_tokens), None)

    def finished(self, request: Any, *, aborted: bool) -> dict[str, Any] | None:
        told = self._call(lambda side: side.finished(request, aborted=aborted), None)
        if self.side is not None and not self.side.live_requests:
            self.times.rest()
        return told

    # ---- a step

    def build(self, output: Any) -> Orders:
        """The orders of the step that vLLM has just planned, and which of its promises are not kept."""
        orders = self._call(lambda side: side.build(output), Orders(step=0))
        promised, self._promised = self._promised, {}
        for load in orders.loads:
            promised.pop(load.request_id, None)
            self._loads[load.job_id] = _Load(load.blocks, self._ranks)
        self.times.step(self._clock.now(), len(output.num_scheduled_tokens))
        return replace(orders, unkept=tuple(promised)) if promised else orders

    def heard(self, reports: Sequence[RankReport]) -> None:
        for report in reports:
            for job_id in report.overdue:
                load = self._loads.get(job_id)
                if load is not None and not load.late:
                    load.late = True
                    self._pool.touch([self._pool.blocks[i] for i in load.blocks])
            for end in report.ends:
                self._rank_ended(end.job_id)
        self._call(lambda side: side.heard(reports), None)

    def _rank_ended(self, job_id: int) -> None:
        load = self._loads.get(job_id)
        if load is None:
            return
        load.left -= 1
        if not load.left:
            del self._loads[job_id]
            if load.late:
                self._pool.free_blocks([self._pool.blocks[i] for i in load.blocks])

    def take_events(self) -> list[tuple[bool, bytes]]:
        """As the side tells them; when it failed, once, that nothing can be restored any more."""
        if self.side is None:
            withdrawn, self._withdrawn = self._withdrawn, []
            return withdrawn
        return self._call(lambda side: side.take_events(), self._withdrawn)

    def take_statistics(self) -> dict[str, float]:
        """What has changed since it was last worth telling: a record of `stats.Changes`."""
        return self._call(self._statistics, {}) if self.side is not None else self._changes.nothing_left()

    def _statistics(self, side: SchedulerSide) -> dict[str, float]:
        now_s = self._clock.now()
        told: dict[str, float] = {}
        if side.worth_telling(now_s, self._told_s):
            side.dirty, self._told_s = False, now_s
            told = self._changes.take(stats.metrics(side))
        at_rest = not side.live_requests
        if self.times.fresh and (at_rest or now_s - self._times_told_s >= STEP_TIMES_EVERY_S):
            self._times_told_s = now_s
            told |= self._changes.take(stats.step_metrics(self.times.report()))
        return told

    @property
    def busy(self) -> bool:
        """vLLM must go on making steps, whether or not a request needs them."""
        if self.side is None:
            return bool(self._promised) or any(not load.late for load in self._loads.values())
        return self._call(lambda side: side.busy, True)

    # ---- what is held

    @property
    def late_blocks(self) -> int:
        """Kept from the pool now, because a copy that was given up may still write them."""
        return sum(len(load.blocks) for load in self._loads.values() if load.late)

    @property
    def held(self) -> int:
        """What is zero when nothing is under way: pins, reservations, requests, jobs, blocks."""
        return len(self._promised) + len(self._loads) + (0 if self.side is None else self.side.pins)

    # ---- inside

    def _call(self, call: Callable[[SchedulerSide], T], otherwise: U) -> T | U:
        if (side := self.side) is None:
            return otherwise
        begun_s = self._clock.now()
        try:
            return call(side)
        except Exception as mistake:
            self._fail(mistake)
            return otherwise
        finally:
            self.times.spend(self._clock.now() - begun_s)

    def _fail(self, mistake: Exception) -> None:
        self._alarm()
        side, self.side = self.side, None
        if side is None:  # it failed once more on its way out
            return
        self.why_off = bug(mistake)
        self._say(f"hostcache: the tier is off: {self.why_off}")
        with contextlib.suppress(Exception):
            self._withdrawn += [(False, block_hash) for block_hash in side.told]


class WorkerWall:
    """All that vLLM's worker calls, in the order of its step: `before_forward`, `after_forward`, `finished`, `report`.

    Every load is told as finished exactly once. When the side fails, those that are under way are told as failed at
    once; the blocks of copies that cannot be stopped are reported overdue until the copier has come to rest.
    """

    def __init__(self, side: WorkerSide, *, clock: Clock, say: Callable[[str], None],
                 alarm: Callable[[], None] = lambda: None) -> None:
        self.side = side
        self._clock = clock
        self._say = say
        self._alarm = alarm
        self._why_off: str | None = None
        self._open: set[int] = set()
        """jobs whose end was not reported"""
        self._owed: set[str] = set()
        """requests that wait for a load of this rank"""
        self._failing: set[str] = set()
        self._ends: list[JobEnd] = []
        self._overdue: list[int] = []
        self._moving: set[int] = set()
        """jobs of a side that failed, whose copies may still run"""
        self._copier: Copier | None = None
        self._step = 0

    def before_forward(self, orders: Orders) -> None:
        self._step = orders.step
        self._open.update(store.job_id for store in orders.stores)
        self._open.update(load.job_id for load in orders.loads)
        self._owed.update(load.request_id for load in orders.loads)
        self._failing.update(orders.unkept)
        self._call(lambda: self.side.before_forward(orders), None)

    def after_forward(self, orders: Orders) -> None:
        loads = [load for load in orders.loads if load.job_id in self._open]
        self._call(lambda: self.side.after_forward(loads), None)

    def finished(self) -> tuple[set[str], set[str]]:
        """Requests whose load is over since the last call, and those of them whose load failed."""
        nobody: tuple[set[str], set[str]] = (set(), set())
        told, failed = self._call(self.side.finished, nobody)
        finished = told & self._owed
        self._owed -= finished
        failing, self._failing = self._failing, set()
        if self._moving and _at_rest(self._copier, 0.0):
            self._end(self._moving)
            self._moving, self._copier = set(), None
        return finished | failing, (failed & finished) | failing

    def report(self) -> RankReport | None:
        report = self._call(self.side.report, None)
        if self._ends or self._overdue:
            report = report or RankReport(step=self._step)
            report = replace(report, ends=(*report.ends, *self._ends), overdue=(*report.overdue, *self._overdue))
            self._ends, self._overdue = [], []
        if report is not None:
            self._open.difference_update(end.job_id for end in report.ends)
        return report

    def close(self, timeout_s: float) -> bool:
        return self._call(lambda: self.side.close(timeout_s), False) and _at_rest(self._copier, timeout_s)

    # ---- inside

    def _call(self, call: Callable[[], T], otherwise: U) -> T | U:
        try:
            return call()
        except Exception as mistake:
            self._fail(mistake)
            return otherwise

    def _fail(self, mistake: Exception) -> None:
        self._alarm()
        if self._why_off is not None:
            return
        self._why_off = bug(mistake)
        self._say(f"hostcache: this rank runs without the tier: {self._why_off}")
        copier = self.side.copier
        left = {job_id for job_id in self._open if not _cancelled(copier, job_id)}
        if not _at_rest(copier, STILL_S):
            self._moving, self._copier = left, copier
            self._overdue += sorted(left)
        self._end(self._open - self._moving)
        self._failing |= self._owed
        self._owed.clear()
        self.side = WorkerSide(copier=None, clock=self._clock, copy_budget_s=0.0, off=self._why_off)

    def _end(self, job_ids: Iterable[int]) -> None:
        self._ends += [
            JobEnd(job_id=job_id, error=self._why_off, copied_bytes=0, submissions=0, seconds=0.0)
            for job_id in sorted(job_ids)
        ]
        self._open.difference_update(job_ids)


def _at_rest(copier: Copier | None, timeout_s: float) -> bool:
    """It takes no more jobs, and none of its copies can move a byte."""
    if copier is None:
        return True
    try:
        return copier.close(timeout_s)
    except Exception:
        return False


def _cancelled(copier: Copier | None, job_id: int) -> bool:
    try:
        return copier is None or copier.cancel(job_id)
    except Exception:
        return False


def bug(mistake: Exception) -> str:
    """Why the tier is off, in one line."""
    text = " ".join(str(mistake).split())
    return f"a bug: {type(mistake).__name__}{': ' if text else ''}{text}; please report it"
