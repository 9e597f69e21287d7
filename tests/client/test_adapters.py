"""Which engine it is by its own word, and its counters under one set of names; what it does not say is absent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.client.scripted import Play, Request, answer, answer_json, serving, stream, usage, word

from hostcache.client.adapters import HISTOGRAMS, adapter_for, scrape_of
from hostcache.client.counters import Scrape, balance, change, resets
from hostcache.client.exposition import read_exposition
from hostcache.client.openai import OpenAIClient
from hostcache.clock import VirtualClock
from hostcache.errors import ServerError
from hostcache.tier import Accounting, History, HostCache, TierConfig, prometheus_text

Routes = dict[str, Callable[[Request], Play]]


def metrics(text: str) -> Callable[[Request], Play]:
    def route(request: Request) -> Play:
        assert "openmetrics" not in request.headers["accept"]
        return answer(200, text.encode(), "Content-Type: text/plain; version=0.0.4; charset=utf-8")

    return route


def owned_by(owner: str) -> Callable[[Request], Play]:
    return lambda _: answer_json({"data": [{"id": "m", "owned_by": owner}]})


def looked_at(routes: Routes) -> tuple[Scrape, dict[str, Any]]:
    async def go() -> tuple[Scrape, dict[str, Any]]:
        async with serving(routes=routes) as server, OpenAIClient(server.url, clock=VirtualClock(50.0)) as client:
            adapter = await adapter_for(client)
            return await adapter.scrape(), await adapter.describe()

    return asyncio.run(go())


STATS = {
    "version": 1,
    "accounting": {"requests": 2, "prompt_tokens": 100, "device_tokens": 48, "host_tokens": 16,
                   "recomputed_tokens": 36, "recomputed": {"new": 16, "evicted": 20}, "bound_tokens": 80,
                   "bound_exact": True, "recovery": {"device_tokens": 1}},
    "host_cache": {"restores": 1, "restore_failures": 0, "restore_timeouts": 0, "restore_bytes": 512,
                   "store_bytes": 1024, "host_evicted_pages": 3, "quota_bytes": 4096, "resident_bytes": 2048,
                   "off_reason": None},
    "host_cache_config": {"host_cache_mode": "on-pressure"},
    "engine": {"model": "tiny", "model_revision": "abc", "page_tokens": 16, "pool_pages": 64, "uptime_s": 20.0,
               "preemptions": 0, "device_evictions": 4, "decode_tokens": 9},
    "front_door": {"refused": 7},
}


@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf"])
def test_a_counter_that_is_no_count_is_absent_and_so_is_every_sum_with_it(value: str) -> None:
    text = "\n".join([
        "# TYPE vllm:prompt_tokens_total counter", f'vllm:prompt_tokens_total{{engine="0"}} {value}',
        'vllm:prompt_tokens_total{engine="1"} 40',
        "# TYPE vllm:prompt_tokens_cached_by_source_total counter",
        'vllm:prompt_tokens_cached_by_source_total{engine="0",source="device"} 16',
        f'vllm:prompt_tokens_cached_by_source_total{{engine="0",source="host"}} {value}',
        "# TYPE vllm:generation_tokens_total counter", 'vllm:generation_tokens_total{engine="0"} 3', ""])
    counters = scrape_of("vllm", read_exposition(text, "text/plain"), 0.0).counters
    assert counters == {"vllm:generation_tokens_total": 3.0, "generated_tokens": 3.0}


def test_our_own_engine_is_read_from_its_stats() -> None:
    scrape, described = looked_at({"/v1/stats": lambda _: answer_json(STATS)})
    assert scrape.engine == described["engine"] == "hostcache"
    expected = {"prompt_tokens": 100, "cached_tokens": 64, "device_tokens": 48, "host_tokens": 16, "requests": 2,
                "recomputed_tokens": 36, "bound_tokens": 80, "restores": 1, "restore_failures": 0,
                "restored_bytes": 512, "written_bytes": 1024, "evicted_snapshots": 4, "refused": 7, "preemptions": 0,
                "quota_bytes": 4096, "resident_bytes": 2048, "accounting.recomputed.evicted": 20}
    assert {name: scrape.counters.get(name) for name in expected} == expected
    assert "generated_tokens" not in scrape.counters  # it counts decoded tokens only, which is not the same
    assert "evicted_pages" not in scrape.counters
    assert balance(dict.fromkeys(scrape.counters, 0.0), scrape.counters).broken == ()
    assert scrape.at_s == 50.0
    assert described == {
        "engine": "hostcache", "version": None, "model": "tiny", "model_revision": "abc", "page_tokens": 16,
        "pool_tokens": 1024,
        "tier": {"on": True, "kind": "hostcache", "quota_bytes": 4096, "mode": "on-pressure"}}


def test_our_own_engine_says_that_its_tier_is_off_and_why() -> None:
    off = {**STATS, "host_cache": None, "host_cache_config": None}
    scrape, described = looked_at({"/v1/stats": lambda _: answer_json(off)})
    assert described["tier"] == {"on": False}
    assert "restores" not in scrape.counters
    assert scrape.counters["evicted_snapshots"] == 4
    failed = {**STATS, "host_cache": {**STATS["host_cache"], "off_reason": "too many late copies"}}  # type: ignore[dict-item]
    tier = looked_at({"/v1/stats": lambda _: answer_json(failed)})[1]["tier"]
    assert (tier["on"], tier["off_reason"]) == (False, "too many late copies")


def test_our_own_engine_that_started_again_is_told_by_its_age() -> None:
    young = {**STATS, "engine": {**STATS["engine"], "uptime_s": 2.0}}  # type: ignore[dict-item]
    opening = looked_at({"/v1/stats": lambda _: answer_json(STATS)})[0]
    closing = looked_at({"/v1/stats": lambda _: answer_json(young)})[0]
    assert "prompt_tokens" in resets(opening, closing)
    assert change(opening, closing, "prompt_tokens") is None
    assert resets(opening, opening) == ()


def test_our_own_engine_is_read_from_its_metrics_where_it_has_no_stats() -> None:
    history = History(1)
    config = TierConfig(host_cache_bytes=0, page_bytes=1, page_tokens=1)
    cache = HostCache(config, history=history)
    text = prometheus_text(Accounting(1, history, cache).stats(), cache.stats())
    scrape, described = looked_at({"/metrics": metrics(text), "/v1/models": owned_by("hostcache")})
    assert scrape.engine == "hostcache"
    canonical = {"prompt_tokens", "cached_tokens", "device_tokens", "host_tokens", "recomputed_tokens", "requests",
                 "bound_tokens", "restores", "restored_bytes", "written_bytes", "quota_bytes", "evicted_snapshots"}
    assert canonical <= set(scrape.counters)
    assert described["tier"] == {"on": False, "kind": "hostcache", "quota_bytes": 0.0, "mode": None}


LABELS = 'engine="{engine}",model_name="m"'


def vllm(*, plugin: bool = False, offload: bool = False, quota_bytes: int = 4096, by_source: bool = True) -> str:
    """Two engines, each with 100 prompt tokens: 48 from the device, 16 from the host, 36 computed."""
    counters = {"prefix_cache_queries": 100, "prefix_cache_hits": 48, "external_prefix_cache_queries": 52,
                "external_prefix_cache_hits": 16, "prompt_tokens": 100, "prompt_tokens_cached": 64,
                "generation_tokens": 10, "num_preemptions": 0, 'request_success{finished_reason="stop"}': 1,
                'request_success{finished_reason="length"}': 2, 'admission_rejections{reason="queue"}': 5}
    if by_source:
        for source, value in {"device": 48, "host": 16, "disk": 0, "p2p": 0, "external_unspecified": 0}.items():
            counters[f'prompt_tokens_cached_by_source{{source="{source}"}}'] = value
        for source, value in {"local_compute": 36, "local_cache_hit": 48, "external_kv_transfer": 16}.items():
            counters[f'prompt_tokens_by_source{{source="{source}"}}'] = value
    lines = ['# TYPE vllm:cache_config_info gauge',
             'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="512"} 1.0',
             "# TYPE vllm:iteration_tokens_total histogram", "vllm:iteration_tokens_total_sum 999",
             "# TYPE process_start_time_seconds gauge", "process_start_time_seconds 1790000000.5"]
    families = {f"vllm:{name}": value for name, value in counters.items()}
    if plugin:
        families |= {"hostcache_restores": 3, "hostcache_restore_bytes": 300, "hostcache_store_bytes": 700,
                     "hostcache_evicted_pages": 9, "hostcache_evicted_saved_pages": 8, "hostcache_bound_tokens": 80,
                     'hostcache_cached_tokens{source="host"}': 1}
        lines += ["# TYPE hostcache_quota_bytes gauge", f'hostcache_quota_bytes{{engine="0"}} {quota_bytes}']
    if offload:
        families |= {"vllm:kv_offload_load_bytes": 30, "vllm:kv_offload_store_bytes": 70}
    declared = set()
    for name, value in families.items():
        family, _, own = name.partition("{")
        for kind in ("total", "created"):
            if (family, kind) not in declared:
                lines.append(f"# TYPE {family}_{kind} {'counter' if kind == 'total' else 'gauge'}")
                declared.add((family, kind))
            for engine in (0, 1):
                labels = ",".join(filter(None, [LABELS.format(engine=engine), own.rstrip("}")]))
                lines.append(f"{family}_{kind}{{{labels}}} {value if kind == 'total' else 1790000000}")
    return "\n".join(lines) + "\n"


def vllm_routes(text: str) -> Routes:
    return {"/metrics": metrics(text), "/v1/models": owned_by("vllm"),
            "/version": lambda _: answer_json({"version": "0.32.0"})}


def test_vllm_is_read_by_exact_names_summed_over_its_engines() -> None:
    scrape, described = looked_at(vllm_routes(vllm()))
    assert scrape.engine == "vllm"
    expected = {"prompt_tokens": 200, "cached_tokens": 128, "device_tokens": 96, "host_tokens": 32,
                "recomputed_tokens": 72, "generated_tokens": 20, "requests": 6, "refused": 10, "preemptions": 0,
                "vllm:external_prefix_cache_queries_total": 104,
                'vllm:prompt_tokens_cached_by_source_total{source="host"}': 32}
    assert {name: scrape.counters.get(name) for name in expected} == expected
    assert not any("created" in name or "iteration_tokens" in name for name in scrape.counters)
    assert not {"restores", "restored_bytes", "evicted_pages", "quota_bytes"} & set(scrape.counters)
    checked = balance(dict.fromkeys(scrape.counters, 0.0), scrape.counters)
    assert len(checked.checked) == 4
    assert checked.broken == ()
    assert described == {"engine": "vllm", "version": "0.32.0", "model": "m", "page_tokens": 16, "pool_tokens": 8192,
                         "tier": {"on": True, "kind": "another connector", "quota_bytes": None, "mode": None}}


def test_an_older_vllm_without_sources_has_its_hits() -> None:
    scrape, _ = looked_at(vllm_routes(vllm(by_source=False)))
    assert (scrape.counters["device_tokens"], scrape.counters["host_tokens"]) == (96, 32)
    assert "recomputed_tokens" not in scrape.counters


def test_inside_vllm_the_tiers_counters_are_the_plugins_and_tokens_stay_vllms() -> None:
    scrape, described = looked_at(vllm_routes(vllm(plugin=True, offload=True)))
    expected = {"restores": 6, "restored_bytes": 600, "written_bytes": 1400, "evicted_pages": 18,
                "evicted_saved_pages": 16, "bound_tokens": 160, "host_tokens": 32, "quota_bytes": 4096}
    assert {name: scrape.counters.get(name) for name in expected} == expected
    assert described["tier"] == {"on": True, "kind": "hostcache", "quota_bytes": 4096, "mode": None}


def test_the_plugin_is_not_called_off_because_a_fresh_server_has_not_told_its_quota() -> None:
    asked: list[Request] = []

    def completion(request: Request) -> Play:
        asked.append(request)
        return stream(word("x"), usage({"prompt_tokens": 3, "completion_tokens": 1}), "[DONE]")

    routes = vllm_routes("") | {
        "/v1/completions": completion,
        "/metrics": lambda _: answer(200, vllm(plugin=True, quota_bytes=4096 if asked else 0).encode())}
    assert looked_at(routes)[1]["tier"]["on"] is True
    assert looked_at(routes | {"/metrics": metrics(vllm(plugin=True, quota_bytes=0))})[1]["tier"]["on"] is False


def test_a_fresh_vllm_is_asked_something_before_it_is_said_to_have_no_connector() -> None:
    """One that is neither ours nor vLLM's own shows in nothing but the tokens that vLLM asked it for."""
    name = 'vllm:external_prefix_cache_queries_total{engine="0"}'
    asked: list[Request] = []

    def routes(queries: int) -> Routes:
        def completion(request: Request) -> Play:
            asked.append(request)
            return stream(word("x"), usage({"prompt_tokens": 3, "completion_tokens": 1}), "[DONE]")

        def metrics_now(_: Request) -> Play:
            seen = 3 * bool(asked)
            return answer(200, (f"# TYPE vllm:prompt_tokens_total counter\nvllm:prompt_tokens_total {seen}\n"
                                "# TYPE vllm:external_prefix_cache_queries_total counter\n"
                                f"{name} {queries * bool(asked)}\n").encode())

        asked.clear()
        return vllm_routes("") | {"/v1/completions": completion, "/metrics": metrics_now}

    assert looked_at(routes(3))[1]["tier"]["kind"] == "another connector"
    assert looked_at(routes(0))[1]["tier"] == {"on": False}
    assert asked


