"""What single conversations got: a ladder's rungs, cold against restored answers, how long restores took. Pure."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hostcache.bench.figures import percentile, ratio
from hostcache.bench.harness.summaries import stats, summary
from hostcache.records import CellRecord, RequestRecord, SegmentRecord

Document = dict[str, Any]

UNMEASURED = ("before", "prime", "after")
"""Segments in which nothing is measured."""

# --- ladders --------------------------------------------------------------------------------------------------------


def rung_values(requests: Sequence[RequestRecord]) -> dict[str, float | None]:
    by_role = _by_role(requests)
    cold, decode = by_role.get("cold", []), by_role.get("decode", [])
    figures = summary(decode, window_s=None)
    values: dict[str, float | None] = {
        "prompt_tokens": percentile([float(request.prompt_tokens) for request in requests if request.prompt_tokens
                                     and request.role in ("cold", "reuse", "after-evict")], 0.5),
        "cold_ttft_s": _ttft(cold),
        "prefill_tok_s": stats(ratio(request.prompt_tokens, _answered_ttft(request)) for request in cold)["p50"],
        "reuse_ttft_s": _ttft(by_role.get("reuse", [])),
        "after_evict_ttft_s": _ttft(by_role.get("after-evict", [])),
        "after_evict_hit_share": _hit_share(by_role.get("after-evict", [])),
        "streams": float(figures["clients"]) if decode else None,
        "decode_tok_s_p50": figures["decode_tok_s"]["p50"],
        "decode_tok_s_mean": figures["decode_tok_s"]["mean"],
        "aggregate_decode_tok_s": figures["aggregate_decode_tok_s"],
    }
    return {**values, "restore_ratio": ratio(values["cold_ttft_s"], values["after_evict_ttft_s"])
            if any((request.host_tokens or 0) > 0 for request in by_role.get("after-evict", [])) else None}


def _by_role(requests: Iterable[RequestRecord]) -> dict[str, list[RequestRecord]]:
    found: dict[str, list[RequestRecord]] = defaultdict(list)
    for request in requests:
        if request.outcome == "ok":
            found[request.role].append(request)
    return found


def _answered_ttft(request: RequestRecord) -> float | None:
    if request.first_token_s is None or request.answered_attempt_s is None:
        return None
    return request.first_token_s - request.answered_attempt_s


def _ttft(requests: Iterable[RequestRecord]) -> float | None:
    value: float | None = stats(map(_answered_ttft, requests))["p50"]
    return value


def _hit_share(requests: Sequence[RequestRecord]) -> float | None:
    value: float | None = summary(requests, window_s=None)["tokens"]["hit_share"]
    return value


def ladder(requests: Sequence[RequestRecord]) -> list[Document]:
    """One row a rung, in order of prompt size; the decode rungs by number of streams."""
    parts: dict[str, list[RequestRecord]] = defaultdict(list)
    for request in requests:
        if request.segment == "rung":
            parts[request.part].append(request)
    rows = [{"part": part, "corpus": corpus_of(part), **rung_values(own),
             "restored_bytes_proof": any((request.host_tokens or 0) > 0 for request in own
                                         if request.role == "after-evict")} for part, own in parts.items()]
    return sorted(rows, key=lambda row: (row["streams"] is not None and row["prompt_tokens"] is None,
                                         row["corpus"], row["prompt_tokens"] or 0, row["streams"] or 0, row["part"]))


def corpus_of(part: str) -> str:
    return next((name for name in ("prose", "code") if name in part.lower()), "")


# --- equivalence ----------------------------------------------------------------------------------------------------


def equivalence(cell: CellRecord, requests: Sequence[RequestRecord], segments: Sequence[Document]) -> Document:
    sessions = _conversations(requests)
    alone = {segment["part"]: segment["counters"] for segment in segments if segment["segment"] == "compare"}
    page = cell.target.get("page_tokens") or cell.parameters.get("page_tokens")
    tierless = (cell.target.get("tier") or {}).get("on") is False
    rows = [_same(part, session, answers, page, alone.get(part, {}), tierless=tierless)
            for (part, session), answers in sessions.items()]
    said = [row["verdict"] for row in rows]
    return {
        "rows": rows, "total": len(rows), **{name: said.count(name) for name in ("identical", "different", "unproven")},
        "cold_vs_cold_identical": sum(row["cold_vs_cold"]["same"] is True for row in rows),
        "cold_vs_cold_compared": sum(row["cold_vs_cold"]["same"] is not None for row in rows),
        "device_identical": sum(row["device_vs_cold"]["same"] is True for row in rows),
        "device_compared": sum(row["device_vs_cold"]["same"] is not None for row in rows),
    }


def _conversations(requests: Sequence[RequestRecord]) -> dict[tuple[str, str], dict[str, RequestRecord]]:
    """(part, session) → the answers by role. A session whose roles stand in parts of their own is one conversation."""
    asked = [request for request in requests if request.role in ("cold", "cold-again", "reuse", "restored")]
    found: dict[tuple[str, str], dict[str, RequestRecord]] = defaultdict(dict)
    once = {session for session in {request.session for request in asked}
            if len(roles := [request.role for request in asked if request.session == session]) == len(set(roles))}
    first_part: dict[str, str] = {}
    for request in asked:
        part = first_part.setdefault(request.session, request.part) if request.session in once else request.part
        found[part, request.session][request.role] = request
    return found


def _same(part: str, session: str, answers: Mapping[str, RequestRecord], page: object,
          counted: Mapping[str, float], *, tierless: bool) -> Document:
    """The verdict is of the restored answer; of a server that says it has no tier, of the device's."""
    cold, again, device, restored = (answers.get(role) for role in ("cold", "cold-again", "reuse", "restored"))
    if tierless and restored is None:
        against = _differs(cold, device)
        missing = "" if device and device.cached_tokens else "nothing came from a cache"
    else:
        against, missing = _differs(cold, restored), _proof_missing(restored, device, page, counted)
    missing = _not_cold(cold, again) or missing
    cold_s, restored_s = (None if each is None else _answered_ttft(each) for each in (cold, restored))
    return {
        "part": part, "session": session, "prompt_tokens": cold.prompt_tokens if cold else None,
        "cold_vs_cold": _differs(cold, again), "device_vs_cold": _differs(cold, device),
        "restored_vs_cold": _differs(cold, restored),
        "device_tokens": restored.device_tokens if restored else None,
        "host_tokens": restored.host_tokens if restored else None,
        "cached_tokens": restored.cached_tokens if restored else None,
        "cold_ttft_s": cold_s, "restored_ttft_s": restored_s, "ttft_ratio": ratio(cold_s, restored_s),
        "verdict": ("unproven" if missing or against["same"] is None else
                    "identical" if against["same"] else "different"),
        "why": against["why"] or missing,
    }


