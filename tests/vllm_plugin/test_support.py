"""Fail-closed: each thing the tier does not know keeps it off, in one line that says which."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.vllm_plugin.fakes import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    Seat,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    group,
    kv_cache_config,
    pool,
    vllm_config,
)

from hostcache.vllm_plugin.config import PluginConfig, from_extra
from hostcache.vllm_plugin.support import repair, why_not, why_not_pool, why_not_version

ON = from_extra({"host_cache_bytes": "1GiB"}, environ={})


def asked(engine: Any = None, cache: Any = None, config: PluginConfig = ON, version: str = "0.32.0") -> str | None:
    return why_not(engine or vllm_config(), cache or kv_cache_config(), config, version=version)


def test_one_group_of_full_attention_on_a_known_vllm_gets_the_tier() -> None:
    assert asked() is None
    assert asked(vllm_config(tensor_parallel_size=8, device_type="cuda")) is None
    assert asked(vllm_config(policy=SimpleNamespace(value="fcfs"))) is None
    assert asked(cache=kv_cache_config(hash_block_size=None)) is None


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.7.dev12+g1a2b3c", "0.32.0+cpu", "0.32.0rc1", "0.32"])
def test_every_version_of_the_declared_range_is_known(version: str) -> None:
    assert why_not_version(version) is None


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.3.2", "0.320.0", "1.32.0", "0.31.2rc1.dev0", "dev", ""])
def test_every_other_version_is_refused_with_the_range(version: str) -> None:
    reason = why_not_version(version)
    assert reason is not None
    assert "0.32.x" in reason
    assert version in reason


@pytest.mark.parametrize(("extra", "says"), [
    ({"host_cache_bytes": 0}, "host_cache_bytes is 0"),
    ({"host_cache_bytes": 1, "host_cache_mode": "off"}, "host_cache_mode is 'off'"),
])
def test_a_tier_that_is_not_wanted_says_so(extra: dict[str, Any], says: str) -> None:
    assert asked(config=from_extra(extra, environ={})) == says


@pytest.mark.parametrize(("changed", "says"), [
    ({"kv_role": "kv_producer"}, "kv_role is 'kv_producer'"),
    ({"enable_prefix_caching": False}, "prefix caching is off"),
    ({"enable_prefix_caching": None}, "prefix caching is off"),
    ({"policy": "priority"}, "scheduling policy is 'priority'"),
    ({"policy": SimpleNamespace(value="priority")}, "scheduling policy is 'priority'"),
    ({"pipeline_parallel_size": 2}, "pipeline parallelism is 2"),
    ({"decode_context_parallel_size": 2}, "decode context parallelism is 2"),
    ({"prefill_context_parallel_size": 4}, "prefill context parallelism is 4"),
    ({"speculative_config": object()}, "speculative decoding"),
    ({"device_type": "xpu"}, "device is 'xpu'"),
])
def test_an_engine_that_the_tier_does_not_know_runs_without_it(changed: dict[str, Any], says: str) -> None:
    reason = asked(vllm_config(**changed))
    assert reason is not None
    assert says in reason
    assert "\n" not in reason


@pytest.mark.parametrize(("cache", "says"), [
    (kv_cache_config(group(), group(SlidingWindowSpec(block_size=16))), "2 KV cache groups (FullAttentionSpec,"),
    (kv_cache_config(group(MambaSpec(block_size=16))), "MambaSpec"),
    (kv_cache_config(group(MLAAttentionSpec(block_size=16))), "MLAAttentionSpec"),
    (kv_cache_config(group(UniformTypeKVCacheSpecs(block_size=16))), "UniformTypeKVCacheSpecs"),
    (kv_cache_config(group(FullAttentionSpec(block_size=16, sliding_window=512))), "sliding window"),
    (kv_cache_config(group(FullAttentionSpec(block_size=16, attention_chunk_size=512))), "chunked local attention"),
    (kv_cache_config(group(FullAttentionSpec(block_size=16, non_causal=True))), "do not attend causally"),
    (kv_cache_config(group(FullAttentionSpec(block_size=16, tokens_per_state=4))), "4 tokens a state"),
    (kv_cache_config(group(host_resident=True)), "HiSparse"),
    (kv_cache_config(hisparse_host_num_blocks=8), "HiSparse"),
    (kv_cache_config(hash_block_size=8), "every 8 tokens and allocates blocks of 16"),
])
def test_a_cache_that_is_not_one_group_of_full_attention_keeps_the_tier_off(cache: Any, says: str) -> None:
    reason = asked(cache=cache)
    assert reason is not None
    assert says in reason


def test_a_model_without_any_cache_keeps_the_tier_off() -> None:
    reason = asked(cache=SimpleNamespace(kv_cache_groups=[]))
    assert reason is not None
    assert "0 KV cache groups (none)" in reason


def test_the_version_is_asked_before_anything_of_a_foreign_configuration_is_read() -> None:
    reason = why_not(object(), object(), ON, version="0.33.0")
    assert reason is not None
    assert "0.33.0 is not supported" in reason


def test_a_pool_whose_evictions_can_be_seen_is_taken_with_or_without_a_collector_in_the_seat() -> None:
    assert why_not_pool(pool()) is None
    assert why_not_pool(pool(metrics_collector=Seat())) is None


@pytest.mark.parametrize(("live", "says"), [
    (SimpleNamespace(blocks=[]), "no enable_caching"),
    (pool(metrics_collector=SimpleNamespace()), "collector without on_block_evicted"),
    (pool(free_block_queue=SimpleNamespace()), "no free_block_queue.iter_blocks_after"),
    (pool(enable_caching=False), "prefix caching is off"),
])
def test_a_pool_that_cannot_be_watched_keeps_the_tier_off(live: Any, says: str) -> None:
    reason = why_not_pool(live)
    assert reason is not None
    assert says in reason


def test_the_seat_must_be_there_even_when_nobody_sits_in_it() -> None:
    live = pool()
    del live.metrics_collector
    assert why_not_pool(live) == "vLLM's block pool has no metrics_collector, so evictions cannot be followed"


@pytest.mark.parametrize("was", ["fail", None, "something new"])
def test_the_failure_policy_is_never_left_at_anything_but_recompute(was: str | None) -> None:
    engine = vllm_config(kv_load_failure_policy=was)
    told = repair(engine)
    assert engine.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert len(told) == 1
    assert repr(was) in told[0]
    assert repair(engine) == []
