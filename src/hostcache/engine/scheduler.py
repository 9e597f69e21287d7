"""Who runs next: admission with deferral, chunked prefill beside decode, growth, preemption, restores before prefill.

Moves requests between their states and decides on pages through `DeviceCache`; knows no tensors, samples nothing.

Why it cannot lock up: admission takes all pages of a prompt at once; a decode that finds none preempts the request that
was admitted last, itself if need be, so the oldest always gets on; every wait for a copy has a deadline.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from enum import Enum, auto

from hostcache.engine.audit import TokenAudit
from hostcache.engine.banks import Kind
from hostcache.engine.device import CacheChoices, DeviceCache, Room
from hostcache.engine.live import Live, State
from hostcache.engine.restores import Ended, Restore, Restores
from hostcache.errors import InvariantBroken
from hostcache.tier import Accounting, HostCache, Match, Reason
from hostcache.tier.copying import CopyDone


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRow:
    """The next `count` tokens of a request go through the model. `prefill`: they are not one decode step."""

    live: Live
    count: int
    prefill: bool

    @property
    def samples(self) -> bool:
        """Do its logits give the next token?"""
        return self.count == self.live.todo


@dataclass(slots=True)
class SchedulerCounters:
    deferred_admissions: int = 0
    preemptions: int = 0
    prefill_holds: int = 0
    """requests held back for another's restore, each once"""
    prefix_waits: int = 0
    """requests held back while another computes their next page, each once"""


class _Verdict(Enum):
    ADMITTED = auto()
    HELD = auto()
    SOON = auto()
    """room is on its way: evictions wait for their write-backs"""
    DEFERRED = auto()