def test_vllms_own_offload_is_a_tier_too() -> None:
    scrape, described = looked_at(vllm_routes(vllm(offload=True)))
    assert (scrape.counters["restored_bytes"], scrape.counters["written_bytes"]) == (60, 140)
    assert (described["tier"]["on"], described["tier"]["kind"]) == (True, "vllm offload")


# What vLLM 0.32.0 on the CPU really shows: a tiny model, prompts of 641 and 961 tokens that push each other out.

REAL = Path(__file__).with_name("metrics")


def real(name: str) -> str:
    return (REAL / f"vllm-0.32-{name}.txt").read_text()


def real_scrape(name: str) -> Scrape:
    return scrape_of("vllm", read_exposition(real(name), "text/plain; version=1.0.0; charset=utf-8"), 0.0)


def test_real_metrics_of_vllm_with_the_plugin_balance() -> None:
    scrape, described = looked_at(vllm_routes(real("hostcache")))
    expected = {"prompt_tokens": 5767, "cached_tokens": 1280, "device_tokens": 640, "host_tokens": 640,
                "recomputed_tokens": 4487, "restores": 1, "restore_failures": 0, "restored_bytes": 655360,
                "written_bytes": 4587520, "evicted_pages": 97, "preemptions": 0, "quota_bytes": 1 << 26}
    assert {name: scrape.counters.get(name) for name in expected} == expected
    found = balance(dict.fromkeys(scrape.counters, 0.0), scrape.counters)
    assert (len(found.checked), found.broken, found.skipped) == (4, (), ())
    assert (described["page_tokens"], described["pool_tokens"], described["prefix_caching"]) == (32, 2080, True)
    assert not any(line.startswith(tuple(HISTOGRAMS)) for line in scrape.raw)  # the plugin has none: absent is absent


