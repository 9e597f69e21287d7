"""What any cache could have held of a stream, and what LRU and the optimum would have, at every capacity.

A hit rate is told in three ways, each by its name, because they differ by up to 23 points on one public trace:

    blocks      blocks held ÷ blocks asked for: the record
    tokens      tokens of the blocks held ÷ prompt tokens
    requests    the mean over requests of blocks held ÷ blocks asked for (AIPerf's definition)

The bound needs no order: whatever the policy, the order, the concurrency or the capacity, an engine that starts empty
computes each distinct block at least once, so at most references − distinct blocks are hits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hostcache.errors import ConfigError
from hostcache.lab.lru import Distances, Touch, stack_distances
from hostcache.lab.opt import optimal_depths
from hostcache.lab.stream import Stream

SHARES = (0.5, 0.9, 0.99, 1.0)
"""Of the maximum: the capacities that reach them are worth naming."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    blocks: float
    tokens: float
    requests: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """Hits at every capacity. `depths` (references,): the least capacity in blocks that holds each, 0: none does."""

    policy: str
    depths: Distances
    counts: npt.NDArray[np.int64]
    """hits in blocks at capacity 0, 1, 2 …; from its end on it rises no more"""

    def hits(self, capacity: int) -> int:
        if capacity < 0:
            raise ConfigError(f"a capacity of {capacity} blocks makes no sense; give 0 or more")
        return int(self.counts[min(capacity, len(self.counts) - 1)])

    def least(self, share: float) -> int:
        """The least capacity with at least that share of the greatest number of hits."""
        return int(np.searchsorted(self.counts, share * self.counts[-1] - 1e-9))


def lru_curve(stream: Stream, touch: Touch = "sequential") -> Curve:
    """Every LRU capacity in one pass."""
    depths = stack_distances(stream.ids, stream.distinct, starts=stream.starts, touch=touch)
    return _curve("lru" if touch == "sequential" else f"lru, {touch}", depths)


def opt_curve(stream: Stream, *, bypass: bool = True) -> Curve:
    """Every optimal capacity in one pass."""
    depths = optimal_depths(stream.ids, stream.distinct, bypass=bypass)
    return _curve("optimum" if bypass else "optimum without bypass", depths)


def _curve(policy: str, depths: Distances) -> Curve:
    histogram = np.bincount(depths, minlength=1)
    histogram[0] = 0
    return Curve(policy=policy, depths=depths, counts=np.cumsum(histogram))


def rates(stream: Stream, hit: npt.NDArray[np.bool_]) -> Rates:
    """`hit` (references,)."""
    sums = np.concatenate(([0], np.cumsum(hit)))
    held = sums[stream.starts[1:]] - sums[stream.starts[:-1]]
    asked = np.diff(stream.starts)
    return Rates(blocks=float(hit.mean()), tokens=float(stream.tokens[hit].sum() / stream.input_tokens.sum()),
                 requests=float(np.mean(held[asked > 0] / asked[asked > 0])))


def rates_at(stream: Stream, curve: Curve, capacity: int) -> Rates:
    return rates(stream, (curve.depths > 0) & (curve.depths <= capacity))


def maximum(stream: Stream) -> Rates:
    """An infinite cache."""
    first = np.zeros(stream.references, dtype=np.bool_)
    first[np.unique(stream.ids, return_index=True)[1]] = True
    return rates(stream, ~first)


def cold_miss_floor(stream: Stream) -> float:
    """distinct ÷ references: the share of blocks that every cache misses."""
    return stream.distinct / stream.references


# Engine blocks and trace blocks -------------------------------------------------------------------------------------


