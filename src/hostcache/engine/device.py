"""What is on the device, how it is written back before it goes, and how room is made. Tier and device meet here.

Owns the page table, the banks and the write-backs on their way. Knows snapshots and keys; no requests, no model. Reads
no clock: `now_s` is an argument. Nothing here blocks: room that waits for a copy is `COMING`; the caller asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b

from hostcache.engine.banks import Banks, Kind, Snapshot
from hostcache.engine.pages import DevicePages, Hold
from hostcache.errors import InvariantBroken
from hostcache.tier import (
    HostCache,
    KeyChain,
    PageKey,
    Pressure,
    StoreJob,
    TierConfig,
    Wait,
    within_reach,
)
from hostcache.tier.copying import Copier, CopyDone, CopyJob, Direction, extents

REACH_ENTRIES = 2
"""A snapshot this near to the end of its bank is written back."""

STORE_PATIENCE = 4.0
"""A write-back that nobody waits for is given up after this many copy budgets: on a busy machine it is only slow."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""How long background write-backs pause after one failed; the pause doubles with each failure in a row."""


class Room(Enum):
    READY = "ready"
    COMING = "coming"
    """an eviction waits for its write-back; ask again next step"""
    NONE = "none"
    """even with every snapshot gone it would not do; nothing was evicted"""


