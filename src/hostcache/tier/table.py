"""The pages the tier knows: a tree (parent = the page before), each on the device, the host, or both. Decides nothing.

Life of a page on the host:   absent → filling → resident → absent
                                     `fill`    `ready`     `drop`      (`fill` → `drop` when its copy fails)
on the device:                absent ⇄ present          `set_device`
A page in neither is not in the table: `prune` takes it out. Rows are numbered slots in parallel columns, because a
million page records as objects would cost the collector seconds and the machine a kilobyte each.
"""

from __future__ import annotations

from collections.abc import Sequence
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

_WORDS = {
    "identity": NONE,  # number of the identity it is kept under
    "parent": NONE,
    "child": NONE,  # first child; siblings form a chain
    "next_sibling": NONE,
    "prev_sibling": NONE,
    "host_children": 0,  # children filling or resident
    "frame": NONE,
    "pins": 0,
    "older": NONE,
    "younger": NONE,
}
"""Columns of 32 bits, each with what it holds where no page is."""

_FLAGS = {
    "known": np.bool_,  # this slot stands for a page
    "state": np.uint8,
    "device": np.bool_,
    "returned": np.bool_,  # somebody came back for it
    "frontier": np.bool_,  # a snapshot ended here
    "fate": np.uint8,  # what was decided for it as its eviction from the device came near
    "dead": np.bool_,  # unmatchable, goes with its last pin
    "listed": np.uint8,
}
"""Columns of a byte, 0 where no page is."""

