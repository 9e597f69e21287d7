"""Which block ids a trace has had, and whether each always follows the same one. Knows no file and no format."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hostcache.workload.blocks import mixed
from hostcache.workload.trace_formats.rows import Blocks

Ranks = npt.NDArray[np.int64]


class KnownIds:
    """Ids by order of first appearance, in sorted columns of 24 bytes an id; newcomers wait until a merge pays.

    Half as much again while it merges. `waiting`: the least number of newcomers to merge.
    """

    def __init__(self, *, waiting: int = 2**16) -> None:
        self.torn: int | None = None
        """An id seen behind two different blocks, once there is one."""
        self._waiting = waiting
        self._ids = np.empty(0, dtype=np.uint64)
        self._links = np.empty(0, dtype=np.uint64)
        self._ranks = np.empty(0, dtype=np.int64)
        self._new: dict[int, tuple[int, int]] = {}
        """id → its link, its rank"""

    def __len__(self) -> int:
        return len(self._ids) + len(self._new)

    def add(self, blocks: Blocks, known: int = 0) -> Ranks:
        """The ranks of a request's blocks from `known` on, of which those before were in a request already.

        A rank not below the number of ids before the call is a newcomer's.
        """
        late = blocks[known:]
        if not len(late):
            return np.empty(0, dtype=np.int64)
        links = np.zeros(len(late), dtype=np.uint64)
        links[1 if known == 0 else 0 :] = mixed(blocks[max(0, known - 1) : -1]) | np.uint64(1)  # 0: the first block
        ranks = np.empty(len(late), dtype=np.int64)
        at = np.searchsorted(self._ids, late)
        old = at < len(self._ids)
        old[old] = self._ids[at[old]] == late[old]
        ranks[old] = self._ranks[at[old]]
        torn = late[old][self._links[at[old]] != links[old]]
        if len(torn):
            self.torn = int(torn[0])
        first = len(self)
        for place in np.flatnonzero(~old).tolist():
            block, link = int(late[place]), int(links[place])
            known_link, ranks[place] = self._new.setdefault(block, (link, first))
            if ranks[place] == first:
                first += 1
            elif known_link != link:
                self.torn = block
        if len(self._new) >= max(self._waiting, len(self._ids) // 8):
            self._merge()
        return ranks

    def _merge(self) -> None:
        fresh = len(self._new)
        ids = np.concatenate((self._ids, np.fromiter(self._new, dtype=np.uint64, count=fresh)))
        links = np.concatenate((self._links, np.fromiter((link for link, _ in self._new.values()), dtype=np.uint64,
                                                         count=fresh)))
        ranks = np.concatenate((self._ranks, np.fromiter((rank for _, rank in self._new.values()), dtype=np.int64,
                                                         count=fresh)))
        order = ids.argsort(kind="stable")
        self._ids, self._links, self._ranks, self._new = ids[order], links[order], ranks[order], {}
