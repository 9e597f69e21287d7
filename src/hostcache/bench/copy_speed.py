"""How near the thread copier comes to a plain memory copy of the same bytes, in one run. Judges nothing.

Each repeat copies the same bytes into the same device memory in every way, in turning order, all memory touched before;
a ratio is between the two copies of one repeat, so a slow moment of the machine hits both.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

from hostcache.clock import Clock, WallClock
from hostcache.copiers import Slabs, ThreadCopier
from hostcache.errors import HostCacheError
from hostcache.tier.copying import CopyDone, CopyJob, Direction, Extent, extents

PUBLISHED_GB_PER_S = {"per segment": 17.0, "batched extents": 57.0}
"""The seed's fleet, PCIe: one call a segment against one a batch. Another machine and another link."""

_DEADLINE_S = 60.0


def run(
    *,
    page_bytes: int = 32 * 46_080,
    pages: int = 188,
    threads: int = 1,
    repeats: int = 15,
    chunk_bytes: int = 8 << 20,
    seed: int = 0,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """GB/s (10^9 bytes) of each way, as median, min and max over `repeats`, and ratios to the plain copy.

    Defaults are a 6,000-token conversation of SmolLM2-135M in float32 at 32 tokens a page. Ways: `plain` (memmove of
    one contiguous buffer, a share a thread), `restore` (neighbouring pages, one extent), `restore_per_page` (an extent
    a page, in one job), `restore_scattered` (pages and frames shuffled), `store`. `bytes_equal`: compared afterwards.
    Takes 3 × pages × page_bytes of memory. Raises HostCacheError when a copy fails or does not end.
    """
    clock = clock or WallClock()
    total = page_bytes * pages
    plain_from, device = _touched(total), _touched(total)
    device_at, plain_at = _address(device), _address(plain_from)
    slabs = Slabs(total, page_bytes)
    copier = ThreadCopier(
        device_at, pages, page_bytes, slabs, clock=clock, owner=device, threads=threads, chunk_bytes=chunk_bytes
    )
    pool = ThreadPoolExecutor(max_workers=threads)
    shuffled = list(range(pages))
    Random(seed).shuffle(shuffled)
    whole = (Extent(device_page=0, frame=0, pages=pages),)
    each = tuple(Extent(device_page=page, frame=page, pages=1) for page in range(pages))
    scattered = extents(shuffled, shuffled)
    submissions: dict[str, int] = {}
    ids = iter(range(1, 1 << 60))

    def copy(way: str, direction: Direction, what: tuple[Extent, ...]) -> None:
        done = _copy(copier, CopyJob(job_id=next(ids), direction=direction, extents=what))
        submissions[way] = done.submissions

    def plain() -> None:
        shares = [total * n // threads for n in range(threads + 1)]
        if threads == 1:
            ctypes.memmove(device_at, plain_at, total)
            return
        list(pool.map(lambda a, b: ctypes.memmove(device_at + a, plain_at + a, b - a), shares, shares[1:]))

    ways: dict[str, Callable[[], None]] = {
        "plain": plain,
        "restore": lambda: copy("restore", Direction.RESTORE, whole),
        "restore_per_page": lambda: copy("restore_per_page", Direction.RESTORE, each),
        "restore_scattered": lambda: copy("restore_scattered", Direction.RESTORE, scattered),
        "store": lambda: copy("store", Direction.STORE, whole),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    try:
        copy("store", Direction.STORE, whole)
        for way in ways.values():
            way()
        order = list(ways)
        for repeat in range(repeats):
            turn = repeat % len(order)
            for way_name in order[turn:] + order[:turn]:
                began_s = clock.now()
                ways[way_name]()
                seconds[way_name].append(clock.now() - began_s)
        bytes_equal = all(_page(device, page, page_bytes) == slabs.view(page) for page in range(pages))
    finally:
        pool.shutdown()
        closed = copier.close(_DEADLINE_S)
    if closed:
        slabs.close()
    return {
        "version": 1,
        "page_bytes": page_bytes,
        "pages": pages,
        "total_bytes": total,
        "threads": threads,
        "repeats": repeats,
        "chunk_bytes": chunk_bytes,
        "bytes_equal": bytes_equal,
        "gb_per_s": {way: _spread([total / one / 1e9 for one in times]) for way, times in seconds.items()},
        "over_plain": {
            way: _spread([plain_s / one for plain_s, one in zip(seconds["plain"], times, strict=True)])
            for way, times in seconds.items()
            if way != "plain"
        },
        "submissions": submissions,
        "seconds": seconds,
        "published_gb_per_s": dict(PUBLISHED_GB_PER_S),
    }


def table(result: Mapping[str, Any]) -> str:
    """The result as lines for a terminal, the seed's figures beside ours."""
    speeds, ratios, calls = result["gb_per_s"], result["over_plain"], result["submissions"]
    labels = {
        "plain": "plain memory copy",
        "restore": "restore, batched",
        "restore_per_page": "restore, a call a page",
        "restore_scattered": "restore, pages shuffled",
        "store": "store, in chunks",
    }
    seed = {"restore": "batched extents", "restore_per_page": "per segment"}
    lines = [
        f"{result['pages']} pages of {result['page_bytes']} bytes, {result['threads']} thread(s), "
        f"{result['repeats']} repeats, median (min to max); seed = the published fleet, over PCIe",
        f"{'':24} {'GB/s':>22} {'over plain':>22} {'calls':>6} {'seed GB/s':>10}",
    ]
    for way, label in labels.items():
        ratio = _text(ratios[way]) if way in ratios else "1"
        published = f"{result['published_gb_per_s'][seed[way]]:.0f}" if way in seed else ""
        lines.append(f"{label:24} {_text(speeds[way]):>22} {ratio:>22} {calls.get(way, 1):>6} {published:>10}".rstrip())
    return "\n".join(lines)


def _text(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['min']:.2f} to {spread['max']:.2f})"


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _copy(copier: ThreadCopier, job: CopyJob) -> CopyDone:
    copier.submit(job)
    if not copier.wait(_DEADLINE_S):
        raise HostCacheError(f"a copy of {job.pages} pages did not end in {_DEADLINE_S:.0f} s; does it swap?")
    (done,) = copier.poll()
    if done.error is not None:
        raise HostCacheError(f"a copy of {job.pages} pages failed: {done.error}; free memory and run again")
    return done


def _touched(size: int) -> mmap.mmap:
    """Anonymous memory of the kind slabs are made of, written once."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    ctypes.memset(_address(memory), 0x5A, size)
    return memory


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _page(memory: mmap.mmap, page: int, page_bytes: int) -> memoryview:
    return memoryview(memory)[page * page_bytes : (page + 1) * page_bytes]