class Verify(Enum):
    """Which restored pages are compared with a digest taken when they were stored."""

    OFF = "off"
    SAMPLED = "sampled"
    ALWAYS = "always"

    def wants(self, key: PageKey) -> bool:
        """One page in sixteen when sampled, by its key: the same one at store and at restore."""
        return self is Verify.ALWAYS or (self is Verify.SAMPLED and key[0] < 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChoices:
    """What one request lets the tier do with its pages: `store_pages` may be written back (None: all of them)."""

    store_pages: int | None = None
    session_closed: bool = False
    expected_return: bool = False


@dataclass(slots=True, kw_only=True)
class _Leaving:
    """A snapshot that has left its bank and waits, until `deadline_s` at most, for the copies of its pages."""

    snapshot: Snapshot
    deadline_s: float | None = None
    jobs: tuple[int, ...] = ()
    failed: bool = False
    """One of these jobs ended with an error: there is no second try."""


@dataclass(slots=True, kw_only=True)
class _Store:
    pages: tuple[int, ...]
    keys: tuple[PageKey, ...]
    deadline_s: float


@dataclass(slots=True)
class DeviceCounters:
    evictions: int = 0
    store_submissions: int = 0
    """copy calls of completed write-backs"""
    verify_failures: int = 0
    pages_verified: int = 0
    store_seconds: list[float] = field(default_factory=list)
    """Durations of the stores that ended since `take_store_seconds`."""


class DeviceCache:
    """Pages and snapshots. Every change of what is published goes to the tier at once.

    A snapshot: `retain` → *banked* → (evicted for pages or entries) *leaving* → gone; or gone at once when superseded.
    """

    def __init__(self, *, pages: int, bank_entries: int, tier: HostCache, config: TierConfig, copier: Copier | None,
                 read_page: Callable[[int], bytes], verify: Verify = Verify.OFF) -> None:
        self.pages = DevicePages(pages)
        self.banks = Banks(bank_entries)
        self.counters = DeviceCounters()
        self.tier_on = copier is not None and config.frames > 0
        self._tier = tier
        self._copier = copier
        self._config = config
        self._read_page = read_page
        self._verify = verify
        self._snapshot_ids = 0
        self._leaving: dict[int, _Leaving] = {}
        self._stores: dict[int, _Store] = {}
        self._digests: dict[PageKey, bytes] = {}
        self._pause_s = 0.0
        self._pause_until_s = float("-inf")
        self._written_pages = 0
        """By background write-backs since the banks changed, failed ones left out."""

    # ---- requests take and give back pages

    def match(self, keys: Sequence[PageKey]) -> list[int]:
        """The pages of the longest published run of leading keys, with a USE hold each."""
        found = self.pages.match(keys)
        self.pages.hold(Hold.USE, found)
        return found

    def served(self, pages: list[int]) -> None:
        """A request was served these leading pages of its prompt: whose they are was used again."""
        for snapshot in self.banks.serving(pages):
            self.banks.use(snapshot)

    def release(self, pages: Sequence[int]) -> None:
        self._gone(self.pages.drop(Hold.USE, pages))

    def quarantine(self, pages: Sequence[int]) -> None:
        """A copy that was given up may still write these unpublished pages of a request."""
        self.pages.hold(Hold.LATE, pages)
        self.pages.drop(Hold.USE, pages)

    def end_quarantine(self, pages: Sequence[int]) -> None:
        self._gone(self.pages.drop(Hold.LATE, pages))

    def publish(self, chain: KeyChain, pages: Sequence[int], start: int, stop: int) -> list[int]:
        """Pages start … stop-1 of a request are completely written. Returns the pages that serve their keys now.

        Where an older page has the key, that one goes on to serve it, and the request goes on reading its own: an equal
        prefix computed in other chunks is rounded differently, so to change pages in mid-request would make its output
        depend on what else was on the device.
        """
        serving = [self.pages.publish(chain.keys[i], pages[i]) for i in range(start, stop)]
        if serving:
            self._tier.device_added(chain, start, stop)
        return serving

    # ---- room

    def make_room(self, count: int, now_s: float) -> Room:
        """At least `count` free pages, by evicting snapshots, least recently used first."""
        if self.pages.free >= count:
            return Room.READY
        if self.pages.free + self.pages.evictable < count:
            return Room.NONE
        for snapshot in self.banks.order():
            leaving = [entry.snapshot.pages for entry in self._leaving.values()]
            promised = sum(self.pages.frees(leaving)) if leaving else 0
            if self.pages.free + promised >= count:
                break
            if not self.pages.all_in_use(snapshot.pages):  # else its going would free nothing
                self._start_leaving(snapshot, now_s)
        return Room.READY if self.pages.free >= count else Room.COMING

    def retain(self, kind: Kind, chain: KeyChain, pages: Sequence[int], choices: CacheChoices, now_s: float) -> None:
        """A prompt or turn completed: the pages that serve its keys stay on the device until evicted."""
        if not pages:
            return
        pages = self.publish(chain, pages, 0, len(pages))  # an older page may have left since it was published
        superseded = self.banks.superseded_by(kind, chain)
        for old in superseded:
            self.banks.remove(old)
        while self.banks.full(kind):
            self._start_leaving(self.banks.oldest(kind), now_s)
        self._snapshot_ids += 1
        self._written_pages = 0
        self.pages.hold(Hold.BANK, pages)
        self.banks.add(self._snapshot_ids, kind, chain, tuple(pages))
        self._tier.retain(self._snapshot_ids, chain, pages=len(pages), store_pages=choices.store_pages,
                          session_closed=choices.session_closed, expected_return=choices.expected_return)
        for old in superseded:
            self._let_go(old)

    # ---- write-back

    def write_back(self, wanted_pages: int, now_s: float) -> int:
        """Start what is within reach of eviction, when `wanted_pages` are wanted soon. Call after the forward pass of
        the step has returned: then the pages' last writer is done. Returns the jobs started. (A device that computes
        on its own would record an event here and have its copier wait for it.)"""
        if not self.tier_on or now_s < self._pause_until_s:
            return 0
        # While the banks stay as they are, each page needs to be written once at most: a host too small for all that
        # is within reach must not be filled over and over.
        if self._written_pages >= self.pages.banked:
            return 0
        victims: tuple[int, ...] = ()
        crowded = any(self.banks.entries(kind) + REACH_ENTRIES > self.banks.capacity for kind in Kind)
        if crowded or self.pages.free < wanted_pages:
            order = self.banks.order()
            frees = zip((s.id for s in order), self.pages.frees(s.pages for s in order), strict=True)
            victims = within_reach(
                self.banks.views(), frees=frees,
                free_pages=self.pages.free, reach_pages=wanted_pages, reach_entries=REACH_ENTRIES)
        jobs = self._tier.plan_writeback(Pressure(now_s=now_s, victims=victims))
        for job in jobs:
            self._submit(job, now_s)
            self._written_pages += len(job.keys)
        return len(jobs)

    def hear(self, now_s: float) -> tuple[bool, list[CopyDone]]:
        """Take in what the copier reports. Returns (something happened, the restores that ended)."""
        if self._copier is None:
            return False, []
        ended = self._copier.poll()
        restores = []
        for done in ended:
            if done.direction is Direction.RESTORE:
                restores.append(done)
                continue
            store = self._stores.pop(done.job_id, None)
            if store is not None:
                self._note_end(done, store, now_s)
                self.counters.store_submissions += done.submissions
                self._gone(self.pages.drop(Hold.STORE, store.pages))
                self.counters.store_seconds.append(done.finished_s - done.submitted_s)
            self._tier.settle(done)
        overdue = [job_id for job_id, store in self._stores.items() if now_s >= store.deadline_s]
        for job_id in overdue:
            self._expire(job_id)
        moved = len(self._leaving)
        for entry in list(self._leaving.values()):
            self._try_to_leave(entry, now_s)
        return bool(ended or overdue or moved != len(self._leaving)), restores

    def corrupt(self, keys: Sequence[PageKey], pages: Sequence[int]) -> list[PageKey]:
        """Which of these restored pages do not hold what was stored. None where nothing was to be compared."""
        bad = []
        for key, page in zip(keys, pages, strict=True):
            digest = self._digests.get(key)
            if digest is None:
                continue
            self.counters.pages_verified += 1
            if blake2b(self._read_page(page), digest_size=16).digest() != digest:
                self.counters.verify_failures += 1
                bad.append(key)
        return bad

    @property
    def next_deadline_s(self) -> float | None:
        """When `hear` has something to give up, at the latest."""
        deadlines = [store.deadline_s for store in self._stores.values()]
        deadlines += [entry.deadline_s for entry in self._leaving.values() if entry.deadline_s is not None]
        return min(deadlines, default=None)

    @property
    def copies_on_their_way(self) -> int:
        return len(self._stores)

    @property
    def leaving(self) -> int:
        return len(self._leaving)

    @property
    def awaited_jobs(self) -> set[int]:
        """The write-backs that evictions wait for."""
        return {job_id for entry in self._leaving.values() for job_id in entry.jobs if job_id in self._stores}

    # ---- forgetting

    def evict_all(self, now_s: float) -> None:
        """Every snapshot leaves as in an eviction: written back first where the mode says so."""
        for snapshot in self.banks.order():
            self._start_leaving(snapshot, now_s)

    def forget_all(self) -> None:
        """What is cached is worth nothing any more, here and on the host. Pages in use stay with their users,
        unpublished. Restores must have been abandoned before."""
        snapshots = [*self.banks, *(entry.snapshot for entry in self._leaving.values())]
        for snapshot in list(self.banks):
            self.banks.remove(snapshot)
        self._leaving.clear()
        for snapshot in snapshots:
            self._let_go(snapshot)
        self._gone(self.pages.unpublish_all())
        self._digests.clear()
        self._tier.forget(None)

    def check(self) -> None:
        self.pages.check()
        self.banks.check()
        banked = sum(len(s.pages) for s in self.banks) + sum(len(e.snapshot.pages) for e in self._leaving.values())
        if banked != self.pages.holds(Hold.BANK):
            raise InvariantBroken(f"snapshots hold {banked} pages, the page table says {self.pages.holds(Hold.BANK)}")
        storing = sum(len(store.pages) for store in self._stores.values())
        if storing != self.pages.holds(Hold.STORE):
            raise InvariantBroken(f"stores hold {storing} pages, the page table says {self.pages.holds(Hold.STORE)}")
        for snapshot in self.banks:
            if self.pages.match(snapshot.chain.keys) != list(snapshot.pages):
                raise InvariantBroken(f"snapshot {snapshot.id} has pages that are not published under its keys")

    # ---- inside

    def _start_leaving(self, snapshot: Snapshot, now_s: float) -> None:
        self.banks.remove(snapshot)
        entry = self._leaving[snapshot.id] = _Leaving(snapshot=snapshot)
        self._try_to_leave(entry, now_s)

    def _try_to_leave(self, entry: _Leaving, now_s: float) -> None:
        snapshot = entry.snapshot
        stays = self.pages.stays(snapshot.pages)
        expired = entry.failed or (entry.deadline_s is not None and now_s >= entry.deadline_s)
        if expired:
            for job_id in entry.jobs:
                if job_id in self._stores:
                    self._expire(job_id)
        elif any(job_id in self._stores for job_id in entry.jobs):
            return
        if not self._may_go(entry, stays, expired, now_s):
            return
        del self._leaving[snapshot.id]
        self.counters.evictions += 1
        self._let_go(snapshot)

    def _may_go(self, entry: _Leaving, stays: int, expired: bool, now_s: float) -> bool:
        """Ask the tier about the pages that would leave the device; start the copies it wants first."""
        answer = self._tier.before_evict(entry.snapshot.id, stays=stays, now_s=now_s, expired=expired)
        if isinstance(answer, Wait):
            for job in answer.jobs:
                if job.job_id not in self._stores:
                    self._submit(job, now_s)
            entry.jobs = answer.job_ids
            if entry.deadline_s is None:
                entry.deadline_s = now_s + answer.budget_s
        return not isinstance(answer, Wait)

    def _let_go(self, snapshot: Snapshot) -> None:
        """It is in no bank any more: give its pages back, and tell the tier in the order it asks for."""
        self._written_pages = 0
        removed = self.pages.drop(Hold.BANK, snapshot.pages)
        self._tier.evicted(snapshot.id)
        self._gone(removed)

    def _gone(self, removed: Iterable[PageKey]) -> None:
        keys = list(removed)
        if keys:
            self._tier.device_removed(keys)

    def _submit(self, job: StoreJob, now_s: float) -> None:
        if self._copier is None:
            raise InvariantBroken(f"the tier planned store {job.job_id} but there is no copier")
        pages = []
        for key in job.keys:
            page = self.pages.find(key)
            if page is None:
                raise InvariantBroken(f"store {job.job_id} wants page {key.hex()}, which is not on the device")
            pages.append(page)
            if self._verify.wants(key):
                self._digests[key] = blake2b(self._read_page(page), digest_size=16).digest()
        while len(self._digests) > 4 * self._config.frames:
            del self._digests[next(iter(self._digests))]
        self.pages.hold(Hold.STORE, pages)
        deadline_s = now_s + STORE_PATIENCE * (self._config.copy_budget_s or 1.0)
        self._stores[job.job_id] = _Store(pages=tuple(pages), keys=tuple(job.keys), deadline_s=deadline_s)
        self._copier.submit(CopyJob(job_id=job.job_id, direction=Direction.STORE, extents=extents(pages, job.frames)))

    def _expire(self, job_id: int) -> None:
        """Over budget: its device pages may be used again at once, the copy is void whatever it still reads."""
        store = self._stores.pop(job_id)
        if self._copier is None:
            raise InvariantBroken(f"store {job_id} is on its way without a copier")
        self._tier.expire(job_id, running=not self._copier.cancel(job_id))
        self._written_pages = max(0, self._written_pages - len(store.pages))
        self._forget_digests(store.keys)
        self._gone(self.pages.drop(Hold.STORE, store.pages))

    def _note_end(self, done: CopyDone, store: _Store, now_s: float) -> None:
        """A copier that fails is asked again later and later; one success, and it is trusted as before."""
        if done.error is None:
            self._pause_s = 0.0
            return
        self._forget_digests(store.keys)
        self._written_pages = max(0, self._written_pages - len(store.pages))
        self._pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
        self._pause_until_s = now_s + self._pause_s
        for entry in self._leaving.values():
            entry.failed = entry.failed or done.job_id in entry.jobs

    def _forget_digests(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            self._digests.pop(key, None)
