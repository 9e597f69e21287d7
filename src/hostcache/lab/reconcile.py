"""An engine's hit rate beside the model's and the bound: is it possible, is it explained, if not, why. Runs nothing.

Verdicts: `impossible`: above what any cache could have held. `explained`: within the tolerance of the model at the same
capacity. `above_model`, `below_model`: possible, and not what LRU says.

What is not explained has a cause, and the likeliest are tried by asking what each would have given:

    counter_not_a_count     a rate above 1, or a count as large as a clock reading: a `_created` line was taken for it
    warm_start              the stream against a cache that had seen it already
    bridge_collision        the stream through a bridge of k texts, for the k that comes nearest; of a rate that is
                            possible it is not tried, since some k comes near any of those
    order_of_touch          of a possible rate: LRU that hears of a request's blocks in another order

Four more, of a possible rate, cannot be tested from two counts: `gap` does it from the requests.

Rates of blocks and of tokens differ where blocks are not full (by 0.7 points on one public trace), so an engine that
counts tokens is held against the bound and the model in tokens: where its queries are the stream's tokens, or where
nobody can tell and the rate is possible in tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np

from hostcache.errors import ConfigError
from hostcache.lab.lru import Touch
from hostcache.lab.oracle import lru_curve, maximum, rates_at
from hostcache.lab.stream import Stream
from hostcache.workload.legacy_bridge import LEGACY_WORDS, collapsed_texts

TOLERANCE = 0.005
"""Half a point between model and engine at the same capacity, block size and order of touch (issue of the probe)."""
NEAR = 0.03
"""A cause is taken for the cause when what it would have given lies so near: the seed's own collapsed stream reads
0.4105 by the model and 0.3865 by the engine."""
A_CLOCK = 1e9
"""Seconds since 1970 have passed it since 2001; no count of hits in a probe does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    name: str
    tested: bool
    would_give: float | None
    """the hit rate, were this the cause"""
    fits: bool
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """Rates in blocks or tokens as the engine counts them; the model's at `capacity_blocks` of the stream. `cause`: the
    likeliest that fits; None: none does, or none is needed; "unknown": none fits what is impossible."""

    engine_hits: float
    engine_queries: float
    engine_hit_rate: float
    max_hit_rate: float
    lru_hit_rate: float
    capacity_blocks: int
    touch: Touch
    verdict: str
    cause: str | None
    causes: tuple[Cause, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def reconcile(stream: Stream, *, capacity_blocks: int, hits: float, queries: float, touch: Touch = "sequential",
              tolerance: float = TOLERANCE, texts: Sequence[int] = (),
              progress: Callable[[str], None] = lambda text: None) -> Reconciled:
    """`hits` of `queries`: what the engine counted over exactly this stream. `texts`: sizes of a collapsed bridge to
    try besides the usual ones. Raises ConfigError for counts that make no rate."""
    if not (0 <= hits < float("inf") and 0 < queries < float("inf")):
        raise ConfigError(f"{hits:g} hits of {queries:g} queries is no rate; give what the engine counted between two "
                          "scrapes, queries above 0")
    rate = hits / queries
    bounds = maximum(stream)
    in_tokens = queries == stream.input_tokens.sum() or (
        queries != stream.references and bounds.blocks < rate <= bounds.tokens)
    most = bounds.tokens if in_tokens else bounds.blocks
    at_capacity = rates_at(stream, lru_curve(stream, touch), capacity_blocks)
    model = at_capacity.tokens if in_tokens else at_capacity.blocks
    verdict = ("impossible" if rate > most else "explained" if abs(rate - model) <= tolerance
               else "above_model" if rate > model else "below_model")
    causes: tuple[Cause, ...] = ()
    if verdict == "impossible":
        causes = tuple(_causes(stream, rate, hits, capacity_blocks, touch, (LEGACY_WORDS, *texts), progress))
    elif verdict != "explained":
        causes = tuple(_possible_causes(stream, rate, capacity_blocks, touch, tolerance))
    cause = next((each.name for each in causes if each.fits), "unknown" if verdict == "impossible" else None)
    return Reconciled(engine_hits=hits, engine_queries=queries, engine_hit_rate=rate, max_hit_rate=most,
                      lru_hit_rate=model, capacity_blocks=capacity_blocks, touch=touch, verdict=verdict, cause=cause,
                      causes=causes)


def _possible_causes(stream: Stream, rate: float, capacity: int, touch: Touch, tolerance: float) -> list[Cause]:
    found = [_warm_start(stream, rate, capacity, touch, tolerance)]
    for order in get_args(Touch):
        if order != touch:
            would = lru_curve(stream, order).hits(capacity) / stream.references
            found.append(Cause(name="order_of_touch", tested=True, would_give=would,
                               fits=abs(would - rate) <= tolerance,
                               says=f"LRU at {capacity} blocks, touched {order}, gives {would:.4f}"))
    found.sort(key=lambda each: (not each.fits, _distance(each, rate)))
    return found + [Cause(name=name, tested=False, would_give=None, fits=False,
                          says="not tested: two counts do not tell; it takes the requests of a replay")
                    for name in ("generated_tokens", "eviction_order", "concurrency", "preemption")]


def _distance(cause: Cause, rate: float) -> float:
    return 0.0 if cause.would_give is None else abs(cause.would_give - rate)


def _causes(stream: Stream, rate: float, hits: float, capacity: int, touch: Touch, texts: Sequence[int],
            progress: Callable[[str], None]) -> list[Cause]:
    progress("impossible: trying the likeliest causes")
    clock = rate > 1 or hits >= A_CLOCK
    found = [Cause(name="counter_not_a_count", tested=True, would_give=None, fits=clock,
                   says=f"{hits:g} hits and a rate of {rate:.4g}" + (
                       " cannot be a count of these requests" if clock else " may be a count"))]
    found.append(_warm_start(stream, rate, capacity, touch, -1 if clock else NEAR))
    # Few texts under many names are touched so often that the order within a request matters, and nobody knows it then.
    for order in (touch, *(each for each in get_args(Touch) if each != touch)):
        count, would = nearest_collapse(stream, rate, capacity, order, texts)
        if near := abs(would - rate) <= NEAR:
            break
    found.append(Cause(name="bridge_collision", tested=True, would_give=would, fits=near and not clock,
                       says=f"a bridge of {count} texts gives {would:.4f} at {capacity} blocks, touched {order}"))
    # The nearest comes first, so that the cause named is the likeliest of those that fit.
    return sorted(found, key=lambda each: (not each.fits, _distance(each, rate)))


def collapsed_rate(stream: Stream, texts: int, capacity: int, touch: Touch = "sequential") -> float:
    """LRU's hit rate on what an engine sees through a bridge of that many texts."""
    seen = stream.through(collapsed_texts(stream.names, texts), why=f"in {texts} texts")
    return lru_curve(seen, touch).hits(capacity) / stream.references


def nearest_collapse(stream: Stream, rate: float, capacity: int, touch: Touch,
                     first: Sequence[int] = ()) -> tuple[int, float]:
    """How many texts come nearest to the rate, and what they give. Known sizes in `first` are taken when they fit."""
    for count in first:
        if abs((given := collapsed_rate(stream, count, capacity, touch)) - rate) <= NEAR:
            return count, given
    sizes = sorted({*np.geomspace(1, max(2, stream.distinct), 24).round().astype(int).tolist(), *first})
    tried = [(count, collapsed_rate(stream, count, capacity, touch)) for count in sizes]
    return min(tried, key=lambda each: abs(each[1] - rate))


def warm_rate(stream: Stream, capacity: int, touch: Touch, *, last_blocks: bool = True) -> float:
    """LRU's hit rate over the stream when the cache has just served the same stream. Without `last_blocks`, the block
    that ends a prompt is never a hit, since an engine always computes the last token."""
    twice = stream.repeated()
    depths = lru_curve(twice, touch).depths[stream.references :]
    held = (depths > 0) & (depths <= capacity)
    if not last_blocks:
        held[stream.starts[1:][np.diff(stream.starts) > 0] - 1] = False
    return float(held.mean())


def _warm_start(stream: Stream, rate: float, capacity: int, touch: Touch, near: float) -> Cause:
    least, most = (warm_rate(stream, capacity, touch, last_blocks=each) for each in (False, True))
    would = min(max(rate, least), most)  # as much of a prompt's last block as the engine's own blocks are smaller
    return Cause(name="warm_start", tested=True, would_give=would, fits=abs(would - rate) <= near,
                 says=f"the same stream a second time at {capacity} blocks gives {least:.4f} … {most:.4f}")
