"""How near is eviction? Says which snapshots are within reach of it; starts nothing, copies nothing, reads no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hostcache.tier.answers import BankView


def within_reach(
    banks: Sequence[BankView],
    *,
    frees: Iterable[tuple[int, int]],
    free_pages: int,
    reach_pages: int,
    reach_entries: int = 2,
) -> tuple[int, ...]:
    """Ids of the snapshots that the device would drop next, nearest first, by whichever limit binds first.

    `frees` gives (snapshot id, pages its eviction frees) in the order the device would evict for want of pages; it is
    read only as far as needed. By pages, a snapshot is within reach while fewer than `reach_pages` are free or freed
    by those before it; by entries, while its bank has fewer than `reach_entries` free places. No limit near: ().
    """
    reached: dict[int, None] = {}
    for bank in banks:
        short = reach_entries - (bank.capacity - len(bank.order))
        reached.update(dict.fromkeys(bank.order[: max(0, short)]))
    if free_pages < reach_pages:
        for snapshot_id, pages in frees:
            reached[snapshot_id] = None
            free_pages += pages
            if free_pages >= reach_pages:
                break
    return tuple(reached)
