"""E1 on a public trace: the tier is worth as much as a device and a host that never hold the same page."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hostcache.testing.rig import Rig
from hostcache.tier import TierConfig

REQUESTS = 3000
DEVICE = 3000


@pytest.fixture(scope="module")
def trace(root: Path) -> list[list[int]]:
    """Block ids of the first requests of Mooncake's conversation trace, a page each."""
    path = root.parent / "shared" / "data" / "mooncake_conversation_trace.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not beside this checkout")
    with gzip.open(path, "rt") as lines:
        return [json.loads(line)["hash_ids"] for line, _ in zip(lines, range(REQUESTS), strict=False)]


def exclusive(trace: Sequence[Sequence[int]], device: int, host: int) -> tuple[int, int]:
    """Pages hit on the device and on the host, least recently used first out, tails before heads; what leaves the
    device goes to the host, and what the host serves leaves it."""
    young: dict[int, None] = {}
    old: dict[int, None] = {}
    hits = [0, 0]
    for pages in trace:
        first = next((i for i, page in enumerate(pages) if page not in young), len(pages))
        end = next((i for i in range(first, len(pages)) if pages[i] not in young and pages[i] not in old), len(pages))
        hits[0] += first
        hits[1] += end - first
        for page in reversed(pages):
            young.pop(page, None)
            old.pop(page, None)
            young[page] = None
        while len(young) > device:
            page = next(iter(young))
            del young[page]
            old[page] = None
        while len(old) > host:
            del old[next(iter(old))]
    return hits[0], hits[1]


def through_the_tier(trace: Sequence[Sequence[int]], host: int) -> Rig:
    """Two tokens a page and one more, so that every page of a request may be hit."""
    rig = Rig(TierConfig(host_cache_bytes=host, page_bytes=1, page_tokens=2), DEVICE)
    for pages in trace:
        rig.visit([*(page for page in pages for _ in range(2)), 0])
    rig.check()
    return rig


@pytest.mark.parametrize("host", [DEVICE // 2, 2 * DEVICE])
def test_e1_the_tier_reaches_the_exclusive_figure_on_a_real_trace(trace: list[list[int]], host: int) -> None:
    references = sum(map(len, trace))
    rig = through_the_tier(trace, host)
    books, stats = rig.accounting.stats(), rig.cache.stats()
    reached = (books.device_tokens + books.host_tokens) / 2 / references
    best = sum(exclusive(trace, DEVICE, host)) / references
    alone = sum(exclusive(trace, DEVICE, 0)) / references
    bound = sum(exclusive(trace, references, 0)) / references
    sys.stdout.write(f"host {host}: tier {reached:.4f}, exclusive LRU {best:.4f}, device alone {alone:.4f}\n")  # -rP
    assert reached >= best - 0.005, f"tier {reached:.4f}, exclusive {best:.4f}, duplicates {stats.duplicate_pages}"
    assert reached > alone + 0.02
    assert not books.bound_exact or books.bound_tokens / 2 / references == pytest.approx(bound)
    assert 0 <= stats.duplicate_pages <= stats.frames / 4, "what a restore leaves behind, until its room is needed"
    assert stats.counters.orphaned_pages == 0
