"""Which device pages are free, who holds the others, and which key a page is published under.

Knows page numbers and keys; no bytes, no requests, no tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum

import numpy as np

from hostcache.errors import InvariantBroken
from hostcache.tier import PageKey
from hostcache.tier.pool import FramePool


class Hold(IntEnum):
    """Why a page is not free."""

    USE = 0
    """an active request reads or writes it"""
    BANK = 1
    """a snapshot contains it"""
    STORE = 2
    """a write-back reads it"""
    LATE = 3
    """a restore that was given up may still write it (quarantine); such a page is never published"""


class DevicePages:
    """The page table. A page: *free* → `allocate` → *held* (any number of holds of any kind) → last `drop` → *free*.

    A held page may be *published* under its key, from when its content is complete; it leaves the index with its last
    hold. One key is published once: a second page of the same content stays unpublished.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = FramePool(count)
        self._holds = np.zeros((len(Hold), count), dtype=np.int32)
        self._index: dict[PageKey, int] = {}
        self._key: list[PageKey | None] = [None] * count

    @property
    def free(self) -> int:
        return self._pool.free

    @property
    def published(self) -> int:
        return len(self._index)

    @property
    def banked(self) -> int:
        """Pages that snapshots contain, each once."""
        return int(np.count_nonzero(self._holds[Hold.BANK]))

    @property
    def quarantined(self) -> int:
        return int(np.count_nonzero(self._holds[Hold.LATE]))

    @property
    def evictable(self) -> int:
        """Pages that come free when every snapshot goes (and the write-backs that read them end)."""
        bank, use, late = self._holds[Hold.BANK], self._holds[Hold.USE], self._holds[Hold.LATE]
        return int(np.count_nonzero((bank > 0) & (use == 0) & (late == 0)))

    def allocate(self, count: int, *, after: int | None = None) -> list[int]:
        """`count` pages with a USE hold each, in as few runs of neighbours as can be had; with `after`, right behind
        that page where free. Raises ValueError, nothing taken, when fewer are free: ask `free` first."""
        pages = self._pool.take(count, after)
        self._holds[Hold.USE, pages] = 1
        return [int(page) for page in pages]

    def hold(self, kind: Hold, pages: Sequence[int]) -> None:
        """One more hold on pages that are not free, each named once."""
        self._holds[kind, np.asarray(pages, dtype=np.int64)] += 1

    def drop(self, kind: Hold, pages: Sequence[int]) -> list[PageKey]:
        """One hold less on each. Returns the keys that left the index, because their page came free, in order."""
        touched = np.asarray(pages, dtype=np.int64)
        if not touched.size:
            return []
        counts = self._holds[kind]
        counts[touched] -= 1
        if (counts[touched] < 0).any():
            raise InvariantBroken(f"a {kind.name} hold was dropped twice among pages {list(pages)[:8]}")
        freed = touched[~self._holds[:, touched].any(axis=0)]
        removed: list[PageKey] = []
        for page in freed.tolist():
            key = self._key[page]
            if key is not None:
                removed.append(key)
                del self._index[key]
                self._key[page] = None
        self._pool.give_back(freed)
        return removed

    def publish(self, key: PageKey, page: int) -> int:
        """The page that serves `key` from now on: this one, or the one that was published before it."""
        holder = self._index.setdefault(key, page)
        if holder == page:
            self._key[page] = key
        return holder

    def unpublish_all(self) -> list[PageKey]:
        """Nothing matches any more; who holds a page keeps it."""
        removed = list(self._index)
        for page in self._index.values():
            self._key[page] = None
        self._index.clear()
        return removed

    def find(self, key: PageKey) -> int | None:
        return self._index.get(key)

    def match(self, keys: Sequence[PageKey]) -> list[int]:
        """The pages of the longest published run of leading keys."""
        found: list[int] = []
        for key in keys:
            page = self._index.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def frees(self, snapshots: Iterable[Sequence[int]]) -> Iterator[int]:
        """How many pages come free as each of these snapshots goes, one after another in this order. Works as far as it
        is read, and only while nothing changes."""
        bank = self._holds[Hold.BANK].copy()
        idle = (self._holds[Hold.USE] == 0) & (self._holds[Hold.LATE] == 0)
        for pages in snapshots:
            touched = np.asarray(pages, dtype=np.int64)
            bank[touched] -= 1
            yield int(np.count_nonzero((bank[touched] == 0) & idle[touched]))

    def stays(self, pages: Sequence[int]) -> int:
        """How many leading pages of a snapshot remain held by requests or other snapshots when it goes."""
        touched = np.asarray(pages, dtype=np.int64)
        kept = (self._holds[Hold.USE, touched] > 0) | (self._holds[Hold.BANK, touched] > 1)
        return int(touched.size) if kept.all() else int(np.argmin(kept))

    def all_in_use(self, pages: Sequence[int]) -> bool:
        """Does a request hold every one of them?"""
        return bool((self._holds[Hold.USE, np.asarray(pages, dtype=np.int64)] > 0).all())

    def holds(self, kind: Hold) -> int:
        """All holds of this kind, for the ledger."""
        return int(self._holds[kind].sum())

    def check(self) -> None:
        self._pool.check()
        held = int(np.count_nonzero(self._holds.any(axis=0)))
        if (self._holds < 0).any() or held + self._pool.free != self.count:
            raise InvariantBroken(f"{held} pages held + {self._pool.free} free != {self.count} pages")
        for key, page in self._index.items():
            if self._key[page] != key:
                raise InvariantBroken(f"page {page} is in the index under a key that is not its own")
            if not self._holds[:, page].any():
                raise InvariantBroken(f"page {page} is published but free")
            if self._holds[Hold.LATE, page]:
                raise InvariantBroken(f"page {page} is published but quarantined")
        keyed = sum(key is not None for key in self._key)
        if keyed != len(self._index):
            raise InvariantBroken(f"{keyed} pages have a key, {len(self._index)} are indexed")
