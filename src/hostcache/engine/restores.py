"""Restores on their way, from the offer to the end, and whether one is worth waiting for. Knows no requests' states.

A restore: `begin` → *copying* → `settle`: committed, or failed; or → `give_up` (late, aborted) → its copy, where it may
still run, keeps frames and device pages in quarantine until it is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hostcache.engine.device import DeviceCache
from hostcache.errors import InvariantBroken
from hostcache.tier import HostCache, KeyChain, Match, PageKey, Reason, Refused, Reservation, TierConfig
from hostcache.tier.copying import Copier, CopyDone, CopyJob, Direction, extents


class Rates:
    """Estimates from decayed sums: tokens prefilled and bytes restored per second. None before the first sample."""

    def __init__(self, keep: float = 0.8) -> None:
        self._keep = keep
        self._tokens = self._prefill_s = self._bytes = self._restore_s = 0.0

    def saw_prefill(self, tokens: int, seconds: float) -> None:
        if tokens > 0 and seconds > 0:
            self._tokens = self._keep * self._tokens + tokens
            self._prefill_s = self._keep * self._prefill_s + seconds

    def saw_restore(self, copied_bytes: int, seconds: float) -> None:
        if copied_bytes > 0 and seconds > 0:
            self._bytes = self._keep * self._bytes + copied_bytes
            self._restore_s = self._keep * self._restore_s + seconds

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return self._tokens / self._prefill_s if self._prefill_s else None

    @property
    def restore_bytes_per_s(self) -> float | None:
        return self._bytes / self._restore_s if self._restore_s else None

    def dearer(self, *, tokens: int, copied_bytes: int, bytes_ahead: int) -> bool:
        """Would restoring, behind what the copier has to do first, take longer than computing these tokens? A restore
        is assumed worth it until both were measured."""
        prefill, restore = self.prefill_tokens_per_s, self.restore_bytes_per_s
        if prefill is None or restore is None:
            return False
        return (bytes_ahead + copied_bytes) / restore > tokens / prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """`reason`: why not all of what the host holds is offered; None also where it holds nothing."""

    match: Match | None = None
    reason: Reason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """`pages[i]` receives reservation.keys[i], page `reservation.start + i` of the request's prompt."""

    request_id: str
    reservation: Reservation
    pages: tuple[int, ...]
    begun_s: float
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """`reason` None: committed. `pages_lost`: a copy may still write its pages; they are no longer the request's."""

    restore: Restore
    reason: Reason | None
    pages_lost: bool = False


@dataclass(slots=True)
class RestoreCounters:
    submissions: int = 0
    """copy calls of committed restores"""


class Restores:
    def __init__(self, *, tier: HostCache, config: TierConfig, device: DeviceCache, copier: Copier | None,
                 rates: Rates) -> None:
        self.counters = RestoreCounters()
        self.seconds: list[float] = []
        """Reservation to commit of those committed since the list was last emptied."""
        self._tier = tier
        self._config = config
        self._device = device
        self._copier = copier
        self._rates = rates
        self._live: dict[int, Restore] = {}
        self._on_its_way: dict[PageKey, int] = {}
        self._late: dict[int, tuple[int, ...]] = {}

    def coming(self, key: PageKey) -> int | None:
        """The restore that brings this page for some request, if one is on its way."""
        return self._on_its_way.get(key)

    def offer(self, chain: KeyChain, start: int, limit: int, *, max_pages: int | None) -> Offer:
        """What the host holds of pages start … limit-1 and the request may (at most `max_pages`) and should have.
        Changes nothing."""
        if self._copier is None:
            return Offer(reason=Reason.TIER_OFF)
        match = self._tier.lookup(chain, start, limit)
        if not match.pages:
            return Offer(reason=Reason.NOT_READY if match.pending else None)
        reason = None
        if max_pages is not None and match.pages > max_pages:
            reason = Reason.OPTED_OUT
            match = replace(match, pages=max_pages)
            if not max_pages:
                return Offer(reason=reason)
        page_bytes = self._config.page_bytes
        ahead = sum(len(restore.pages) for restore in self._live.values()) * page_bytes
        if self._rates.dearer(tokens=match.pages * self._config.page_tokens, copied_bytes=match.pages * page_bytes,
                              bytes_ahead=ahead):
            return Offer(reason=Reason.DEARER)
        return Offer(match=match, reason=reason)

    def begin(self, request_id: str, match: Match, pages: Sequence[int], now_s: float) -> Restore | Reason:
        """Reserve and start to copy into the first of `pages` (at least match.pages of them)."""
        if self._copier is None:
            raise InvariantBroken(f"request {request_id} was offered a restore without a copier")
        reservation = self._tier.reserve(match)
        if isinstance(reservation, Refused):
            return reservation.reason
        restore = Restore(request_id=request_id, reservation=reservation, pages=tuple(pages[: reservation.pages]),
                          begun_s=now_s, deadline_s=now_s + self._config.restore_budget_s)
        self._live[reservation.job_id] = restore
        self._on_its_way.update(dict.fromkeys(reservation.keys, reservation.job_id))
        self._copier.submit(CopyJob(job_id=reservation.job_id, direction=Direction.RESTORE,
                                    extents=extents(restore.pages, reservation.frames)))
        return restore

    def settle(self, reports: Sequence[CopyDone], now_s: float) -> list[Ended]:
        """Take in what the copier reported, then give up what is over its budget."""
        ended = []
        for done in reports:
            restore = self._live.get(done.job_id)
            if restore is None:
                self._tier.settle(done)
                self._device.end_quarantine(self._late.pop(done.job_id, ()))
                continue
            self._forget(restore)
            corrupt = [] if done.error else self._device.corrupt(restore.reservation.keys, restore.pages)
            good = done.error is None and not corrupt
            if good:
                self._tier.commit(restore.reservation, done)
                self.counters.submissions += done.submissions
                self.seconds.append(now_s - restore.begun_s)
                self._rates.saw_restore(done.copied_bytes, done.finished_s - done.started_s)
            else:
                self._tier.abandon(restore.reservation, Reason.FAILED, copying=False)
                self._tier.distrust(corrupt)
            ended.append(Ended(restore=restore, reason=None if good else Reason.FAILED))
        for restore in [r for r in self._live.values() if now_s >= r.deadline_s]:
            ended.append(self.give_up(restore, Reason.LATE))
        return ended

    def give_up(self, restore: Restore, reason: Reason) -> Ended:
        """Its request goes on without it."""
        job_id = restore.reservation.job_id
        if self._copier is None:
            raise InvariantBroken(f"restore {job_id} is on its way without a copier")
        self._forget(restore)
        copying = not self._copier.cancel(job_id)
        self._tier.abandon(restore.reservation, reason, copying=copying)
        if copying:
            self._device.quarantine(restore.pages)
            self._late[job_id] = restore.pages
        return Ended(restore=restore, reason=reason, pages_lost=copying)

    @property
    def live(self) -> list[Restore]:
        return list(self._live.values())

    @property
    def next_deadline_s(self) -> float | None:
        return min((restore.deadline_s for restore in self._live.values()), default=None)

    @property
    def late(self) -> int:
        """Copies given up that have not been reported yet."""
        return len(self._late)

    @property
    def late_pages(self) -> int:
        return sum(len(pages) for pages in self._late.values())

    def _forget(self, restore: Restore) -> None:
        del self._live[restore.reservation.job_id]
        for key in restore.reservation.keys:
            self._on_its_way.pop(key, None)
