"""Every optimal capacity in one pass: Belady's choice with and without bypass. Knows no trace, no tokens, no engine.

Optimal replacement keeps what is used soonest (Belady 1966), and obeys inclusion: the contents of C entries lie within
those of C + 1, so that one ordered stack stands for all capacities (Mattson, Gecsei, Slutz, Traiger 1970). A reference
found at depth d hits every cache of at least d entries.

Below the place where a touched entry goes in, each place keeps the one of two entries that is used sooner and hands the
other down, to the depth at which the touched one was found. So only the entries that are later than all above them
move, each into the place of the next such one. The stack is cut into stretches with their latest use known, and a
stretch without such an entry is passed over whole. An entry that is never used again is a hole: it counts as latest of
all, is filled by whatever comes down, and holes at the end are dropped.

`bypass` True: an entry may be turned away (the true bound of a tier with admission). False: it is always taken in, as
by a demand-fetched cache, which hits less.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from hostcache.lab.compiled import compiled
from hostcache.lab.lru import Distances, Ids

STRETCH = 64


def next_uses(ids: Ids) -> npt.NDArray[np.int64]:
    """For each reference the place of the next one to the same id; `len(ids)` where there is none."""
    found = np.full(len(ids), len(ids), dtype=np.int64)
    order = np.argsort(ids, kind="stable")
    same = ids[order[1:]] == ids[order[:-1]]
    found[order[:-1][same]] = order[1:][same]
    return found


def optimal_depths(ids: Ids, distinct: int, *, bypass: bool) -> Distances:
    """`ids` (references,), each in [0, distinct) → the least capacity that holds each one, 0 for a first reference."""
    return _depths(ids, distinct, next_uses(ids), bypass, STRETCH)


def optimal_hits(ids: Ids, capacity: int, *, bypass: bool) -> int:
    """Hits of one optimal cache, by keeping a heap of next uses: what `optimal_depths` is held against."""
    uses = next_uses(ids).tolist()
    held: dict[int, int] = {}
    latest: list[tuple[int, int]] = []
    hits = 0
    if not capacity:
        return 0
    for each, use in zip(ids.tolist(), uses, strict=True):
        if each in held:
            hits += 1
        elif len(held) >= capacity:
            while held.get(latest[0][1]) != -latest[0][0]:
                heapq.heappop(latest)
            if bypass and -latest[0][0] <= use:
                continue
            del held[heapq.heappop(latest)[1]]
        held[each] = use
        heapq.heappush(latest, (-use, each))
    return hits


@compiled
def _depths(ids: Ids, distinct: int, uses: npt.NDArray[np.int64], bypass: bool, stretch: int) -> Distances:
    never = len(ids)
    room = 4 * stretch
    key = np.full(room, never, dtype=np.int64)  # next use of the entry at each depth, from 0
    owner = np.full(room, -1, dtype=np.int32)
    top = np.full(room // stretch, never, dtype=np.int64)  # latest use within each stretch; holes are latest
    place = np.full(distinct, -1, dtype=np.int32)
    found = np.zeros(len(ids), dtype=np.int32)
    size = 0
    for at in range(len(ids)):
        each = ids[at]
        end = place[each]  # its depth; -1: it was never here
        if end >= 0:
            found[at] = end + 1
            limit = end
        else:
            limit = size
        carried, carried_key = each, uses[at]
        depth = 0
        if not bypass and limit > 0:
            # It is taken in whatever it is worth; the one above hands itself down.
            carried, carried_key = owner[0], key[0]
            owner[0], key[0] = each, uses[at]
            place[each] = 0
            top[0] = key[:stretch].max()
            depth = 1
        while depth < limit and carried_key < never:
            part = depth // stretch
            stop = min(limit, (part + 1) * stretch)
            if top[part] > carried_key:
                for here in range(depth, stop):
                    if key[here] > carried_key:
                        other, other_key = owner[here], key[here]
                        owner[here], key[here] = carried, carried_key
                        place[carried] = here
                        carried, carried_key = other, other_key
                        if carried_key >= never:
                            break
                top[part] = key[part * stretch:(part + 1) * stretch].max()
            depth = stop
        if end >= 0:
            # Whatever was carried goes where the touched one was. A hole stays a hole.
            owner[end], key[end] = carried, carried_key
            if carried_key < never:
                place[carried] = end
            part = end // stretch
            top[part] = key[part * stretch:(part + 1) * stretch].max()
        elif carried_key < never:
            if size == room:
                wider = np.full(2 * room, never, dtype=np.int64)
                wider[:room] = key
                key = wider
                owners = np.full(2 * room, -1, dtype=np.int32)
                owners[:room] = owner
                owner = owners
                tops = np.full(2 * room // stretch, never, dtype=np.int64)
                tops[:room // stretch] = top
                top = tops
                room *= 2
            owner[size], key[size] = carried, carried_key
            place[carried] = size
            part = size // stretch
            top[part] = key[part * stretch:(part + 1) * stretch].max()
            size += 1
        while size > 0 and key[size - 1] >= never:
            size -= 1
    return found