def test_real_metrics_of_vllms_own_offload_balance_and_say_how_many_loads_there_were() -> None:
    fresh, later = real_scrape("offload-fresh"), real_scrape("offload")
    assert resets(fresh, later) == ()
    assert {name: change(fresh, later, name) for name in ("prompt_tokens", "host_tokens", "restored_bytes",
                                                          "written_bytes", "restores")} == {
        "prompt_tokens": 5159, "host_tokens": 640, "restored_bytes": 655360, "written_bytes": 4620288, "restores": None}
    assert balance(fresh.counters, later.counters).broken == ()
    kept = {line.partition("{")[0] for line in later.raw if line.startswith("vllm:kv_offload_load_size")}
    assert kept == {f"vllm:kv_offload_load_size_{part}" for part in ("bucket", "sum", "count", "created")}
    assert 'vllm:kv_offload_load_size_bucket{engine="0",le="1e+06",model_name="tiny"} 1.0' in later.raw
    assert not any("load_size" in line for line in fresh.raw)  # declared, and without a line before the first load
    assert not any("_bucket" in line and "load_size" not in line for line in later.raw)
    assert looked_at(vllm_routes(real("offload")))[1]["tier"] == {
        "on": True, "kind": "vllm offload", "quota_bytes": None, "mode": None}


