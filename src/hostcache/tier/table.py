"""The pages the tier knows: a tree (parent = the page before), each on the device, the host, or both. Decides nothing.

Life of a page on the host:   absent → filling → resident → absent
                                     `fill`    `ready`     `drop`      (`fill` → `drop` when its copy fails)
on the device:                absent ⇄ present          `set_device`
A page in neither is not in the table: `prune` takes it out. Rows are numbered slots in parallel columns, because a
million page records as objects would cost the collector seconds and the machine a kilobyte each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import numpy.typing as npt

from hostcache.errors import InvariantBroken
from hostcache.tier.keys import KEY_BYTES, KeyChain, PageKey

Slots = npt.NDArray[np.int64]

NONE = -1
"""No slot, no frame: inside the columns only."""

ABSENT, FILLING, RESIDENT = 0, 1, 2
UNLISTED, DUPLICATE, ONCE, RETURNED = 0, 1, 2, 3
"""Which list an evictable page stands in; the value is also its worth: duplicates go first, returned pages last."""

UNDECIDED, LEAVING, KEPT_OUT, OPTED_OUT, FAILED = 0, 1, 2, 3, 4
"""Fates: LEAVING its host copy is the one that will remain; the others say why it has none."""

_COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("known", "u1", 0),  # this slot stands for a page
    ("identity", "i4", NONE),  # number of the identity it is kept under
    ("parent", "i4", NONE),
    ("child", "i4", NONE),  # first child; siblings form a chain
    ("next_sibling", "i4", NONE),
    ("prev_sibling", "i4", NONE),
    ("host_children", "i4", 0),  # children filling or resident
    ("frame", "i4", NONE),
    ("state", "u1", ABSENT),
    ("device", "u1", 0),
    ("pins", "i4", 0),
    ("returned", "u1", 0),  # somebody came back for it
    ("frontier", "u1", 0),  # a snapshot ended here
    ("fate", "u1", 0),  # what was decided for it as its eviction from the device came near
    ("dead", "u1", 0),  # unmatchable, goes with its last pin
    ("used", "i8", 0),  # tick of its last use
    ("listed", "u1", UNLISTED),
    ("older", "i4", NONE),
    ("younger", "i4", NONE),
)


@dataclass(slots=True)
class Tally:
    """How many pages are what, kept as they change, so that asking costs nothing however many there are."""

    filling: int = 0
    resident: int = 0
    duplicate: int = 0
    """resident and on the device"""
    dirty: int = 0
    """on the device only"""
    pinned: int = 0
    frontiers: int = 0
    """resident pages that a snapshot ended with"""


class PageTable:
    """Key → slot, and the columns. Slots are recycled; columns grow by doubling."""

    known: npt.NDArray[np.uint8]
    identity: npt.NDArray[np.int32]
    parent: npt.NDArray[np.int32]
    child: npt.NDArray[np.int32]
    next_sibling: npt.NDArray[np.int32]
    prev_sibling: npt.NDArray[np.int32]
    host_children: npt.NDArray[np.int32]
    frame: npt.NDArray[np.int32]
    state: npt.NDArray[np.uint8]
    device: npt.NDArray[np.uint8]
    pins: npt.NDArray[np.int32]
    returned: npt.NDArray[np.uint8]
    frontier: npt.NDArray[np.uint8]
    fate: npt.NDArray[np.uint8]
    dead: npt.NDArray[np.uint8]
    used: npt.NDArray[np.int64]
    listed: npt.NDArray[np.uint8]
    older: npt.NDArray[np.int32]
    younger: npt.NDArray[np.int32]

    def __init__(self, capacity: int = 1024) -> None:
        self.index: dict[bytes, int] = {}
        self.tally = Tally()
        self._capacity = capacity
        for name, kind, empty in _COLUMNS:
            setattr(self, name, np.full(capacity, empty, dtype=kind))
        self._keys = np.zeros((capacity, KEY_BYTES), dtype=np.uint8)
        self._spare = np.arange(capacity - 1, -1, -1, dtype=np.int64)
        self._spares = capacity
        self._oldest = [NONE] * 4
        self._youngest = [NONE] * 4

    # ---- finding

    def find(self, keys: Sequence[PageKey]) -> Slots:
        """The slot of each key, NONE where unknown."""
        return np.fromiter(map(self.index.get, keys, repeat(NONE)), dtype=np.int64, count=len(keys))

    def resident_run(self, chain: KeyChain, start: int, stop: int) -> Slots:
        """Slots of the longest run of resident pages from `start` on. Costs what it finds, not what it is asked."""
        found: list[Slots] = []
        step = 16
        while start < stop:
            slots = self.find(chain.keys[start : min(stop, start + step)])
            held = (slots >= 0) & (self.state[slots] == RESIDENT)
            if not held.all():
                found.append(slots[: int(held.argmin())])
                break
            found.append(slots)
            start += len(slots)
            step = min(4096, step * 4)
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def key(self, slot: int) -> PageKey:
        return PageKey(self._keys[slot].tobytes())

    def keys_of(self, slots: Slots) -> list[PageKey]:
        data = self._keys[slots].tobytes()
        return [PageKey(data[at : at + KEY_BYTES]) for at in range(0, len(data), KEY_BYTES)]

    def live(self) -> Slots:
        """Every used slot, dead ones included."""
        return np.flatnonzero(self.known)

    def __len__(self) -> int:
        return self._capacity - self._spares

    # ---- the tree

    def add(self, chain: KeyChain, start: int, stop: int) -> tuple[Slots, Slots]:
        """Slots of pages [start, stop), adding those that are unknown. Returns (all of them, the added ones).

        Page start-1, if any, becomes the parent of page `start`; a page that lost its parent finds it again here.
        """
        keys = chain.keys[start:stop]
        slots = self.find(keys)
        missing = np.flatnonzero(slots < 0)
        added = self._new(len(missing))
        if len(missing):
            slots[missing] = added
            self.index.update(zip((keys[i] for i in missing.tolist()), added.tolist(), strict=True))
            data = b"".join([keys[i] for i in missing.tolist()])
            self._keys[added] = np.frombuffer(data, dtype=np.uint8).reshape(-1, KEY_BYTES)
        before = self.index.get(chain.keys[start - 1], NONE) if start and len(slots) else NONE
        parents = np.concatenate(([before], slots[:-1])) if len(slots) else slots
        # Freshly added neighbours are each other's only relation and are joined in one go; the rest one by one.
        orphan = (self.parent[slots] == NONE) & (parents != NONE)
        fresh = np.zeros(len(slots), dtype=bool)
        fresh[missing] = True
        inner = orphan & fresh & np.concatenate(([False], fresh[:-1])) if len(slots) else orphan
        self.parent[slots[inner]] = parents[inner]
        self.child[parents[inner]] = slots[inner]
        for at in np.flatnonzero(orphan & ~inner).tolist():
            self._adopt(int(slots[at]), int(parents[at]))
        return slots, added

    def _adopt(self, slot: int, parent: int) -> None:
        first = int(self.child[parent])
        self.parent[slot] = parent
        self.next_sibling[slot] = first
        if first != NONE:
            self.prev_sibling[first] = slot
        self.child[parent] = slot
        if self.state[slot] != ABSENT:
            self.host_children[parent] += 1
            self.relist(parent)

    def _leave_parent(self, slot: int) -> None:
        parent, before, after = int(self.parent[slot]), int(self.prev_sibling[slot]), int(self.next_sibling[slot])
        if parent == NONE:
            return
        if before != NONE:
            self.next_sibling[before] = after
        else:
            self.child[parent] = after
        if after != NONE:
            self.prev_sibling[after] = before
        self.parent[slot] = self.prev_sibling[slot] = self.next_sibling[slot] = NONE

    def children(self, slot: int) -> Iterator[int]:
        child = int(self.child[slot])
        while child != NONE:
            following = int(self.next_sibling[child])
            yield child
            child = following

    def prune(self, slot: int) -> None:
        """Take a page that is in no tier, has no pin and no child out of the table."""
        self.detach_key(slot)
        self._leave_parent(slot)
        for name, _, empty in _COLUMNS:
            getattr(self, name)[slot] = empty
        self._spare[self._spares] = slot
        self._spares += 1

    def detach_key(self, slot: int) -> None:
        """Make the page unmatchable."""
        key = self.key(slot)
        if self.index.get(key) == slot:
            del self.index[key]

    # ---- states

    def fill(self, slots: Slots, frames: npt.NDArray[np.int64]) -> None:
        """absent → filling: a copy into these frames is on its way."""
        self.tally.filling += len(slots)
        self.tally.dirty -= _count(self.device[slots])
        self.frame[slots] = frames
        self.state[slots] = FILLING
        self._count_host_children(slots, 1)

    def ready(self, slots: Slots) -> None:
        """filling → resident."""
        self.tally.filling -= len(slots)
        self.tally.resident += len(slots)
        self.tally.duplicate += _count(self.device[slots])
        self.tally.frontiers += _count(self.frontier[slots])
        self.state[slots] = RESIDENT
        self.relist_all(slots)

    def drop(self, slots: Slots) -> npt.NDArray[np.int64]:
        """filling or resident → absent. Returns the frames, which the caller now owns."""
        for slot in slots[self.listed[slots] != UNLISTED].tolist():
            self._unlink(slot)
        resident, device = self.state[slots] == RESIDENT, self.device[slots] == 1
        self.tally.filling -= len(slots) - _count(resident)
        self.tally.resident -= _count(resident)
        self.tally.duplicate -= _count(resident & device)
        self.tally.dirty += _count(device)
        self.tally.frontiers -= _count(resident & (self.frontier[slots] == 1))
        frames = self.frame[slots].astype(np.int64)
        self.frame[slots] = NONE
        self.state[slots] = ABSENT
        self.fate[slots] = UNDECIDED
        self._count_host_children(slots, -1)
        return frames

    def _count_host_children(self, slots: Slots, change: int) -> None:
        parents = self.parent[slots]
        parents = parents[parents != NONE]
        np.add.at(self.host_children, parents, change)
        self.relist_all(parents)

    def set_device(self, slots: Slots, present: bool) -> None:
        states = self.state[slots[self.device[slots] != present]]
        sign = 1 if present else -1
        self.tally.duplicate += sign * _count(states == RESIDENT)
        self.tally.dirty += sign * _count(states == ABSENT)
        self.device[slots] = present
        if not present:
            self.fate[slots] = UNDECIDED
        self.relist_all(slots)

    def touch(self, slots: Slots, tick: int) -> None:
        """These pages were used now: they become young, and are no longer about to leave the device."""
        self.used[slots] = tick
        self.fate[slots] = UNDECIDED
        self.relist_all(slots, moved=True)

    def mark_frontier(self, slot: int) -> None:
        """A snapshot ends with this page."""
        self.tally.frontiers += int(self.state[slot] == RESIDENT and not self.frontier[slot])
        self.frontier[slot] = 1

    def pin(self, slots: Slots) -> None:
        self.tally.pinned += _count(self.pins[slots] == 0)
        self.pins[slots] += 1
        self.relist_all(slots)

    def unpin(self, slots: Slots) -> None:
        self.pins[slots] -= 1
        self.tally.pinned -= _count(self.pins[slots] == 0)
        self.relist_all(slots)

    # ---- evictable pages, oldest first

    def worth(self, slot: int) -> int:
        """The list this page belongs in now. Evictable: resident, unpinned, and no page behind it on the host."""
        if self.state[slot] != RESIDENT or self.pins[slot] or self.host_children[slot] or self.dead[slot]:
            return UNLISTED
        if self.device[slot] and self.fate[slot] != LEAVING:
            return DUPLICATE
        return RETURNED if self.returned[slot] else ONCE

    def relist_all(self, slots: npt.NDArray[np.signedinteger], *, moved: bool = False) -> None:
        """Put each page into the list it belongs in; `moved` also moves those that stay to the young end."""
        # Only tails can be listed, so of a long chain hardly any page is looked at.
        maybe = (self.listed[slots] != UNLISTED) | ((self.state[slots] == RESIDENT) & (self.host_children[slots] == 0))
        for slot in slots[maybe].tolist():
            self.relist(slot, moved=moved)

    def relist(self, slot: int, *, moved: bool = False) -> None:
        worth = self.worth(slot)
        if worth == self.listed[slot] and not moved:
            return
        if self.listed[slot] != UNLISTED:
            self._unlink(slot)
        if worth != UNLISTED:
            self._link(slot, worth)

    def oldest(self, worth: int) -> int | None:
        slot = self._oldest[worth]
        return None if slot == NONE else slot

    def youngest(self, worth: int) -> int | None:
        slot = self._youngest[worth]
        return None if slot == NONE else slot

    def _link(self, slot: int, worth: int) -> None:
        """Insert by last use. A page that becomes a tail is nearly always as old or as young as an end of the list;
        from further inside than a few steps its place is approximate."""
        used = self.used[slot]
        younger, older = NONE, self._youngest[worth]
        steps = 8
        while older != NONE and self.used[older] > used and steps:
            younger, older = older, int(self.older[older])
            steps -= 1
        if not steps:
            older, younger = NONE, self._oldest[worth]
            steps = 8
            while younger != NONE and self.used[younger] < used and steps:
                older, younger = younger, int(self.younger[younger])
                steps -= 1
        self.older[slot], self.younger[slot] = older, younger
        if older == NONE:
            self._oldest[worth] = slot
        else:
            self.younger[older] = slot
        if younger == NONE:
            self._youngest[worth] = slot
        else:
            self.older[younger] = slot
        self.listed[slot] = worth

    def _unlink(self, slot: int) -> None:
        worth, older, younger = int(self.listed[slot]), int(self.older[slot]), int(self.younger[slot])
        if older == NONE:
            self._oldest[worth] = younger
        else:
            self.younger[older] = younger
        if younger == NONE:
            self._youngest[worth] = older
        else:
            self.older[younger] = older
        self.older[slot] = self.younger[slot] = NONE
        self.listed[slot] = UNLISTED

    # ---- slots

    def _new(self, count: int) -> Slots:
        while self._spares < count:
            self._grow()
        self._spares -= count
        slots = self._spare[self._spares : self._spares + count][::-1].copy()
        self.known[slots] = 1
        return slots

    def _grow(self) -> None:
        old, self._capacity = self._capacity, self._capacity * 2
        for name, kind, empty in _COLUMNS:
            setattr(self, name, np.concatenate((getattr(self, name), np.full(old, empty, dtype=kind))))
        self._keys = np.concatenate((self._keys, np.zeros((old, KEY_BYTES), dtype=np.uint8)))
        spare = np.empty(self._capacity, dtype=np.int64)
        spare[:old] = np.arange(self._capacity - 1, old - 1, -1)
        spare[old : old + self._spares] = self._spare[: self._spares]
        self._spare = spare
        self._spares += old

    # ---- proof

    def check(self) -> None:
        """Tree, lists and columns agree. O(pages), in whole columns: it runs after every move in the tests."""
        live = self.live()
        dead, state, device = self.dead[live] == 1, self.state[live], self.device[live] == 1
        named = live[~dead]
        if len(self.index) != len(named) or (self.find(self.keys_of(named)) != named).any():
            raise InvariantBroken(f"{len(self.index)} keys lead to {len(named)} live pages")
        self._check_tree(live)
        tail = (state == RESIDENT) & (self.pins[live] == 0) & (self.host_children[live] == 0) & ~dead
        kept = np.where(self.returned[live] == 1, RETURNED, ONCE)
        worth = np.where(device & (self.fate[live] != LEAVING), DUPLICATE, kept)
        _same("listed", live, self.listed[live], np.where(tail, worth, UNLISTED))
        _same("without a frame", live, self.frame[live] == NONE, state == ABSENT)
        waiting = dead & (self.child[live] != NONE)  # for the last pin of a page behind it
        _same("in no tier", live, (state == ABSENT) & ~device & (self.pins[live] == 0) & ~waiting, False)
        counted = Tally(
            filling=_count(state == FILLING), resident=_count(state == RESIDENT),
            duplicate=_count((state == RESIDENT) & device), dirty=_count((state == ABSENT) & device),
            pinned=_count(self.pins[live] > 0), frontiers=_count((state == RESIDENT) & (self.frontier[live] == 1)))
        if counted != self.tally:
            raise InvariantBroken(f"the tally is {self.tally}, counting gives {counted}")
        for worth_ in (DUPLICATE, ONCE, RETURNED):
            self._check_list(worth_, int((self.listed[live] == worth_).sum()))

    def _check_tree(self, live: Slots) -> None:
        joined = live[self.parent[live] != NONE]
        above, before, after = self.parent[joined], self.prev_sibling[joined], self.next_sibling[joined]
        _same("reached from its parent", joined, np.where(before == NONE, self.child[above], joined), joined)
        _same("reached from its sibling", joined, np.where(before == NONE, joined, self.next_sibling[before]), joined)
        _same("reached backwards", joined, np.where(after == NONE, joined, self.prev_sibling[after]), joined)
        _same("under its sibling's parent", joined, np.where(before == NONE, above, self.parent[before]), above)
        count = np.zeros(self._capacity, dtype=np.int64)
        np.add.at(count, above, self.state[joined] != ABSENT)
        _same("with host children", live, self.host_children[live], count[live])

    def _check_list(self, worth: int, claimed: int) -> None:
        seen, slot, before = 0, self._oldest[worth], NONE
        while slot != NONE:
            if self.listed[slot] != worth or self.older[slot] != before or seen > claimed:
                raise InvariantBroken(f"the list of worth {worth} is broken at slot {slot}")
            seen, before, slot = seen + 1, slot, int(self.younger[slot])
        if seen != claimed or self._youngest[worth] != before:
            raise InvariantBroken(f"the list of worth {worth} holds {seen} pages, {claimed} claim to stand in it")


def _count(flags: npt.NDArray[np.generic]) -> int:
    return int(np.count_nonzero(flags))


def _same(what: str, slots: Slots, found: npt.ArrayLike, expected: npt.ArrayLike) -> None:
    wrong = np.flatnonzero(np.asarray(found) != np.asarray(expected))
    if len(wrong):
        at = int(wrong[0])
        values = [np.broadcast_to(np.asarray(v), len(slots))[at] for v in (found, expected)]
        where = f"{len(wrong)} pages, first slot {slots[at]}"
        raise InvariantBroken(f"{where}: {what} is {values[0]}, should be {values[1]}")
