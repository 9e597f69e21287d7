"""What a set of requests took, got and cost: times, rates, tokens, both readings of refusals. Pure; knows nothing of
cells, arms or bars. The order of the requests changes nothing: sums are exact (`fsum`), percentiles sort."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import fsum
from statistics import fmean
from typing import Any

from hostcache.bench.figures import percentile, ratio
from hostcache.errors import ConfigError
from hostcache.records import RequestRecord

Document = dict[str, Any]

FORMULAS: Mapping[str, str] = {
    "ttft_s": "first token − start; the start is named: from_due, from_sent or from_answered",
    "e2e_s": "last byte − start, the same three starts",
    "from_due": "the start is when the request was due: lag, refusals and waits are in it. The figure of record",
    "from_sent": "the start is the first attempt: refusals and waits are in it, the client's own lag is not",
    "from_answered": "the start is the attempt that was answered: neither refusals nor waits (as was published)",
    "turn latency": "e2e_s from_due",
    "lag_s": "first attempt − due: how late this client was",
    "tpot_s": "(E2E − TTFT) ÷ (n − 1), n = completion tokens of the usage; unknown for n < 2",
    "itl_s": "the gaps between neighbouring chunks of one reply, all replies pooled",
    "decode_tok_s": "(n − 1) ÷ (last byte − first token) of one reply",
    "aggregate_decode_tok_s": "Σ (n − 1) ÷ the time during which at least one reply was being decoded",
    "hit_share": "Σ cached tokens ÷ Σ prompt tokens, of the served requests whose usage says both: total coverage, "
                 "device and host together",
    "device_share, host_share": "Σ device (host) tokens ÷ Σ prompt tokens, of the served requests whose usage says all",
    "recomputed_share": "1 − hit_share",
    "served_per_s": "served ÷ window; a turn that was started in the window counts however late it ends",
    "goodput_per_s": "requests that meet every given limit ÷ window; TTFT and E2E from_due, ITL the mean gap, "
                     "TPOT 0 for n < 2",
    "as_retries": "a refusal that was waited out is a retry; an error is a request that was given up or failed",
    "as_errors": "a request that was refused at all is an error, as for a client that never retries (a lower bound)",
    "prefill_tok_s": "prompt tokens ÷ TTFT from_answered of one cold request",
    "percentiles": "linear between the closest ranks",
    "ratio": "arm ÷ baseline of each pair (same attempt); the figure is the median of the pairs, spread is their range",
    "noise": "the range of the same ratio between repeated runs of one arm (A/A), either way round",
    "counters": "closing scrape − opening scrape; a counter that is absent from either is absent here, not 0",
}
"""Goes into every JSON file beside the numbers."""

GOODPUT_KEYS = ("ttft", "tpot", "itl", "e2el")


def parse_goodput(text: str) -> dict[str, float]:
    """`ttft:2000 tpot:50` (ms, as vLLM writes it) → name → milliseconds. Raises ConfigError."""
    limits: dict[str, float] = {}
    for item in text.replace(",", " ").split():
        name, found, value = item.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if not found or name not in GOODPUT_KEYS or not limit > 0:
            raise ConfigError(f"goodput {item!r} is not KEY:MILLISECONDS; keys are {', '.join(GOODPUT_KEYS)}, "
                              "for example ttft:2000 tpot:50")
        limits[name] = limit
    return limits


def stats(values: Iterable[float | None]) -> Document:
    """n, mean and percentiles of what is known; None of nothing."""
    known = sorted(value for value in values if value is not None)
    return {
        "n": len(known), "mean": fsum(known) / len(known) if known else None,
        **{name: percentile(known, share) for name, share in (("p50", .5), ("p90", .9), ("p95", .95), ("p99", .99))},
        "max": known[-1] if known else None,
    }


def tpot_s(request: RequestRecord) -> float | None:
    if request.first_token_s is None or request.completion_tokens is None or request.completion_tokens < 2:
        return None
    return (request.ended_s - request.first_token_s) / (request.completion_tokens - 1)


def decode_tok_s(request: RequestRecord) -> float | None:
    per_token = tpot_s(request)
    return 1 / per_token if per_token else None


def since(start: Callable[[RequestRecord], float | None], end: float | None, request: RequestRecord) -> float | None:
    begun = start(request)
    return None if begun is None or end is None else end - begun


_STARTS: Mapping[str, Callable[[RequestRecord], float | None]] = {
    "from_due": lambda request: request.due_s,
    "from_sent": lambda request: request.sent_s,
    "from_answered": lambda request: request.answered_attempt_s,
}


def summary(requests: Sequence[RequestRecord], *, window_s: float | None,
            goodput: Mapping[str, float] | None = None) -> Document:
    """Every figure of one population. Rates are None without a window."""
    served = [request for request in requests if request.outcome == "ok"]
    outcomes = Counter(request.outcome for request in requests)
    return {
        "n": len(requests), "served": len(served), "refused": outcomes["refused"], "errors": outcomes["error"],
        "aborted": outcomes["aborted"],
        "reasons": _reasons(request for request in requests if request.outcome != "ok"),
        "notes": _reasons(served),
        "retries": sum(len(request.retries) for request in requests),
        "retried": sum(bool(request.retries) for request in requests),
        "clients": len({request.client for request in requests}),
        "sessions": len({request.session for request in requests}),
        "window_s": window_s,
        "served_per_s": ratio(len(served), window_s),
        **{name: _times(served, start) for name, start in _STARTS.items()},
        "lag_s": stats(request.sent_s - request.due_s for request in requests),
        "waited_s": stats(None if request.answered_attempt_s is None else request.answered_attempt_s - request.sent_s
                          for request in served if request.retries),
        "tpot_s": stats(map(tpot_s, served)),
        "itl_s": stats(gap for request in served for gap in _gaps(request.chunk_s)),
        "decode_tok_s": stats(map(decode_tok_s, served)),
        "aggregate_decode_tok_s": aggregate_decode(served),
        "tokens": tokens(served),
        "readings": {
            "as_retries": _reading(served, len(requests) - len(served) - outcomes["aborted"], window_s),
            "as_errors": _reading(
                [request for request in served if not request.retries],
                len(requests) - outcomes["aborted"] - sum(not request.retries for request in served), window_s)},
        "goodput": _goodput(requests, window_s, goodput) if goodput else None,
    }


def _times(served: Sequence[RequestRecord], start: Callable[[RequestRecord], float | None]) -> Document:
    return {"ttft_s": stats(since(start, request.first_token_s, request) for request in served),
            "e2e_s": stats(since(start, request.ended_s, request) for request in served)}


def _reasons(requests: Iterable[RequestRecord]) -> dict[str, int]:
    """How often each stable first word of a reason was given."""
    found = Counter((request.reason.split() or ["unnamed"])[0].rstrip(":,.") if request.reason else "unnamed"
                    for request in requests if request.reason or request.outcome != "ok")
    return dict(sorted(found.items()))


def _reading(served: Sequence[RequestRecord], errors: int, window_s: float | None) -> Document:
    times = _times(served, _STARTS["from_due"])
    return {"served": len(served), "errors": errors, "served_per_s": ratio(len(served), window_s),
            "turn_s_mean": times["e2e_s"]["mean"], "turn_s_p95": times["e2e_s"]["p95"],
            "ttft_s_p50": times["ttft_s"]["p50"], "ttft_s_p95": times["ttft_s"]["p95"]}


def _gaps(chunk_s: Sequence[float]) -> list[float]:
    return [later - sooner for sooner, later in pairwise(chunk_s)]


def aggregate_decode(served: Sequence[RequestRecord]) -> float | None:
    """Tokens after each first one, over the time in which any reply was under way: the union of their intervals."""
    spans = sorted((request.first_token_s, request.ended_s, request.completion_tokens) for request in served
                   if request.first_token_s is not None and (request.completion_tokens or 0) > 1)
    busy, until = [], float("-inf")
    for begun, ended, _ in spans:
        if ended > until:
            busy.append(ended - max(begun, until))
            until = ended
    return ratio(sum((count or 1) - 1 for _, _, count in spans), fsum(busy))


def tokens(served: Sequence[RequestRecord]) -> Document:
    """Where the prompt tokens came from. Requests whose usage does not say are left out and counted: `without_usage`,
    `without_cached`, `without_parts`."""
    told = [request for request in served if request.prompt_tokens is not None]
    covered = [request for request in told if request.cached_tokens is not None]
    split = [request for request in covered if request.device_tokens is not None and request.host_tokens is not None]
    prompt, cached = _sum(covered, "prompt_tokens"), _sum(covered, "cached_tokens")
    parts = _sum(split, "prompt_tokens")
    reasons: Counter[str] = Counter()
    for request in covered:
        reasons.update(request.recomputed or {})
    hit_share = ratio(cached, prompt)
    return {
        "prompt": _sum(told, "prompt_tokens"), "completion": _sum(served, "completion_tokens"),
        "counted_prompt": prompt, "cached": cached, "recomputed": None if cached is None or prompt is None
        else prompt - cached,
        "device": _sum(split, "device_tokens"), "host": _sum(split, "host_tokens"),
        "hit_share": hit_share, "device_share": ratio(_sum(split, "device_tokens"), parts),
        "host_share": ratio(_sum(split, "host_tokens"), parts),
        "recomputed_share": None if hit_share is None else 1 - hit_share,
        "recomputed_by_reason": dict(sorted(reasons.items())),
        "restored_requests": sum((request.host_tokens or 0) > 0 for request in split) if split else None,
        "device_requests": sum(not request.host_tokens and (request.device_tokens or 0) > 0 for request in split)
        if split else None,
        "without_usage": len(served) - len(told), "without_cached": len(told) - len(covered),
        "without_parts": len(covered) - len(split),
    }


def _sum(requests: Sequence[RequestRecord], name: str) -> int | None:
    values = [value for request in requests if (value := getattr(request, name)) is not None]
    return sum(values) if values else None


def _goodput(requests: Sequence[RequestRecord], window_s: float | None, limits: Mapping[str, float]) -> Document:
    """Requests that were refused, failed, or whose needed figure is unknown are not good; the last are counted."""
    asked = [request for request in requests if request.outcome != "aborted"]
    met = [_meets(request, limits) for request in asked]
    good = sum(each is True for each in met)
    return {"limits_ms": dict(limits), "good": good, "unknown": sum(each is None for each in met),
            "good_share": ratio(good, len(asked)), "goodput_per_s": ratio(good, window_s)}


def _meets(request: RequestRecord, limits: Mapping[str, float]) -> bool | None:
    if request.outcome != "ok":
        return False
    short = request.completion_tokens is not None and request.completion_tokens < 2
    found = {
        "ttft": None if request.first_token_s is None else request.first_token_s - request.due_s,
        "tpot": 0.0 if short else tpot_s(request),
        "itl": fmean(gaps) if (gaps := _gaps(request.chunk_s)) else 0.0,
        "e2el": request.ended_s - request.due_s,
    }
    values = {name: found[name] for name in limits}
    if any(value is not None and 1000 * value > limits[name] for name, value in values.items()):
        return False
    return None if any(value is None for value in values.values()) else True
