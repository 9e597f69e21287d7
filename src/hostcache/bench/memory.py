"""What the tier costs in memory: peak RSS of a server with it minus one without, under the same load.

The load is distinct prompts of real code, one after the other, until the quota has been written once over; a tier
that is not filled proves nothing about its size. Metadata (keys, index, history) are not part of the quota: they are
allowed for and reported apart.
"""

from __future__ import annotations

import asyncio
import io
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from hostcache.bench.demo import make_launcher
from hostcache.bench.progress import Progress
from hostcache.bench.servers import Launcher, RunningServer, ServerPlan
from hostcache.client.counters import read
from hostcache.client.openai import Failure
from hostcache.clock import Clock, WallClock
from hostcache.errors import ConfigError, ServerError
from hostcache.sizes import format_size
from hostcache.workload.agents import stream
from hostcache.workload.corpus import CodeCorpus, load_corpus

FULL_SHARE = 0.95
"""A quota counts as filled from here on: room is made before bytes are taken, so it is rarely full to the last page."""
METADATA_BYTES_PER_PAGE = 400
"""The allowance beside the quota: what the tier's bookkeeping may cost a page, history not counted."""


def run(*, model: str = "smollm2", quota_bytes: int = 2 << 30, pool_tokens: int = 2048, page_tokens: int = 32,
        prompt_tokens: int = 512, turnover: float = 1.1, seed: int = 0, err: TextIO | None = None,
        clock: Clock | None = None, command: Sequence[str] | None = None) -> dict[str, Any]:
    """Peak bytes of both servers and how full the quota was. `turnover`: how many quotas worth of KV are written.

    Takes about turnover × quota ÷ (KV bytes per token) tokens of prefill, twice: some minutes for 2 GiB of smollm2.
    Raises ServerError when a server fails, ConfigError when the corpus is too small for the quota.
    """
    clock, said = clock or WallClock(), err or io.StringIO()
    with tempfile.TemporaryDirectory(prefix="hostcache-memory-") as folder:
        launcher = make_launcher(model, Path(folder), clock, said, command)
        plans = [ServerPlan(model=model, pool_tokens=pool_tokens, page_tokens=page_tokens, host_cache_bytes=quota,
                            concurrency=4) for quota in (quota_bytes, 0)]
        return asyncio.run(_both(launcher, Progress(said, clock), load_corpus(), plans, prompt_tokens, turnover, seed))


async def _both(launcher: Launcher, progress: Progress, corpus: CodeCorpus, plans: Sequence[ServerPlan],
                prompt_tokens: int, turnover: float, seed: int) -> dict[str, Any]:
    on, off = plans
    progress.stage("memory, tier on")
    async with launcher.running(on, name="on") as server:
        opening = await server.client.stats()
        page_bytes, quota = read(opening, "host_cache_config", "page_bytes"), read(opening, "host_cache", "quota_bytes")
        if not page_bytes or not quota:
            raise ServerError("the server does not say the size of a page or of its quota in /v1/stats")
        count = -(-int(turnover * quota / page_bytes) // max(1, prompt_tokens // on.page_tokens))
        prompts = await _prompts(server, corpus, count, prompt_tokens)
        await _load(server, progress, prompts, seed)
        closing = await server.client.stats()
        with_tier = server.peak_rss_bytes()
    progress.stage("memory, tier off")
    async with launcher.running(off, name="off") as server:
        await _load(server, progress, prompts, seed)
        without = server.peak_rss_bytes()
    progress.finish()
    if with_tier is None or without is None:
        raise ServerError("/proc does not say the peak memory of a process here; run on Linux")
    pages = int(quota // page_bytes)
    return {
        "version": 1, "model": on.model, "quota_bytes": int(quota), "page_bytes": int(page_bytes), "pages": pages,
        "prompts": count, "prompt_tokens": prompt_tokens, "peak_rss_on_bytes": with_tier, "peak_rss_off_bytes": without,
        "growth_bytes": with_tier - without, "growth_over_quota": (with_tier - without) / quota,
        "metadata_allowance_bytes": pages * METADATA_BYTES_PER_PAGE,
        "bytes_used": read(closing, "host_cache", "bytes_used"),
        "filled_share": (read(closing, "host_cache", "bytes_used") or 0) / quota,
        "store_bytes": read(closing, "host_cache", "store_bytes"),
        "host_evictions": read(closing, "host_cache", "host_evictions"),
    }


async def _prompts(server: RunningServer, corpus: CodeCorpus, count: int, prompt_tokens: int) -> list[list[int]]:
    stock: list[int] = []
    for file in corpus.files:
        if len(stock) >= count * prompt_tokens:
            break
        stock += await server.client.tokenize(file.text)
    if len(stock) < count * prompt_tokens:
        raise ConfigError(f"filling the quota takes {count * prompt_tokens} tokens, the corpus has {len(stock)}; "
                          "use a smaller --quota or a larger model")
    return [stock[at : at + prompt_tokens] for at in range(0, count * prompt_tokens, prompt_tokens)]


async def _load(server: RunningServer, progress: Progress, prompts: Sequence[Sequence[int]], seed: int) -> None:
    rng = stream(seed, "memory")
    for number, prompt in enumerate(prompts):
        progress.show(f"prompt {number + 1}/{len(prompts)}")
        outcome = await server.client.complete(prompt, model=server.model, max_tokens=1, rng=rng)
        if isinstance(outcome, Failure):
            raise ServerError(f"prompt {number + 1} of {len(prompts)} failed: {outcome.error}")


def bars(result: Mapping[str, Any]) -> list[tuple[str, str, float, bool]]:
    """(what, bar, value, met)."""
    quota, metadata = result["quota_bytes"], result["metadata_allowance_bytes"]
    return [
        ("quota filled by the load", f"at least {FULL_SHARE}", result["filled_share"],
         result["filled_share"] >= FULL_SHARE),
        ("peak RSS, on − off, in quotas", f"at most 1.05 + {metadata / quota:.4f} for metadata",
         result["growth_over_quota"], result["growth_bytes"] <= 1.05 * quota + metadata),
    ]


def table(result: Mapping[str, Any]) -> str:
    rows = (
        ("peak RSS with the tier", format_size(result["peak_rss_on_bytes"])),
        ("peak RSS without", format_size(result["peak_rss_off_bytes"])),
        ("difference", f"{format_size(result['growth_bytes'])} = {result['growth_over_quota']:.4f} of the quota"),
        ("quota", f"{format_size(result['quota_bytes'])}, {result['filled_share']:.1%} in use at the end"),
        ("allowed for metadata", f"{format_size(result['metadata_allowance_bytes'])} "
                                 f"({METADATA_BYTES_PER_PAGE} bytes × {result['pages']:,} pages)"),
    )
    head = f"{result['model']}: the same {result['prompts']} prompts of {result['prompt_tokens']} tokens to both"
    return "\n".join([head, *(f"{name:24} {value}" for name, value in rows)])
