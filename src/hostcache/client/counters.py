"""Scrapes and their differences. Absent is absent, never 0; a counter that went down says nothing but that it did.

Knows no engine: `adapters.py` makes scrapes. `read`, `delta` and `delta_by_name` work on an answer of /v1/stats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hostcache.errors import ServerError

GAUGES = frozenset({"quota_bytes", "resident_bytes"})
"""Canonical names that may go down."""
PROCESS = "process"
_PROCESS_TOLERANCE_S = 1.0
"""A start that was told as an age moves by as much as an answer takes; no server starts again so fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """A server's counters at one moment. `at_s` on the client's clock.

    `counters`: canonical name → value, and the engine's own under their full names, summed over its processes.
    `parts`: name → the series that were summed into it (as `name{labels}`), so that one of several engines that started
    again is seen also where the sum went up. `created`: series → when it began, in unix seconds; PROCESS → when the
    server began, on any clock that stays the same. `raw`: the lines read.
    """

    engine: str
    counters: dict[str, float]
    created: dict[str, float]
    raw: tuple[str, ...]
    at_s: float
    parts: dict[str, dict[str, float]] = field(default_factory=dict)


def resets(opening: Scrape, closing: Scrape) -> tuple[str, ...]:
    """Names of counters of which nothing can be said between the two: one of their series went down, is gone, or
    began anew. Sorted; a counter that the closing scrape lacks altogether is among them."""
    found: set[str] = set()
    began, begins = opening.created.get(PROCESS), closing.created.get(PROCESS)
    if began is not None and begins is not None and begins > began + _PROCESS_TOLERANCE_S:
        found.update(name for name in opening.counters if name not in GAUGES)
    for name, before in opening.counters.items():
        if name in GAUGES:
            continue
        after = closing.counters.get(name)
        if after is None or after < before:
            found.add(name)
    for name, series in opening.parts.items():
        if name in GAUGES:
            continue
        later = closing.parts.get(name, {})
        for key, before in series.items():
            began, begins = opening.created.get(key), closing.created.get(key)
            if later.get(key, -1.0) < before or (began is not None and begins is not None and begins > began):
                found.add(name)
    return tuple(sorted(found))


def change(opening: Scrape, closing: Scrape, name: str) -> float | None:
    """closing − opening. None where either lacks it ("unavailable") or it was reset in between; never negative but for
    one of GAUGES."""
    before, after = opening.counters.get(name), closing.counters.get(name)
    if before is None or after is None or name in resets(opening, closing):
        return None
    return after - before


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """`checked`: the sums that could be formed; `broken`: those that are not equal, with their numbers; `skipped`:
    those that do not hold for this bracket, and why. All empty: the server says too little."""

    checked: tuple[str, ...]
    broken: tuple[str, ...]
    skipped: tuple[str, ...]


_SUMS: tuple[tuple[str, tuple[str, ...], tuple[str, ...], bool], ...] = (
    ("cached + recomputed = prompt", ("cached_tokens", "recomputed_tokens"), ("prompt_tokens",), False),
    ("device + host = cached", ("device_tokens", "host_tokens"), ("cached_tokens",), False),
    ("vLLM: parts by source = prompt tokens", tuple(
        f'vllm:prompt_tokens_by_source_total{{source="{source}"}}'
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")), ("vllm:prompt_tokens_total",),
     False),
    # vLLM leaves requests that were preempted and came back out of queries and hits (v1/metrics/stats.py).
    ("vLLM: cached by source = hits + external hits", tuple(
        f'vllm:prompt_tokens_cached_by_source_total{{source="{source}"}}'
        for source in ("device", "host", "disk", "p2p", "external_unspecified")),
     ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total"), True),
)


def balance(opening: Mapping[str, float], closing: Mapping[str, float]) -> Balance:
    """Whether what the counters say of one bracket adds up. The arguments are `Scrape.counters`, or those of a record.

    Meant for a server at rest at both ends. Counters that were reset must be left out by the caller.
    """
    checked, broken, skipped = [], [], []
    preempted = closing.get("preemptions", 0.0) - opening.get("preemptions", 0.0)
    for title, left, right, only_without_preemption in _SUMS:
        sums = []
        for names in (left, right):
            if any(name not in opening or name not in closing for name in names):
                break
            sums.append(sum(closing[name] - opening[name] for name in names))
        if len(sums) < 2:
            continue
        if only_without_preemption and preempted:
            skipped.append(f"{title}: {preempted:g} preemptions")
            continue
        checked.append(title)
        if sums[0] != sums[1]:
            broken.append(f"{title}: {sums[0]:g} and {sums[1]:g}")
    return Balance(checked=tuple(checked), broken=tuple(broken), skipped=tuple(skipped))


def read(stats: Mapping[str, Any], *path: str) -> int | float | None:
    """The number at `path`, or None where any part of it is absent or null."""
    value: Any = stats
    for name in path:
        if not isinstance(value, Mapping) or value.get(name) is None:
            return None
        value = value[name]
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def delta(opening: Mapping[str, Any], closing: Mapping[str, Any], *path: str) -> int | float | None:
    """closing − opening of a counter; None where either scrape lacks it.

    Raises ServerError when it went down: the server restarted between the scrapes and nothing can be said.
    """
    before, after = read(opening, *path), read(closing, *path)
    if before is None or after is None:
        return None
    if after < before:
        raise ServerError(f"counter {'.'.join(path)} went down from {before} to {after}; the server restarted")
    return after - before


def delta_by_name(opening: Mapping[str, Any], closing: Mapping[str, Any], *path: str) -> dict[str, int]:
    """Per-name differences of a mapping of counters; a name the opening scrape lacks started at 0 (it is created on
    first use), names that did not move are left out."""
    after: Any = closing
    for name in path:
        after = after.get(name) or {}
    moved = {}
    for name in after:
        moved_by = int(after[name]) - int(read(opening, *path, name) or 0)
        if moved_by < 0:
            raise ServerError(f"counter {'.'.join((*path, name))} went down by {-moved_by}; the server restarted")
        if moved_by:
            moved[str(name)] = moved_by
    return moved
