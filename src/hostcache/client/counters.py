"""Differences between two scrapes of /v1/stats. Absent is absent, never 0; a counter that went down voids the cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hostcache.errors import ServerError


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
        change = int(after[name]) - int(read(opening, *path, name) or 0)
        if change < 0:
            raise ServerError(f"counter {'.'.join((*path, name))} went down by {-change}; the server restarted")
        if change:
            moved[str(name)] = change
    return moved
