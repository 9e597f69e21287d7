"""Settings → a running engine: model, pool, slabs, copier and tier, each sized and checked. Serves nothing itself."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hostcache.clock import Clock
from hostcache.copiers import Slabs, ThreadCopier, available_bytes, check_quota
from hostcache.engine.device import Verify
from hostcache.engine.engine import Engine, EngineConfig, Log
from hostcache.engine.interfaces import CausalModel, ModelSpec, Tokenizer
from hostcache.engine.loading import load_model
from hostcache.engine.requests import EngineHandle
from hostcache.engine.running import RunningEngine
from hostcache.engine.sampling import sample
from hostcache.errors import ConfigError, HostCacheError, MemoryRefused
from hostcache.settings import Settings
from hostcache.sizes import format_size
from hostcache.tier import Identity, Mode, TierConfig

MOST_POOL_TOKENS = 65536
"""The largest pool that is taken without being asked for by `pool_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    """The tier's memory and who fills it; both None where the tier is off."""

    slabs: Slabs | None
    copier: ThreadCopier | None

    def release(self, timeout_s: float) -> bool:
        """Memory stays mapped under a copy that does not end."""
        if self.copier is not None and not self.copier.close(timeout_s):
            return False
        if self.slabs is not None:
            self.slabs.close()
        return True


def build_engine(settings: Settings, clock: Clock, log: Log) -> EngineHandle:
    """Load, size, check, start. Raises ModelError, ConfigError or MemoryRefused, one line with the way out."""
    cache_dir = None if settings.model_dir is None else Path(settings.model_dir).expanduser()
    model, tokenizer = load_model(settings.model, device=settings.device, dtype=settings.dtype,
                                  threads=settings.threads, cache_dir=cache_dir)
    return start_engine(model, tokenizer, settings, clock, log)


def start_engine(model: CausalModel, tokenizer: Tokenizer, settings: Settings, clock: Clock, log: Log) -> RunningEngine:
    """The same with a model that is there already."""
    spec = model.spec
    page_bytes = spec.kv_bytes_per_token(model.dtype.itemsize) * settings.page_tokens
    pages = _pool_pages(settings, model, page_bytes)
    max_context = _max_context(settings, spec, pages)
    tier = TierConfig(
        host_cache_bytes=settings.host_cache_bytes, page_bytes=page_bytes, page_tokens=settings.page_tokens,
        mode=Mode(settings.host_cache_mode), copy_budget_s=settings.host_cache_copy_budget_ms / 1000,
        restore_budget_s=settings.host_cache_restore_budget_ms / 1000,
        store_pace_s=settings.host_cache_store_pace_ms / 1000, eviction=settings.host_cache_eviction)
    if tier.frames and model.device.type == "cpu":
        check_quota(tier.host_cache_bytes, pages * page_bytes, other="the device pool")
    pool = new_pool(model, pages, settings.page_tokens)
    host = _host(tier, model, pool, clock, log)
    config = EngineConfig(
        page_tokens=settings.page_tokens, slots=settings.concurrency, bank_entries=settings.prefix_cache_entries,
        prefill_batch_tokens=settings.prefill_batch_tokens, max_context=max_context, seed=settings.seed,
        verify=Verify(settings.host_cache_verify),
        identity=Identity(
            model=spec.model_id, revision=spec.revision, dtype=str(model.dtype), page_tokens=settings.page_tokens,
            layout=f"page,layer={spec.layers},kv=2,head={spec.kv_heads},token,dim={spec.head_dim}"))
    engine = Engine(config, model=model, tokenizer=tokenizer, pool=pool, sample=sample, clock=clock, log=log, tier=tier,
                    copier=host.copier)
    log("engine", model=spec.model_id, device=str(model.device), dtype=str(model.dtype), max_context=max_context,
        pool_pages=pages, page_tokens=settings.page_tokens, pool=format_size(pages * page_bytes),
        host_cache=format_size(tier.frames * page_bytes) if host.copier is not None else "off")
    return RunningEngine(engine, model_id=spec.model_id, clock=clock, log=log, rss_bytes=rss_reader(),
                         release=host.release)


def new_pool(model: CausalModel, pages: int, page_tokens: int) -> torch.Tensor:
    """The device's pages, as `CausalModel` lays them out. Main memory is taken page by page as it is written, in huge
    pages where the system has them: first touches and copies are faster."""
    spec = model.spec
    shape = (pages, spec.layers, 2, spec.kv_heads, page_tokens, spec.head_dim)
    if model.device.type != "cpu":
        return torch.empty(shape, dtype=model.dtype, device=model.device)
    memory = mmap.mmap(-1, pages * page_tokens * spec.kv_bytes_per_token(model.dtype.itemsize))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # refused: slower, nothing else
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=model.dtype).view(shape)


def rss_reader() -> Callable[[], int]:
    """Resident bytes of this process, now; 0 where /proc does not say."""
    statm, page_bytes = Path("/proc/self/statm"), os.sysconf("SC_PAGE_SIZE")

    def read() -> int:
        try:
            return int(statm.read_text(encoding="ascii").split()[1]) * page_bytes
        except OSError:
            return 0

    return read


def _pool_pages(settings: Settings, model: CausalModel, page_bytes: int) -> int:
    if settings.pool_tokens is not None:
        pages = settings.pool_tokens // settings.page_tokens
        if model.device.type == "cpu":
            check_quota(pages * page_bytes, setting="pool_tokens' pool", other="")
        return pages
    have = available_bytes() if model.device.type == "cpu" else torch.cuda.mem_get_info(model.device)[0]
    share = int(have * settings.memory_reservation)
    pages = min(share // page_bytes, MOST_POOL_TOKENS // settings.page_tokens)
    if pages < 2:
        raise MemoryRefused(
            f"memory_reservation is {settings.memory_reservation * 100:g}% of {format_size(have)} available, which "
            f"holds {pages} pages of {format_size(page_bytes)}; raise memory_reservation or lower page_tokens")
    return pages


def _max_context(settings: Settings, spec: ModelSpec, pages: int) -> int:
    """No request may be longer than the model, the setting or the pool says."""
    if settings.max_context is not None and settings.max_context > spec.max_position:
        raise ConfigError(f"max_context is {settings.max_context}, but {spec.model_id} has positions for "
                          f"{spec.max_position} tokens; give at most that")
    return min(settings.max_context or spec.max_position, pages * settings.page_tokens)


def _host(tier: TierConfig, model: CausalModel, pool: torch.Tensor, clock: Clock, log: Log) -> _Host:
    """The engine serves whether or not the tier can be had; which of both it is, the log and /v1/stats say."""
    nothing = _Host(slabs=None, copier=None)
    if not tier.frames:
        if tier.mode is not Mode.OFF and tier.host_cache_bytes:
            log("host cache: off, host_cache_bytes is less than one page", level="warning",
                host_cache_bytes=tier.host_cache_bytes, page_bytes=tier.page_bytes)
        return nothing
    if model.device.type != "cpu":
        log("host cache: off, no CUDA copier in this version", level="warning")
        return nothing
    try:
        slabs = Slabs(tier.frames * tier.page_bytes, tier.page_bytes)
        copier = ThreadCopier(pool.data_ptr(), pool.shape[0], tier.page_bytes, slabs, clock=clock, owner=pool)
    except HostCacheError as refusal:
        log("host cache: off, its memory cannot be had", level="warning", error=str(refusal))
        return nothing
    return _Host(slabs=slabs, copier=copier)