def test_restores_of_our_own_server_are_kept_with_their_buckets() -> None:
    lines = [f"hostcache_{name}_latency_seconds_{end}" for name in ("restore", "store", "restore_store")
             for end in ('bucket{le="0.1"} 2', 'bucket{le="+Inf"} 3', "sum 0.5", "count 3")]
    text = "".join(f"# TYPE hostcache_{name}_latency_seconds histogram\n" for name in ("restore", "store",
                                                                                     "restore_store"))
    raw = scrape_of("hostcache", read_exposition("\n".join([text.rstrip(), *lines, ""]), "text/plain"), 0.0).raw
    assert list(raw) == lines[:4]


def test_a_process_that_began_later_resets_everything() -> None:
    text = vllm()
    opening = looked_at(vllm_routes(text))[0]
    closing = looked_at(vllm_routes(text.replace("1790000000.5", "1790000900.5")))[0]
    assert set(resets(opening, closing)) == set(opening.counters)


SGLANG = ('# TYPE sglang:prompt_tokens_total counter\nsglang:prompt_tokens_total{{model_name="m"}} 100\n'
          "# TYPE sglang:cached_tokens_total counter\n{cached}"
          '# TYPE sglang:generation_tokens_total counter\nsglang:generation_tokens_total{{model_name="m"}} 7\n'
          "# TYPE sglang:cache_hit_rate gauge\nsglang:cache_hit_rate 0.0\n"
          "# TYPE sglang:hicache_host_total_tokens gauge\nsglang:hicache_host_total_tokens 4096\n"
          "# TYPE sglang:max_total_num_tokens gauge\nsglang:max_total_num_tokens 8192\n")


