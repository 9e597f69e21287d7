"""Hands out frame numbers and takes them back. Knows nothing of bytes, keys, tokens or GPUs.

Life of a frame: free → taken (`take`) → free (`give_back`). Free frames form runs of neighbours; runs lie in buckets
by the power of two of their length, and both ends of a run know it, so taking and joining cost O(1) a run.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hostcache.errors import InvariantBroken

Frames = npt.NDArray[np.int64]


class FramePool:
    """Frames 0 … total-1, handed out in runs of neighbours where possible."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        # _length[first frame of a run] and _length[last frame of it] hold its length; 0 anywhere else.
        self._length = np.zeros(total, dtype=np.int64)
        self._buckets: list[dict[int, None]] = [{} for _ in range(max(1, total.bit_length()))]
        if total:
            self._put(0, total)

    def take(self, count: int, after: int | None = None) -> Frames:
        """`count` frames in ascending runs; with `after`, the frames right behind that one first, if free.

        Raises ValueError when fewer than `count` are free (nothing is taken then): ask `free` first.
        """
        if not 0 <= count <= self.free:
            raise ValueError(f"asked for {count} frames, {self.free} of {self.total} are free")
        taken: list[Frames] = []
        left = count
        if left and after is not None and after + 1 < self.total and self._starts(after + 1):
            left -= self._cut(after + 1, after + 1, left, taken)
        while left:
            left -= self._cut(*self._choose(left), left, taken)
        self.free -= count
        return np.concatenate(taken) if taken else np.empty(0, dtype=np.int64)

    def give_back(self, frames: npt.NDArray[np.int64]) -> None:
        """Frames in any order become free and join their neighbours. Each must be taken, and given once."""
        if not len(frames):
            return
        ordered = np.sort(np.asarray(frames, dtype=np.int64))
        breaks = (np.flatnonzero(np.diff(ordered) != 1) + 1).tolist()
        for a, b in zip([0, *breaks], [*breaks, len(ordered)], strict=True):
            first, length = int(ordered[a]), b - a
            behind = first + length
            if behind < self.total and self._starts(behind):
                length += self._remove(behind)
            if first and self._ends(first - 1):
                before = int(self._length[first - 1])
                self._remove(first - before)
                first, length = first - before, length + before
            self._put(first, length)
        self.free += len(ordered)

    def check(self, taken: Frames | None = None) -> None:
        """The runs are disjoint, not adjacent, and add up to `free`. O(runs). With the `taken` frames that holders know
        of: every frame is free or taken, once. O(frames)."""
        runs = sorted((first, int(self._length[first])) for bucket in self._buckets for first in bucket)
        if sum(length for _, length in runs) != self.free:
            raise InvariantBroken(f"free runs hold {sum(n for _, n in runs)} frames, the pool says {self.free}")
        for (first, length), (following, _) in pairwise(runs):
            if first + length >= following:
                raise InvariantBroken(f"free run {first}+{length} touches the run at {following}")
        if taken is None:
            return
        holders = np.bincount(taken, minlength=self.total)
        for first, length in runs:
            holders[first : first + length] += 1
        if len(holders) != self.total or np.count_nonzero(holders == 1) != self.total:
            frame = int((holders != 1).argmax())
            raise InvariantBroken(f"frame {frame} of {self.total} is free or taken {holders[frame]} times")

    # ---- runs

    def _starts(self, frame: int) -> bool:
        length = int(self._length[frame])
        return length > 0 and frame in self._buckets[length.bit_length() - 1]

    def _ends(self, frame: int) -> bool:
        length = int(self._length[frame])
        return length > 0 and frame - length + 1 in self._buckets[length.bit_length() - 1]

    def _put(self, first: int, length: int) -> None:
        self._length[first] = self._length[first + length - 1] = length
        self._buckets[length.bit_length() - 1][first] = None

    def _remove(self, first: int) -> int:
        length = int(self._length[first])
        del self._buckets[length.bit_length() - 1][first]
        self._length[first] = self._length[first + length - 1] = 0
        return length

    def _choose(self, want: int) -> tuple[int, int]:
        """(run, first frame to take). A run with plenty of room is entered in its middle, so that the conversation
        before it and this one can both grow in place; else the tightest run that fits; else the longest there is."""
        top = next(bucket for bucket in reversed(self._buckets) if bucket)
        longest = next(reversed(top))
        length = int(self._length[longest])
        if length >= 8 * want:
            return longest, longest + length // 2
        for bucket in self._buckets[(want - 1).bit_length() :]:
            if bucket:
                run = next(reversed(bucket))
                return run, run
        return longest, longest

    def _cut(self, run: int, first: int, want: int, taken: list[Frames]) -> int:
        """Take up to `want` frames from `first` on out of the free run that starts at `run`; says how many."""
        length = self._remove(run)
        count = min(want, run + length - first)
        if first > run:
            self._put(run, first - run)
        if first + count < run + length:
            self._put(first + count, run + length - first - count)
        taken.append(np.arange(first, first + count, dtype=np.int64))
        return count
