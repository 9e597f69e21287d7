"""Keeps the pages: takes them in, makes room for better ones, sees off those that leave. Plans nothing, copies nothing.

The one owner of the page table and the frame pool. A page that has left every tier goes with all that could only be
reached through it; what a running copy holds becomes unmatchable at once (*dead*) and goes with its last pin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hostcache.tier import table as t
from hostcache.tier.config import TierConfig
from hostcache.tier.eviction import Duel, Rule
from hostcache.tier.history import History
from hostcache.tier.keys import KeyChain, PageKey
from hostcache.tier.notes import Departure, read_note, write_note
from hostcache.tier.pool import FramePool
from hostcache.tier.stats import Counters

STALE_TURNOVERS = 4
"""A returned conversation not used while this many times the host's pages were computed counts as never returned."""

TRIM_FACTOR = 4
"""A victim up to this many times what is needed goes whole: a head without its tail is worth little, and whole
conversations leave neighbouring frames. Of a larger one only the tail goes."""


DEPARTURES = {t.KEPT_OUT: Departure.KEPT_OUT, t.OPTED_OUT: Departure.OPTED_OUT, t.FAILED: Departure.FAILED}
"""How a page without a host copy left, by its fate; any other: NOT_WRITTEN."""


class Keeper:
    """`tick` counts the new pages ever seen: the time in which use and regret are measured."""

    def __init__(self, config: TierConfig, history: History, count: Counters) -> None:
        self.pool = FramePool(config.frames)
        self.table = t.PageTable()
        self.tick = 0
        self._lru = config.eviction == "lru"
        self._history = history
        self._count = count
        self._duel = Duel(config.frames)
        self._identities: list[bytes] = []
        self._identity_numbers: dict[bytes, int] = {}

    # ---- coming

    def take_in(self, chain: KeyChain, start: int, stop: int) -> None:
        """Pages [start, stop) are on the device."""
        slots, added = self.table.add(chain, start, stop)
        if len(added):
            self._greet(chain, start, slots, added)
        self.table.set_device(slots, True)

    def _greet(self, chain: KeyChain, start: int, slots: t.Slots, added: t.Slots) -> None:
        """New rows: note whose they are, whether they were here before, and whether losing them was a mistake."""
        table = self.table
        digest = chain.identity.digest
        if digest not in self._identity_numbers:
            self._identity_numbers[digest] = len(self._identities)
            self._identities.append(digest)
        table.identity[added] = self._identity_numbers[digest]
        self.tick += len(added)
        table.used[added] = self.tick
        parent = int(table.parent[added[0]])
        if parent != t.NONE and table.frontier[parent]:
            table.returned[added] = 1
        fresh = np.isin(slots, added, assume_unique=True)
        keys = [chain.keys[start + i] for i in np.flatnonzero(fresh).tolist()]
        ids = self._history.ids(digest, keys)
        for slot, note in zip(added.tolist(), self._history.notes(ids), strict=True):
            if note:
                table.returned[slot] = 1
                departure, tick = read_note(note)
                rule = departure.rule
                if rule is not None:
                    self._duel.returned(rule, 1, self.tick - tick)

    # ---- going

    def off_device(self, keys: Sequence[PageKey]) -> None:
        """These pages left the device (heads first). Those without a host copy leave the table."""
        table = self.table
        slots = table.find(keys)
        slots = slots[slots >= 0]
        fates = table.fate[slots].copy()
        table.set_device(slots, False)
        for at in range(len(slots) - 1, -1, -1):
            slot = int(slots[at])
            if table.state[slot] == t.ABSENT:
                departure = DEPARTURES.get(int(fates[at]), Departure.NOT_WRITTEN)
                if departure is Departure.KEPT_OUT:
                    self._duel.lost(Rule.KEEP, 1)
                self.collapse(slot, departure)

    def distrust(self, keys: Sequence[PageKey]) -> None:
        """The host's bytes of these pages are not what was stored: they are never offered again."""
        table = self.table
        for slot in reversed(table.find(keys).tolist()):
            if slot == t.NONE or table.state[slot] != t.RESIDENT:
                continue
            if table.pins[slot]:
                self._kill(slot, Departure.FAILED)
                continue
            self.pool.give_back(table.drop(np.array([slot], dtype=np.int64)))
            if not table.device[slot]:
                self.collapse(slot, Departure.FAILED)

    def pages_of(self, identity: bytes) -> t.Slots:
        """Every page under the identity of this digest."""
        live = self.table.live()
        mine: t.Slots = live[self.table.identity[live] == self._identity_numbers.get(identity, t.NONE)]
        return mine

    def forget(self, slots: t.Slots) -> None:
        """Drop these whole trees of pages from every tier. The caller tells the history."""
        self.table.set_device(slots, False)
        for root in slots[self.table.parent[slots] == t.NONE].tolist():
            self._kill(root, None)

    # ---- room

    def make_room(self, part: t.Slots, before: int) -> int:
        """Free frames for `part`, whose parent `before` must stay, as far as it may displace others. How many."""
        want = len(part)
        guard = np.array([before] if before != t.NONE else [], dtype=np.int64)
        self.table.pin(guard)
        rule: Rule | None = None
        while self.pool.free < want:
            victim, contested = self._victim(bool(self.table.returned[part[0]]))
            if victim is not None and contested and rule is None:
                rule = self._duel.choose()
            if victim is None or (contested and rule is Rule.KEEP):
                break
            self._evict(victim, want - self.pool.free)
        self.table.unpin(guard)
        return min(want, self.pool.free)

    def _victim(self, returned: bool) -> tuple[int | None, bool]:
        """The next tail to evict for a newcomer that has `returned` or not, and whether its place is contested: its
        worth is the newcomer's own, so that either could stay."""
        table = self.table
        if self._lru:
            oldest = (table.oldest(worth) for worth in (t.DUPLICATE, t.ONCE, t.RETURNED))
            return min((s for s in oldest if s is not None), key=lambda s: int(table.used[s]), default=None), False
        if (duplicate := table.youngest(t.DUPLICATE)) is not None:
            return duplicate, False
        once, came_back = table.oldest(t.ONCE), table.oldest(t.RETURNED)
        # A copy whose page the device is about to drop as well is as good as the newcomer's: to trade one for the other
        # would only move bytes. It was written lately, so nothing older is left in its list.
        once = None if once is not None and table.device[once] else once
        came_back = None if came_back is not None and table.device[came_back] else came_back
        if once is not None:
            return once, not returned
        if came_back is None:
            return None, False
        stale = self.tick - int(table.used[came_back]) > STALE_TURNOVERS * self.pool.total
        if stale:
            return came_back, not returned
        return (came_back, True) if returned else (None, False)

    def _evict(self, tail: int, need: int) -> None:
        """Drop the run of pages that ends in `tail`: whole when it is small, else as much of its tail as is needed."""
        table = self.table
        run = [tail]
        worth = int(table.listed[tail])
        slot = int(table.parent[tail])
        while slot != t.NONE and len(run) <= TRIM_FACTOR * need:
            alone = table.host_children[slot] == 1 and table.state[slot] == t.RESIDENT and not table.pins[slot]
            duplicate = bool(table.device[slot]) and table.fate[slot] != t.LEAVING
            if not alone or duplicate != (worth == t.DUPLICATE) or (worth == t.ONCE and table.returned[slot]):
                break
            run.append(slot)
            slot = int(table.parent[slot])
        if len(run) > TRIM_FACTOR * need:
            del run[need:]
        self._count.host_evictions += 1
        self._count.host_evicted_pages += len(run)
        lost = 0
        self.pool.give_back(table.drop(np.array(run, dtype=np.int64)))
        for slot in run:
            if not table.device[slot]:
                lost += 1
                self.collapse(slot, Departure.DISPLACED)
        if lost:
            self._duel.lost(Rule.DISPLACE, lost)

    # ---- pages that are in no tier

    def collapse(self, slot: int, departure: Departure) -> None:
        """A page has left every tier: it leaves the table, and what could only be reached through it goes with it."""
        table = self.table
        if not table.known[slot] or table.state[slot] != t.ABSENT or table.device[slot] or table.pins[slot]:
            return  # a page behind it took it along, or something still holds it
        if not table.dead[slot]:
            self._note(slot, departure)
            table.detach_key(slot)
            table.dead[slot] = 1
            for child in list(table.children(slot)):
                self._kill(child, Departure.DISPLACED)
        self._bury_all([slot])

    def _kill(self, root: int, departure: Departure | None) -> None:
        """Make a page and all behind it unmatchable, and drop what no copy holds in place. Without a departure
        the history is told by the caller."""
        table = self.table
        order, stack = [], [root]
        while stack:
            slot = stack.pop()
            order.append(slot)
            stack.extend(table.children(slot))
        for slot in order:
            if not table.dead[slot]:
                if departure is not None:
                    self._note(slot, departure)
                    self._count.orphaned_pages += int(table.state[slot] != t.ABSENT)
                table.detach_key(slot)
                table.dead[slot] = 1
        self._bury_all(reversed(order))

    def _bury(self, slot: int) -> None:
        """A dead page without pins gives its frame back; without children it leaves the table, and so do the dead pages
        before it that only waited for it."""
        table = self.table
        while not table.pins[slot]:
            one = np.array([slot], dtype=np.int64)
            if table.state[slot] == t.RESIDENT:
                self.pool.give_back(table.drop(one))
            table.set_device(one, False)
            if table.child[slot] != t.NONE:
                return
            parent = int(table.parent[slot])
            table.prune(slot)
            if parent == t.NONE or not table.dead[parent]:
                return
            slot = parent
        table.relist(slot)

    def _note(self, slot: int, departure: Departure) -> None:
        ids = self._history.ids(self._identities[self.table.identity[slot]], [self.table.key(slot)])
        self._history.left(ids, write_note(departure, self.tick))

    def _bury_all(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if self.table.dead[slot]:  # else it went already, with a page behind it
                self._bury(slot)

    def pin(self, slots: t.Slots) -> None:
        self._count.pins_taken += len(slots)
        self.table.pin(slots)

    def unpin(self, slots: t.Slots, *, bury: bool = True) -> None:
        """One pin less on each; dead pages that waited for it go, unless the caller sees to them."""
        self._count.pins_released += len(slots)
        self.table.unpin(slots)
        if bury:
            self._bury_all(slots[self.table.dead[slots] == 1][::-1].tolist())
