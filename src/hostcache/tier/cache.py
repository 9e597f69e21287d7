"""HostCache: the tier's face. Decides what is kept, written back, evicted and restored; never copies. Read this first.

Life of a page, with the call that takes each step:

    device_added     it was computed and published; nothing moves
    plan_writeback   its snapshot came within reach of eviction: a frame is taken, the page is *filling*
    plan_pages       the same, for a device that evicts page by page
    settle           the copy is over: the page is *resident*, or nothing changed
    device_removed   the device dropped it; the host copy is what remains
    lookup, reserve  its conversation returned: the page is pinned
    commit, abandon  the copy back is over, or will not be used: unpinned
    (make room)      the quota is needed for something better: the page is gone, and the history says why

One thread owns it, time is an argument, and being full, missing or late is an answer. With no frames every call answers
neutrally, but the history is kept: the accounts are open with the tier off too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hostcache.errors import InvariantBroken
from hostcache.tier import table as t
from hostcache.tier.answers import Clean, Drop, Match, Pressure, Refused, Reservation, StoreJob, Wait
from hostcache.tier.config import Mode, TierConfig
from hostcache.tier.copying import CopyDone
from hostcache.tier.eviction import LEAST_PAYBACK, Payback
from hostcache.tier.history import History
from hostcache.tier.keeper import DEPARTURES, Keeper
from hostcache.tier.keys import Identity, KeyChain, PageKey
from hostcache.tier.notes import Departure, write_note
from hostcache.tier.reasons import Reason
from hostcache.tier.stats import Counters, TierStats

MAX_STORE_JOBS = 4
"""Write-back jobs at a time: enough to keep a copier busy, few enough that plans stay fresh."""

LONGEST_SILENCE = 64
"""After two waits in a row for a store ran out no new one starts for a copy budget, then twice that, at most this many
budgets; the first that succeeds ends it. A copier that stands still costs few waits; one that recovers is used."""


@dataclass(slots=True)
class _Snapshot:
    slots: t.Slots
    store_pages: int
    skipped: bool = False
    evicting: bool = False
    waited: bool = False


class HostCache:
    """See the module and design section 5 for the contract of each call."""

    def __init__(self, config: TierConfig, *, history: History) -> None:
        self.config = config
        self._history = history
        self._count = Counters()
        self._keeper = Keeper(config, history, self._count)
        self._payback = Payback(config.frames)
        self._pool, self._table = self._keeper.pool, self._keeper.table
        self._snapshots: dict[int, _Snapshot] = {}
        self._fresh: dict[int, None] = {}
        self._stores: dict[int, t.Slots] = {}
        self._reserved: dict[int, t.Slots] = {}
        self._draining: dict[int, t.Slots] = {}
        self._quarantine: dict[int, npt.NDArray[np.int64]] = {}
        self._last_job = 0
        self._next_store_s = 0.0
        self._waits_in_vain = 0
        self._silent_until_s = 0.0
        self._off: str | None = None if config.frames else "host_cache_bytes is 0 or the mode is off"

    # ---- what the device did

    def device_added(self, chain: KeyChain, start: int, stop: int) -> None:
        """Pages [start, stop) of the chain are on the device, complete and confirmed.

        Pages whose predecessor was never reported, or was forgotten, are not tracked: nothing could reach them.
        """
        tracked = self._off is None and (not start or chain.keys[start - 1] in self._table.index)
        if tracked:
            self._keeper.take_in(chain, start, stop)
        self._history.seen(chain, start, stop)
        if not tracked and self._off is None:  # nobody will say so when they leave
            ids = self._history.ids(chain.identity.digest, chain.keys[start:stop])
            self._history.left(ids, write_note(Departure.NOT_WRITTEN, self._keeper.tick))

    def device_removed(self, keys: Sequence[PageKey]) -> None:
        """These pages left the device (heads first). Those without a host copy are in no tier any more."""
        self._keeper.off_device(keys)

    def device_cleared(self) -> None:
        """Every page left the device at once, and what is on the host stays good."""
        self._keeper.off_device(self._table.keys_of(self._table.on_device()))

    def retain(
        self,
        snapshot_id: int,
        chain: KeyChain,
        *,
        pages: int,
        store_pages: int | None = None,
        session_closed: bool = False,
        expected_return: bool = False,
    ) -> None:
        """Remember a snapshot: the chain's first `pages` pages, which the device holds. Moves nothing.

        `pages` counts only whole pages that a forward pass wrote and the engine confirmed: of n tokens ending in a
        fresh sample, (n - 1) // page_tokens. `store_pages` caps what may be written back (None: all). Hints are soft.
        """
        if self._off is not None:
            return
        if snapshot_id in self._snapshots:
            raise ValueError(f"snapshot {snapshot_id} is already retained; ids are used once")
        slots = self._table.find(chain.keys[:pages])
        if len(slots) and int(slots.min()) < 0:  # its head was forgotten while the request ran
            slots = slots[: int((slots < 0).argmax())]
        pages = len(slots)
        allowed = pages if store_pages is None else max(0, min(pages, store_pages))
        self._snapshots[snapshot_id] = _Snapshot(slots, allowed)
        self._fresh[snapshot_id] = None
        if pages:
            self._table.mark_frontier(int(slots[-1]))
        if session_closed:
            self._table.returned[slots] = 0
            self._table.relist_all(slots)
        elif expected_return:
            self._table.returned[slots] = 1
            self._table.relist_all(slots)

    def touch(self, chain: KeyChain, pages: int) -> None:
        """The first `pages` pages of the chain were used again: they have returned, and are young."""
        if self._off is not None or not pages:
            return
        slots = self._table.find(chain.keys[:pages])
        slots = slots[slots >= 0]
        self._table.returned[slots] = 1
        self._table.touch(slots, self._keeper.tick)

    # ---- write-back

    def plan_writeback(self, pressure: Pressure) -> list[StoreJob]:
        """The write-back jobs to start now. On-pressure: none while `victims` is empty. May be called at every step."""
        if self._off is not None or self.config.mode is Mode.ON_EVICT:
            return []
        order = dict.fromkeys(s for s in pressure.victims if s in self._snapshots)
        for snapshot_id in order:
            self._expect_eviction(self._snapshots[snapshot_id])
        if self.config.mode is Mode.ON_RETAIN:
            order.update(self._fresh)
        jobs: list[StoreJob] = []
        for snapshot_id in order:
            while self._may_start(pressure.now_s):
                leaving = snapshot_id in pressure.victims
                job = self._store(self._snapshots[snapshot_id], pressure.now_s, leaving=leaving)
                if job is None:
                    self._fresh.pop(snapshot_id, None)
                    break
                jobs.append(job)
        return jobs

    def may_store(self, now_s: float) -> bool:
        """Whether one more write-back may start that nothing waits for."""
        return len(self._stores) < MAX_STORE_JOBS and now_s >= self._next_store_s

    def plan_pages(self, keys: Sequence[PageKey], *, now_s: float, at_once: bool = False) -> list[StoreJob]:
        """For a device that evicts page by page, tails first, instead of by snapshots: these pages are the next to
        leave, nearest first. The write-back jobs to start now: while one more `may_store`, or all that there is room
        for when they leave `at_once`. Pages that are unknown, written or not on the device are passed over. May be
        called at every step; to be followed by `device_removed` when they have left.
        """
        if self._off is not None or not len(keys):
            return []
        table = self._table
        slots = table.find(tuple(dict.fromkeys(keys)))
        slots = slots[slots >= 0]
        slots = slots[table.device[slots]]
        table.fate[slots[table.state[slots] != t.ABSENT]] = t.LEAVING
        table.relist_all(slots)
        jobs: list[StoreJob] = []
        for run in table.runs(slots[table.state[slots] == t.ABSENT]):
            left = run[~table.dead[run] & table.known[run]]  # room for another may have taken what was before it
            while len(left):
                if not at_once and not self._may_start(now_s):
                    return jobs
                job = self._write(left[: self.config.max_job_pages], now_s, leaving=True)
                if job is None:
                    table.fate[left] = t.KEPT_OUT
                    self._count.stores_skipped += 1
                    break
                jobs.append(job)
                left = left[len(job.keys) :]
        return jobs

    def before_evict(self, snapshot_id: int, *, stays: int, now_s: float, expired: bool = False) -> Clean | Wait | Drop:
        """The device is about to drop a snapshot; its first `stays` pages remain there in other hands.

        `expired`: the wait that an earlier answer asked for is over. Then the answer is Clean or Drop.
        """
        snapshot = self._snapshots.get(snapshot_id)
        if snapshot is None:
            return Clean()
        if not snapshot.evicting:
            snapshot.evicting = True
            self._count.device_evictions += 1
        going = snapshot.slots[stays:]
        self._expect_eviction(snapshot)
        if (self._table.state[going] == t.RESIDENT).all():
            return Clean()
        jobs: list[StoreJob] = []
        if expired:
            self._waits_in_vain += 1
            budgets = min(LONGEST_SILENCE, 2 ** min(30, self._waits_in_vain) // 4)
            self._silent_until_s = now_s + budgets * self.config.copy_budget_s
        if not expired and self._off is None and now_s >= self._silent_until_s and self._may_stall():
            while (job := self._store(snapshot, now_s, leaving=True)) is not None:
                jobs.append(job)
        states = self._table.state[going]
        mine = {job.job_id for job in jobs}
        filling = set(going[states == t.FILLING].tolist())
        running = tuple(
            i for i, s in self._stores.items() if i in mine or (filling and not filling.isdisjoint(s.tolist()))
        )
        if running and not expired:
            self._count.evict_waits += not snapshot.waited
            snapshot.waited = True
            return Wait(job_ids=running, budget_s=self.config.copy_budget_s, jobs=tuple(jobs))
        missing = going[states != t.RESIDENT]
        self._count.evict_drops_uncached += 1
        self._count.evict_drop_pages += len(missing)
        return Drop(reason=self._why_unwritten(int(missing[0]), expired), pages=len(missing))

    def evicted(self, snapshot_id: int) -> None:
        """It is gone from its bank. Tell `device_removed` which pages left the device with it."""
        snapshot = self._snapshots.pop(snapshot_id, None)
        self._fresh.pop(snapshot_id, None)
        if snapshot is not None:
            # Those that stay in other hands are no longer about to leave: their copies are duplicates again.
            table, slots = self._table, snapshot.slots
            stay = slots[(table.state[slots] != t.ABSENT) & (table.fate[slots] == t.LEAVING) & table.device[slots]]
            table.fate[stay] = t.UNDECIDED
            table.relist_all(stay)

    def settle(self, done: CopyDone) -> None:
        """A copy is over. A store's pages become resident, or nothing changed; what only waited for the copy to end is
        released. A job that is unknown or was settled before changes nothing."""
        if (slots := self._stores.pop(done.job_id, None)) is not None:
            if done.error is None:
                self._finish_store(slots, done)
            else:
                self._count.stores_failed += 1
                self._pool.give_back(self._undo_store(slots, t.FAILED))
        elif (frames := self._quarantine.pop(done.job_id, None)) is not None:
            self._count.late_completions += 1
            self._pool.give_back(frames)
        elif (slots := self._draining.pop(done.job_id, None)) is not None:
            self._keeper.unpin(slots)
        elif done.job_id not in self._reserved:
            self._count.late_completions += 1

    def expire(self, job_id: int, *, running: bool) -> None:
        """A store is over its budget: its pages are not on the host. `running`: the copy may still touch its frames,
        which are set aside until `settle` hears of its end; else they come back at once."""
        slots = self._stores.pop(job_id, None)
        if slots is None:
            return
        self._count.stores_failed += 1
        frames = self._undo_store(slots, t.UNDECIDED)
        if not running:
            self._pool.give_back(frames)
            return
        self._quarantine[job_id] = frames
        if self.quarantined > self.config.quarantine_limit * self._pool.total:
            self._off = f"{self.quarantined} of {self._pool.total} frames are held by copies that do not end"

    def new_job_id(self) -> int:
        self._last_job += 1
        return self._last_job

    def _may_start(self, now_s: float) -> bool:
        """Whether another job may run ahead of need: one at a time while nothing comes back."""
        limit = MAX_STORE_JOBS if self._pays else 1
        return len(self._stores) < limit and now_s >= max(self._next_store_s, self._silent_until_s)

    @property
    def _pays(self) -> bool:
        """Plain `lru` does not ask."""
        return self._payback.pays or self.config.eviction == "lru"

    def _may_stall(self) -> bool:
        """Whether an eviction may wait for pages that nobody has begun to write. Where nothing else writes, one in so
        many may all the same: else nothing could ever come back."""
        return self._pays or (
            self.config.mode is Mode.ON_EVICT and self._count.device_evictions % LEAST_PAYBACK == 0)

    def _expect_eviction(self, snapshot: _Snapshot) -> None:
        """Its pages are not duplicates to be given up first: soon theirs will be the only copies."""
        slots = snapshot.slots
        self._table.fate[slots[self._table.state[slots] != t.ABSENT]] = t.LEAVING
        self._table.relist_all(slots)

    def _store(self, snapshot: _Snapshot, now_s: float, *, leaving: bool) -> StoreJob | None:
        """The next job of this snapshot, its first unwritten pages; None when there is none or no room for it."""
        table = self._table
        slots = snapshot.slots[: snapshot.store_pages]
        absent = (table.state[slots] == t.ABSENT) & table.device[slots]
        dirty = np.flatnonzero(absent)
        if snapshot.store_pages < len(snapshot.slots):
            beyond = snapshot.slots[snapshot.store_pages :]
            table.fate[beyond[table.state[beyond] == t.ABSENT]] = t.OPTED_OUT
        if not len(dirty):
            return None
        if len(slots) > self._pool.total:
            self._skip(snapshot, slots[dirty])
            return None
        job = self._write(slots[dirty[: self.config.max_job_pages]], now_s, leaving=leaving)
        if job is None:
            self._skip(snapshot, slots[dirty])
        return job

    def _write(self, part: t.Slots, now_s: float, *, leaving: bool) -> StoreJob | None:
        """A job for these unwritten pages of one conversation, heads first, or for as many of them as find room."""
        table = self._table
        before = int(table.parent[part[0]])
        room = self._keeper.make_room(part, before)
        if not room:
            return None
        part = part[:room]
        behind = int(table.frame[before]) if before != t.NONE and table.frame[before] != t.NONE else None
        frames = self._pool.take(room, behind)
        table.fill(part, frames)
        table.fate[part] = t.LEAVING if leaving else t.UNDECIDED
        self._keeper.pin(part)
        job = StoreJob(job_id=self.new_job_id(), keys=tuple(table.keys_of(part)), frames=frames)
        self._stores[job.job_id] = part
        self._next_store_s = now_s + self.config.store_pace_s
        self._count.stores_issued += 1
        self._count.peak_frames = max(self._count.peak_frames, self._pool.total - self._pool.free)
        return job

    def _skip(self, snapshot: _Snapshot, dirty: t.Slots) -> None:
        """Not worth a frame, or larger than the host: counted once a snapshot."""
        self._table.fate[dirty] = t.KEPT_OUT
        if not snapshot.skipped:
            snapshot.skipped = True
            self._count.stores_skipped += 1

    def _finish_store(self, slots: t.Slots, done: CopyDone) -> None:
        table = self._table
        self._waits_in_vain = 0
        self._silent_until_s = 0.0
        self._count.stores_completed += 1
        self._count.store_pages += len(slots)
        self._count.store_bytes += len(slots) * self.config.page_bytes
        self._count.copy_submissions += done.submissions
        table.used[slots] = self._keeper.tick
        self._payback.wrote(len(slots))
        table.ready(slots)
        self._keeper.unpin(slots)

    def _undo_store(self, slots: t.Slots, fate: int) -> npt.NDArray[np.int64]:
        """filling → absent. Returns the frames; pages that the device has dropped meanwhile leave the table."""
        table = self._table
        frames = table.drop(slots)
        table.fate[slots] = fate
        self._keeper.unpin(slots, bury=False)
        self._keeper.collapse(slots[::-1], np.full(len(slots), DEPARTURES[fate]))
        return frames

    def _why_unwritten(self, slot: int, expired: bool) -> Reason:
        if expired and self._table.state[slot] == t.FILLING:
            return Reason.LATE
        return Departure(int(DEPARTURES[self._table.fate[slot]])).reason

    # ---- restore

    def lookup(self, chain: KeyChain, start: int, limit: int) -> Match:
        """The longest run of pages on the host from `start` on, before page `limit`. Changes only a counter."""
        self._count.lookups += 1
        if self._off is not None or start >= limit:
            return Match(chain=chain, start=start, pages=0)
        limit = min(limit, len(chain))
        pages = len(self._table.resident_run(chain, start, limit))
        self._count.host_hits += pages > 0
        following = self._table.index.get(chain.keys[start + pages], t.NONE) if start + pages < limit else t.NONE
        pending = following != t.NONE and bool(self._table.state[following] == t.FILLING)
        return Match(chain=chain, start=start, pages=pages, pending=pending)

    def reserve(self, match: Match) -> Reservation | Refused:
        """Pin what is left of a match, perhaps less than it promised."""
        if self._off is not None:
            return Refused(reason=Reason.TIER_OFF)
        slots = self._table.resident_run(match.chain, match.start, match.start + match.pages)
        if not len(slots):
            return Refused(reason=Reason.EVICTED)
        self._keeper.pin(slots)
        job_id = self.new_job_id()
        self._reserved[job_id] = slots
        self._count.reservations += 1
        return Reservation(
            job_id=job_id,
            start=match.start,
            pages=len(slots),
            keys=match.chain.keys[match.start : match.start + len(slots)],
            frames=self._table.frame[slots].astype(np.int64),
        )

    def commit(self, reservation: Reservation, done: CopyDone | None = None) -> None:
        """The bytes are in place. Ends the reservation."""
        slots = self._end(reservation)
        self._count.restores += 1
        self._count.restore_pages += len(slots)
        self._payback.restored(len(slots))
        self._count.restore_bytes += len(slots) * self.config.page_bytes
        if done is not None:
            self._count.copy_submissions += done.submissions
        self._table.returned[slots] = 1
        self._table.used[slots] = self._keeper.tick
        self._keeper.unpin(slots)

    def abandon(self, reservation: Reservation, reason: Reason, *, copying: bool) -> None:
        """It will not be used. `copying`: its copy may still run; they stay put until `settle` hears of its end."""
        slots = self._end(reservation)
        if reason is Reason.LATE:
            self._count.restore_timeouts += 1
        elif reason is not Reason.ABORTED:
            self._count.restore_failures += 1
        if copying:
            self._draining[reservation.job_id] = slots
        else:
            self._keeper.unpin(slots)

    def _end(self, reservation: Reservation) -> t.Slots:
        slots = self._reserved.pop(reservation.job_id, None)
        if slots is None:
            raise ValueError(f"reservation {reservation.job_id} has ended already; commit or abandon it exactly once")
        return slots

    def distrust(self, keys: Sequence[PageKey]) -> None:
        """The host's bytes of these pages are not what was stored: they are never offered again."""
        self._keeper.distrust(keys)

    # ---- forgetting

    def forget(self, identity: Identity | None = None) -> None:
        """Drop every page of an identity, or of all: weights changed, or the cache was reset. Pages under a running
        copy become unmatchable at once and go when it ends."""
        if identity is None:
            self._snapshots.clear()
            self._fresh.clear()
            self._history.clear()
            self._keeper.forget(self._table.live())
            return
        self._history.forget(identity.digest)
        slots = self._keeper.pages_of(identity.digest)
        for snapshot_id in [i for i, s in self._snapshots.items() if np.isin(s.slots[:1], slots).any()]:
            self.evicted(snapshot_id)
        self._keeper.forget(slots)

    # ---- what it looks like

    def take_changes(self) -> list[tuple[bool, PageKey]]:
        """Since the last call: pages that became restorable (True) or ceased to be (False), in order; whoever applies
        them all knows what the tier holds. They are recorded from the first call on."""
        changes = self._table.journal or []
        self._table.journal = []
        return changes

    @property
    def off_reason(self) -> str | None:
        """None while the tier works; else why it is off."""
        return self._off

    @property
    def quarantined(self) -> int:
        """Frames that a copy which was given up may still touch."""
        return sum(len(frames) for frames in self._quarantine.values())

    def held(self, keys: Sequence[PageKey]) -> list[Reason | None]:
        """For each page: None where a tier holds it, NOT_READY where its copy is on the way and it has left the device,
        FORGOTTEN where it is in no tier (the history may know more). For the accounts."""
        if self._off is not None:
            return [Reason.TIER_OFF] * len(keys)
        table = self._table
        slots = table.find(keys)
        answers: list[Reason | None] = [None] * len(keys)
        held = (slots >= 0) & ((table.state[slots] == t.RESIDENT) | table.device[slots])
        others = np.flatnonzero(~held)
        for at, slot in zip(others.tolist(), slots[others].tolist(), strict=True):
            answers[at] = Reason.FORGOTTEN if slot == t.NONE else Reason.NOT_READY
        return answers

    def stats(self) -> TierStats:
        """A frozen record of now. O(1)."""
        tally = self._table.tally
        return TierStats(
            counters=self._count.copy(),
            frames=self._pool.total,
            page_bytes=self.config.page_bytes,
            free_frames=self._pool.free,
            resident_pages=tally.resident,
            filling_pages=tally.filling,
            quarantined_frames=self.quarantined,
            pinned_pages=tally.pinned,
            duplicate_pages=tally.duplicate,
            dirty_pages=tally.dirty,
            snapshots=len(self._snapshots),
            resident_snapshots=tally.frontiers,
            live_reservations=len(self._reserved) + len(self._draining),
            live_stores=len(self._stores),
            off_reason=self._off,
        )

    def check(self) -> None:
        """The invariants of design section 5. O(pages). Raises InvariantBroken with the numbers."""
        table = self._table
        table.check()
        parts = (self._pool.free, table.tally.filling, table.tally.resident, self.quarantined)
        if sum(parts) != self._pool.total:
            raise InvariantBroken(f"free + filling + resident + quarantined is {parts}, not {self._pool.total} frames")
        live = table.live()
        frames, parents = table.frame[live], table.parent[live]
        onhost = frames != t.NONE
        self._pool.check(np.concatenate([frames[onhost], *self._quarantine.values()]))
        owners = [*self._reserved.values(), *self._draining.values(), *self._stores.values()]
        held = sum(map(len, owners))
        owned = np.bincount(np.concatenate(owners), minlength=len(table.pins)) if owners else 0
        if np.count_nonzero(table.pins != owned):
            raise InvariantBroken(f"{int(table.pins.sum())} pins, but their owners hold {held} pages")
        if self._count.pins_taken - self._count.pins_released != held:
            raise InvariantBroken(f"{self._count.pins_taken} − {self._count.pins_released} pins are not {held} live")
        above = parents[(parents != t.NONE) & onhost & ~table.dead[live]]
        if np.count_nonzero(table.state[above].astype(bool) | table.device[above]) != len(above):
            raise InvariantBroken("a page is on the host although its predecessor is in no tier")
        if self._count.peak_frames > self._pool.total:
            raise InvariantBroken(f"{self._count.peak_frames} frames were in use, the quota is {self._pool.total}")
