"""The baseline of `hostcache bench vllm`: vLLM's OffloadingConnector with our worker for the CPU, in a real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.vllm.engine import POOL, PROMPTS, Engine, cold_answers

from hostcache.bench.vllm.offload_spec import runs

SPEC: dict[str, Any] = {"spec_name": "MemcpyOffloadingSpec", "spec_module_path": "hostcache.bench.vllm.offload_spec",
                        "cpu_bytes_to_use": 64 << 20, "offload_prompt_only": False}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_runs_cover_every_block_once_and_count_up(pairs: list[tuple[int, int]]) -> None:
    sources, targets = np.array([a for a, _ in pairs], np.int32), np.array([b for _, b in pairs], np.int32)
    found = list(runs(sources, targets))
    assert [at for first, behind in found for at in range(first, behind)] == list(range(len(pairs)))
    for first, behind in found:
        for ids in (sources, targets):
            assert list(ids[first:behind]) == list(range(ids[first], ids[first] + behind - first))


def test_evicted_prompts_come_back_from_the_host_with_the_cold_answers(tiny_llama: Path) -> None:
    from vllm.config import KVTransferConfig

    expected = cold_answers(tiny_llama)
    transfer = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=SPEC)
    engine = Engine(tiny_llama, blocks=POOL, extra=None, kv_transfer_config=transfer)
    try:
        first = [engine.answers([tokens])[0] for tokens in PROMPTS]
        before = engine.metric("vllm:external_prefix_cache_hits")
        again = [engine.answers([tokens])[0] for tokens in PROMPTS]
        assert (first, again) == (expected, expected)
        assert engine.metric("vllm:external_prefix_cache_hits") - before > 0.5 * sum(map(len, PROMPTS))
    finally:
        engine.close()
