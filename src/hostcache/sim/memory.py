"""The simulated device's pages and banks, and what stands in every page and frame. Decides nothing, knows no time.

A page holds the print of the tokens it stands for instead of their KV. A page is *held* by requests and snapshots;
*published* pages can be found by key; a page under a running copy is not handed out before that copy is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import overload

import numpy as np
import numpy.typing as npt

from hostcache.errors import InvariantBroken
from hostcache.tier import BankView, CopyJob, Direction, KeyChain, PageKey
from hostcache.tier.pool import FramePool
from hostcache.workload.conversations import Frontier, Prints

Pages = npt.NDArray[np.int64]

TORN = np.uint64(0)
"""In a page or frame that holds nothing whole."""


@dataclass(slots=True, eq=False)
class Snapshot:
    """A conversation on the device up to `frontier`, in one bank."""

    number: int
    bank: str
    chain: KeyChain
    pages: Pages
    frontier: Frontier
    used: int = 0


Place = tuple[bytes, int]


def place(chain: KeyChain, frontier: Frontier) -> Place:
    """What a frontier is known by: the same tokens under another identity end elsewhere."""
    return chain.identity.digest, frontier.print_


class _Order(Sequence[int]):
    """A bank's snapshot numbers, next victim first, without copying them."""

    def __init__(self, entries: Mapping[int, Snapshot]) -> None:
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, int):
            return list(self._entries)[at]
        return list(islice(self._entries, at.start, at.stop, at.step))


