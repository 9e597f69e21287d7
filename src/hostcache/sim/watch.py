"""Independent books of a run: what a fleet's tier must never do, told from outside of it. Drives nothing.

The tier's own `check()` proves that its tables agree with each other. This proves what they are for: that no copy
touches a frame of another, that a restored page is the right one, that a late word changes nothing, that every request
ends once, is counted once and was not failed by the tier, and that no wait exceeds its budget.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import numpy as np

from hostcache.errors import InvariantBroken
from hostcache.frontdoor import AdmissionQueue, FrontDoorStats, Ticket
from hostcache.sim.memory import Memory, Pages, Snapshot
from hostcache.sim.requests import How, Live, Outcome
from hostcache.sim.shape import FleetShape
from hostcache.tier import (
    Accounting,
    Clean,
    CopyDone,
    CopyJob,
    Direction,
    Drop,
    HostCache,
    KeyChain,
    PageKey,
    Reason,
    RequestReport,
    Reservation,
    Wait,
    check_balance,
)

_SLACK_S = 1e-9
_MOST_SEEN = 1 << 13
"""Pages seen beyond which the bound is no longer counted a second time: the watch must not grow with a long run."""
_LEFT = (Reason.EVICTED, Reason.NOT_WRITTEN, Reason.OPTED_OUT, Reason.FAILED, Reason.FORGOTTEN)
"""Why a page may be in no tier."""


class Watched(Protocol):
    """What is looked at of a fleet."""

    shape: FleetShape
    cache: HostCache
    accounting: Accounting
    memory: Memory
    door: AdmissionQueue
    queue: deque[Live]
    active: dict[int, Live]
    waiting: dict[Ticket, Live]
    stores: dict[int, Pages]
    restores: dict[int, Live]
    late: dict[int, Pages]


@dataclass(slots=True)
class _Copy:
    direction: Direction
    keys: Sequence[PageKey]
    frames: Pages
    void: bool = False
    """whatever it brings belongs to weights that are gone"""


@dataclass(slots=True)
class _Open:
    """What is known of a request when its account is opened. `held[i]`: what the tier said of page i of the bound."""

    held: list[Reason | None] | None
    exact: bool
    """the history could tell then"""
    missed: Reason | None = None


class Watch:
    """Raises InvariantBroken at the event that broke something."""

    def __init__(self, fleet: Watched) -> None:
        self._fleet = fleet
        self._frames = fleet.shape.tier.frames
        self._stands = np.full(self._frames, None, dtype=object)
        """By frame: the key of the page whose copy ended in it, until another copy into it begins."""
        self._whole = np.zeros(self._frames, dtype=bool)
        self._writing = np.zeros(self._frames, dtype=np.int64)
        """By frame: the job that may still write it, 0 for none."""
        self._reading = np.zeros(self._frames, dtype=np.int32)
        self._copies: dict[int, _Copy] = {}
        self._open: set[int] = set()
        self._accounts: dict[int, _Open] = {}
        self._seen: set[PageKey] | None = set()
        self._requests = self._prompt_tokens = self._served_tokens = self._bound_tokens = 0
        self._recomputed: Counter[Reason] = Counter()
        self._ended: Counter[How] = Counter()
        self._door: FrontDoorStats | None = None
        self.evictions = self.restores = self.faults = 0
        self.waits = self.drops = self.late_stores = self.late_restores = self.repeats = self.joins = 0
        self.evicted_pages = self.lost_pages = 0
        """Pages of evicted snapshots that left the device, and those of them without a host copy."""
        self.restore_s = self.saved_s = 0.0
        """Copy time of the restores that were used, and the prefill time they saved."""

    # ---- requests

    def sent(self, number: int) -> None:
        self._open.add(number)

    def ended_request(self, outcome: Outcome) -> None:
        if outcome.number not in self._open:
            raise InvariantBroken(f"request {outcome.number} ended twice")
        self._open.discard(outcome.number)
        self._accounts.pop(outcome.number, None)
        self._ended[outcome.how] += 1

    def published(self, chain: KeyChain, start: int, stop: int) -> None:
        """These pages exist now."""
        if self._seen is not None:
            self._seen.update(chain.keys[start:stop])
            if len(self._seen) > _MOST_SEEN:
                self._seen = None

    def forgot(self) -> None:
        """Nothing that was seen may be served any more."""
        if self._seen is not None:
            self._seen.clear()
        self._stands[:] = None
        self._whole &= self._reading > 0
        for copy in self._copies.values():
            copy.void = True

    def distrusted(self, keys: Sequence[PageKey]) -> None:
        """What is on the host of these pages may never be restored."""
        self._stands[[stands in keys for stands in self._stands.tolist()]] = None

    def opened(self, live: Live) -> None:
        """Its account is opened: what an infinite cache would serve is counted a second time."""
        if live.number in self._accounts:
            raise InvariantBroken(f"the account of request {live.number} was opened twice")
        held = None
        if self._seen is not None:
            keys = live.turn.chain.keys[: (live.turn.prompt_tokens - 1) // self._fleet.shape.page]
            bound = sum(1 for _ in takewhile(self._seen.__contains__, keys))
            held = self._fleet.cache.held(keys[:bound])
        self._accounts[live.number] = _Open(held, self._fleet.accounting.stats().bound_exact)

    def placed(self, live: Live, pages: Pages) -> None:
        """It is served these pages of the device: every page must be what its tokens say, under its identity."""
        memory = self._fleet.memory
        if memory.named(pages) != list(live.turn.chain.keys[: len(pages)]) or (
                memory.prints[pages] != live.turn.prints[: len(pages)]).any():
            raise InvariantBroken(f"request {live.number} is served device pages of another conversation")

    def missed(self, live: Live, reason: Reason) -> None:
        """The fleet does not use what the host holds for it."""
        account = self._accounts[live.number]
        account.missed = account.missed or reason

    def settled(self, live: Live, report: RequestReport) -> None:
        check_balance(report)
        account = self._accounts[live.number]
        if report.prompt_tokens != live.turn.prompt_tokens:
            raise InvariantBroken(f"request {live.number} of {live.turn.prompt_tokens} tokens is booked with "
                                  f"{report.prompt_tokens}")
        if account.exact and Reason.FORGOTTEN in report.recomputed:
            raise InvariantBroken(f"request {live.number} had to compute {report.recomputed[Reason.FORGOTTEN]} tokens "
                                  "and nobody knows why: a page left without a word to the history")
        served = report.device_tokens + report.host_tokens
        if account.held is not None:
            self._check_bound(live.number, account, report, served // self._fleet.shape.page)
        self._requests += 1
        self._prompt_tokens += report.prompt_tokens
        self._served_tokens += served
        self._bound_tokens += report.bound_tokens
        self._recomputed.update(report.recomputed)

    def _check_bound(self, number: int, account: _Open, report: RequestReport, served: int) -> None:
        held = account.held
        assert held is not None
        bound = max(len(held), served) * self._fleet.shape.page
        if report.bound_tokens != bound:
            raise InvariantBroken(f"request {number}: an infinite cache would have served {bound} tokens, "
                                  f"the books say {report.bound_tokens}")
        if served >= len(held) or Reason.ABORTED in report.recomputed:
            return
        there = held[served]
        reasons = (account.missed or Reason.NOT_READY,) if there is None else (
            _LEFT if there is Reason.FORGOTTEN else (there,))
        if report.first_miss is None or report.first_miss[0] not in reasons:
            named = report.first_miss and report.first_miss[0].value
            raise InvariantBroken(f"request {number} had to compute page {served} because of {reasons[0].value}, "
                                  f"the books say {named}")

    # ---- copies

    def submitted(self, job: CopyJob, keys: Sequence[PageKey], frames: Pages) -> None:
        """A copy of these pages from or to these frames begins."""
        name = f"job {job.job_id} ({job.direction.value})"
        if len(frames) and not 0 <= int(frames.min()) <= int(frames.max()) < self._frames:
            raise InvariantBroken(f"{name} uses frame {int(frames.max())}; the quota is {self._frames} frames")
        if (writers := self._writing[frames]).any():
            at = int(writers.argmax())
            raise InvariantBroken(f"{name} uses frame {frames[at]}, which job {writers[at]} may still write")
        if job.direction is Direction.STORE:
            if self._reading[frames].any():
                raise InvariantBroken(f"{name} writes a frame that a restore may still read")
            self._writing[frames] = job.job_id
            self._stands[frames] = None
            self._whole[frames] = False
        else:
            if self._stands[frames].tolist() != list(keys):
                raise InvariantBroken(f"{name} restores pages from frames in which others, or none, were stored")
            self._reading[frames] += 1
        self._copies[job.job_id] = _Copy(job.direction, keys, frames)

    def ended(self, job_id: int) -> _Copy | None:
        """A copy is over or will never run. None: it was before."""
        copy = self._copies.pop(job_id, None)
        if copy is not None:
            if copy.direction is Direction.STORE:
                self._writing[copy.frames] = 0
            else:
                self._reading[copy.frames] -= 1
        return copy

    @contextmanager
    def settling(self, done: CopyDone) -> Iterator[None]:
        """Around what the fleet does with a completion: one that nobody waits for any more must change nothing."""
        fleet = self._fleet
        self.faults += done.error is not None
        awaited = done.job_id in fleet.stores or done.job_id in fleet.restores
        copy = self.ended(done.job_id)
        if awaited:
            if copy is None:
                raise InvariantBroken(f"job {done.job_id} is awaited although its end was heard of")
            if done.error is None and copy.direction is Direction.STORE and not copy.void:
                self._stands[copy.frames] = copy.keys
                self._whole[copy.frames] = True
            yield
            return
        self.faults += 1
        self.repeats += copy is None
        before = fleet.cache.stats()
        yield
        after = fleet.cache.stats()
        if (before.resident_pages < after.resident_pages or before.live_stores != after.live_stores
                or before.counters.stores_completed != after.counters.stores_completed
                or before.counters.restores != after.counters.restores
                or (copy is None and before.free_frames != after.free_frames)):
            raise InvariantBroken(f"the completion of job {done.job_id} came late or twice and was taken for a new one")

    @contextmanager
    def making_room(self) -> Iterator[None]:
        """Around what may evict from the host: tails go before heads, so nothing may lose the page before it."""
        before = self._fleet.cache.stats().counters.orphaned_pages
        yield
        orphans = self._fleet.cache.stats().counters.orphaned_pages - before
        if orphans:
            raise InvariantBroken(f"to make room on the host {orphans} pages lost the page before them: "
                                  "a head was evicted before its tail")

    def restored(self, live: Live, reservation: Reservation, done: CopyDone) -> None:
        """A restore is about to be used: every page must be what its tokens say."""
        fleet = self._fleet
        span = slice(reservation.start, reservation.start + reservation.pages)
        wrong = np.flatnonzero(fleet.memory.prints[live.pages[span]] != live.turn.prints[span])
        if len(wrong):
            raise InvariantBroken(f"request {live.number}: page {reservation.start + int(wrong[0])} was restored wrong "
                                  f"({len(wrong)} of {reservation.pages})")
        self.restores += 1
        self.restore_s += done.finished_s - done.started_s
        saved = fleet.shape.costs.prefill_s(live.hit_tokens, live.promised)
        if saved <= 0:
            raise InvariantBroken(f"request {live.number}: a restore of {reservation.pages} pages saves no time")
        self.saved_s += saved

    def evicted(self, victim: Snapshot, answer: Clean | Wait | Drop) -> None:
        if isinstance(answer, Wait):
            raise InvariantBroken(f"snapshot {victim.number} is asked to wait twice")
        self.evictions += 1
        self.evicted_pages += len(victim.pages) - self._fleet.memory.stays(victim)
        if isinstance(answer, Drop):
            self.drops += 1
            self.lost_pages += answer.pages

    def waited(self, seconds: float, budget_s: float) -> None:
        self.waits += 1
        if seconds > budget_s + _SLACK_S:
            raise InvariantBroken(f"the engine waited {seconds} s for a store; its budget is {budget_s} s")

    # ---- proof

    def check(self) -> None:
        """Everything there is to check. O(pages)."""
        fleet = self._fleet
        fleet.cache.check()
        fleet.memory.check(
            [live.pages for live in fleet.active.values()],
            [*fleet.stores.values(), *fleet.late.values(), *map(_restoring_pages, fleet.restores.values())])
        self._check_books()
        self._check_door()
        self._check_tier()

    def _check_books(self) -> None:
        books = self._fleet.accounting.stats()  # balanced where it is the sum of reports that were
        if (books.requests, books.prompt_tokens, books.device_tokens + books.host_tokens, books.bound_tokens) != (
                self._requests, self._prompt_tokens, self._served_tokens, self._bound_tokens):
            raise InvariantBroken(f"the books count {books.requests} requests of {books.prompt_tokens} tokens, bound "
                                  f"{books.bound_tokens}; settled were {self._requests} of {self._prompt_tokens}, "
                                  f"bound {self._bound_tokens}")
        if books.recomputed != self._recomputed:
            raise InvariantBroken("the books' reasons are not the sum of those of the requests")

    def _check_door(self) -> None:
        fleet = self._fleet
        door = fleet.door.stats()
        if door != self._door:
            self._door = door
            fleet.door.check()
        inside = len(fleet.waiting) + len(fleet.queue) + len(fleet.active)
        handed = 0
        if fleet.shape.hand_off:
            handed = sum(live.account is not None for live in (*fleet.queue, *fleet.active.values()))
        counted = door.running + door.waiting + handed
        if counted != inside or inside != len(self._open):
            raise InvariantBroken(f"{counted} are in the door or through it, {inside} in the fleet, "
                                  f"{len(self._open)} of those sent have not ended")
        if door.arrived != self._ended.total() + inside:
            raise InvariantBroken(f"{door.arrived} requests came, {self._ended.total()} ended and {inside} are inside")

    def _check_tier(self) -> None:
        """Its numbers against those of the copies that were begun and not heard of since."""
        tier = self._fleet.cache.stats()
        filling = quarantined = pins = stores = 0
        for job_id, copy in self._copies.items():
            pages = len(copy.frames)
            if copy.direction is Direction.RESTORE:
                pins += pages
            elif job_id in self._fleet.stores:
                filling += pages
                pins += pages
                stores += 1
            else:
                quarantined += pages
        found = (tier.filling_pages, tier.quarantined_frames, tier.counters.pins_taken - tier.counters.pins_released)
        if found != (filling, quarantined, pins):
            raise InvariantBroken(f"the tier counts {found[0]} pages filling, {found[1]} frames in quarantine and "
                                  f"{found[2]} pins; its copies have {filling}, {quarantined} and {pins}")
        if (tier.live_stores, tier.live_reservations) != (stores, sum(
                copy.direction is Direction.RESTORE for copy in self._copies.values())):
            raise InvariantBroken(f"the tier counts {tier.live_stores} stores and {tier.live_reservations} "
                                  f"reservations; {stores} and {len(self._copies) - stores} copies are alive")
        if tier.resident_pages > (stored := int(np.count_nonzero(self._whole))):
            raise InvariantBroken(f"{tier.resident_pages} pages are resident, {stored} were stored")
        used = filling + quarantined + tier.resident_pages
        if used + tier.free_frames != self._frames or tier.counters.peak_frames > self._frames:
            raise InvariantBroken(f"{used} frames in use + {tier.free_frames} free, at the peak "
                                  f"{tier.counters.peak_frames}: the quota is {self._frames}")

    def at_rest(self) -> None:
        """After the last event: nothing is left open."""
        if self._open:
            raise InvariantBroken(f"{len(self._open)} requests never ended, the first is {min(self._open)}")
        stats = self._fleet.cache.stats()
        if not self._copies and (stats.pinned_pages or stats.live_reservations or stats.live_stores):
            raise InvariantBroken(f"{stats.pinned_pages} pages are pinned, {stats.live_reservations} reservations and "
                                  f"{stats.live_stores} stores are open although nothing runs")


def _restoring_pages(live: Live) -> Pages:
    at = live.reservation
    assert at is not None
    return live.pages[at.start : at.start + at.pages]