def sglang(**cached: int) -> Routes:
    lines = "".join(f'sglang:cached_tokens_total{{cache_source="{source}",model_name="m"}} {value}\n'
                    for source, value in cached.items())
    return {"/metrics": metrics(SGLANG.format(cached=lines)), "/v1/models": owned_by("sglang"),
            "/get_server_info": lambda _: answer_json({"version": "0.5.9"})}


def test_sglang_is_read_by_source_and_a_source_that_has_served_nothing_yet_is_0() -> None:
    nothing, _ = looked_at(sglang())
    device, described = looked_at(sglang(device=48))
    both, _ = looked_at(sglang(device=48, host=16, storage=4))
    assert nothing.counters["cached_tokens"] == 0  # declared, and has counted nothing
    assert change(nothing, both, "cached_tokens") == 68
    assert change(device, both, "host_tokens") == 20
    assert change(device, both, "device_tokens") == 0
    assert resets(device, both) == ()
    assert device.counters["generated_tokens"] == 7
    assert described == {"engine": "sglang", "version": "0.5.9", "model": "m", "pool_tokens": 8192, "tier": {
        "on": True, "kind": "hicache", "quota_bytes": None, "mode": None, "quota_tokens": 4096}}


def test_llama_cpp_counts_what_it_computed() -> None:
    text = ("# TYPE llamacpp:prompt_tokens_total counter\nllamacpp:prompt_tokens_total 36\n"
            "# TYPE llamacpp:tokens_predicted_total counter\nllamacpp:tokens_predicted_total 9\n")
    scrape, described = looked_at({
        "/metrics": metrics(text), "/v1/models": owned_by("llamacpp"),
        "/props": lambda _: answer_json({"build_info": "b9000-abc"})})
    assert scrape.counters["recomputed_tokens"] == 36
    assert scrape.counters["generated_tokens"] == 9
    assert "prompt_tokens" not in scrape.counters
    assert described == {"engine": "llama.cpp", "version": "b9000-abc", "model": "m", "tier": None}


@pytest.mark.parametrize(("routes", "engine"), [
    ({}, "unknown"), ({"/v1/models": owned_by("library")}, "unknown"), ({"/v1/models": owned_by("vllm")}, "vllm"),
    ({"/metrics": metrics("# TYPE up gauge\nup 1\n")}, "unknown"), ({"/metrics": metrics("<html>")}, "unknown"),
    ({"/v1/stats": lambda _: answer_json({"requests": 3})}, "unknown")])
def test_a_server_that_says_nothing_has_no_counters_and_no_tier(routes: Routes, engine: str) -> None:
    scrape, described = looked_at(routes)
    assert (scrape.engine, scrape.counters, scrape.raw) == (engine, {}, ())
    assert (described["engine"], described["tier"]) == (engine, None)


def test_metrics_of_a_known_engine_that_cannot_be_read_are_an_error_and_not_an_empty_scrape() -> None:
    with pytest.raises(ServerError, match="line 1"):
        looked_at({"/metrics": metrics("<html>"), "/v1/models": owned_by("vllm")})
