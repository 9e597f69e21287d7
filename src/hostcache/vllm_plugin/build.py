"""Puts the two sides together from vLLM's configuration: sizes, identity, slabs, this device's copier. Runs nothing.

Both sides compute the same numbers from the same configuration, so that a frame number means the same on each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hostcache.clock import Clock
from hostcache.copiers import Fault, Slabs, ThreadCopier, check_quota, memory_limit
from hostcache.copiers.cuda import CudaCopier
from hostcache.copiers.cuda_runtime import CudaRuntime
from hostcache.errors import ConfigError, HostCacheError
from hostcache.sizes import format_size
from hostcache.tier import Copier, TierConfig
from hostcache.vllm_plugin.config import PluginConfig
from hostcache.vllm_plugin.keys import identity_of
from hostcache.vllm_plugin.layout import Blocks, blocks_of, evenly_spaced
from hostcache.vllm_plugin.prefault import start_pinning, start_prefault
from hostcache.vllm_plugin.scheduler_side import SchedulerSide
from hostcache.vllm_plugin.worker_side import WorkerSide


def tier_config(config: PluginConfig, vllm_config: Any, kv_cache_config: Any) -> TierConfig:
    """A page is a block over all layers and all ranks: the quota is the total of the engine."""
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    page_bytes = rank_block_bytes(kv_cache_config) * int(vllm_config.parallel_config.world_size)
    return config.tier(page_bytes=page_bytes, page_tokens=int(spec.block_size))


def rank_block_bytes(kv_cache_config: Any) -> int:
    group = kv_cache_config.kv_cache_groups[0]
    return int(group.kv_cache_spec.page_size_bytes) * len(group.layer_names)


def why_too_large(config: PluginConfig) -> str | None:
    """One line when this machine could never meet the quota: to be asked before a tier of that size is built. What is
    free just now is for the ranks to judge."""
    most = memory_limit()
    if config.host_cache_bytes <= most:
        return None
    return (f"host_cache_bytes is {format_size(config.host_cache_bytes)}, and there are {format_size(most)} of memory "
            "in all; lower it")


def scheduler_side(config: PluginConfig, vllm_config: Any, kv_cache_config: Any, *, clock: Clock,
                   say: Callable[[str], None]) -> SchedulerSide:
    return SchedulerSide(
        config=tier_config(config, vllm_config, kv_cache_config), identity=identity_of(vllm_config, kv_cache_config),
        ranks=int(vllm_config.parallel_config.world_size),
        step_tokens=int(vllm_config.scheduler_config.max_num_batched_tokens), clock=clock, say=say,
        keep_on_reset=config.keep_on_reset, events=_events_wanted(vllm_config))


def _events_wanted(vllm_config: Any) -> bool:
    events = getattr(vllm_config, "kv_events_config", None)
    return events is not None and bool(events.enable_kv_cache_events)


def this_device() -> CudaRuntime:
    """The CUDA device on which this worker computes."""
    import torch

    from hostcache.copiers.cuda import torch_runtime

    return torch_runtime(torch.cuda.current_device())


def worker_side(config: PluginConfig, vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any], *,
                clock: Clock, say: Callable[[str], None], fault: Fault | None = None,
                cuda: Callable[[], CudaRuntime] = this_device) -> WorkerSide:
    """Never raises for want of memory or for a layout it does not know: then this rank copies nothing, and says so.

    Memory is pinned, or touched, on a thread that starts when the pool fills: an engine under no pressure takes none.
    """
    copier: Copier | None = None
    off: str | None = None
    prepare: Callable[[], object] | None = None
    try:
        sizes = tier_config(config, vllm_config, kv_cache_config)
        blocks = blocks_of(kv_caches, int(kv_cache_config.num_blocks))
        expected = rank_block_bytes(kv_cache_config)
        if blocks.block_bytes != expected:
            raise ConfigError(f"a block has {blocks.block_bytes} bytes in vLLM's tensors, {expected} in its plan")
        check_quota(config.host_cache_bytes)  # of all ranks: they share the machine
        slabs = Slabs(sizes.frames * expected, expected)
        device = str(vllm_config.device_config.device_type)
        # Never before every rank has looked whether there is memory for all: by its first step each has.
        if device == "cuda":
            copier = on_device = CudaCopier(cuda(), blocks.layout, blocks.count, slabs, clock=clock, owner=blocks.owner)
            prepare = partial(start_pinning, on_device)
        else:
            copier = _thread_copier(blocks, slabs, clock, fault)
            prepare = partial(start_prefault, slabs, clock)
    except HostCacheError as refusal:
        off = str(refusal)
        say(f"hostcache: this rank runs without the tier: {off}")
    return WorkerSide(copier=copier, clock=clock, copy_budget_s=config.copy_budget_s, off=off, prepare=prepare)


def _thread_copier(blocks: Blocks, slabs: Slabs, clock: Clock, fault: Fault | None) -> Copier:
    address, segments, distance = evenly_spaced(blocks.layout.segments)
    return ThreadCopier(address, blocks.count, blocks.block_bytes, slabs, clock=clock, owner=blocks.owner,
                        segments=segments, segment_stride_bytes=distance, fault=fault)
