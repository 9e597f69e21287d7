"""Which engine is this, and its counters under one set of names. Measures nothing and decides nothing about a run.

Canonical counters; one that an engine does not have is absent, and none is made up from others but where it says so:

`prompt_tokens`, `cached_tokens`, `device_tokens`, `host_tokens`, `recomputed_tokens`, `bound_tokens`, `requests`,
`generated_tokens`, `restores`, `restore_failures`, `restore_timeouts`, `restored_bytes`, `written_bytes`,
`evicted_pages`, `evicted_saved_pages`, `evicted_snapshots`, `host_evicted_pages`, `refused`, `preemptions`, and the
gauges `quota_bytes`, `resident_bytes`.

- hostcache: /v1/stats, else /metrics. `cached_tokens` is device + host. It has no count of generated tokens, and counts
  evictions from the device in snapshots, not in pages.
- vLLM 0.32: token counts are its own (`vllm:prompt_tokens…`, by source); `host_tokens` is every source but the device
  (host, disk, p2p, unspecified), or the external hits where there is no count by source. They are counted at
  admission, so a load that failed later stands among the hits. Restores, bytes and evictions are the plugin's
  (`hostcache_…`), else vLLM's offload families', which say nothing of a quota. Any other connector is known by the
  tokens that vLLM asked it for, and by nothing else.
- SGLang: `sglang:prompt_tokens_total` (whole prompts) and `sglang:cached_tokens_total` by `cache_source`. The gauge
  `sglang:cache_hit_rate` is not read: it is of the last batch.
- llama.cpp: `llamacpp:prompt_tokens_total` counts the tokens it computed, so it is `recomputed_tokens`.

Beside them stand the engine's own counters: full sample name, with the labels that tell parts apart (`{source="host"}`)
and summed over those that tell processes apart. Of histograms, those of restores stand among the raw lines
(`HISTOGRAMS`), no other does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

from hostcache.client.counters import PROCESS, Scrape, read
from hostcache.client.exposition import CREATED, Exposition, Sample, read_exposition
from hostcache.client.openai import OpenAIClient
from hostcache.errors import ServerError

Engine = Literal["hostcache", "vllm", "sglang", "llama.cpp", "unknown"]
_PREFIXES: Mapping[str, Engine] = {"vllm:": "vllm", "sglang:": "sglang", "llamacpp:": "llama.cpp",
                                   "hostcache_": "hostcache"}
"""In this order: inside vLLM the plugin's names stand beside vLLM's."""
_OWNERS: Mapping[str, Engine] = {"hostcache": "hostcache", "vllm": "vllm", "sglang": "sglang",
                                 "llamacpp": "llama.cpp", "llama.cpp": "llama.cpp"}
_PROCESS_LABELS = frozenset({"engine", "model_name", "model", "pid", "worker", "instance", "tp_rank", "pp_rank",
                             "dp_rank", "moe_ep_rank", "engine_type", "is_streaming"})
"""Labels that tell who counted, not what was counted."""
HISTOGRAMS = frozenset({"hostcache_restore_latency_seconds", "vllm:kv_offload_load_size"})
"""How long restores took (hostcache's own server; the plugin in vLLM has none); how large vLLM's own loads were, so how
many, in bytes: of their time it counts the sum alone, `vllm:kv_offload_load_time_total`."""
_HISTOGRAM_LINES = frozenset(f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count"))
_QUOTA = "hostcache_quota_bytes"
_ASKED_CONNECTOR = "vllm:external_prefix_cache_queries_total"
_START = "process_start_time_seconds"


class Adapter(Protocol):
    """One server whose engine is known."""

    @property
    def engine(self) -> Engine: ...

    async def scrape(self) -> Scrape:
        """Its counters now. Raises ServerError where it does not answer or cannot be read."""
        ...

    async def describe(self) -> dict[str, Any]:
        """`engine`, `version` (None: not said), `model`, `tier`, and `pool_tokens`, `page_tokens`, `prefix_caching` (is
        the device's on?) where it says so.

        `tier` is None where the server does not say whether it has one; else `on` (bool) and, when on, `kind`,
        `quota_bytes` and `mode` as far as they are known; when it turned itself off, `off_reason`.
        """
        ...


async def adapter_for(client: OpenAIClient) -> Adapter:
    """Finds out by what the server itself says: /v1/stats, then the names in /metrics, then the owner of its model.

    Raises ServerError only where the server does not answer.
    """
    stats = await client.get_json("/v1/stats")
    if isinstance(stats, dict) and "version" in stats and isinstance(stats.get("accounting"), dict):
        return _Stats(client)
    engine: Engine = _OWNERS.get(await _owner(client), "unknown")
    status, content_type, text = await client.get_text("/metrics")
    readable = False
    if status == 200:
        try:
            families = read_exposition(text, content_type).families
        except ServerError:
            families = {}  # of an engine that is known it is an error, with the first scrape
            readable = engine != "unknown"
        else:
            readable = True
        engine = next((named for prefix, named in _PREFIXES.items()
                       if any(name.startswith(prefix) for name in families)), engine)
    return _Metrics(client, engine, has_metrics=readable)


async def _owner(client: OpenAIClient) -> str:
    return str(_card(await client.get_json("/v1/models")).get("owned_by", "")).lower()


def _card(models: Any) -> Mapping[str, Any]:
    try:
        card = models["data"][0]
    except (KeyError, IndexError, TypeError):
        return {}
    return card if isinstance(card, dict) else {}


# -- hostcache's own engine, by /v1/stats ----------------------------------------------------------------------------

_STATS: Mapping[str, tuple[str, str]] = {
    "prompt_tokens": ("accounting", "prompt_tokens"), "device_tokens": ("accounting", "device_tokens"),
    "host_tokens": ("accounting", "host_tokens"), "recomputed_tokens": ("accounting", "recomputed_tokens"),
    "bound_tokens": ("accounting", "bound_tokens"), "requests": ("accounting", "requests"),
    "restores": ("host_cache", "restores"), "restore_failures": ("host_cache", "restore_failures"),
    "restore_timeouts": ("host_cache", "restore_timeouts"), "restored_bytes": ("host_cache", "restore_bytes"),
    "written_bytes": ("host_cache", "store_bytes"), "host_evicted_pages": ("host_cache", "host_evicted_pages"),
    "evicted_snapshots": ("engine", "device_evictions"), "refused": ("front_door", "refused"),
    "preemptions": ("engine", "preemptions"), "quota_bytes": ("host_cache", "quota_bytes"),
    "resident_bytes": ("host_cache", "resident_bytes"),
}
_STATS_BESIDE: Mapping[str, tuple[str, ...]] = {
    "accounting": ("aborted_before_admission",),
    "host_cache": ("lookups", "host_hits", "restore_pages", "stores_issued", "stores_completed", "stores_failed",
                   "stores_skipped", "store_pages", "evict_waits", "evict_drops_uncached", "evict_drop_pages",
                   "host_evictions", "orphaned_pages", "late_completions", "verify_failures", "token_mismatches"),
    "engine": ("deferred_admissions", "prefix_waits", "requests_finished", "requests_aborted", "requests_failed",
               "prefill_tokens", "decode_tokens", "steps"),
    "front_door": ("arrived", "served", "left_waiting"),
}


class _Stats:
    engine: Engine = "hostcache"

    def __init__(self, client: OpenAIClient) -> None:
        self._client = client

    async def scrape(self) -> Scrape:
        stats = await self._client.stats()
        at_s = self._client.clock.now()
        counters: dict[str, float] = {}
        for name, path in _STATS.items():
            _put(counters, name, read(stats, *path))
        if "device_tokens" in counters and "host_tokens" in counters:
            counters["cached_tokens"] = counters["device_tokens"] + counters["host_tokens"]
        for section, names in _STATS_BESIDE.items():
            for name in names:
                _put(counters, f"{section}.{name}", read(stats, section, name))
        for part in ("recomputed", "recovery"):
            for name in _mapping(stats, "accounting", part):
                _put(counters, f"accounting.{part}.{name}", read(stats, "accounting", part, name))
        uptime_s = read(stats, "engine", "uptime_s")
        return Scrape(engine=self.engine, counters=counters, at_s=at_s,
                      created={} if uptime_s is None else {PROCESS: at_s - uptime_s},
                      raw=tuple(f"{section} {json.dumps(stats[section], sort_keys=True)}"
                                for section in ("accounting", "engine", "front_door", "host_cache")
                                if stats.get(section) is not None))

    async def describe(self) -> dict[str, Any]:
        stats = await self._client.stats()
        engine, tier = _mapping(stats, "engine"), stats.get("host_cache")
        described: dict[str, Any] = {
            "engine": self.engine, "version": stats.get("hostcache_version"), "model": engine.get("model"),
            "model_revision": engine.get("model_revision")}
        if tier is None:
            described["tier"] = {"on": False}
        else:
            off_reason = _text(tier, "off_reason")
            config = _mapping(stats, "host_cache_config")
            described["tier"] = {
                "on": off_reason is None, "kind": "hostcache", "quota_bytes": read(stats, "host_cache", "quota_bytes"),
                "mode": config.get("host_cache_mode", config.get("mode")),
                **({} if off_reason is None else {"off_reason": off_reason})}
        pages, page_tokens = read(stats, "engine", "pool_pages"), read(stats, "engine", "page_tokens")
        if page_tokens is not None:
            described["page_tokens"] = page_tokens
            if pages is not None:
                described["pool_tokens"] = pages * page_tokens
        return described


# -- everybody who has /metrics --------------------------------------------------------------------------------------


class _Metrics:
    def __init__(self, client: OpenAIClient, engine: Engine, *, has_metrics: bool) -> None:
        self.engine = engine
        self._client = client
        self._has_metrics = has_metrics

    async def scrape(self) -> Scrape:
        if not self._has_metrics:
            return Scrape(engine=self.engine, counters={}, created={}, raw=(), at_s=self._client.clock.now())
        return scrape_of(self.engine, await self._exposition(), self._client.clock.now())

    async def _exposition(self) -> Exposition:
        status, content_type, text = await self._client.get_text("/metrics")
        if status != 200:
            raise ServerError(f"{self._client.base_url}/metrics answered {status}")
        return read_exposition(text, content_type)

    async def describe(self) -> dict[str, Any]:
        card = _card(await self._client.get_json("/v1/models"))
        described: dict[str, Any] = {"engine": self.engine, "version": await self._version(), "model": card.get("id"),
                                     "tier": None}
        if self._has_metrics:
            exposition = await self._exposition()
            if self.engine == "vllm" and _knows_no_tier_yet(exposition):
                await self._client.capabilities()
                exposition = await self._exposition()
            described["tier"] = _tier(self.engine, exposition)
            described |= _pool(self.engine, exposition)
        return described

    async def _version(self) -> str | None:
        for path, name in {"vllm": (("/version", "version"),), "llama.cpp": (("/props", "build_info"),),
                           "sglang": (("/server_info", "version"), ("/get_server_info", "version")),
                           }.get(self.engine, ()):
            said = await self._client.get_json(path)
            if isinstance(said, dict) and isinstance(said.get(name), str):
                return str(said[name])
        return None


def scrape_of(engine: Engine, exposition: Exposition, at_s: float) -> Scrape:
    """The counters of one text of /metrics."""
    own = _Own(exposition)
    counters: dict[str, float] = {}
    parts: dict[str, dict[str, float]] = {}
    for name in own.names():
        counters[name], parts[name] = own.sum_of(name), own.series[name]
    for name, sources in _canonical(engine, own):
        if sources is not None and all(source in counters for source in sources):
            counters[name] = sum((counters[source] for source in sources), 0.0)
            parts[name] = {key: value for source in sources for key, value in parts[source].items()}
    gauges = _gauges(exposition)
    _put(counters, "quota_bytes", gauges.get(_QUOTA))
    _put(counters, "resident_bytes", gauges.get("hostcache_resident_bytes"))
    return Scrape(engine=engine, counters=counters, created=own.created, raw=own.lines, at_s=at_s, parts=parts)


class _Own:
    """An engine's counters by name: summed over processes, with the series of each."""

    def __init__(self, exposition: Exposition) -> None:
        self.series: dict[str, dict[str, float]] = {}
        self.created: dict[str, float] = {}
        lines = []
        no_counts: set[str] = set()
        for sample in exposition.samples:
            if sample.name == _START:
                self.created[PROCESS] = max(sample.value, self.created.get(PROCESS, sample.value))
            if not sample.name.startswith(tuple(_PREFIXES)):
                continue
            if sample.kind == CREATED:
                self.created[_key(sample.name.removesuffix("_created") + "_total", sample.labels)] = sample.value
            elif sample.kind == "counter" and sample.name.endswith("_total"):
                if 0 <= sample.value < math.inf:
                    self.series.setdefault(_grouped(sample), {})[_key(sample.name, sample.labels)] = sample.value
                else:  # NaN, say: nothing can be said of the family's sums either
                    no_counts.add(sample.name)
            elif sample.kind != "gauge" and not (sample.kind == "histogram" and sample.name in _HISTOGRAM_LINES):
                continue
            lines.append(sample.line)
        self.lines = tuple(lines)
        for name in [each for each in self.series if each.partition("{")[0] in no_counts]:
            del self.series[name]
        for name, kind in exposition.families.items():
            # Declared and without a sample: a counter with labels that has counted nothing yet. It is there.
            if kind == "counter" and name.startswith(tuple(_PREFIXES)) and name not in no_counts and not any(
                    have.partition("{")[0] == name for have in self.series):
                self.series[name] = {}

    def names(self) -> tuple[str, ...]:
        return tuple(self.series)

    def sum_of(self, name: str) -> float:
        return sum(self.series[name].values(), 0.0)

    def parts_of(self, family: str) -> tuple[str, ...] | None:
        """The names of a family's parts; the family itself where its counters have no labels of their own; None where
        there is no such family."""
        return tuple(name for name in self.series if name.partition("{")[0] == family) or None


def _canonical(engine: Engine, own: _Own) -> Iterator[tuple[str, tuple[str, ...] | None]]:
    """Canonical name → the counters that add up to it, None: it has none. Of several for one name the last counts
    whose counters are all there: the better source stands last."""
    if engine == "vllm":
        yield "prompt_tokens", ("vllm:prompt_tokens_total",)
        yield "cached_tokens", ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
        yield "cached_tokens", ("vllm:prompt_tokens_cached_total",)
        yield "device_tokens", ("vllm:prefix_cache_hits_total",)
        yield "host_tokens", ("vllm:external_prefix_cache_hits_total",)
        by_source = own.parts_of("vllm:prompt_tokens_cached_by_source_total") or ()
        device = 'vllm:prompt_tokens_cached_by_source_total{source="device"}'
        if device in by_source:
            yield "device_tokens", (device,)
            yield "host_tokens", tuple(name for name in by_source if name != device)
        yield "recomputed_tokens", ('vllm:prompt_tokens_by_source_total{source="local_compute"}',)
        yield "generated_tokens", ("vllm:generation_tokens_total",)
        yield "requests", own.parts_of("vllm:request_success_total")
        yield "refused", own.parts_of("vllm:admission_rejections_total")
        yield "preemptions", ("vllm:num_preemptions_total",)
        yield "restored_bytes", own.parts_of("vllm:kv_offload_load_bytes_total")
        yield "written_bytes", own.parts_of("vllm:kv_offload_store_bytes_total")
    elif engine == "sglang":
        yield "prompt_tokens", own.parts_of("sglang:prompt_tokens_total")
        cached = own.parts_of("sglang:cached_tokens_total")
        yield "cached_tokens", cached
        device = 'sglang:cached_tokens_total{cache_source="device"}'
        if cached is not None and any("cache_source=" in name for name in cached):
            # A source appears with its first token, so one that is not there yet has counted nothing.
            yield "device_tokens", tuple(name for name in cached if name == device)
            yield "host_tokens", tuple(name for name in cached if name != device)
        yield "generated_tokens", own.parts_of("sglang:generation_tokens_total")
        yield "requests", own.parts_of("sglang:num_requests_total")
        yield "preemptions", own.parts_of("sglang:num_retracted_requests_total")
    elif engine == "llama.cpp":
        yield "recomputed_tokens", ("llamacpp:prompt_tokens_total",)
        yield "generated_tokens", ("llamacpp:tokens_predicted_total",)
    elif engine == "hostcache":
        yield "prompt_tokens", ("hostcache_prompt_tokens_total",)
        yield "cached_tokens", own.parts_of("hostcache_cached_tokens_total")
        yield "device_tokens", ('hostcache_cached_tokens_total{source="device"}',)
        yield "host_tokens", ('hostcache_cached_tokens_total{source="host"}',)
        yield "recomputed_tokens", own.parts_of("hostcache_recomputed_tokens_total")
        yield "requests", ("hostcache_requests_total",)
        yield "evicted_snapshots", ("hostcache_engine_device_evictions_total",)
        yield "evicted_snapshots", ("hostcache_device_evictions_total",)
        yield "refused", ("hostcache_front_door_refused_total",)
        yield "preemptions", ("hostcache_engine_preemptions_total",)
    for name, family in {
        "bound_tokens": "bound_tokens", "restores": "restores", "restore_failures": "restore_failures",
        "restore_timeouts": "restore_timeouts", "restored_bytes": "restore_bytes", "written_bytes": "store_bytes",
        "evicted_pages": "evicted_pages", "evicted_saved_pages": "evicted_saved_pages",
    }.items():
        yield name, (f"hostcache_{family}_total",)


def _gauges(exposition: Exposition) -> dict[str, float]:
    gauges: dict[str, float] = {}
    for sample in exposition.samples:
        if sample.kind == "gauge":
            gauges[sample.name] = gauges.get(sample.name, 0.0) + sample.value
    return gauges


def _tier(engine: Engine, exposition: Exposition) -> dict[str, Any] | None:
    gauges = _gauges(exposition)
    if engine in ("hostcache", "vllm"):
        quota_bytes = gauges.get(_QUOTA)
        if quota_bytes is not None:
            return {"on": quota_bytes > 0, "kind": "hostcache", "quota_bytes": quota_bytes, "mode": None}
        if any(name.startswith(("vllm:kv_offload_", "vllm:simple_kv_offload_")) for name in exposition.families):
            return {"on": True, "kind": "vllm offload", "quota_bytes": None, "mode": None}
        if _counted(exposition, _ASKED_CONNECTOR):
            return {"on": True, "kind": "another connector", "quota_bytes": None, "mode": None}
        return {"on": False}
    if engine == "sglang":
        tokens = gauges.get("sglang:hicache_host_total_tokens")
        return None if tokens is None else {"on": tokens > 0, "kind": "hicache", "quota_bytes": None, "mode": None,
                                            "quota_tokens": tokens}
    return None


def _knows_no_tier_yet(exposition: Exposition) -> bool:
    """vLLM before its first request: the plugin tells its gauges with a step, and no connector was asked for
    anything."""
    quota_bytes = _gauges(exposition).get(_QUOTA)
    return quota_bytes == 0 if quota_bytes is not None else not _counted(exposition, "vllm:prompt_tokens_total")


def _counted(exposition: Exposition, name: str) -> float:
    return sum(sample.value for sample in exposition.samples if sample.name == name)


def _pool(engine: Engine, exposition: Exposition) -> dict[str, Any]:
    for sample in exposition.samples:
        if sample.name == "vllm:cache_config_info":
            said: dict[str, Any] = {}
            blocks, size = sample.labels.get("num_gpu_blocks", ""), sample.labels.get("block_size", "")
            if size.isdecimal():
                said["page_tokens"] = int(size)
                if blocks.isdecimal():
                    said["pool_tokens"] = int(blocks) * int(size)
            caching = sample.labels.get("enable_prefix_caching")
            return said if caching is None else {**said, "prefix_caching": caching == "True"}
        if sample.name == "sglang:max_total_num_tokens":
            return {"pool_tokens": int(sample.value)}
    return {}


def _grouped(sample: Sample) -> str:
    return _key(sample.name, {name: value for name, value in sample.labels.items() if name not in _PROCESS_LABELS})


def _key(name: str, labels: Mapping[str, str]) -> str:
    inner = ",".join(f"{label}={json.dumps(value, ensure_ascii=False)}" for label, value in sorted(labels.items()))
    return f"{name}{{{inner}}}" if inner else name


def _put(counters: dict[str, float], name: str, value: float | None) -> None:
    if value is not None:
        counters[name] = float(value)


def _mapping(stats: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    value: Any = stats
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _text(value: object, name: str) -> str | None:
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, str) and found else None
