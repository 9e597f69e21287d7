"""Keeps the pages: takes them in, makes room for better ones, sees off those that leave. Plans nothing, copies nothing.

The one owner of the page table and the frame pool. A page that has left every tier goes with all that could only be
reached through it; what a running copy holds becomes unmatchable at once (*dead*) and goes with its last pin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

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


DEPARTURES = np.array([Departure.NOT_WRITTEN, Departure.NOT_WRITTEN, Departure.KEPT_OUT, Departure.OPTED_OUT,
                       Departure.FAILED], dtype=np.int64)
"""How a page without a host copy left, by its fate: UNDECIDED, LEAVING, KEPT_OUT, OPTED_OUT or FAILED."""


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
            self._greet(chain.identity.digest, added)
        self.table.set_device(slots, True)

    def _greet(self, digest: bytes, added: t.Slots) -> None:
        """New rows: note whose they are, whether they were here before, and whether losing them was a mistake."""
        table = self.table
        if digest not in self._identity_numbers:
            self._identity_numbers[digest] = len(self._identities)
            self._identities.append(digest)
        table.identity[added] = self._identity_numbers[digest]
        self.tick += len(added)
        table.used[added] = self.tick
        parent = int(table.parent[added[0]])
        if parent != t.NONE and table.frontier[parent]:
            table.returned[added] = 1
        notes = self._history.notes(self._history.ids(digest, table.keys_of(added)))
        for note, run in groupby(note for note in notes if note):
            departure, tick = read_note(note)
            if departure.rule is not None:
                self._duel.returned(departure.rule, sum(1 for _ in run), self.tick - tick)
        table.returned[added[[bool(note) for note in notes]]] = 1

    # ---- going

    def off_device(self, keys: Sequence[PageKey]) -> None:
        """These pages left the device (heads first). Those without a host copy leave the table."""
        table = self.table
        slots = table.find(keys)
        slots = slots[slots >= 0]
        fates = table.fate[slots]
        table.set_device(slots, False)
        unwritten = np.flatnonzero(table.state[slots] == t.ABSENT)[::-1]
        fates = fates[unwritten]
        for _ in range(int(np.count_nonzero(fates == t.KEPT_OUT))):
            self._duel.lost(Rule.KEEP, 1)
        self.collapse(slots[unwritten], DEPARTURES[fates])

    def distrust(self, keys: Sequence[PageKey]) -> None:
        """The host's bytes of these pages are not what was stored: they are never offered again."""
        table = self.table
        for slot in reversed(table.find(keys).tolist()):
            if slot == t.NONE or table.state[slot] != t.RESIDENT:
                continue
            if table.pins[slot]:
                self._kill(slot, Departure.FAILED)
                continue
            one = np.array([slot], dtype=np.int64)
            self.pool.give_back(table.drop(one))
            self.collapse(one, np.array([Departure.FAILED]))

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
        """Free frames for `part`, whose parent `before` must stay, as far as it may displace others. How many.

        A stem, which has pages behind it on the host, is no newcomer: without it they are worth nothing. It displaces
        whatever can go, in need the last of its own."""
        want = len(part)
        guard = np.array([before] if before != t.NONE else [], dtype=np.int64)
        self.table.pin(guard)
        stem = bool(self.table.host_children[part[-1]])
        rule = Rule.DISPLACE if stem else None
        while self.pool.free < want:
            victim, contested = self._victim(bool(self.table.returned[part[0]]))
            if victim is None and stem:
                victim = self.table.hosted_tail(int(part[-1]))
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
        once, came_back = table.oldest(t.ONCE), table.oldest(t.RETURNED)
        # A copy whose page the device is about to drop as well is as good as the newcomer's: to trade one for the other
        # would only move bytes. It was written lately, so nothing older is left in its list.
        once = None if once is not None and table.device[once] else once
        came_back = None if came_back is not None and table.device[came_back] else came_back
        if self._lru:
            oldest = (s for s in (table.oldest(t.DUPLICATE), once, came_back) if s is not None)
            return min(oldest, key=lambda s: int(table.used[s]), default=None), False
        if (duplicate := table.youngest(t.DUPLICATE)) is not None:
            return duplicate, False
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
        run = table.ancestors(tail, TRIM_FACTOR * need + 1)
        worth, above = table.listed[tail], run[1:]
        duplicate = table.device[above] & (table.fate[above] != t.LEAVING)
        stays = (table.host_children[above] != 1) | (table.state[above] != t.RESIDENT) | (table.pins[above] != 0)
        stays |= duplicate != (worth == t.DUPLICATE)
        if worth == t.ONCE:
            stays |= table.returned[above]
        if stays.any():
            run = run[: 1 + int(stays.argmax())]
        if len(run) > TRIM_FACTOR * need:
            run = run[:need]
        self._count.host_evictions += 1
        self._count.host_evicted_pages += len(run)
        self.pool.give_back(table.drop(run))
        lost = run[~table.device[run]]
        self.collapse(lost, np.full(len(lost), Departure.DISPLACED))
        if len(lost):
            self._duel.lost(Rule.DISPLACE, len(lost))

    # ---- pages that are in no tier

    def collapse(self, slots: t.Slots, departures: npt.NDArray[np.int64]) -> None:
        """Pages, tails first, that lost a copy: those in no tier now leave the table, and what could only be reached
        through them goes with them. What something still holds stays."""
        table = self.table
        gone = (table.state[slots] == t.ABSENT) & ~table.device[slots] & (table.pins[slots] == 0)
        slots, departures = slots[gone], departures[gone]
        if not len(slots):
            return
        # A run: each page is the only child of the next, so that they all go at once when the first has no child.
        after, before = slots[:-1], slots[1:]
        joined = (table.child[before] == after) & (table.next_sibling[after] == t.NONE)
        joined &= (departures[1:] == departures[:-1]) & ~table.dead[before]
        starts = [0, *(np.flatnonzero(~joined) + 1).tolist()]
        for start, stop in zip(starts, [*starts[1:], len(slots)], strict=True):
            departure = Departure(int(departures[start]))
            first = slots[start]
            if table.known[first] and not table.dead[first] and table.child[first] == t.NONE:
                self._detach(slots[start:stop], departure)
                self._clear(slots[start:stop])
            else:
                for slot in slots[start:stop].tolist():
                    self._collapse_one(slot, departure)

    def _collapse_one(self, slot: int, departure: Departure) -> None:
        table = self.table
        if not table.known[slot]:
            return  # a page behind it took it along
        if not table.dead[slot]:
            self._detach(np.array([slot], dtype=np.int64), departure)
            for child in table.children(slot):
                self._kill(child, Departure.DISPLACED)
        self._bury_all([slot])

    def _kill(self, root: int, departure: Departure | None) -> None:
        """Make a page and all behind it unmatchable, and drop what no copy holds in place. Without a departure
        the history is told by the caller."""
        table = self.table
        tree = table.tree(root)
        alive = tree[~table.dead[tree]]
        if departure is not None:
            self._count.orphaned_pages += int(np.count_nonzero(table.state[alive] != t.ABSENT))
        self._detach(alive, departure)
        if table.pins[tree].any():
            self._bury_all(tree[::-1].tolist())
        else:
            self._clear(tree[::-1])

    def _clear(self, tree: t.Slots) -> None:
        """A dead page and all behind it, itself last, that nothing pins: they leave every tier and the table, and so do
        the dead pages before it that only waited for it."""
        table = self.table
        resident = tree[table.state[tree] == t.RESIDENT]
        if len(resident):
            self.pool.give_back(table.drop(resident))
        if table.device[tree].any():
            table.set_device(tree, False)
        parent = int(table.parent[tree[-1]])
        table.prune(tree)
        if parent != t.NONE:
            self._bury_all([parent])

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
            table.prune(one)
            if parent == t.NONE or not table.dead[parent]:
                return
            slot = parent
        table.relist(slot)

    def _detach(self, slots: t.Slots, departure: Departure | None) -> None:
        """These pages of one conversation become unmatchable; the history hears how they left."""
        keys = self.table.detach(slots)
        if departure is not None and keys:
            ids = self._history.ids(self._identities[self.table.identity[slots[0]]], keys)
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
            self._bury_all(slots[self.table.dead[slots]][::-1].tolist())
