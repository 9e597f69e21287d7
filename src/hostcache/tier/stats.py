"""The tier's counters and the frozen record they leave in. Formats nothing but names and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from typing import Any

from hostcache.tier.accounting import AccountingStats
from hostcache.tier.reasons import Reason


@dataclass(slots=True)
class Counters:
    """What only grows (`peak_frames`: the most frames ever in use). Pages unless the name says otherwise."""

    lookups: int = 0
    host_hits: int = 0
    reservations: int = 0
    restores: int = 0
    restore_failures: int = 0
    restore_timeouts: int = 0
    restore_pages: int = 0
    restore_bytes: int = 0
    stores_issued: int = 0
    stores_completed: int = 0
    stores_failed: int = 0
    stores_skipped: int = 0
    store_pages: int = 0
    store_bytes: int = 0
    copy_submissions: int = 0
    evict_waits: int = 0
    evict_drops_uncached: int = 0
    evict_drop_pages: int = 0
    device_evictions: int = 0
    host_evictions: int = 0
    host_evicted_pages: int = 0
    orphaned_pages: int = 0
    late_completions: int = 0
    pins_taken: int = 0
    pins_released: int = 0
    peak_frames: int = 0

    def copy(self) -> Counters:
        return Counters(*_every_counter(self))


_every_counter = attrgetter(*(field.name for field in fields(Counters)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """The tier at one moment. Frames and pages are counts; multiply by `page_bytes`."""

    counters: Counters
    frames: int
    page_bytes: int
    free_frames: int
    resident_pages: int
    filling_pages: int
    quarantined_frames: int
    pinned_pages: int
    duplicate_pages: int
    dirty_pages: int
    snapshots: int
    resident_snapshots: int
    live_reservations: int
    live_stores: int
    off_reason: str | None

    def as_json(self) -> dict[str, Any]:
        size = self.page_bytes
        return {
            **asdict(self.counters),
            "frames": self.frames,
            "free_frames": self.free_frames,
            "resident_pages": self.resident_pages,
            "resident_snapshots": self.resident_snapshots,
            "snapshots": self.snapshots,
            "live_reservations": self.live_reservations,
            "live_stores": self.live_stores,
            "live_pins": self.counters.pins_taken - self.counters.pins_released,
            "quota_bytes": self.frames * size,
            "bytes_used": (self.frames - self.free_frames) * size,
            "peak_bytes": self.counters.peak_frames * size,
            "resident_bytes": self.resident_pages * size,
            "filling_bytes": self.filling_pages * size,
            "pinned_bytes": self.pinned_pages * size,
            "duplicate_bytes": self.duplicate_pages * size,
            "dirty_bytes": self.dirty_pages * size,
            "quarantined_bytes": self.quarantined_frames * size,
            "off_reason": self.off_reason,
        }


_GAUGES = {
    "quota_bytes": "Host bytes the tier may use. Page tables and other metadata are not counted.",
    "bytes_used": "Host bytes in use: resident, filling and quarantined frames. Free frames are not counted.",
    "resident_bytes": "Host bytes of pages that can be restored. Copies under way are not counted.",
    "filling_bytes": "Host bytes that a write-back is filling now.",
    "live_pins": "Pins that a restore or a write-back holds now: taken − released.",
    "pinned_bytes": "Host bytes that a restore or a write-back holds in place.",
    "duplicate_bytes": "Host bytes of pages that are on the device too.",
    "dirty_bytes": "Device bytes without a host copy. Pages not yet retained are not counted.",
    "quarantined_bytes": "Host bytes that a copy which was given up may still touch.",
    "resident_snapshots": "Conversation frontiers whose last page is on the host.",
    "live_reservations": "Reservations taken and not yet ended: zero when no request is live.",
}

_COUNTERS = {
    "lookups": "Questions to the tier. One request may ask often.",
    "host_hits": "Lookups that found at least one page. A hit is not yet a restore.",
    "restores": "Restores that ended with every byte in place. Abandoned ones are not counted.",
    "restore_failures": "Restores given up for any reason but time and the client's leaving.",
    "restore_timeouts": "Restores given up because they were over budget.",
    "restore_bytes": "Bytes of committed restores.",
    "stores_issued": "Write-back jobs handed to the copier.",
    "stores_completed": "Write-back jobs whose pages became resident.",
    "stores_failed": "Write-back jobs that failed or were over budget.",
    "stores_skipped": "Snapshots not written because nothing on the host was worth less, or larger than the host.",
    "store_bytes": "Bytes of completed write-backs.",
    "copy_submissions": "Copy calls of finished jobs, both directions.",
    "evict_waits": "Evictions that waited for a write-back.",
    "evict_drops_uncached": "Snapshots that left the device without a complete host copy.",
    "device_evictions": "Snapshots the device evicted. Superseded ones are not counted.",
    "host_evictions": "Runs of pages that left the host to make room.",
    "orphaned_pages": "Pages dropped because the page before them had left every tier: waste, should stay 0.",
    "late_completions": "Completions of copies that had been given up.",
    "pins_taken": "Pages pinned for a restore or a write-back, each time counted.",
    "pins_released": "Pins given back: taken − released are live, zero when no copy is.",
}


LATENCY_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Buckets of every histogram of copies: a page takes a fraction of a millisecond, a long conversation a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric without its `_total`. `samples`: value of `label` → number; "" where there is no label. Of a
    histogram: value → how many of it."""

    name: str
    kind: str
    text: str
    label: str
    samples: Mapping[str, float]