_KEY = np.dtype(f"V{KEY_BYTES}")
_EMPTY = np.array([list(_WORDS.values())], dtype=np.int32).T


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

    identity: npt.NDArray[np.int32]
    parent: npt.NDArray[np.int32]
    child: npt.NDArray[np.int32]
    next_sibling: npt.NDArray[np.int32]
    prev_sibling: npt.NDArray[np.int32]
    host_children: npt.NDArray[np.int32]
    frame: npt.NDArray[np.int32]
    pins: npt.NDArray[np.int32]
    older: npt.NDArray[np.int32]
    younger: npt.NDArray[np.int32]
    known: npt.NDArray[np.bool_]
    state: npt.NDArray[np.uint8]
    device: npt.NDArray[np.bool_]
    returned: npt.NDArray[np.bool_]
    frontier: npt.NDArray[np.bool_]
    fate: npt.NDArray[np.uint8]
    dead: npt.NDArray[np.bool_]
    listed: npt.NDArray[np.uint8]
    used: npt.NDArray[np.int64]
    """Tick of its last use."""

    def __init__(self, capacity: int = 1024) -> None:
        self.index: dict[bytes, int] = {}
        self.tally = Tally()
        self.journal: list[tuple[bool, PageKey]] | None = None
        """Where it is kept: each page that became restorable (True) or ceased to be, in order."""
        self._capacity = 0
        self._words = np.empty((len(_WORDS), 0), dtype=np.int32)
        self._flags = np.empty((len(_FLAGS), 0), dtype=np.uint8)
        self._keys = np.empty(0, dtype=_KEY)
        self.used = np.empty(0, dtype=np.int64)
        self._spare = np.empty(0, dtype=np.int64)
        self._spares = 0
        self._stretch(capacity)
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

    def keys_of(self, slots: Slots) -> list[PageKey]:
        keys: list[PageKey] = self._keys[slots].tolist()
        return keys

    def live(self) -> Slots:
        """Every used slot, dead ones included."""
        return np.flatnonzero(self.known)

    def on_device(self) -> Slots:
        """The pages on the device that can still be matched, each behind the one before it."""
        roots = np.flatnonzero(self.known & (self.parent == NONE)).tolist()
        slots = np.concatenate([self.tree(root) for root in roots]) if roots else self.live()
        here: Slots = slots[self.device[slots] & ~self.dead[slots]]
        return here

    def runs(self, slots: Slots) -> list[Slots]:
        """These pages as stretches of conversations, each heads first, in the order in which they came: neighbours that
        are each other's parent, in either direction, stay together."""
        if not len(slots):
            return []
        upward = self.parent[slots[:-1]] == slots[1:]
        downward = self.parent[slots[1:]] == slots[:-1]
        runs, start = [], 0
        for at in range(1, len(slots) + 1):
            joined = upward if upward[start : start + 1].any() else downward
            if at < len(slots) and joined[at - 1]:
                continue
            run = slots[start:at]
            runs.append(run[::-1] if joined is upward else run)
            start = at
        return runs

    def hosted_tail(self, slot: int) -> int | None:
        """The last page of one conversation that goes on behind this page on the host; None when it is held."""
        while self.host_children[slot]:
            slot = next(child for child in self.children(slot) if self.state[child] != ABSENT)
        return slot if self.listed[slot] != UNLISTED else None

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
            unknown = [keys[i] for i in missing.tolist()]
            self.index.update(zip(unknown, added.tolist(), strict=True))
            self._keys[added] = np.frombuffer(b"".join(unknown), dtype=_KEY)
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

    def children(self, slot: int) -> list[int]:
        following, child, found = self.next_sibling.data, int(self.child[slot]), []
        while child != NONE:
            found.append(child)
            child = following[child]
        return found

    def tree(self, root: int) -> Slots:
        """The page and all behind it, itself first."""
        child, following = self.child.data, self.next_sibling.data
        order, stack = [], [root]
        while stack:
            order.append(stack.pop())
            slot = child[order[-1]]
            while slot != NONE:
                stack.append(slot)
                slot = following[slot]
        return np.array(order, dtype=np.int64)

    def ancestors(self, slot: int, count: int) -> Slots:
        """The page, the one before it and so on, tail first: `count` of them, or as many as there are."""
        above, run = self.parent.data, []
        for _ in range(count):
            run.append(slot)
            slot = above[slot]
            if slot == NONE:
                break
        return np.array(run, dtype=np.int64)

    def detach(self, slots: Slots) -> list[PageKey]:
        """These pages become unmatchable: dead. Returns their keys."""
        keys = self.keys_of(slots)
        for key in keys:
            del self.index[key]
        self._note(False, slots[self.state[slots] == RESIDENT])
        self.dead[slots] = 1
        return keys

    def prune(self, tree: Slots) -> None:
        """Take a dead page and all behind it, itself last, out of the table; none is in a tier or pinned any more."""
        self._leave_parent(int(tree[-1]))
        self._words[:, tree] = _EMPTY
        self._flags[:, tree] = 0
        self.used[tree] = 0
        self._spare[self._spares : self._spares + len(tree)] = tree
        self._spares += len(tree)

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
        self._note(True, slots)
        self.relist_all(slots)

    def drop(self, slots: Slots) -> npt.NDArray[np.int64]:
        """filling or resident → absent. Returns the frames, which the caller now owns."""
        for slot in slots[self.listed[slots] != UNLISTED].tolist():
            self._unlink(slot)
        resident, device = self.state[slots] == RESIDENT, self.device[slots]
        self.tally.filling -= len(slots) - _count(resident)
        self.tally.resident -= _count(resident)
        self.tally.duplicate -= _count(resident & device)
        self.tally.dirty += _count(device)
        self.tally.frontiers -= _count(resident & self.frontier[slots])
        self._note(False, slots[resident])
        frames = self.frame[slots].astype(np.int64)
        self.frame[slots] = NONE
        self.state[slots] = ABSENT
        self.fate[slots] = UNDECIDED
        self._count_host_children(slots, -1)
        return frames

    def _note(self, restorable: bool, slots: Slots) -> None:
        if self.journal is not None:
            self.journal += [(restorable, key) for key in self.keys_of(slots[~self.dead[slots]])]

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
        tail = (self.state[slots] == RESIDENT) & ~self.host_children[slots].astype(bool)
        maybe = tail | self.listed[slots].astype(bool)
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
            self._stretch(2 * self._capacity)
        self._spares -= count
        slots = self._spare[self._spares : self._spares + count][::-1].copy()
        self.known[slots] = 1
        return slots

    def _stretch(self, capacity: int) -> None:
        """Room for this many pages. The columns of one width are the rows of one array: a page is wiped in one go."""
        old, self._capacity = self._capacity, capacity
        more = capacity - old
        all_words = np.empty((len(_WORDS), capacity), dtype=np.int32)
        all_words[:, :old], all_words[:, old:] = self._words, _EMPTY
        self._words = all_words
        all_flags = np.zeros((len(_FLAGS), capacity), dtype=np.uint8)
        all_flags[:, :old] = self._flags
        self._flags = all_flags
        for name, words in zip(_WORDS, self._words, strict=True):
            setattr(self, name, words)
        for (name, kind), flags in zip(_FLAGS.items(), self._flags, strict=True):
            setattr(self, name, flags.view(kind))
        self._keys = np.concatenate((self._keys, np.zeros(more, dtype=_KEY)))
        self.used = np.concatenate((self.used, np.zeros(more, dtype=np.int64)))
        spare = np.empty(capacity, dtype=np.int64)
        spare[:more] = np.arange(capacity - 1, old - 1, -1)
        spare[more : more + self._spares] = self._spare[: self._spares]
        self._spare = spare
        self._spares += more

    # ---- proof

    def check(self) -> None:
        """Index, tree, lists and columns agree. O(pages), in whole columns: it runs after every move in the tests."""
        live = self.live()
        state, device, dead = self.state[live], self.device[live], self.dead[live]
        listed, children, pinned = self.listed[live], self.host_children[live], self.pins[live].astype(bool)
        resident, hosted = state == RESIDENT, state.astype(bool)
        slots = np.fromiter(self.index.values(), dtype=np.int64, count=len(self.index))
        if (len(slots) != len(live) - _count(dead) or _count(self.known[slots] > self.dead[slots]) != len(slots)
                or b"".join(self.index) != self._keys[slots].tobytes()):
            raise InvariantBroken(f"{len(slots)} keys lead to {len(live) - _count(dead)} live pages")
        worth = self.returned[live] + ONCE
        worth[device & (self.fate[live] != LEAVING)] = DUPLICATE
        worth[~resident | pinned | dead | children.astype(bool)] = UNLISTED
        _same("listed", live, listed, worth)
        _same("with a frame", live, self.frame[live] != NONE, hosted)
        has_child = self.child[live] != NONE  # a dead page may wait for the last pin of a page behind it
        _same("in some tier, or held", live, hosted | device | pinned | (dead & has_child), True)
        counted = Tally(
            filling=_count(hosted) - _count(resident), resident=_count(resident), duplicate=_count(resident & device),
            dirty=_count(device > hosted), pinned=_count(pinned), frontiers=_count(resident & self.frontier[live]))
        if counted != self.tally:
            raise InvariantBroken(f"the tally is {self.tally}, counting gives {counted}")
        self._check_tree(live, _count(has_child), children)
        for worth_, claimed in enumerate(np.bincount(listed, minlength=4).tolist()):
            if worth_ != UNLISTED:
                self._check_list(worth_, claimed)

    def _check_tree(self, live: Slots, parents: int, host_children: npt.NDArray[np.int32]) -> None:
        above = self.parent[live]
        below = above != NONE
        joined, above = live[below], above[below]
        before = self.prev_sibling[joined]
        first = before == NONE
        reached, beside = self.next_sibling[before], self.parent[before]
        reached[first], beside[first] = self.child[above[first]], above[first]
        _same("reached", joined, reached, joined)
        _same("under its sibling's parent", joined, beside, above)
        # Each page is reached in one step of its own. Did another step lead elsewhere, there would be more steps.
        steps = parents + _count(self.next_sibling[live] != NONE)
        if steps != len(joined) or parents != _count(first):
            raise InvariantBroken(f"{parents} first children and {steps} steps lead to {len(joined)} pages")
        count = np.bincount(above[self.state[joined].astype(bool)], minlength=self._capacity)
        _same("with host children", live, host_children, count[live])

    def _check_list(self, worth: int, claimed: int) -> None:
        listed, older, younger = self.listed.data, self.older.data, self.younger.data
        seen, slot, before = 0, self._oldest[worth], NONE
        while slot != NONE:
            if listed[slot] != worth or older[slot] != before or seen > claimed:
                raise InvariantBroken(f"the list of worth {worth} is broken at slot {slot}")
            seen, before, slot = seen + 1, slot, younger[slot]
        if seen != claimed or self._youngest[worth] != before:
            raise InvariantBroken(f"the list of worth {worth} holds {seen} pages, {claimed} claim to stand in it")


def _count(flags: npt.NDArray[np.generic]) -> int:
    return int(np.count_nonzero(flags))


def _same(
    what: str, slots: Slots, found: npt.NDArray[np.generic], expected: npt.NDArray[np.generic] | bool
) -> None:
    if not _count(found != expected):
        return
    wrong = np.flatnonzero(found != expected)
    at = int(wrong[0])
    values = [np.broadcast_to(np.asarray(v), len(slots))[at] for v in (found, expected)]
    where = f"{len(wrong)} pages, first slot {slots[at]}"
    raise InvariantBroken(f"{where}: {what} is {values[0]}, should be {values[1]}")
