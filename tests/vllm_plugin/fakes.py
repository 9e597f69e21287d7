"""vLLM's configuration as far as `support` reads it: the names of fields, nothing else of vLLM."""

from __future__ import annotations

from types import SimpleNamespace as Namespace
from typing import Any


class FullAttentionSpec(Namespace):
    """vLLM's specs are told apart by the name of their class."""


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec(Namespace):
    pass


class MambaSpec(Namespace):
    pass


class UniformTypeKVCacheSpecs(Namespace):
    pass


def group(spec: Any = None, **fields: Any) -> Namespace:
    return Namespace(kv_cache_spec=spec or FullAttentionSpec(block_size=16, sliding_window=None), **fields)


def kv_cache_config(*groups: Namespace, **fields: Any) -> Namespace:
    return Namespace(kv_cache_groups=list(groups or [group()]), num_blocks=64, **{"hash_block_size": 16, **fields})


def vllm_config(**changed: Any) -> Namespace:
    """`changed`: one of the flat names below."""
    value = {"kv_role": "kv_both", "kv_load_failure_policy": "fail", "enable_prefix_caching": True, "policy": "fcfs",
             "pipeline_parallel_size": 1, "tensor_parallel_size": 1, "decode_context_parallel_size": 1,
             "prefill_context_parallel_size": 1, "speculative_config": None, "device_type": "cpu", **changed}
    return Namespace(
        kv_transfer_config=Namespace(kv_role=value["kv_role"], kv_load_failure_policy=value["kv_load_failure_policy"]),
        cache_config=Namespace(enable_prefix_caching=value["enable_prefix_caching"]),
        scheduler_config=Namespace(policy=value["policy"]),
        parallel_config=Namespace(**{name: size for name, size in value.items() if name.endswith("parallel_size")}),
        speculative_config=value["speculative_config"],
        device_config=Namespace(device_type=value["device_type"]))


class Seat(Namespace):
    def on_block_evicted(self, block: object) -> None: ...

    def on_block_allocated(self, block: object) -> None: ...

    def on_block_accessed(self, block: object) -> None: ...

    def reset(self) -> None: ...


def pool(**changed: Any) -> Namespace:
    return Namespace(**{"enable_caching": True, "blocks": [], "metrics_collector": None,
                        "free_block_queue": Namespace(iter_blocks_after=iter),
                        "cached_block_hash_to_block": Namespace(get_one_block=id), "get_cached_block": id, "touch": id,
                        "free_blocks": id, **changed})
