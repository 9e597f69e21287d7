"""The engine's frozen record of one moment, and its two forms: the mapping of /v1/stats and Prometheus text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hostcache.tier import AccountingStats, TierStats, prometheus_text
from hostcache.tier.stats import LATENCY_BOUNDS_S


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramRecord:
    """`counts[i]`: samples of at most LATENCY_BOUNDS_S[i] seconds and over the bound before it; the last: all longer
    ones."""

    counts: tuple[int, ...]
    sum_s: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    def as_json(self) -> dict[str, Any]:
        """Cumulative buckets as Prometheus has them; `mean_s` is null before the first sample."""
        total = 0
        buckets: dict[str, int] = {}
        for bound, count in zip([*map(str, LATENCY_BOUNDS_S), "+Inf"], self.counts, strict=True):
            total += count
            buckets[bound] = total
        mean_s = self.sum_s / total if total else None
        return {"buckets": buckets, "sum_s": self.sum_s, "count": total, "mean_s": mean_s}


class Histogram:
    """Seconds in fixed buckets."""

    def __init__(self) -> None:
        self._counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, samples_s: Iterable[float]) -> None:
        for seconds in samples_s:
            self._counts[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
            self._sum_s += seconds

    def frozen(self) -> HistogramRecord:
        return HistogramRecord(counts=tuple(self._counts), sum_s=self._sum_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Names as in docs/counters.md, section `engine`."""

    model: str
    model_revision: str
    page_tokens: int
    pool_pages: int
    free_pages: int
    quarantined_pages: int
    active_requests: int
    waiting_requests: int
    restoring_requests: int
    deferred_admissions: int
    prefix_waits: int
    preemptions: int
    slots: int
    slots_used: int
    max_context: int
    bank_prompt_entries: int
    bank_turn_entries: int
    bank_capacity: int
    device_evictions: int
    requests_finished: int
    requests_aborted: int
    requests_failed: int
    prefill_tokens: int
    decode_tokens: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats:
    """What the driver knows of the tier's work, beside the tier's own record."""

    prefill_holds: int
    restore_submissions: int
    store_submissions: int
    verify_failures: int
    pages_verified: int
    token_mismatches: int
    restore_latency: HistogramRecord
    store_latency: HistogramRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsRecord:
    """Published once a step by the engine's thread; any thread may read it. `tier` is None when the tier is off."""

    engine: EngineStats
    accounting: AccountingStats
    tier: TierStats | None
    transfers: TransferStats
    tier_config: Mapping[str, Any]

    def as_json(self, *, uptime_s: float, rss_bytes: int) -> dict[str, Any]:
        """`engine`, `accounting`, `host_cache` (None when off), `host_cache_config` (None when off)."""
        engine = {**asdict(self.engine), "uptime_s": uptime_s, "rss_bytes": rss_bytes}
        host = None
        if self.tier is not None:
            host = {
                **self.tier.as_json(),
                "prefill_holds": self.transfers.prefill_holds,
                "restore_submissions": self.transfers.restore_submissions,
                "store_submissions": self.transfers.store_submissions,
                "verify_failures": self.transfers.verify_failures,
                "pages_verified": self.transfers.pages_verified,
                "token_mismatches": self.transfers.token_mismatches,
                "restore_latency": self.transfers.restore_latency.as_json(),
                "store_latency": self.transfers.store_latency.as_json(),
            }
        return {
            "engine": engine,
            "accounting": self.accounting.as_json(),
            "host_cache": host,
            "host_cache_config": dict(self.tier_config) if self.tier is not None else None,
        }

    def metrics_text(self, *, uptime_s: float, rss_bytes: int) -> str:
        lines = list(_engine_lines(self.engine, uptime_s, rss_bytes))
        if self.tier is not None:
            lines += _transfer_lines(self.transfers)
        return prometheus_text(self.accounting, self.tier) + "\n".join(lines) + "\n"


_COUNTERS = {
    "deferred_admissions": "Requests that had to wait because the active contexts filled the pool, each once.",
    "prefix_waits": "Requests that waited while another computed their next page, each once.",
    "preemptions": "Times a running request gave its pages back to resume later.",
    "requests_finished": "Requests that ended by stop or length. Aborted and failed ones are not counted.",
    "requests_aborted": "Requests whose client left.",
    "requests_failed": "Requests that ended in an error of the engine.",
    "prefill_tokens": "Prompt tokens computed, recovery after preemption included. Cached ones are not counted.",
    "decode_tokens": "Tokens computed one at a time. The first token of an answer is not counted.",
    "steps": "Forward passes.",
}

_GAUGES = {
    "pool_pages": "Pages of the device pool.",
    "free_pages": "Device pages neither in use nor held by a snapshot, a write-back or a late restore.",
    "quarantined_pages": "Device pages that a restore which was given up may still write.",
    "active_requests": "Requests in a slot, waiting for a restore included.",
    "waiting_requests": "Requests that wait for pages or a slot. Those at the front door are not counted.",
    "restoring_requests": "Requests in a slot whose restore is on its way.",
    "slots": "Requests that can run at the same time.",
    "bank_prompt_entries": "Snapshots in the prompt bank.",
    "bank_turn_entries": "Snapshots in the turn bank.",
    "bank_capacity": "Most snapshots in each bank.",
}


def _engine_lines(record: EngineStats, uptime_s: float, rss_bytes: int) -> Iterator[str]:
    values = asdict(record)
    for kind, table, ending in (("counter", _COUNTERS, "_total"), ("gauge", _GAUGES, "")):
        for name, text in table.items():
            yield from _family(f"hostcache_engine_{name}{ending}", kind, text, values[name])
    yield from _family("hostcache_engine_uptime_seconds", "gauge", "Seconds since the engine started.", uptime_s)
    yield from _family("hostcache_process_resident_bytes", "gauge", "Resident memory of this process.", rss_bytes)


def _transfer_lines(record: TransferStats) -> Iterator[str]:
    yield from _family("hostcache_prefill_holds_total", "counter",
                       "Requests held back because another was restoring their next page, each once.",
                       record.prefill_holds)
    yield from _family("hostcache_verify_failures_total", "counter",
                       "Restored pages whose bytes were not the stored ones. Pages not compared are not counted.",
                       record.verify_failures)
    yield from _family("hostcache_token_mismatches_total", "counter",
                       "Pages found under a key of other tokens. Compared with host_cache_verify always only.",
                       record.token_mismatches)
    for name, text, histogram in (
        ("restore", "From reservation to commit of committed restores.", record.restore_latency),
        ("store", "From submission to completion of write-backs.", record.store_latency),
    ):
        family = f"hostcache_{name}_latency_seconds"
        yield f"# HELP {family} {text}"
        yield f"# TYPE {family} histogram"
        shape = histogram.as_json()
        for bound, count in shape["buckets"].items():
            yield f'{family}_bucket{{le="{bound}"}} {count}'
        yield f"{family}_sum {shape['sum_s']}"
        yield f"{family}_count {shape['count']}"


def _family(name: str, kind: str, text: str, value: float) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    yield f"{name} {value}"