class Scheduler:
    def __init__(self, *, device: DeviceCache, restores: Restores, tier: HostCache, accounting: Accounting, slots: int,
                 prefill_batch_tokens: int, page_tokens: int, audit: TokenAudit | None = None) -> None:
        self.slots = slots
        self.counters = SchedulerCounters()
        self._device = device
        self._restores = restores
        self._tier = tier
        self._accounting = accounting
        self._batch_tokens = prefill_batch_tokens
        self._page_tokens = page_tokens
        self._audit = audit
        self._queue: list[Live] = []
        """In order of submission, whatever comes back to it."""
        self._active: dict[str, Live] = {}
        """RESTORING and RUNNING, in order of admission."""
        self._admissions = 0
        pool = device.pages.count
        self._least_reach = max(pool // 16, 2 * prefill_batch_tokens // page_tokens)
        self._most_reach = max(1, pool // 4)
        self._usual_pages = 0.0
        """The most pages an admission has taken lately: it decays by a tenth with each."""

    # ---- a step

    def plan(self, reports: list[CopyDone], now_s: float) -> list[PlannedRow]:
        """The rows of this step, after everything that decides on them. `reports`: restores that ended."""
        for ended in self._restores.settle(reports, now_s):
            self._end_restore(ended)
        self._grow(now_s)
        self._admit(now_s)
        return self._rows()

    def wrote(self, row: PlannedRow) -> None:
        """A forward pass wrote the row's tokens: publish the pages it completed."""
        live, page_tokens = row.live, self._page_tokens
        before = live.written // page_tokens
        live.written += row.count
        whole = live.written // page_tokens
        if whole > len(live.chain):
            live.chain = live.chain.extend(live.tokens[len(live.chain) * page_tokens : whole * page_tokens])
        if not live.stale:
            self._device.publish(live.chain, live.pages, before, whole)
            if self._audit is not None:
                self._audit.note(live.chain.keys, live.tokens, before, whole)

    def retain_prompt(self, live: Live, now_s: float) -> None:
        """Its whole prompt is written."""
        if not live.prompt_retained:
            live.prompt_retained = True
            self._retain(Kind.PROMPT, live, live.prompt_tokens // self._page_tokens, live.choices(), now_s)

    def finish(self, live: Live, now_s: float) -> None:
        """Its turn is complete: what is written of it stays as a snapshot."""
        self._retain(Kind.TURN, live, live.written // self._page_tokens, live.choices(), now_s)
        self.drop(live)

    # ---- coming and going

    def enqueue(self, live: Live) -> None:
        insort(self._queue, live, key=lambda other: other.order)

    def drop(self, live: Live) -> None:
        """It is over, in whatever state it is: pages and pins are given back."""
        if live.state is State.WAITING:
            self._queue.remove(live)
            self._device.release(live.claim)
            live.claim = []
        elif live.state is not State.ENDED:
            lost: set[int] = set()
            if live.restore is not None:
                ended = self._restores.give_up(live.restore, Reason.ABORTED)
                lost = set(ended.restore.pages) if ended.pages_lost else lost
                live.restore = None
            self._device.release([page for page in live.pages if page not in lost])
            live.pages = []
            del self._active[live.request.request_id]
        live.state = State.ENDED

    def forget_caches(self) -> None:
        """Before the caches are emptied: restores end, and what runs leaves nothing behind."""
        for restore in self._restores.live:
            self._end_restore(self._restores.give_up(restore, Reason.FORGOTTEN))
        for live in [*self._active.values(), *self._queue]:
            self._device.release(live.claim)
            live.claim = []
        for live in self._active.values():
            live.stale = True

    # ---- what it looks like

    @property
    def active(self) -> list[Live]:
        return list(self._active.values())

    @property
    def waiting(self) -> list[Live]:
        return list(self._queue)

    @property
    def reach_pages(self) -> int:
        """So many free pages should be had without waiting: what an admission usually takes, and what waits now. The
        snapshots that would go for them are within reach of eviction."""
        asked = 0
        for live in self._queue[: self.slots]:
            asked += live.pages_to_start if live.wanted_pages is None else live.wanted_pages
        reach = min(max(self._least_reach, round(self._usual_pages)), self._most_reach)
        return min(self._device.pages.count, reach + asked)

    def check(self) -> None:
        if len(self._active) > self.slots:
            raise InvariantBroken(f"{len(self._active)} requests are active in {self.slots} slots")
        orders = [live.order for live in self._queue]
        if orders != sorted(orders) or any(live.state is not State.WAITING or live.pages for live in self._queue):
            raise InvariantBroken("the queue is out of order, or a waiting request holds pages")
        for live in self._active.values():
            name = live.request.request_id
            if (live.state is State.RESTORING) != (live.restore is not None):
                raise InvariantBroken(f"request {name} is {live.state.value} with restore {live.restore}")
            if len(set(live.pages)) != len(live.pages) or live.written > len(live.pages) * self._page_tokens:
                raise InvariantBroken(f"request {name} wrote {live.written} tokens to {live.pages}")

    # ---- growth and preemption

    def _grow(self, now_s: float) -> None:
        """A page for every decode that stands at the end of its last one; oldest first."""
        for live in list(self._active.values()):
            while live.state is State.RUNNING and live.written == len(live.pages) * self._page_tokens:
                room = self._device.make_room(1, now_s)
                if room is Room.READY:
                    live.pages += self._device.pages.allocate(1, after=live.pages[-1])
                elif room is Room.COMING or not self._give_way(live, now_s):
                    break

    def _give_way(self, live: Live, now_s: float) -> bool:
        """Free something for `live` although no snapshot is left: False when it can only wait."""
        claims = [waiting for waiting in self._queue if waiting.claim]
        if claims:
            for waiting in claims:
                self._device.release(waiting.claim)
                waiting.claim = []
            return True
        youngest = max(self._active.values(), key=lambda other: other.admitted)
        if youngest.state is State.RESTORING or len(self._active) == 1:
            return False
        self._preempt(youngest, now_s)
        return True

    def _preempt(self, live: Live, now_s: float) -> None:
        """Back to the queue. Its whole pages stay as a snapshot, so that they are written back before they go."""
        self.counters.preemptions += 1
        kind = Kind.TURN if live.answer_tokens else Kind.PROMPT
        mine = live.choices()
        choices = CacheChoices(store_pages=mine.store_pages, expected_return=True)
        self._retain(kind, live, live.written // self._page_tokens, choices, now_s)
        live.recovering = True
        self._requeue(live, live.pages)

    def _requeue(self, live: Live, pages: list[int]) -> None:
        self._device.release(pages)
        live.pages = []
        live.written = 0
        live.recovered = (0, 0)
        live.wanted_pages = None
        live.stale = False  # it starts anew, from what the caches hold now
        live.state = State.WAITING
        del self._active[live.request.request_id]
        self.enqueue(live)

    def _retain(self, kind: Kind, live: Live, whole: int, choices: CacheChoices, now_s: float) -> None:
        if not live.stale:
            self._device.retain(kind, live.chain.prefix(whole), live.pages[:whole], choices, now_s)

    # ---- admission

    def _admit(self, now_s: float) -> None:
        for live in list(self._queue):
            if len(self._active) >= self.slots:
                return
            verdict = self._try_admit(live, now_s)
            if verdict is _Verdict.DEFERRED and not live.deferred:
                live.deferred = True
                self.counters.deferred_admissions += 1
            if verdict in (_Verdict.SOON, _Verdict.DEFERRED):
                return

    def _try_admit(self, live: Live, now_s: float) -> _Verdict:
        claimed = live.claim
        if self._audit is not None:
            live.agreed_pages = self._audit.agreed(live.chain.keys, live.tokens)
        pages = self._device.match(live.chain.keys[: live.loadable_pages])
        self._device.release(claimed)
        live.claim = []
        if self._is_coming(live, len(pages)):
            self._device.release(pages)
            return _Verdict.HELD
        live.wanted_pages = live.pages_to_start - len(pages)
        # One page to spare for each that runs: it may be the next to want one.
        room = self._device.make_room(live.wanted_pages + len(self._active), now_s)
        if room is Room.COMING:
            live.claim = pages
            return _Verdict.SOON
        if room is Room.NONE:
            self._device.release(pages)
            return _Verdict.DEFERRED
        self._take_slot(live, pages, now_s)
        return _Verdict.ADMITTED

    def _is_coming(self, live: Live, have: int) -> bool:
        """Is its next page being computed by another request, which is before it anyway, or restored for one? It waits
        for one restore at most. What is on the device never waits."""
        if have >= live.loadable_pages:
            return False
        key = live.chain.keys[have]
        restore = self._restores.coming(key)
        if restore is not None:
            if live.waits_for is None and live.loads_pages != 0:
                live.waits_for = restore
                self.counters.prefill_holds += 1
            return live.waits_for == restore
        computed = any(
            other.state is State.RUNNING and not other.stale and other.written <= have * self._page_tokens
            and have < len(other.chain) and other.chain.keys[have] == key for other in self._active.values())
        if computed and not live.shared:
            live.shared = True
            self.counters.prefix_waits += 1
        return computed

    def _take_slot(self, live: Live, matched: list[int], now_s: float) -> None:
        have = len(matched)
        if live.account is None:
            live.account = self._accounting.open(
                live.request.request_id, live.chain.prefix(live.prompt_tokens // self._page_tokens), live.prompt_tokens)
        fresh = self._device.pages.allocate(live.pages_to_start - have, after=matched[-1] if matched else None)
        self._queue.remove(live)
        self._usual_pages = max(len(fresh), 0.9 * self._usual_pages)
        self._admissions += 1
        live.admitted = self._admissions
        live.pages = matched + fresh
        live.written = have * self._page_tokens
        live.state = State.RUNNING
        self._active[live.request.request_id] = live
        self._device.served(matched)
        if live.recovering:
            live.recovered = (have, 0)
        else:
            live.device_pages = have
        restored = self._start_restore(live, have, fresh, now_s)
        self._tier.touch(live.chain, have + restored)

    def _start_restore(self, live: Live, have: int, fresh: list[int], now_s: float) -> int:
        """Returns how many pages behind the first `have` are on their way from the host."""
        limit = live.loadable_pages
        if have >= limit or not live.may_restore:
            return 0
        if self._restores.coming(live.chain.keys[have]) is not None:
            self._miss(live, Reason.NOT_READY)  # it waited once; the same pages are not copied twice at a time
            return 0
        offer = self._restores.offer(live.chain, have, limit, max_pages=live.loads_pages)
        if offer.reason is not None:
            self._miss(live, offer.reason)
        if offer.match is None:
            return 0
        return self._begin_restore(live, offer.match, fresh, now_s)

    def _begin_restore(self, live: Live, match: Match, fresh: list[int], now_s: float) -> int:
        restore = self._restores.begin(live.request.request_id, match, fresh, now_s)
        if not isinstance(restore, Restore):
            self._miss(live, restore)
            return 0
        live.restore = restore
        live.state = State.RESTORING
        return len(restore.pages)

    def _end_restore(self, ended: Ended) -> None:
        restore = ended.restore
        live = self._active[restore.request_id]
        live.restore = None
        live.state = State.RUNNING
        if ended.reason is None:
            first, count = restore.reservation.start, len(restore.pages)
            live.written = (first + count) * self._page_tokens
            self._device.publish(live.chain, live.pages, first, first + count)
            if live.recovering:
                live.recovered = (live.recovered[0], count)
            else:
                live.host_pages = count
            return
        self._miss(live, ended.reason)
        live.may_restore = False
        if ended.pages_lost:
            lost = set(restore.pages)
            self._requeue(live, [page for page in live.pages if page not in lost])

    def _miss(self, live: Live, reason: Reason) -> None:
        if live.account is not None and live.report is None and not live.recovering:
            live.account.miss(reason)

    # ---- rows

    def _rows(self) -> list[PlannedRow]:
        rows = []
        budget = self._batch_tokens
        for live in self._active.values():
            if live.state is not State.RUNNING:
                continue
            if live.answer_tokens and live.todo == 1:
                if live.written < len(live.pages) * self._page_tokens:
                    rows.append(PlannedRow(live=live, count=1, prefill=False))
                continue
            count = min(live.todo, budget)
            if count < live.todo:  # end on a page border where that is possible
                count = max(0, (live.written + count) // self._page_tokens * self._page_tokens - live.written) or count
            if count:
                budget -= count
                rows.append(PlannedRow(live=live, count=count, prefill=True))
        return rows
