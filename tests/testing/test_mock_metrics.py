"""/metrics and /v1/stats of the mock: read by prometheus_client's own parsers, and by our documentation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import prometheus_client.openmetrics.parser
import prometheus_client.parser
import pytest
from prometheus_client.metrics_core import Metric

from hostcache.errors import InvariantBroken
from hostcache.testing.mock_cache import BlockChain, MockCache
from hostcache.testing.mock_config import MockConfig, Style
from hostcache.testing.mock_metrics import Ledger, Moment, classic_text, openmetrics_text, stats_json

# Typed here: they carry no annotations.
read_classic: Callable[[str], Iterable[Metric]] = prometheus_client.parser.text_string_to_metric_families
read_openmetrics: Callable[[str], Iterable[Metric]] = (
    prometheus_client.openmetrics.parser.text_string_to_metric_families)

CREATED_S = 1_790_000_000.25


def moment(style: Style = "vllm", *, host_blocks: int = 64, plugin: bool = False) -> Moment:
    """After three prompts of 33 tokens on two device blocks, the third like the first."""
    config = MockConfig(style=style, device_blocks=2, host_blocks=host_blocks, plugin=plugin,
                        model='a "mock"')
    cache = MockCache(block_tokens=16, device_blocks=2, host_blocks=host_blocks)
    ledger = Ledger(created_unix_s=CREATED_S, started_s=0.0, arrived=3, handled=3, finished=3)
    for prompt in (range(33), range(100, 133), range(33)):
        chain = BlockChain(16)
        chain.extend(prompt)
        report = cache.admit(chain.digests, 33)
        ledger.settle(report, restore_s=report.host_tokens * 1e-3)
        ledger.generated_tokens += 5
    return Moment(config=config, ledger=ledger, cache=cache, running=0, waiting=0, now_s=9.0)


def samples(families: Iterable[Metric], name: str) -> dict[str, float]:
    """By the value of the label `source`, or of no label."""
    return {sample.labels.get("source", ""): sample.value
            for family in families for sample in family.samples if sample.name == name}


@pytest.mark.parametrize("host_blocks", [0, 64])
@pytest.mark.parametrize(("style", "plugin"), [("vllm", False), ("vllm", True), ("hostcache", False)])
def test_both_formats_say_the_same(style: Style, plugin: bool, host_blocks: int) -> None:
    now = moment(style, host_blocks=host_blocks, plugin=plugin)
    classic = {(sample.name, str(sample.labels)): sample.value
               for family in read_classic(classic_text(now)) for sample in family.samples}
    openmetrics = {(sample.name, str(sample.labels)): sample.value
                   for family in read_openmetrics(openmetrics_text(now)) for sample in family.samples}
    assert classic == openmetrics
    assert {value for (name, _), value in classic.items() if name.endswith("_created")} == {CREATED_S}


def test_vllm_s_families_balance() -> None:
    families = list(read_openmetrics(openmetrics_text(moment())))
    assert samples(families, "vllm:prompt_tokens_total") == {"": 99}
    assert samples(families, "vllm:prompt_tokens_by_source_total") == {
        "local_compute": 67, "local_cache_hit": 0, "external_kv_transfer": 32}
    cached = samples(families, "vllm:prompt_tokens_cached_by_source_total")
    hits = samples(families, "vllm:prefix_cache_hits_total")[""]
    external = samples(families, "vllm:external_prefix_cache_hits_total")[""]
    assert sum(cached.values()) == hits + external == 32
    queries = samples(families, "vllm:prefix_cache_queries_total")[""]
    assert samples(families, "vllm:external_prefix_cache_queries_total")[""] == queries - hits
    assert samples(families, "vllm:kv_offload_load_bytes_total") == {"": 2 * 16 * 1024}


def test_inside_vllm_the_plugin_counts_beside_it() -> None:
    families = list(read_openmetrics(openmetrics_text(moment(plugin=True))))
    assert samples(families, "hostcache_restore_bytes_total") == {"": 2 * 16 * 1024}
    assert samples(families, "hostcache_cached_tokens_total") == {"device": 0, "host": 32}
    assert samples(families, "hostcache_quota_bytes") == {"": 64 * 16 * 1024}
    evicted, saved = (samples(families, f"hostcache_evicted_{name}_total") for name in ("pages", "saved_pages"))
    assert evicted == saved == {"": 4}
    assert samples(families, "vllm:kv_offload_load_bytes_total") == {}


def test_a_server_without_a_tier_has_no_offload_families() -> None:
    now = moment(host_blocks=0)
    assert "kv_offload" not in classic_text(now)
    assert samples(read_classic(classic_text(now)), "vllm:external_prefix_cache_queries_total") == {"": 0}


def test_the_documented_counters_are_all_there() -> None:
    """Of docs/counters.md, up to the part on vLLM."""
    text = (Path(__file__).parents[2] / "docs" / "counters.md").read_text(encoding="utf-8")
    stats = stats_json(moment("hostcache"))
    for part in text.split("\n## ")[1:]:
        title = part.split("\n", 1)[0].strip("` ")
        if title in ("accounting", "host_cache", "engine", "front_door"):
            documented = set(re.findall(r"^\| `(\w+)` \|", part.split("\n### ")[0], re.MULTILINE))
            assert documented <= set(stats[title])
    assert stats["host_cache"]["restore_latency"]["count"] == 1
    assert stats["host_cache"]["restore_latency"]["buckets"]["+Inf"] == 1


def test_with_the_tier_off_its_records_are_null() -> None:
    stats = stats_json(moment("hostcache", host_blocks=0))
    assert stats["host_cache"] is None
    assert stats["host_cache_config"] is None


def test_books_that_do_not_balance_are_found() -> None:
    now = moment()
    now.ledger.prompt_tokens += 1
    with pytest.raises(InvariantBroken, match="are not 100"):
        stats_json(now)
