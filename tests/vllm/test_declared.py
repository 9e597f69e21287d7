"""What the plugin assumes of vLLM's names and shapes, asked of the installed one. Red: vLLM changed, and
`hostcache.vllm_plugin.support` must learn it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from tests.vllm.engine import Engine
from tests.vllm.models import VOCABULARY

from hostcache.settings import settle
from hostcache.vllm_plugin import register, support
from hostcache.vllm_plugin.launch import Launch, compose
from hostcache.vllm_plugin.register import CONNECTOR, ENTRY_POINT

pytestmark = pytest.mark.vllm


def fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_the_installed_vllm_is_of_the_declared_range_and_both_ways_to_ask_agree() -> None:
    import vllm

    found = support.installed()
    assert found is not None
    assert support.why_not_version(vllm.__version__) is None
    assert support.why_not_version(found[1]) is None
    assert found[0] in support.DISTRIBUTIONS


def test_every_field_that_support_reads_is_one_of_vllms() -> None:
    from vllm.v1 import kv_cache_interface as cache

    from vllm import config as engine

    assert {"kv_role", "kv_load_failure_policy", "kv_connector_extra_config"} <= fields(engine.KVTransferConfig)
    assert "enable_prefix_caching" in fields(engine.CacheConfig)
    assert "policy" in fields(engine.SchedulerConfig)
    assert {"pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"} <= fields(
        engine.ParallelConfig)
    assert "device_type" in dir(engine.DeviceConfig(device="cpu"))
    assert {"kv_transfer_config", "cache_config", "scheduler_config", "parallel_config", "speculative_config",
            "device_config"} <= fields(engine.VllmConfig)
    assert {"kv_cache_groups", "hash_block_size", "hisparse_host_num_blocks"} <= fields(cache.KVCacheConfig)
    assert {"kv_cache_spec", "host_resident"} <= fields(cache.KVCacheGroupSpec)
    assert {"block_size", "sliding_window", "attention_chunk_size", "non_causal", "tokens_per_state"} <= fields(
        cache.FullAttentionSpec)


def test_the_policy_that_vllm_would_use_on_its_own_is_the_one_that_must_be_repaired() -> None:
    from vllm.config import KVTransferConfig

    assert KVTransferConfig(kv_connector="x", kv_role="kv_both").kv_load_failure_policy == "fail"


def test_a_real_pool_has_the_seat_from_which_evictions_are_seen() -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector

    assert support.why_not_pool(BlockPool(8, True, 16)) is None
    seated = BlockPool(8, True, 16, metrics_collector=KVCacheMetricsCollector())
    assert support.why_not_pool(seated) is None
    assert support.why_not_pool(BlockPool(8, False, 16)) == "prefix caching is off in vLLM's block pool"


def test_the_connector_is_registered_by_entry_point_and_registering_again_changes_nothing() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    points = {point.name: point for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    assert points[ENTRY_POINT].load() is register.register
    register.register()
    register.register()
    assert KVConnectorFactory.get_connector_class_by_name(CONNECTOR).__name__ == CONNECTOR


def test_the_command_that_the_launcher_writes_is_one_that_vllm_parses() -> None:
    """By vLLM's own parser, in a process of its own, up to the configuration of the engine; no model is loaded."""
    made = composed("--max-model-len", "256")
    script = (
        "import sys\n"
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])\n"
        "validate_parsed_serve_args(parsed)\n"
        "transfer = parsed.kv_transfer_config\n"
        "print('READ', transfer.kv_connector, transfer.kv_role, transfer.kv_load_failure_policy, parsed.middleware,\n"
        "      transfer.kv_connector_extra_config['host_cache_bytes'], parsed.host)\n")
    arguments = made.command[made.command.index("serve") + 1:]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False,
                          timeout=200)
    assert f"READ {CONNECTOR} kv_both recompute ['hostcache.frontdoor.FrontDoor'] {1024**3} 127.0.0.1" in done.stdout, (
        done.stdout[-500:] + done.stderr[-2000:])


def composed(*flags: str) -> Launch:
    settled = settle({"host_cache_bytes": "1GiB"}, environ={})
    return compose("m", settled, flags, front_door=True, environ={})


def test_a_tiny_model_loads_in_this_process_and_its_output_depends_on_what_stands_before(tiny_llama: Path) -> None:
    """The negative control of every test that compares outputs: other prefix, other answer."""
    texts = [[3 + (at * step) % (VOCABULARY - 3) for at in range(100)] for step in (1, 5, 11)]
    asked = [[*text[:80], *texts[0][80:]] for text in texts]  # all end alike
    engine = Engine(tiny_llama, blocks=24, extra=None, max_len=256)
    try:
        answers = [tuple(answer) for answer in engine.answers([*asked, asked[0]])]
    finally:
        engine.close()
    assert len(set(answers)) == 3
    assert answers[3] == answers[0]