class Memory:
    """Device pages, banks, host frames. It is also the copiers' `Mover`: prints move as bytes would."""

    def __init__(self, pages: int, frames: int, banks: Mapping[str, int], *, prompts_first: bool) -> None:
        """`banks`: name → entries. `prompts_first`: for want of pages the first bank is emptied before the next one;
        else the least recently used snapshot of any bank goes."""
        self.pool = FramePool(pages)
        self.prints: Prints = np.zeros(pages, dtype=np.uint64)
        self.host: Prints = np.zeros(frames, dtype=np.uint64)
        self.capacity = dict(banks)
        self.banks: dict[str, dict[int, Snapshot]] = {name: {} for name in banks}
        self.snapshots: dict[int, Snapshot] = {}
        self.where: dict[PageKey, int] = {}
        self._frontiers: dict[Place, Snapshot] = {}
        self._prompts_first = prompts_first
        self._holders = np.zeros(pages, dtype=np.int32)
        self._requests = np.zeros(pages, dtype=np.int32)  # of the holders
        self._copies = np.zeros(pages, dtype=np.int32)
        self._keys: npt.NDArray[np.object_] = np.full(pages, None, dtype=object)
        self._newest = np.zeros(pages, dtype=np.int64)
        self._tick = 0

    # ---- pages

    @property
    def free_pages(self) -> int:
        return self.pool.free

    @property
    def reclaimable(self) -> int:
        """Pages that would be free with every snapshot evicted."""
        kept = (self._requests > 0) | ((self._holders == 0) & (self._copies > 0))
        return self.pool.total - int(np.count_nonzero(kept))

    def take(self, count: int) -> Pages:
        """`count` pages, held by a request. Ask `free_pages` first."""
        pages = self.pool.take(count)
        self._holders[pages] = 1
        self._requests[pages] = 1
        self.prints[pages] = TORN
        return pages

    def hold(self, pages: Pages) -> None:
        """A request needs these pages too."""
        self._holders[pages] += 1
        self._requests[pages] += 1

    def release(self, pages: Pages) -> list[PageKey]:
        """A request lets go. Returns the keys of the published pages that left the device, heads first."""
        self._requests[pages] -= 1
        return self._leave(pages)

    def _leave(self, pages: Pages) -> list[PageKey]:
        self._holders[pages] -= 1
        gone = pages[self._holders[pages] == 0]
        if not len(gone):
            return []
        left: list[PageKey] = [key for key in self._keys[gone].tolist() if key is not None]
        self._keys[gone] = None
        for key in left:
            del self.where[key]
        self.pool.give_back(gone[self._copies[gone] == 0])
        return left

    def publish(self, chain: KeyChain, pages: Pages, start: int, stop: int) -> None:
        """Pages [start, stop) of the chain are complete in `pages` and can be found. One that is there already is
        replaced, in place, by the one that is there."""
        keys = chain.keys
        if not any(map(self.where.__contains__, keys[start:stop])):
            self.where.update(zip(keys[start:stop], pages[start:stop].tolist(), strict=True))
            self._keys[pages[start:stop]] = keys[start:stop]
            return
        for i in range(start, stop):
            page = int(pages[i])
            there = self.where.setdefault(keys[i], page)
            if there == page:
                self._keys[page] = keys[i]
            else:
                pages[i] = there
                self.hold(pages[i : i + 1])
                self.release(np.array([page], dtype=np.int64))

    def find(self, chain: KeyChain, limit: int) -> Pages:
        """The published pages of the chain's longest prefix on the device, before page `limit`."""
        keys, where = chain.keys, self.where
        low, high = 0, min(limit, len(keys))
        while low < high:  # whoever holds a page holds all before it
            middle = (low + high + 1) // 2
            if keys[middle - 1] in where:
                low = middle
            else:
                high = middle - 1
        return np.fromiter(map(where.__getitem__, keys[:low]), dtype=np.int64, count=low)

    def named(self, pages: Pages) -> list[PageKey | None]:
        """The key under which each page can be found."""
        keys: list[PageKey | None] = self._keys[pages].tolist()
        return keys

    def unpublish_all(self) -> None:
        """Nothing that is on the device may be found any more."""
        self._keys[:] = None
        self.where.clear()
        self._frontiers.clear()

    # ---- copies

    def copying(self, pages: Pages) -> None:
        """A copy may touch these pages from now on."""
        self._copies[pages] += 1

    def copied(self, pages: Pages) -> None:
        """That copy is over."""
        self._copies[pages] -= 1
        self.pool.give_back(pages[(self._copies[pages] == 0) & (self._holders[pages] == 0)])

    def begin(self, job: CopyJob) -> None:
        target = self.host if job.direction is Direction.STORE else self.prints
        for each in job.extents:
            at = each.frame if job.direction is Direction.STORE else each.device_page
            target[at : at + each.pages] = TORN

    def finish(self, job: CopyJob, pages: int) -> None:
        for each in job.extents:
            count = min(pages, each.pages)
            pages -= count
            device = slice(each.device_page, each.device_page + count)
            frames = slice(each.frame, each.frame + count)
            if job.direction is Direction.STORE:
                self.host[frames] = self.prints[device]
            else:
                self.prints[device] = self.host[frames]

    # ---- snapshots

    def add(self, snapshot: Snapshot) -> None:
        """Into its bank, youngest. It holds its pages. Make room in the bank first."""
        self._tick += 1
        snapshot.used = self._tick
        self._holders[snapshot.pages] += 1
        self._newest[snapshot.pages] = snapshot.number
        self.banks[snapshot.bank][snapshot.number] = snapshot
        self.snapshots[snapshot.number] = snapshot
        self._frontiers[place(snapshot.chain, snapshot.frontier)] = snapshot

    def drop(self, snapshot: Snapshot) -> list[PageKey]:
        """Out of its bank. Returns the keys that left the device with it."""
        del self.banks[snapshot.bank][snapshot.number], self.snapshots[snapshot.number]
        ends = place(snapshot.chain, snapshot.frontier)
        if self._frontiers.get(ends) is snapshot:
            del self._frontiers[ends]
        return self._leave(snapshot.pages)

    def touch(self, snapshot: Snapshot) -> None:
        """It was used: youngest of its bank."""
        self._tick += 1
        snapshot.used = self._tick
        bank = self.banks[snapshot.bank]
        bank[snapshot.number] = bank.pop(snapshot.number)

    def ending_at(self, chain: KeyChain, frontier: Frontier) -> Snapshot | None:
        """The snapshot that ends exactly there."""
        return self._frontiers.get(place(chain, frontier))

    def holding(self, page: int) -> Snapshot | None:
        """The newest snapshot that was retained over this page, if it is still there."""
        return self.snapshots.get(int(self._newest[page]))

    def stays(self, snapshot: Snapshot) -> int:
        """How many leading pages of it remain on the device without it."""
        own = self._holders[snapshot.pages] == 1
        return int(own.argmax()) if own.any() else len(own)

    def victims(self) -> Iterator[Snapshot]:
        """In the order in which they are evicted for want of pages."""
        if self._prompts_first:
            for bank in self.banks.values():
                yield from bank.values()
            return
        heads = [iter(bank.values()) for bank in self.banks.values()]
        nexts = [next(head, None) for head in heads]
        while any(nexts):
            at = min((each.used, i) for i, each in enumerate(nexts) if each is not None)[1]
            oldest = nexts[at]
            nexts[at] = next(heads[at], None)
            if oldest is not None:
                yield oldest

    def frees(self) -> Iterator[tuple[int, int]]:
        """(snapshot number, pages that its eviction frees), in that order."""
        for snapshot in self.victims():
            yield snapshot.number, int(np.count_nonzero(self._holders[snapshot.pages] == 1))

    def views(self) -> list[BankView]:
        return [BankView(order=_Order(bank), capacity=self.capacity[name]) for name, bank in self.banks.items()]

    # ---- proof

    def check(self, held: Sequence[Pages], copying: Sequence[Pages]) -> None:
        """`held`: the pages of every live request; `copying`: of every copy that may run. O(pages)."""
        requests, copies = self._tally(held), self._tally(copying)
        holders = requests + self._tally([snapshot.pages for snapshot in self.snapshots.values()])
        if (requests != self._requests).any():
            raise InvariantBroken(f"requests hold {int(requests.sum())} device pages, counted are "
                                  f"{int(self._requests.sum())}")
        if (holders != self._holders).any() or (copies != self._copies).any():
            raise InvariantBroken(f"{int(self._holders.sum())} holders and {int(self._copies.sum())} copies of device "
                                  f"pages are counted, {int(holders.sum())} and {int(copies.sum())} exist")
        used = int(np.count_nonzero(holders + copies))
        if used + self.pool.free != self.pool.total:
            raise InvariantBroken(f"{used} pages used + {self.pool.free} free are not {self.pool.total}")
        for name, bank in self.banks.items():
            if len(bank) > self.capacity[name]:
                raise InvariantBroken(f"{len(bank)} snapshots in the {name} bank of {self.capacity[name]}")

    def _tally(self, groups: Sequence[Pages]) -> npt.NDArray[np.int64]:
        """How often each page is in the groups."""
        if not groups:
            return np.zeros(self.pool.total, dtype=np.int64)
        return np.bincount(np.concatenate(groups), minlength=self.pool.total)
