"""A server's own account of one request, from the several shapes in which servers give it. Reads nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyUsage:
    """The server's own account of one request. None where it did not say."""

    prompt_tokens: int
    completion_tokens: int
    hit_tokens: int | None
    device_tokens: int | None
    host_tokens: int | None
    recomputed: dict[str, int] | None
    first_miss: dict[str, Any] | None


def read_usage(usage: Mapping[str, Any] | None, timings: Mapping[str, Any] | None) -> ReplyUsage | None:
    """None where neither says anything. Raises ValueError or TypeError for what is no account.

    Hit tokens are, in this order: `prompt_cache_hit_tokens` (this project's engine, DeepSeek),
    `prompt_tokens_details.cached_tokens` (OpenAI, vLLM with --enable-prompt-tokens-details, SGLang with
    --enable-cache-report, llama.cpp), `timings.cache_n`, prompt − `timings.prompt_n` (older llama.cpp).
    llama.cpp's `tokens_cached` is not read: it is what its slot holds after the answer, the answer included.
    """
    timings = timings or {}
    hit: int | None
    if not usage:
        if "prompt_n" not in timings or "predicted_n" not in timings:
            return None
        hit = _count(timings.get("cache_n", 0), "timings.cache_n")
        return _account(hit + _count(timings["prompt_n"], "timings.prompt_n"),
                        _count(timings["predicted_n"], "timings.predicted_n"), hit, {})
    prompt = _count(usage.get("prompt_tokens"), "usage.prompt_tokens")
    details = usage.get("prompt_tokens_details") or {}
    hit = None
    for value, name in ((usage.get("prompt_cache_hit_tokens"), "usage.prompt_cache_hit_tokens"),
                        (details.get("cached_tokens"), "usage.prompt_tokens_details.cached_tokens"),
                        (timings.get("cache_n"), "timings.cache_n")):
        if value is not None:
            hit = _count(value, name)
            break
    else:
        if timings.get("prompt_n") is not None:
            hit = prompt - _count(timings["prompt_n"], "timings.prompt_n")
    return _account(prompt, _count(usage.get("completion_tokens"), "usage.completion_tokens"), hit,
                    usage.get("hostcache") or {})


def _account(prompt: int, completion: int, hit: int | None, report: Mapping[str, Any]) -> ReplyUsage:
    recomputed, miss = report.get("recomputed"), report.get("first_miss")
    device, host = report.get("device"), report.get("host")
    return ReplyUsage(
        prompt_tokens=prompt, completion_tokens=completion, hit_tokens=hit,
        device_tokens=None if device is None else _count(device, "usage.hostcache.device"),
        host_tokens=None if host is None else _count(host, "usage.hostcache.host"),
        recomputed=None if recomputed is None else {
            str(reason): _count(n, f"usage.hostcache.recomputed.{reason}") for reason, n in recomputed.items()},
        first_miss=None if miss is None else dict(miss),
    )


def _count(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53 or value != int(value):
        raise ValueError(f"{name} is {str(value)[:40]!r}, not a count")
    return int(value)