def _differs(one: RequestRecord | None, other: RequestRecord | None) -> Document:
    """Token by token where ids came back, else by the digest of the text."""
    if one is None or other is None:
        return {"same": None, "at": None, "why": "not run"}
    failed = next((each for each in (one, other) if each.outcome != "ok"), None)
    if failed is not None:
        return {"same": None, "at": None, "why": f"{failed.role}: {failed.reason or failed.outcome}"}
    if one.reply_ids and other.reply_ids:
        at = next((i for i, (a, b) in enumerate(zip(one.reply_ids, other.reply_ids, strict=False)) if a != b), None)
        if at is None and len(one.reply_ids) != len(other.reply_ids):
            at = min(len(one.reply_ids), len(other.reply_ids))
        return {"same": at is None, "at": at, "why": "" if at is None else f"first difference at token {at}"}
    same = one.reply_sha256 == other.reply_sha256
    return {"same": same, "at": None, "why": "" if same else "the texts differ; no token ids to say where"}


def _not_cold(*answers: RequestRecord | None) -> str:
    """Which cold answer was none; empty where each was, as far as the server says."""
    warm = next((each for each in answers if each is not None and each.cached_tokens), None)
    return "" if warm is None else f"{warm.role}: {warm.cached_tokens} tokens came from a cache"


def _proof_missing(restored: RequestRecord | None, device: RequestRecord | None, page: object,
                   counted: Mapping[str, float]) -> str:
    """Why nobody can say that this was a restore; empty where it was one. By its own usage, else by what the server
    `counted` while it was alone."""
    if restored is None or restored.outcome != "ok":
        return "not run"
    if device is not None and device.outcome == "ok" and not device.cached_tokens:
        return "the reference was not served from the device"
    host, left = restored.host_tokens, float(restored.device_tokens or 0)
    if host is None:
        if "restores" not in counted and "host_tokens" not in counted:
            return "the server does not say what was restored"
        left, host = counted.get("device_tokens", 0.0), restored.cached_tokens
        if not (counted.get("restores") or counted.get("host_tokens")):
            host = 0
    if not host:
        return "nothing was restored"
    least = page if isinstance(page, int) and page else host
    return f"{left:.0f} tokens were still on the device" if left >= least else ""


# --- restores -------------------------------------------------------------------------------------------------------


_OWN_FAMILY = "restore_latency of /v1/stats"
_LOAD_TIME, _LOADS = "vllm:kv_offload_load_time_total", "vllm:kv_offload_load_size_count"
"""vLLM's own offloading has no buckets of time, only the sum."""
_BUCKET = re.compile(r"^(?P<family>[A-Za-z_:][\w:]*)_bucket\{(?P<labels>.*)\}\s+(?P<value>\S+)")
_LINE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{.*\})?\s+(?P<value>\S+)")
_BOUND = re.compile(r'le="([^"]+)"')
_TTFT_BOUNDS = tuple(factor * 10.0 ** power for power in range(-3, 3) for factor in (1, 2, 5))


