"""The retracted probe, re-derived from the public trace: the number that exceeded a theorem, and why.

The second seed document's figures: 600 requests of the conversation trace, a device cache of 65,536 tokens in blocks of
64, an engine that counted 815,968 hits of 2,111,376 queries behind a bridge whose 13,712 blocks had 33 texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from hostcache.errors import ConfigError
from hostcache.lab.oracle import cold_miss_floor
from hostcache.lab.reconcile import collapsed_rate, reconcile
from hostcache.lab.stream import digest_of, stream_of
from hostcache.workload.legacy_bridge import LEGACY_WORDS, legacy_texts
from hostcache.workload.traces import open_trace

REQUESTS = 600
CAPACITY_BLOCKS = 65_536 // 64
ENGINE_HITS, ENGINE_QUERIES = 815_968, 2_111_376
SLICE = "c9b79365e7ebb5f5148c7528a0618b95e40c418d5f206e81c0c51d9458159a6b"
"""The canonical digest of those requests."""
WHERE = "https://github.com/kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl"


def story(path: Path | None) -> dict[str, Any]:
    """Ready for JSON. Raises ConfigError where the trace is absent or another one."""
    if path is None or not path.exists():
        absent = "no --trace is given" if path is None else f"--trace {path} does not exist"
        raise ConfigError(f"{absent}; the story needs Mooncake's conversation trace ({WHERE})")
    trace = open_trace(path)
    if digest_of(islice(trace, REQUESTS), block_tokens=trace.format.block_tokens) != SLICE:
        raise ConfigError(f"--trace {path} does not begin with the {REQUESTS} requests of the story; it needs "
                          f"Mooncake's conversation trace ({WHERE})")
    stream = stream_of(trace, limit=REQUESTS)
    outcome = reconcile(stream, capacity_blocks=CAPACITY_BLOCKS, hits=ENGINE_HITS, queries=ENGINE_QUERIES)
    return {
        "references": stream.references, "distinct": stream.distinct, "max_hit_rate": outcome.max_hit_rate,
        "cold_miss_floor": cold_miss_floor(stream), "lru_hit_rate": outcome.lru_hit_rate,
        "collapsed_texts": len(np.unique(legacy_texts(stream.names))),
        "lru_hit_rate_collapsed": collapsed_rate(stream, LEGACY_WORDS, CAPACITY_BLOCKS),
        "engine_hit_rate": outcome.engine_hit_rate, "verdict": outcome.verdict, "cause": outcome.cause,
    }


def story_text(told: Mapping[str, Any]) -> str:
    """The same as a page of text."""
    rows = [
        (f"blocks named by the first {REQUESTS} requests", f"{told['references']:,}"),
        ("different ones among them", f"{told['distinct']:,}"),
        ("the most that any cache can hold", f"{told['max_hit_rate']:.6f}"),
        ("the least that every cache misses", f"{told['cold_miss_floor']:.6f}"),
        (f"LRU of {CAPACITY_BLOCKS:,} blocks", f"{told['lru_hit_rate']:.6f}"),
        (f"the engine: {ENGINE_HITS:,} hits of {ENGINE_QUERIES:,}", f"{told['engine_hit_rate']:.6f}"),
        ("texts that its bridge had for them", f"{told['collapsed_texts']}"),
        ("the same LRU on what came through that bridge", f"{told['lru_hit_rate_collapsed']:.6f}"),
        ("verdict", str(told["verdict"])),
        ("cause", str(told["cause"])),
    ]
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:<{width}}  {value}\n" for name, value in rows)
