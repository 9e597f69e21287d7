"""Which block ids a trace has had, and whether each always follows the same one. Knows no file and no format."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hostcache.workload.trace_formats.rows import Blocks

Ranks = npt.NDArray[np.int64]

NOTHING = -1
"""What a prompt's first block follows."""


@dataclass(slots=True)
class _Runs:
    """Stretches of ids that came one after the other, each one above the one before. Sorted, none over another."""

    first: Blocks
    count: Ranks
    rank: Ranks
    """Of the first id; the others' are one more each."""
    behind: Ranks
    """The rank that the first id follows; each other one follows the one before it."""

    def look_up(self, blocks: Blocks, ranks: Ranks, behind: Ranks) -> None:
        """Fills in what is known of `blocks`."""
        if not len(self.first):
            return
        at = np.searchsorted(self.first, blocks, side="right") - 1
        within = blocks - self.first[at]  # of an id below all others: too large for any run
        known = within < self.count[at].astype(np.uint64)
        at, inside = at[known], within[known].astype(np.int64)
        ranks[known] = self.rank[at] + inside
        behind[known] = np.where(inside == 0, self.behind[at], ranks[known] - 1)

    def take_in(self, other: _Runs) -> None:
        """One column after the other: each is there twice for a while."""
        order = np.argsort(other.first)
        at = np.searchsorted(self.first, other.first[order])
        self.first = np.insert(self.first, at, other.first[order])
        self.count = np.insert(self.count, at, other.count[order])
        self.rank = np.insert(self.rank, at, other.rank[order])
        self.behind = np.insert(self.behind, at, other.behind[order])


def _no_runs() -> _Runs:
    none = np.empty(0, dtype=np.int64)
    return _Runs(np.empty(0, dtype=np.uint64), none, none, none)


class KnownIds:
    """Ids by order of first appearance: 32 bytes for each run of consecutive ids that came together first.

    Half as much again while runs are merged. `recent`: the least number of runs that are.
    """

    def __init__(self, *, recent: int = 2**16) -> None:
        self.torn: int | None = None
        """An id seen behind two different blocks, once there is one."""
        self._least = recent
        self._ids = 0
        self._old, self._recent = _no_runs(), _no_runs()

    def __len__(self) -> int:
        return self._ids

    def add(self, blocks: Blocks, starts: npt.NDArray[np.int64]) -> Ranks:
        """The rank of each block of some requests, which begin at `starts` (and end at its last).

        A rank not below the number of ids before the call is a newcomer's.
        """
        known = self._ids
        ranks, wanted = np.full(len(blocks), NOTHING), np.full(len(blocks), NOTHING)
        self._old.look_up(blocks, ranks, wanted)
        self._recent.look_up(blocks, ranks, wanted)
        new = np.flatnonzero(ranks == NOTHING)
        ids, first, inverse = np.unique(blocks[new], return_index=True, return_inverse=True)
        by_first = np.argsort(first)
        places = np.empty(len(ids), dtype=np.int64)
        places[by_first] = np.arange(len(ids))
        ranks[new] = known + places[inverse.reshape(-1)]
        behind = np.concatenate(([NOTHING], ranks))[:-1]
        behind[starts[:-1][np.diff(starts) > 0]] = NOTHING
        fresh, fresh_behind = ids[by_first], behind[new[first[by_first]]]
        wanted[new] = fresh_behind[ranks[new] - known]
        if len(torn := np.flatnonzero(wanted != behind)):
            self.torn = int(blocks[torn[0]])
        self._ids += len(ids)
        if len(ids):
            self._keep(fresh, fresh_behind, known)
        return ranks

    def _keep(self, fresh: Blocks, behind: Ranks, rank: int) -> None:
        ranks = rank + np.arange(len(fresh))
        goes_on = (fresh[1:] > fresh[:-1]) & (fresh[1:] - fresh[:-1] == 1) & (behind[1:] == ranks[:-1])
        at = np.concatenate(([0], np.flatnonzero(~goes_on) + 1))
        self._recent.take_in(_Runs(fresh[at], np.diff(at, append=len(fresh)), ranks[at], behind[at]))
        if len(self._recent.first) >= max(self._least, len(self._old.first) // 8):
            self._old.take_in(self._recent)
            self._recent = _no_runs()