def families(accounting: AccountingStats, tier: TierStats | None) -> Iterator[Family]:
    """Bytes and tokens as base units; counters since the start."""
    yield from _accounting_families(accounting)
    if tier is not None:
        values = tier.as_json()
        for name, text in _GAUGES.items():
            yield Family(name=f"hostcache_{name}", kind="gauge", text=text, label="", samples={"": values[name]})
        for name, text in _COUNTERS.items():
            yield Family(name=f"hostcache_{name}", kind="counter", text=text, label="", samples={"": values[name]})


def prometheus_text(accounting: AccountingStats, tier: TierStats | None) -> str:
    """The classic text format, version 0.0.4; `_total` only on counters."""
    return "\n".join(line for family in families(accounting, tier) for line in _lines(family)) + "\n"


def _lines(family: Family) -> Iterator[str]:
    name = f"{family.name}_total" if family.kind == "counter" else family.name
    yield f"# HELP {name} {family.text}"
    yield f"# TYPE {name} {family.kind}"
    for value, number in family.samples.items():
        labels = f'{{{family.label}="{value}"}}' if family.label else ""
        yield f"{name}{labels} {number}"


def _accounting_families(record: AccountingStats) -> Iterator[Family]:
    for name, text, label, samples in (
        ("requests", "Requests whose account is settled. Requests still waiting are not counted.", "",
         {"": record.requests}),
        ("prompt_tokens", "Prompt tokens of settled requests.", "", {"": record.prompt_tokens}),
        ("cached_tokens", "Prompt tokens served from a cache, by tier. Recovery after preemption is not counted.",
         "source", {"device": record.device_tokens, "host": record.host_tokens}),
        ("recomputed_tokens", "Prompt tokens that were computed, by the reason why no cache served them.", "reason",
         {reason.value: record.recomputed.get(reason, 0) for reason in Reason}),
        ("bound_tokens", "Prompt tokens an infinite cache of whole pages would have served.", "",
         {"": record.bound_tokens}),
        ("recovery_tokens", "Tokens of preempted requests that were admitted again, by source.", "source",
         {"device": record.recovery_device_tokens, "host": record.recovery_host_tokens,
          "computed": record.recovery_recomputed_tokens}),
    ):
        yield Family(name=f"hostcache_{name}", kind="counter", text=text, label=label, samples=samples)
