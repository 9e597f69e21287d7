"""Our own tier as a policy beside LRU and the optimum: the real `hostcache.tier` over a trace's stream. Times nothing.

Requests come one after the other, each copy is over at once, so what is measured is what the tier decides: what it
writes, what it keeps, what it lets go. The device is an LRU touched tail first, as vLLM frees a request's blocks
(`testing/page_rig.py`), so that the device hits are those of `lru_curve(stream, "tail-first")`; what the host adds is
the tier's. Answers of a model are not in a trace and not in the caches either.

    one page = one block of the trace      every block may be a hit, as in the other figures of the oracle
    pages of `page_tokens`                 as an engine counts: whole pages, never a prompt's last token

A page is known by all that comes before it. Where a trace gives one id two predecessors there are two pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hostcache.errors import ConfigError, InvariantBroken
from hostcache.lab.lru import Touch
from hostcache.lab.oracle import Rates, rates, seen_by_engine
from hostcache.lab.stream import Stream
from hostcache.testing.page_rig import PageRig
from hostcache.tier import Identity, KeyChain, Reason, TierConfig
from hostcache.workload.blocks import block_keys

HISTORY_PAGES = 1 << 16
"""What the tier remembers at least, as in the engines' drivers; more than that where 16 a frame are more."""
TELL_EVERY = 64
TOUCH: Touch = "tail-first"
"""The order in which the device hears of a request's pages, whatever order the curves are in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTier:
    """Pages, over a whole stream. Cannot be made with more hits than any cache could have, or without balance."""

    requests: int
    references: int
    page_tokens: int
    device_pages: int
    host_pages: int
    device_hits: int
    host_hits: int
    bound_hits: int
    """of an infinite cache, in the same pages"""
    hit_rate: Rates
    missed: Mapping[str, int]
    """by reason (`hostcache.tier.Reason`): pages; with the hits they are all references. `partial_page`: a whole page
    that ends a prompt, whose last token is always computed"""
    written: int
    """device → host"""
    longer_than_device: int
    """requests with more pages than the device has; their heads stay, the rest passes through"""

    def __post_init__(self) -> None:
        if self.hits > self.bound_hits:
            raise InvariantBroken(
                f"impossible: {self.hits:,} hits of {self.references:,} references, no cache can have more than "
                f"{self.bound_hits:,}; no figure is given, the tier or its driver has a fault: please report it")
        if self.hits + sum(self.missed.values()) != self.references:
            raise InvariantBroken(f"{self.hits:,} hits and {sum(self.missed.values()):,} misses are not the "
                                  f"{self.references:,} references; please report it")

    @property
    def hits(self) -> int:
        return self.device_hits + self.host_hits

    def as_json(self) -> dict[str, Any]:
        return {"policy": "hostcache", "touch": TOUCH, **asdict(self)}


def own_tier(stream: Stream, *, device_tokens: int, host_tokens: int, page_tokens: int | None = None,
             history_pages: int = HISTORY_PAGES,
             progress: Callable[[int], None] = lambda requests: None) -> OwnTier:
    """`page_tokens` None: one page = one block. `progress` hears how many requests have been driven.

    Raises ConfigError for pages that do not fit the blocks, InvariantBroken where a figure would be impossible.
    """
    size = page_tokens or stream.block_tokens
    seen, may_hit = _in_pages(stream, page_tokens)
    if not seen.references:
        raise ConfigError(f"no prompt of the trace has a whole page of {size} tokens; give smaller pages")
    # A frame for each page that there is: more of them could never be taken.
    config = TierConfig(host_cache_bytes=min(host_tokens // size, seen.distinct), page_bytes=1, page_tokens=size)
    rig = PageRig(config, device_tokens // size, history_entries=max(history_pages, 16 * config.frames))
    identity = Identity(model="trace", revision=stream.digest, dtype="none", layout="none", page_tokens=size)
    all_keys = block_keys(np.arange(seen.distinct, dtype=np.uint64), block_tokens=1, page_tokens=1)
    starts = seen.starts.tolist()
    limits = np.diff(np.concatenate(([0], np.cumsum(may_hit)))[seen.starts])
    served = np.zeros(seen.requests, dtype=np.int64)
    device_hits = 0
    for at, limit in enumerate(limits.tolist()):
        keys = tuple(map(all_keys.__getitem__, seen.ids[starts[at] : starts[at + 1]].tolist()))
        visit = rig.serve(KeyChain(identity=identity, keys=keys, plain=keys), keys, prompt_tokens=limit * size + 1)
        device_hits += visit.device
        served[at] = visit.device + visit.host
        if at % TELL_EVERY == TELL_EVERY - 1:
            progress(at + 1)
    rig.cache.check()
    place = np.arange(seen.references) - np.repeat(seen.starts[:-1], np.diff(seen.starts))
    first = np.zeros(seen.references, dtype=np.bool_)
    first[np.unique(seen.ids, return_index=True)[1]] = True
    bound = int(np.count_nonzero(may_hit & ~first))
    return OwnTier(
        requests=seen.requests, references=seen.references, page_tokens=size, device_pages=rig.device_pages,
        host_pages=host_tokens // size, device_hits=device_hits, host_hits=int(served.sum()) - device_hits,
        bound_hits=bound,
        hit_rate=rates(seen, place < np.repeat(served, np.diff(seen.starts))),
        missed=_missed(rig, size, never_seen=int(np.count_nonzero(may_hit)) - bound,
                       at_the_end=int(np.count_nonzero(~may_hit))),
        written=rig.cache.stats().counters.store_pages,
        longer_than_device=int(np.count_nonzero(np.diff(seen.starts) > rig.device_pages)))


def _in_pages(stream: Stream, page_tokens: int | None) -> tuple[Stream, npt.NDArray[np.bool_]]:
    """The stream in pages, each named by its whole prefix, and which references may be hits."""
    if page_tokens is None:
        seen, may_hit = stream, np.ones(stream.references, dtype=np.bool_)
    else:
        seen, may_hit = seen_by_engine(stream, page_tokens)
    return seen.through(np.arange(seen.distinct), why="by prefix"), may_hit


def _missed(rig: PageRig, page_tokens: int, *, never_seen: int, at_the_end: int) -> dict[str, int]:
    """The tier's own accounts, in pages. Its history is bounded: what it has forgotten may be a page that was never
    seen. How many those are is known here."""
    tokens = rig.accounting.stats().recomputed
    pages = {reason: tokens.get(reason, 0) // page_tokens for reason in Reason}
    pages[Reason.FORGOTTEN] += pages[Reason.NEW] - never_seen
    pages[Reason.NEW], pages[Reason.PARTIAL_PAGE] = never_seen, at_the_end
    return {reason.value: count for reason, count in pages.items() if count}
