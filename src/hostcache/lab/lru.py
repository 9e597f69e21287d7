"""Every LRU capacity in one pass: the stack distance of each reference. Knows no trace, no tokens, no engine.

The stack distance of a reference is the number of different ids touched since the same id was touched last, itself
included (Mattson, Gecsei, Slutz, Traiger 1970): an LRU cache of C entries holds it exactly when the distance is at
most C. A first reference has none.

With numba: each id's latest touch is one bit on a line of slots, in order of time; the distance is the number of bits
from there on. The bits of 64 slots are one word, a Fenwick tree over the words sums the rest, so that the tree of a
million ids fits a level-two cache; the word that is being filled joins it when it is full. The line is packed when it
is full. A prompt that comes back asks for blocks that lie side by side on the line: the sum before the word asked last
is kept, and what leaves one word is taken out of the tree at once when another word's turn comes. Without numba: the
same numbers by counting, for each reference, the earlier ones whose previous touch lies before its own, bit by bit over
the whole array at once.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from hostcache.lab.compiled import HAVE_NUMBA, compiled

Ids = npt.NDArray[np.int32]
Distances = npt.NDArray[np.int32]
Starts = npt.NDArray[np.int64]

Touch = Literal["sequential", "batched", "tail-first"]
"""`sequential`: a block is looked up and touched, then the next one. `batched`: all blocks of a request are looked up,
then all are touched, first to last. `tail-first`: looked up together, touched last to first, as vLLM frees a request's
blocks, so that what is held is always closed under prefixes."""

SHORT = 200_000
"""References that are counted sooner without compiling anything."""

NEVER = 0
"""The distance of a first reference."""


def stack_distances(ids: Ids, distinct: int, *, starts: Starts | None = None, touch: Touch = "sequential",
                    loops: bool | None = None) -> Distances:
    """`ids` (references,), each in [0, distinct) → distances (references,), `NEVER` for a first reference.

    `starts` (requests + 1,): where each request's references begin and the last one ends; of no matter when touched in
    sequence. `loops`: by slots, which is fast only when compiled, else by other means; None: whatever ends sooner.
    """
    if loops is None:
        loops = HAVE_NUMBA and len(ids) > SHORT
    if touch == "sequential" or starts is None:
        if not loops:
            return _by_counting(ids)
        starts = np.arange(len(ids) + 1, dtype=np.int64)
    if loops:
        return _by_slots(ids, distinct, starts, touch == "tail-first")
    return _by_list(ids, starts, touch == "tail-first")


def lru_hits(ids: Ids, capacity: int) -> int:
    """Hits of one LRU cache touched in sequence, by walking it: the plain definition of what the distances say."""
    held: dict[int, None] = {}
    hits = 0
    for each in ids.tolist():
        if each in held:
            hits += 1
            del held[each]
        elif len(held) >= capacity:
            if not capacity:
                continue
            del held[next(iter(held))]
        held[each] = None
    return hits


@compiled
def _by_slots(ids: Ids, distinct: int, starts: Starts, tail_first: bool) -> Distances:
    longest = 1
    for request in range(len(starts) - 1):
        longest = max(longest, starts[request + 1] - starts[request])
    slots = 64 * ((2 * distinct + longest + 4096) // 64)
    words = slots // 64
    one = np.uint64(1)
    bits = np.zeros(words, dtype=np.uint64)
    tree = np.zeros(words + 1, dtype=np.int32)
    owner = np.zeros(slots, dtype=np.int32)
    place = np.full(distinct, -1, dtype=np.int32)
    found = np.zeros(len(ids), dtype=np.int32)
    top = 0
    marked = 0
    filling = 0  # the one word that is not in the tree, being touched all the time
    asked = -1  # the word looked up last, and the marks in the words before it
    before = 0
    left = 0  # a word that marks were taken from, and how many of them the tree still counts
    gone = 0
    for request in range(len(starts) - 1):
        first, end = starts[request], starts[request + 1]
        if top + (end - first) > slots:
            top = _pack(bits, tree, owner, place)
            filling = top >> 6
            asked, before, left, gone = -1, 0, 0, 0
        for at in range(first, end):
            slot = place[ids[at]]
            if slot >= 0:
                word = slot >> 6
                if word != asked:
                    if word == asked + 1:
                        before += _ones(bits[asked]) if asked >= 0 else 0
                    else:
                        before = -gone if left < word else 0
                        node = word
                        while node > 0:
                            before += tree[node]
                            node &= node - 1
                    asked = word
                up_to = _ones(bits[word] & (np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(63 - (slot & 63))))
                found[at] = marked - before - up_to + 1
        for step in range(end - first):
            at = end - 1 - step if tail_first else first + step
            each = ids[at]
            slot = place[each]
            now = top >> 6
            if now != filling:
                full = _ones(bits[filling])
                node = filling + 1
                while node <= words:
                    tree[node] += full
                    node += node & -node
                filling = now
            if slot >= 0:
                was = slot >> 6
                bits[was] &= ~(one << np.uint64(slot & 63))
                if was < asked:
                    before -= 1
                if was != filling:
                    if was != left:
                        node = left + 1
                        while gone and node <= words:
                            tree[node] -= gone
                            node += node & -node
                        left, gone = was, 0
                    gone += 1
            else:
                marked += 1
            bits[now] |= one << np.uint64(top & 63)
            place[each] = top
            owner[top] = each
            top += 1
    return found


@compiled
def _pack(bits: npt.NDArray[np.uint64], tree: npt.NDArray[np.int32], owner: npt.NDArray[np.int32],
          place: npt.NDArray[np.int32]) -> int:
    """Move the marked slots together, in order; the first free one. Its word is not in the tree."""
    top = 0
    for slot in range(len(owner)):
        each = owner[slot]
        if place[each] == slot:
            owner[top] = each
            place[each] = top
            top += 1
    bits[:] = 0
    for slot in range(top):
        bits[slot >> 6] |= np.uint64(1) << np.uint64(slot & 63)
    words = len(bits)
    tree[:] = 0
    for node in range(1, (top >> 6) + 1):
        tree[node] = _ones(bits[node - 1])
    for node in range(1, words + 1):
        above = node + (node & -node)
        if above <= words:
            tree[above] += tree[node]
    return top


@compiled
def _ones(word: np.uint64) -> int:
    """Bits set (the parallel sum of Warren, Hacker's Delight, section 5-1)."""
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return int((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


def _by_counting(ids: Ids) -> Distances:
    """Touched in sequence. Between a touch at p and the next one at i lie as many different ids as there are touches
    j < i whose own previous one is before p, less the p + 1 that lie up to p. Counted by the bits of p + 1, most
    significant first: among those of equal higher bits, in order of time, a 1 has all zeros ahead of it below it."""
    size = len(ids)
    before = previous(ids)
    values = before + 1
    smaller = np.zeros(size, dtype=np.int32)
    order = np.arange(size, dtype=np.int32)
    start = np.zeros(size, dtype=np.int32)  # of the group of equal higher bits
    ahead = np.arange(size, dtype=np.int32)
    for bit in reversed(range(size.bit_length())):
        ones = (values >> bit) & 1
        zeros = np.cumsum(1 - ones, dtype=np.int32)
        zeros -= 1 - ones
        zeros -= zeros[start]  # zeros ahead within the group
        smaller[order] += zeros * ones
        ends = np.flatnonzero(np.append(start[1:] != start[:-1], True)) if size else np.empty(0, dtype=np.int64)
        split = np.repeat((zeros + (1 - ones))[ends], np.diff(ends, prepend=-1)) + start
        target = np.where(ones == 1, split + (ahead - start - zeros), start + zeros)
        start_after = np.where(ones == 1, split, start)
        values, order, start = (_moved(each, target) for each in (values, order, start_after))
    found = smaller - before
    found[before < 0] = NEVER
    return found


def _moved(values: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    after = np.empty_like(values)
    after[target] = values
    return after


def previous(ids: Ids) -> npt.NDArray[np.int32]:
    """For each reference the place of the one before it to the same id, -1 where there is none."""
    order = np.argsort(ids, kind="stable").astype(np.int32)
    before = np.full(len(ids), -1, dtype=np.int32)
    same = ids[order[1:]] == ids[order[:-1]]
    before[order[1:][same]] = order[:-1][same]
    return before


def _by_list(ids: Ids, starts: Starts, tail_first: bool) -> Distances:
    """The loop of `_by_slots` in plain Python: a slot for each touch, never packed."""
    size, marked, top = len(ids), 0, 0
    tree, place, found = [0] * (size + 1), dict[int, int](), [NEVER] * size
    listed = ids.tolist()

    def add(slot: int, change: int) -> None:
        node = slot + 1
        while node <= size:
            tree[node] += change
            node += node & -node

    for first, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        for at in range(first, end):
            node = place.get(listed[at], -1) + 1
            if node:
                below = 0
                while node:
                    below += tree[node]
                    node &= node - 1
                found[at] = marked - below + 1
        for at in range(end - 1, first - 1, -1) if tail_first else range(first, end):
            each = listed[at]
            if each in place:
                add(place[each], -1)
            else:
                marked += 1
            place[each] = top
            add(top, 1)
            top += 1
    return np.array(found, dtype=np.int32)
