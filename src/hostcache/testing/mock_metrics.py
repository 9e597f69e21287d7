"""What a mock server has counted, as the records and texts of the servers it stands for. Pure; counts nothing itself.

`stats_json` is version 1 of hostcache's /v1/stats (docs/counters.md). `metric_families` and the two texts are
/metrics with hostcache's names or with vLLM's, in the classic format and in OpenMetrics; both write `_created`, as
prometheus_client does: a sample of the counter in OpenMetrics, a gauge family of its own in the classic text.
vLLM's names and labels: vllm/v1/metrics/loggers.py and
distributed/kv_transfer/kv_connector/v1/offloading/metrics.py of vLLM 0.32.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hostcache.errors import InvariantBroken
from hostcache.testing.mock_cache import MockCache
from hostcache.testing.mock_config import MockConfig
from hostcache.tier import (
    AccountingStats,
    Counters,
    Family,
    Reason,
    RequestReport,
    TierStats,
    check_balance,
    families,
)
from hostcache.tier.stats import LATENCY_BOUNDS_S

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
CLASSIC = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(slots=True)
class Ledger:
    """Counts of one life of a server, from its start or restart; tokens and requests. `settle` keeps the balance."""

    created_unix_s: float
    started_s: float
    arrived: int = 0
    refused: int = 0
    failed: int = 0
    left: int = 0
    left_waiting: int = 0
    handled: int = 0
    finished: int = 0
    settled: int = 0
    prompt_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    bound_tokens: int = 0
    generated_tokens: int = 0
    decoded_tokens: int = 0
    recomputed: Counter[Reason] = field(default_factory=Counter)
    restores_s: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))
    restored_s: float = 0.0

    def settle(self, report: RequestReport, *, restore_s: float) -> None:
        """At a request's first token."""
        check_balance(report)
        self.settled += 1
        self.prompt_tokens += report.prompt_tokens
        self.device_tokens += report.device_tokens
        self.host_tokens += report.host_tokens
        self.bound_tokens += report.bound_tokens
        self.recomputed.update(report.recomputed)
        if report.host_tokens:
            self.restores_s[bisect_left(LATENCY_BOUNDS_S, restore_s)] += 1
            self.restored_s += restore_s

    @property
    def computed_tokens(self) -> int:
        return sum(self.recomputed.values())

    def accounting(self) -> AccountingStats:
        """Raises InvariantBroken unless device + host + recomputed = prompt."""
        stats = AccountingStats(
            requests=self.settled, prompt_tokens=self.prompt_tokens, device_tokens=self.device_tokens,
            host_tokens=self.host_tokens, recomputed=dict(self.recomputed), bound_tokens=self.bound_tokens,
            bound_exact=True, recovery_device_tokens=0, recovery_host_tokens=0, recovery_recomputed_tokens=0,
            aborted_before_admission=self.left_waiting)
        check_balance(stats)
        return stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A server at one moment: what the texts are made of."""

    config: MockConfig
    ledger: Ledger
    cache: MockCache
    running: int
    waiting: int
    now_s: float

    def check(self) -> None:
        self.cache.check()
        gone = self.ledger.handled + self.ledger.refused + self.ledger.left_waiting
        if self.ledger.arrived != gone + self.running + self.waiting:
            raise InvariantBroken(f"{self.ledger.arrived} requests arrived, {gone} are gone, {self.running} run and "
                                  f"{self.waiting} wait")


def stats_json(now: Moment) -> dict[str, Any]:
    config, ledger, cache = now.config, now.ledger, now.cache
    tier = _tier(now) if cache.host_blocks else None
    engine = {
        "model": config.model, "model_revision": f"mock-{config.seed}", "page_tokens": config.block_tokens,
        "pool_pages": config.device_blocks, "free_pages": config.device_blocks - cache.on_device,
        "quarantined_pages": 0, "active_requests": now.running, "waiting_requests": 0, "restoring_requests": 0,
        "deferred_admissions": 0, "prefix_waits": 0, "preemptions": 0, "slots": config.slots,
        "slots_used": now.running, "max_context": config.max_context_tokens, "bank_prompt_entries": 0,
        "bank_turn_entries": 0, "bank_capacity": 0, "device_evictions": cache.counters.device_evicted,
        "requests_finished": ledger.finished, "requests_aborted": ledger.left, "requests_failed": ledger.failed,
        "prefill_tokens": ledger.computed_tokens, "decode_tokens": ledger.decoded_tokens, "steps": 0,
        "uptime_s": now.now_s - ledger.started_s, "rss_bytes": None,
    }
    host = None if tier is None else {
        **tier.as_json(), "prefill_holds": 0, "restore_submissions": cache.counters.restores,
        "store_submissions": cache.counters.stores, "verify_failures": 0, "pages_verified": 0, "token_mismatches": 0,
        "restore_latency": _histogram(ledger.restores_s, ledger.restored_s),
        "store_latency": _histogram([0] * (len(LATENCY_BOUNDS_S) + 1), 0.0),
    }
    return {
        "version": 1, "engine": engine, "accounting": ledger.accounting().as_json(), "host_cache": host,
        "host_cache_config": None if tier is None else {
            "host_cache_bytes": tier.frames * tier.page_bytes, "host_cache_mode": "on-pressure",
            "frames": tier.frames, "page_bytes": tier.page_bytes, "page_tokens": config.block_tokens},
        "front_door": {
            "slots": config.slots, "running": now.running, "waiting": now.waiting, "waiting_limit": config.waiting,
            "arrived": ledger.arrived, "served": ledger.handled, "refused": ledger.refused,
            "left_waiting": ledger.left_waiting, "draining": False},
    }


def _tier(now: Moment) -> TierStats:
    """All zeros where there is none."""
    counted, cache = now.cache.counters, now.cache
    size = now.config.block_bytes
    return TierStats(
        counters=Counters(
            lookups=counted.lookups, host_hits=counted.hits, reservations=counted.restores, restores=counted.restores,
            restore_pages=counted.restored_blocks, restore_bytes=counted.restored_blocks * size,
            stores_issued=counted.stores, stores_completed=counted.stores, store_pages=counted.stored_blocks,
            store_bytes=counted.stored_blocks * size, copy_submissions=counted.restores + counted.stores,
            device_evictions=counted.device_evicted, host_evictions=counted.host_evicted,
            host_evicted_pages=counted.host_evicted, peak_frames=counted.peak_host_blocks),
        frames=cache.host_blocks, page_bytes=size, free_frames=cache.host_blocks - cache.on_host,
        resident_pages=cache.on_host, filling_pages=0, quarantined_frames=0, pinned_pages=0,
        duplicate_pages=cache.on_both, dirty_pages=cache.on_device - cache.on_both, snapshots=0, resident_snapshots=0,
        live_reservations=0, live_stores=0, off_reason=None)


def _histogram(counts: list[int], sum_s: float) -> dict[str, Any]:
    total, buckets = 0, {}
    for bound, count in zip([*map(str, LATENCY_BOUNDS_S), "+Inf"], counts, strict=True):
        total += count
        buckets[bound] = total
    return {"buckets": buckets, "sum_s": sum_s, "count": total, "mean_s": sum_s / total if total else None}


# -- /metrics --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFamily:
    """`name` without `_total`. `samples`: labels as they are written, without braces, and the value."""

    name: str
    kind: str
    text: str
    samples: tuple[tuple[str, float], ...]


def metric_families(now: Moment) -> list[MetricFamily]:
    return list(_vllm(now) if now.config.style == "vllm" else _hostcache(now))


def _hostcache(now: Moment) -> Iterator[MetricFamily]:
    ledger = now.ledger
    for each in families(ledger.accounting(), _tier(now) if now.config.host_blocks else None):
        yield _labelled(each, "")
    for name, kind, text, value in (
        ("engine_requests_finished", "counter", "Requests whose answer was sent to its end.", ledger.finished),
        ("engine_prefill_tokens", "counter", "Prompt tokens computed.", ledger.computed_tokens),
        ("engine_decode_tokens", "counter", "Tokens of answers but each one's first.", ledger.decoded_tokens),
        ("engine_preemptions", "counter", "Preemptions: none here.", 0),
        ("engine_pool_pages", "gauge", "Blocks of the device.", now.config.device_blocks),
        ("front_door_running", "gauge", "Requests inside.", now.running),
        ("front_door_waiting", "gauge", "Requests waiting at the door.", now.waiting),
        ("front_door_served", "counter", "Requests let in whose handling is over.", ledger.handled),
        ("front_door_refused", "counter", "Requests refused at the door.", ledger.refused),
    ):
        yield MetricFamily(name=f"hostcache_{name}", kind=kind, text=text, samples=(("", value),))


def _labelled(family: Family, own: str) -> MetricFamily:
    return MetricFamily(name=family.name, kind=family.kind, text=family.text, samples=tuple(
        (",".join(filter(None, (own, f'{family.label}="{value}"' if family.label else ""))), number)
        for value, number in family.samples.items()))


def _vllm(now: Moment) -> Iterator[MetricFamily]:
    config, ledger, cache = now.config, now.ledger, now.cache
    own = f'engine="0",model_name="{_escaped(config.model)}"'

    def one(name: str, value: float, text: str, kind: str = "counter") -> MetricFamily:
        return MetricFamily(name=f"vllm:{name}", kind=kind, text=text, samples=((own, float(value)),))

    def by(name: str, label: str, values: Mapping[str, float], text: str) -> MetricFamily:
        return MetricFamily(name=f"vllm:{name}", kind="counter", text=text, samples=tuple(
            (f'{own},{label}="{value}"', float(number)) for value, number in values.items()))

    yield one("num_requests_running", now.running, "Requests inside.", "gauge")
    yield one("num_requests_waiting", now.waiting, "Requests waiting.", "gauge")
    yield one("kv_cache_usage_perc", cache.on_device / max(1, config.device_blocks), "Share of blocks used.", "gauge")
    yield one("prefix_cache_queries", ledger.prompt_tokens, "Tokens asked of the device's prefix cache.")
    yield one("prefix_cache_hits", ledger.device_tokens, "Of these, cached.")
    asked = ledger.prompt_tokens - ledger.device_tokens if config.host_blocks else 0
    yield one("external_prefix_cache_queries", asked, "Tokens asked of the connector.")
    yield one("external_prefix_cache_hits", ledger.host_tokens, "Of these, held.")
    yield one("num_preemptions", 0, "Preemptions: none here.")
    yield one("prompt_tokens", ledger.prompt_tokens, "Prompt tokens.")
    yield by("prompt_tokens_by_source", "source", {
        "local_compute": ledger.computed_tokens, "local_cache_hit": ledger.device_tokens,
        "external_kv_transfer": ledger.host_tokens}, "Prompt tokens by source.")
    yield one("prompt_tokens_cached", ledger.device_tokens + ledger.host_tokens, "Cached prompt tokens.")
    yield by("prompt_tokens_cached_by_source", "source", {
        "device": ledger.device_tokens, "host": ledger.host_tokens, "disk": 0, "p2p": 0, "external_unspecified": 0},
        "Cached prompt tokens by tier.")
    yield one("generation_tokens", ledger.generated_tokens, "Tokens of answers.")
    yield by("request_success", "finished_reason", {
        "stop": 0, "length": ledger.finished, "abort": ledger.left, "error": ledger.failed}, "Finished requests.")
    counted, size = cache.counters, config.block_bytes
    if config.plugin:
        for each in families(ledger.accounting(), _tier(now)):
            yield _labelled(each, own)
        saved = counted.device_evicted if config.host_blocks else 0
        for name, value in (("evicted_pages", counted.device_evicted), ("evicted_saved_pages", saved),
                            ("evicted_lost_pages", counted.device_evicted - saved)):
            yield MetricFamily(name=f"hostcache_{name}", kind="counter", text="Blocks that left the device.",
                               samples=((own, value),))
    elif config.host_blocks:
        yield one("kv_offload_load_bytes", counted.restored_blocks * size, "Bytes restored.")
        yield one("kv_offload_load_time", ledger.restored_s, "Seconds of restores.")
        yield one("kv_offload_store_bytes", counted.stored_blocks * size, "Bytes written.")
        yield one("kv_offload_store_time", 0, "Seconds of write-backs: none here.")
    info = (f'block_size="{config.block_tokens}",enable_prefix_caching="{bool(config.device_blocks)}",engine="0",'
            f'num_gpu_blocks="{config.device_blocks}"')
    yield MetricFamily(name="vllm:cache_config_info", kind="gauge", text="Settings.", samples=((info, 1.0),))


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def classic_text(now: Moment) -> str:
    """Version 0.0.4."""
    lines = []
    for family in metric_families(now):
        counter = family.kind == "counter"
        name = f"{family.name}_total" if counter else family.name
        lines += [f"# HELP {name} {family.text}", f"# TYPE {name} {family.kind}"]
        lines += [f"{name}{_braced(labels)} {value}" for labels, value in family.samples]
        if counter:
            name = f"{family.name}_created"
            lines += [f"# HELP {name} {family.text}", f"# TYPE {name} gauge"]
            lines += [f"{name}{_braced(labels)} {now.ledger.created_unix_s!r}" for labels, _ in family.samples]
    return "\n".join(lines) + "\n"


def openmetrics_text(now: Moment) -> str:
    lines = []
    for family in metric_families(now):
        ending = "_total" if family.kind == "counter" else ""
        lines += [f"# HELP {family.name} {family.text}", f"# TYPE {family.name} {family.kind}"]
        for labels, value in family.samples:
            lines.append(f"{family.name}{ending}{_braced(labels)} {value}")
            if ending:
                lines.append(f"{family.name}_created{_braced(labels)} {now.ledger.created_unix_s!r}")
    return "\n".join(lines) + "\n# EOF\n"


def _braced(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""
