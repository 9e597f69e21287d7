"""What the tier's own bookkeeping costs: time a call, growth with the tier's size, collector pauses, bytes a page.

Copies nothing: jobs are settled as done at once. A ratio is between two measurements of one repeat, so that a slow
moment of the machine hits both: a conversation and its bare hash chain, the small tier and the large one.
"""

from __future__ import annotations

import gc
import statistics
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hostcache.clock import Clock, WallClock
from hostcache.errors import HostCacheError
from hostcache.tier import (
    CopyDone,
    Direction,
    History,
    HostCache,
    Identity,
    KeyChain,
    Pressure,
    Reservation,
    TierConfig,
    Wait,
    key_chain,
)

Tokens = npt.NDArray[np.int32]
T = TypeVar("T")

CALLS = ("keys", "retain", "plan", "settle", "evict", "lookup", "reserve", "commit")
"""`retain`: device_added + retain. `plan`: every plan_writeback until one has nothing to do. `settle`: once a job.
`evict`: before_evict + evicted + device_removed."""

BARE_RATIO_BAR = 5.0
LINEARITY_BAR = 1.5
GROWTH_BAR = 3.0
PAUSE_BAR_S = 0.010
BYTES_BAR = 400.0


def run(
    *,
    tokens: int = 1_000_007,
    page_tokens: int = 64,
    small_pages: int = 10_000,
    large_pages: int = 1_000_000,
    memory_pages: int = 135_000,
    conversation_pages: int = 500,
    repeats: int = 15,
    seed: int = 0,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Times in seconds, medians over `repeats`. Takes about half a minute and 1 GB with the defaults.

    `conversation`: one of `tokens` tokens (and of a hundredth and a tenth of it) through an empty tier, call by call,
    beside the bare hash chain over the same tokens. `growth`: each call for a new conversation of `conversation_pages`
    in a tier that is full with `small_pages` or `large_pages`, so that the plan evicts; `stats` is the frozen record
    (shown, no bar). `pause_s`: a full collection over all that was created since before there was a tier, both alive
    (what is older is frozen out of it); `pause_process_s`: over the whole process, `pause_empty_s`: before them.
    `bytes_per_page`: allocated by a full tier of `memory_pages` without its history; the default is just after its
    table has grown, the dearest moment.
    """
    clock = clock or WallClock()
    rng = np.random.default_rng(seed)
    sizes = sorted({max(page_tokens, tokens // 100), max(page_tokens, tokens // 10), tokens})
    pauses_empty_s = [_longest_pause(clock) for _ in range(repeats)]
    conversation = _conversation(sizes, page_tokens, repeats, rng, clock)
    bytes_per_page = _bytes_per_page(memory_pages, page_tokens, conversation_pages, rng)
    gc.collect()
    gc.freeze()
    try:
        growth, pauses_s = _growth((small_pages, large_pages), page_tokens, conversation_pages, repeats, rng, clock)
    finally:
        gc.unfreeze()
    result: dict[str, Any] = {
        "version": 1,
        "tokens": tokens,
        "page_tokens": page_tokens,
        "repeats": repeats,
        "seed": seed,
        "conversation": conversation,
        "linearity": _per_token(conversation[-1]) / _per_token(conversation[0]),
        "growth": growth,
        "pause_s": max(pauses_s["tier"]),
        "pause_process_s": statistics.median(pauses_s["process"]),
        "pause_empty_s": statistics.median(pauses_empty_s),
        "memory_pages": memory_pages,
        "bytes_per_page": bytes_per_page,
    }
    result["bars"] = _bars(result)
    return result


def table(result: Mapping[str, Any]) -> str:
    """The result as lines for a terminal."""
    lines = [
        f"bookkeeping, {result['page_tokens']} tokens a page, medians of {result['repeats']}; milliseconds",
        f"{'tokens':>10} " + " ".join(f"{name:>8}" for name in (*CALLS, "all", "bare", "ratio")),
    ]
    for row in result["conversation"]:
        times = [row["calls_s"][name] * 1e3 for name in CALLS] + [row["total_s"] * 1e3, row["bare_s"] * 1e3]
        lines.append(f"{row['tokens']:>10,} " + " ".join(f"{x:>8.2f}" for x in [*times, row["ratio"]]))
    growth = result["growth"]
    lines += [
        "",
        f"a conversation of {growth['conversation_pages']} pages in a full tier; milliseconds",
        f"{'pages':>10} " + " ".join(f"{name:>8}" for name in (*CALLS, "stats")),
    ]
    for row in growth["tiers"]:
        times = [row["calls_s"][name] * 1e3 for name in (*CALLS, "stats")]
        lines.append(f"{row['pages']:>10,} " + " ".join(f"{x:>8.2f}" for x in times))
    lines.append(f"{'ratio':>10} " + " ".join(f"{growth['ratios'][name]:>8.2f}" for name in (*CALLS, "stats")))
    lines.append("")
    for bar in result["bars"]:
        figures = f"{bar['value']:.4g} {bar['unit']} (at most {bar['at_most']:g})"
        lines.append(f"{bar['verdict']:>4}  {bar['name']}: {figures}")
    return "\n".join(lines)


def _bars(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    ratios = result["growth"]["ratios"]
    dearest = max(CALLS, key=lambda name: ratios[name])
    longest = result["conversation"][-1]
    pages = result["growth"]["tiers"][-1]["pages"]
    rows = [
        (f"{longest['tokens']:,} tokens ÷ their bare hash chain", longest["ratio"], BARE_RATIO_BAR, "×"),
        ("seconds a token, longest ÷ shortest conversation", result["linearity"], LINEARITY_BAR, "×"),
        (f"dearest call ({dearest}) at {pages:,} pages ÷ small tier", ratios[dearest], GROWTH_BAR, "×"),
        (f"longest collector pause at {pages:,} pages (whole process {result['pause_process_s'] * 1e3:.1f} "
         f"ms, without a tier {result['pause_empty_s'] * 1e3:.1f} ms)",
         result["pause_s"] * 1e3, PAUSE_BAR_S * 1e3, "ms"),
        (f"bytes a page beside the history, {result['memory_pages']:,} pages", result["bytes_per_page"], BYTES_BAR,
         "bytes"),
    ]
    return [
        {"name": name, "value": value, "at_most": bar, "unit": unit, "verdict": "pass" if value <= bar else "miss"}
        for name, value, bar, unit in rows
    ]


# ---- one conversation through an empty tier


def _conversation(
    sizes: Sequence[int], page_tokens: int, repeats: int, rng: np.random.Generator, clock: Clock
) -> list[dict[str, Any]]:
    calls: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    bare: dict[int, list[float]] = {size: [] for size in sizes}
    for repeat in range(repeats):
        for size in sizes:
            tokens = _tokens(rng, size)
            frames = 2 * (size // page_tokens)
            driver = _Driver(_tier(frames, page_tokens, 16 * frames), _identity(page_tokens), clock)

            def chain(tokens: Tokens = tokens, size: int = size) -> None:
                bare[size].append(_timed(clock, lambda: _bare_chain(tokens, page_tokens))[1])

            gc.collect()
            if repeat % 2:
                chain()
            calls[size].append(driver.through(tokens))
            if not repeat % 2:
                chain()
    rows = []
    for size in sizes:
        totals = [sum(one.values()) for one in calls[size]]
        rows.append({
            "tokens": size,
            "pages": size // page_tokens,
            "calls_s": {name: statistics.median(one[name] for one in calls[size]) for name in CALLS},
            "total_s": statistics.median(totals),
            "bare_s": statistics.median(bare[size]),
            "ratio": statistics.median(a / b for a, b in zip(totals, bare[size], strict=True)),
        })
    return rows


def _per_token(row: Mapping[str, Any]) -> float:
    return float(row["total_s"]) / int(row["tokens"])


def _bare_chain(tokens: Tokens, page_tokens: int) -> bytes:
    """The least that exact keys can cost: one digest a page over parent and tokens."""
    data, step, last = tokens.tobytes(), 4 * page_tokens, bytes(16)
    for at in range(0, len(data) - step + 1, step):
        last = blake2b(last + data[at : at + step], digest_size=16).digest()
    return last


# ---- a full tier, small and large


def _growth(
    sizes: tuple[int, int], page_tokens: int, pages: int, repeats: int, rng: np.random.Generator, clock: Clock
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    drivers = {}
    for size in sizes:
        drivers[size] = _Driver(_tier(size, page_tokens, 16 * size), _identity(page_tokens), clock)
        drivers[size].fill(rng, size, pages)
    calls: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    pauses_s: dict[str, list[float]] = {"tier": [], "process": []}
    for repeat in range(repeats + 1):
        pauses_s["tier"].append(_longest_pause(clock))
        for size in sizes if repeat % 2 else sizes[::-1]:
            tokens = _tokens(rng, pages * page_tokens + 1)
            times = drivers[size].through(tokens)
            times["stats"] = _timed(clock, drivers[size].cache.stats)[1]
            if repeat:  # the first round warms the machine's caches
                calls[size].append(times)
    for size in sizes:
        if not drivers[size].cache.stats().counters.host_evictions:
            raise HostCacheError(f"a full tier of {size} pages evicted nothing; give fewer pages than it holds")
    gc.unfreeze()
    pauses_s["process"] = [_longest_pause(clock) for _ in range(repeats)]
    names = (*CALLS, "stats")
    small, large = sizes
    return {
        "conversation_pages": pages,
        "tiers": [
            {"pages": size, "calls_s": {name: statistics.median(one[name] for one in calls[size]) for name in names}}
            for size in sizes
        ],
        "ratios": {
            name: statistics.median(b[name] / a[name] for a, b in zip(calls[small], calls[large], strict=True))
            for name in names
        },
    }, pauses_s


def _longest_pause(clock: Clock) -> float:
    """Of one full collection, as the collector itself reports its start and end."""
    began_s, pauses_s = 0.0, [0.0]

    def listen(phase: str, info: dict[str, int]) -> None:
        nonlocal began_s
        if phase == "start":
            began_s = clock.now()
        else:
            pauses_s.append(clock.now() - began_s)

    gc.callbacks.append(listen)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(listen)
    return max(pauses_s)


def _bytes_per_page(pages: int, page_tokens: int, conversation: int, rng: np.random.Generator) -> float:
    """What Python and numpy allocated, per resident page of a full tier whose history keeps two entries."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        driver = _Driver(_tier(pages, page_tokens, 2), _identity(page_tokens), WallClock())
        driver.fill(rng, pages, conversation)
        gc.collect()
        allocated = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    return allocated / driver.cache.stats().resident_pages


# ---- driving the tier


@dataclass(slots=True)
class _Driver:
    """Takes conversations through every call, as an engine would, with copies that are over at once."""

    cache: HostCache
    identity: Identity
    clock: Clock
    snapshots: int = 0

    def through(self, tokens: Tokens) -> dict[str, float]:
        """Seconds of each call. Raises HostCacheError when the tier does not hold all of it in the end."""
        clock, cache, times = self.clock, self.cache, dict.fromkeys(CALLS, 0.0)
        chain, times["keys"] = _timed(clock, lambda: key_chain(tokens, self.identity))
        _, times["retain"] = _timed(clock, lambda: self._retain(chain))
        pressure = Pressure(now_s=0.0, victims=(self.snapshots,))
        while True:
            jobs, seconds = _timed(clock, lambda: cache.plan_writeback(pressure))
            times["plan"] += seconds
            if not jobs:
                break
            for job in jobs:
                done = _done(job.job_id, job.keys)
                times["settle"] += _timed(clock, lambda done=done: cache.settle(done))[1]  # type: ignore[misc]
        _, times["evict"] = _timed(clock, lambda: self._evict(chain))
        match, times["lookup"] = _timed(clock, lambda: cache.lookup(chain, 0, len(chain)))
        reservation, times["reserve"] = _timed(clock, lambda: cache.reserve(match))
        if not isinstance(reservation, Reservation) or reservation.pages < len(chain):
            raise HostCacheError(f"the tier holds {match.pages} of {len(chain)} pages; give it room for them all")
        _, times["commit"] = _timed(clock, lambda: cache.commit(reservation))
        return times

    def fill(self, rng: np.random.Generator, pages: int, conversation: int) -> None:
        """Conversations that were never used again, until the host is full."""
        cache = self.cache
        for at in range(0, pages, conversation):
            count = min(conversation, pages - at)
            chain = key_chain(_tokens(rng, count * self.identity.page_tokens), self.identity)
            self._retain(chain)
            while jobs := cache.plan_writeback(Pressure(now_s=0.0, victims=(self.snapshots,))):
                for job in jobs:
                    cache.settle(_done(job.job_id, job.keys))
            self._evict(chain)

    def _retain(self, chain: KeyChain) -> None:
        self.snapshots += 1
        self.cache.device_added(chain, 0, len(chain))
        self.cache.retain(self.snapshots, chain, pages=len(chain))

    def _evict(self, chain: KeyChain) -> None:
        if isinstance(answer := self.cache.before_evict(self.snapshots, stays=0, now_s=0.0), Wait):
            raise HostCacheError(f"{len(answer.jobs)} jobs were left to the last moment; plan_writeback missed them")
        self.cache.evicted(self.snapshots)
        self.cache.device_removed(chain.keys)


def _tier(frames: int, page_tokens: int, history_entries: int) -> HostCache:
    config = TierConfig(host_cache_bytes=frames, page_bytes=1, page_tokens=page_tokens)
    return HostCache(config, history=History(history_entries))


def _identity(page_tokens: int) -> Identity:
    return Identity(model="bench", revision="1", dtype="float32", layout="none", page_tokens=page_tokens)


def _tokens(rng: np.random.Generator, count: int) -> Tokens:
    return rng.integers(0, 50_000, count, dtype=np.int32)


def _done(job_id: int, keys: Sequence[bytes]) -> CopyDone:
    return CopyDone(
        job_id=job_id, direction=Direction.STORE, error=None, copied_bytes=len(keys), submissions=1,
        submitted_s=0.0, started_s=0.0, finished_s=0.0,
    )


def _timed(clock: Clock, call: Callable[[], T]) -> tuple[T, float]:
    began_s = clock.now()
    answer = call()
    return answer, clock.now() - began_s