def restore_histogram(brackets: Sequence[SegmentRecord], requests: Sequence[RequestRecord]) -> Document | None:
    """How long restores took: the server's own buckets where it has a restore histogram in seconds; else their mean,
    with no bounds and no counts, where it has their sum; else the TTFT of the turns that were served from the host.
    `counts[i]`: at most `bounds_s[i]` and above the bound before it."""
    counted: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    for bracket in brackets:
        if bracket.segment in UNMEASURED or bracket.resets:
            continue
        for lines, sign in ((bracket.raw_opening, -1.0), (bracket.raw_closing, 1.0)):
            for family, bound, value in _buckets(lines):
                counted[family][bound] += sign * value
    moved = {family: buckets for family, buckets in counted.items() if max(buckets.values()) > 0}
    if moved:
        family = sorted(moved)[0]
        bounds = sorted(moved[family])
        totals = [moved[family][bound] for bound in bounds]
        return {"source": f"counter {family}", "n": round(totals[-1]), "mean_s": _mean(family, brackets),
                "bounds_s": [None if bound == float("inf") else bound for bound in bounds],
                "counts": [round(total - before) for before, total in zip([0.0, *totals], totals, strict=False)]}
    loads = _moved(_LOADS, brackets)
    if loads:
        return {"source": f"counters {_LOAD_TIME} ÷ {_LOADS}", "n": round(loads),
                "mean_s": ratio(_moved(_LOAD_TIME, brackets), loads), "bounds_s": [], "counts": []}
    alone = _from_host_alone(brackets, requests)
    times = [seconds for request in requests if request.outcome == "ok"
             and ((request.host_tokens or 0) > 0 or (request.segment, request.part) in alone)
             and (seconds := _answered_ttft(request)) is not None]
    if not times:
        return None
    counts = [0] * (len(_TTFT_BOUNDS) + 1)
    for each in times:
        counts[bisect_left(_TTFT_BOUNDS, each)] += 1
    return {"source": "TTFT of turns that were served from the host", "n": len(times),
            "mean_s": stats(times)["mean"], "bounds_s": [*_TTFT_BOUNDS, None], "counts": counts}


def _mean(family: str, brackets: Sequence[SegmentRecord]) -> float | None:
    """Δ sum ÷ Δ count of the same histogram; None where those lines were not kept."""
    total_s, count = _moved(f"{family}_sum", brackets), _moved(f"{family}_count", brackets)
    for bracket in brackets if family == _OWN_FAMILY else ():
        if bracket.segment not in UNMEASURED and not bracket.resets:
            for lines, sign in ((bracket.raw_opening, -1.0), (bracket.raw_closing, 1.0)):
                for own in map(_own_latency, lines):
                    total_s += sign * float(own.get("sum_s", 0.0))
                    count += sign * float(own.get("count", 0.0))
    return ratio(total_s, count) if total_s else None


def _moved(name: str, brackets: Sequence[SegmentRecord]) -> float:
    """Δ of a raw line, all its series together, in the measured brackets; 0 where there is none."""
    return sum((sign * float(found["value"]) for bracket in brackets
                if bracket.segment not in UNMEASURED and not bracket.resets
                for lines, sign in ((bracket.raw_opening, -1.0), (bracket.raw_closing, 1.0))
                for line in lines if (found := _LINE.match(line)) and found["name"] == name), 0.0)


def _from_host_alone(brackets: Sequence[SegmentRecord], requests: Sequence[RequestRecord]) -> set[tuple[str, str]]:
    """Brackets of a single request that does not say what came from the host, while the server counted that something
    did."""
    sent = Counter((request.segment, request.part) for request in requests)
    silent = {(request.segment, request.part) for request in requests if request.host_tokens is None}
    return {place for bracket in brackets if sent[place := (bracket.segment, bracket.part)] == 1 and place in silent
            and not bracket.resets
            and bracket.closing.get("host_tokens", 0.0) > bracket.opening.get("host_tokens", 0.0)}


def _own_latency(line: str) -> Mapping[str, Any]:
    """The restore histogram in a raw line of hostcache's own /v1/stats; empty for any other line."""
    if not line.startswith("host_cache {"):
        return {}
    found: Mapping[str, Any] = json.loads(line.removeprefix("host_cache ")).get("restore_latency") or {}
    return found


def _buckets(lines: Iterable[str]) -> Iterable[tuple[str, float, float]]:
    for line in lines:
        for bound, value in (_own_latency(line).get("buckets") or {}).items():
            yield _OWN_FAMILY, float(bound), float(value)
        found = _BUCKET.match(line)
        if found is None:
            continue
        family, bound = found["family"], _BOUND.search(found["labels"])
        restores = "restore" in family or "kv_offload_load" in family
        if bound is not None and restores and ("seconds" in family or family.endswith("_time")):
            yield family, float(bound[1]), float(found["value"])