def seen_by_engine(stream: Stream, engine_block_tokens: int) -> tuple[Stream, npt.NDArray[np.bool_]]:
    """The stream in blocks of an engine, and which of them may be hits at all: granularity corrected both ways.

    An engine with smaller blocks caches parts of a trace block, and of a prompt's last block as many as are full; with
    larger ones a block is as good as the last trace block within. A block that ends the prompt can be held and is never
    a hit, since the last token is always computed (vLLM 0.32: at most tokens − 1).

    Raises ConfigError when neither size is a multiple of the other.
    """
    size, given = engine_block_tokens, stream.block_tokens
    if size < 1 or (given % size and size % given):
        raise ConfigError(f"engine blocks of {size} tokens and trace blocks of {given}: neither is a multiple of the "
                          "other; choose an engine block that is")
    whole = stream.input_tokens // size
    if stream.rounding == "floor":
        whole = np.minimum(whole, np.diff(stream.starts) * given // size)
    starts = np.concatenate(([0], np.cumsum(whole))).astype(np.int64)
    request = np.repeat(np.arange(stream.requests), whole)
    place = np.arange(starts[-1]) - starts[:-1][request]
    if given >= size:
        parts = given // size
        block = stream.ids[stream.starts[:-1][request] + place // parts].astype(np.int64)
        names = block * parts + place % parts
    else:
        names = stream.ids[stream.starts[:-1][request] + (place + 1) * (size // given) - 1].astype(np.int64)
    view = stream.cut(names, starts, engine_block_tokens)
    may_hit = (place + 1) * size < stream.input_tokens[request]
    return view, may_hit


def in_engine_blocks(stream: Stream, engine_block_tokens: int, capacities_tokens: Mapping[str, int],
                     touch: Touch) -> dict[str, Any]:
    """Bound and LRU as an engine with such blocks counts, ready for JSON: hits in tokens, rates ÷ prompt tokens.

    Raises ConfigError when neither size is a multiple of the other, or no prompt has a whole block.
    """
    seen, may_hit = seen_by_engine(stream, engine_block_tokens)
    if not seen.references:
        raise ConfigError(f"no prompt of the trace has a whole block of {engine_block_tokens} tokens; give fewer")
    depths = lru_curve(seen, touch).depths

    def of(name: str, blocks: int) -> dict[str, Any]:
        hits = int(np.count_nonzero((depths > 0) & (depths <= blocks) & may_hit)) * engine_block_tokens
        return {"name": name, "capacity_blocks": blocks, "hit_tokens": hits,
                "hit_rate": hits / int(stream.input_tokens.sum())}

    most = of("an infinite cache", seen.distinct)
    return {"block_tokens": engine_block_tokens, "references": seen.references, "distinct": seen.distinct,
            "max_hit_tokens": most["hit_tokens"], "max_hit_rate": most["hit_rate"],
            "lru": [of(name, tokens // engine_block_tokens) for name, tokens in capacities_tokens.items()]}


# Two tiers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoTiers:
    """Blocks, over a whole stream."""

    policy: str
    device_blocks: int
    host_blocks: int
    device_hits: int
    host_hits: int

    @property
    def hits(self) -> int:
        return self.device_hits + self.host_hits


def two_tiers(curve: Curve, device_blocks: int, host_blocks: int) -> tuple[TwoTiers, TwoTiers]:
    """Inclusive and exclusive LRU, read off one LRU curve.

    Inclusive: the host holds a copy of all that was touched and learns of every touch, so it adds only what it is
    larger by. Exclusive: the host takes what the device evicts and gives back what is asked for; together they are one
    LRU of both sizes.
    """
    device = curve.hits(device_blocks)

    def both(policy: str, capacity: int) -> TwoTiers:
        return TwoTiers(policy=policy, device_blocks=device_blocks, host_blocks=host_blocks, device_hits=device,
                        host_hits=curve.hits(capacity) - device)

    return (both("inclusive lru", max(device_blocks, host_blocks)),
            both("exclusive lru", device_blocks + host_blocks))


# All of it ----------------------------------------------------------------------------------------------------------


def capacities(curve: Curve, distinct: int, points: int = 96) -> list[int]:
    """Capacities worth drawing: evenly spaced in the logarithm up to where nothing more is gained, no more than there
    are blocks."""
    most = max(2, min(distinct, int(len(curve.counts) * 1.25)))
    return sorted({0, 1, *np.unique(np.geomspace(1, most, points).round().astype(int)).tolist()})


def oracle(stream: Stream, *, pool_tokens: int | None = None, host_tokens: int | None = None,
           page_tokens: int | None = None, touch: Touch = "sequential",
           progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Everything, ready for JSON. `pool_tokens`, `host_tokens`: a device pool and a host tier behind it to look at.
    `page_tokens`: an engine's blocks to count in too."""
    progress("LRU at every capacity")
    lru = lru_curve(stream, touch)
    progress("the optimum at every capacity")
    curves = [lru, opt_curve(stream), opt_curve(stream, bypass=False)]
    pool = None if pool_tokens is None else pool_tokens // stream.block_tokens
    host = None if host_tokens is None else host_tokens // stream.block_tokens
    marked = {"device pool": pool, "device pool and host": None if pool is None or host is None else pool + host}
    at = {name: blocks for name, blocks in marked.items() if blocks is not None}
    engine = None
    if page_tokens is not None:
        progress(f"LRU in blocks of {page_tokens} tokens")
        sizes = {"device pool": pool_tokens, "device pool and host": None if pool_tokens is None or host_tokens is None
                 else pool_tokens + host_tokens}
        engine = in_engine_blocks(stream, page_tokens, {
            name: tokens for name, tokens in sizes.items() if tokens is not None}, touch)
    points = sorted({*capacities(lru, stream.distinct), *at.values()})
    return {
        "digest": stream.digest, "requests": stream.requests, "references": stream.references,
        "distinct": stream.distinct, "block_tokens": stream.block_tokens, "touch": touch,
        "prompt_tokens": int(stream.input_tokens.sum()),
        "max_hit_rate": asdict(maximum(stream)), "cold_miss_floor": cold_miss_floor(stream),
        "curves": [{"policy": curve.policy, "capacity_blocks": points,
                    "hit_rate": [curve.hits(each) / stream.references for each in points],
                    "reaches": {f"{share:g}": curve.least(share) for share in SHARES}} for curve in curves],
        "at": [{"name": name, "capacity_blocks": blocks, "capacity_tokens": blocks * stream.block_tokens,
                "hit_rate": {curve.policy: asdict(rates_at(stream, curve, blocks)) for curve in curves}}
               for name, blocks in at.items()],
        "two_tiers": [] if pool is None or host is None else [
            {**asdict(each), "hit_rate": each.hits / stream.references} for each in two_tiers(lru, pool, host)],
        "engine_blocks": engine,
    }
