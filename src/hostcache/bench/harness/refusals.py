"""Why a figure may not be used: late client, restarted server, warm start, counters that do not add up, an arm nobody
confirmed; and the proof that pages were evicted and restored. Pure; knows nothing of latencies or comparisons.

Reasons refuse one of three things: `cell` (void: no figure of it counts), `comparison` (its figures stand alone) and
`benefit` (see `comparing`: a ratio may be shown, none may be claimed).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from hostcache.bench.figures import ratio
from hostcache.records import CellRecord, EndRecord, RequestRecord, SegmentRecord

Document = dict[str, Any]

LAG_BAR_S = 0.020
"""A cell whose dispatch lag p99 is above this is void, unless it names its own bar: an order above what an idle client
shows (0.9 ms at 10 requests/s of 128 chunks) and half of what a choked one does (40 ms at p50, 75 requests/s)."""
TEMPLATE_TOKENS = 64
"""Without token counts of its own the client cannot know what a chat template adds: so many tokens of the cell's first
prompt may be found in the cache before it is called contaminated."""
_CANONICAL = ("prompt_tokens", "cached_tokens", "device_tokens", "host_tokens", "recomputed_tokens", "generated_tokens",
              "requests", "restores", "restored_bytes", "written_bytes", "evicted_pages", "evicted_snapshots",
              "refused")
"""Counters that only a restart takes down. (Other names of an engine may be levels.)"""

_LATER = ("revisit", "reuse", "restored", "after-evict")
"""Roles that are meant to find something in the cache."""
_COLD = ("cold", "cold-again", "control", "probe")
"""Roles whose text is new each time."""
def _reason(code: str, refuses: str, text: str) -> Document:
    return {"code": code, "refuses": refuses, "text": text}


def end_reasons(end: EndRecord | None) -> list[Document]:
    if end is None:
        return [_reason("cut-short", "comparison", "the file has no last line: the run was cut short")]
    if end.outcome == "failed":
        return [_reason("failed", "cell", f"the run failed: {end.detail or 'no detail'}")]
    if end.outcome == "interrupted":
        return [_reason("interrupted", "comparison", f"the run was interrupted: {end.detail or 'no detail'}")]
    return []


def arm_reasons(cell: CellRecord) -> list[Document]:
    if cell.target.get("arm_confirmed_by") not in (None, "", "not asked"):
        return []
    return [_reason("arm-not-confirmed", "comparison",
                    f"arm {cell.arm!r} is what was asked for; nothing that the server said of itself confirms it")]


def lag_bar(cell: CellRecord, given: float | None) -> float:
    if given is not None:
        return given
    own = cell.parameters.get("lag_bar_ms")
    return LAG_BAR_S if own is None else float(own) / 1000


def lag_reasons(lag: Document) -> list[Document]:
    if lag["p99"] is None or lag["p99"] <= lag["bar_s"]:
        return []
    return [_reason("lag", "cell",
                    f"the client was the bottleneck: dispatch lag p99 {1000 * lag['p99']:.1f} ms is above its bar of "
                    f"{1000 * lag['bar_s']:g} ms; send from more processes, or less")]


def reset_reasons(brackets: Sequence[SegmentRecord]) -> list[Document]:
    """Within a bracket, as the harness saw it; and between two brackets, by counters that went down."""
    found = []
    for bracket in brackets:
        where = _where(bracket.segment, bracket.part)
        down = [*bracket.resets, *_down(bracket.opening, bracket.closing)]
        if down:
            named = ", ".join(sorted(set(down))[:6])
            found.append(_reason("reset", "cell",
                                 f"counters were reset during {where} ({named}): the server restarted"))
    for sooner, later in pairwise(brackets):
        if later.segment == "before":  # a resumed run may go on with another process
            continue
        down = _down(sooner.closing, later.opening)
        if down:
            found.append(_reason("reset", "cell", f"counters were reset before {_where(later.segment, later.part)} "
                                                  f"({', '.join(down)}): the server restarted"))
    return found


def _down(sooner: Mapping[str, float], later: Mapping[str, float]) -> list[str]:
    return [name for name in _CANONICAL if name in sooner and name in later and later[name] < sooner[name]]


def _where(segment: str, part: str) -> str:
    return f"{segment} {part}".strip()


def start_state(requests: Sequence[RequestRecord]) -> Document:
    """Was the cache cold for this cell's texts? Judged by the first request of each session and by the controls.

    Where the client could not count what it had sent before (`shared_tokens` is None), only the first request
    of the load and the controls tell, and a chat template's worth of tokens is allowed.
    """
    firsts: dict[tuple[str, str], RequestRecord] = {}
    for request in requests:
        if request.role not in _LATER:
            firsts.setdefault((request.part, request.session), request)
    opener = next((request for request in requests if request.role != "control"), None)
    controls = [request for request in requests if request.role == "control"]
    cold = [request for request in requests if request.role in _COLD]
    told = {id(request): request for request in [*firsts.values(), *cold] if request.cached_tokens is not None}
    judged = [(request, request.shared_tokens if request.shared_tokens is not None else TEMPLATE_TOKENS)
              for request in told.values()
              if request.shared_tokens is not None or request.role == "control" or request is opener]
    over = [(request, allowed) for request, allowed in judged if (request.cached_tokens or 0) > allowed]
    worst = max(over, key=lambda each: (each[0].cached_tokens or 0) - each[1], default=None)
    return {
        "verdict": "contaminated" if over else "cold" if judged else "unknown",
        "first_visits": len(firsts), "judged": len(judged), "above_expected": len(over),
        "worst": None if worst is None else {"session": worst[0].session, "cached_tokens": worst[0].cached_tokens,
                                             "expected_tokens": worst[1], "prompt_tokens": worst[0].prompt_tokens},
        "control": {"n": len(controls),
                    "hit_share": ratio(sum(request.cached_tokens or 0 for request in controls
                                           if request.cached_tokens is not None),
                                       sum(request.prompt_tokens or 0 for request in controls
                                           if request.cached_tokens is not None))} if controls else None,
    }


def start_reasons(start: Document) -> list[Document]:
    if start["verdict"] != "contaminated":
        return []
    worst = start["worst"]
    return [_reason("contaminated", "cell",
                    f"{start['above_expected']} of {start['judged']} first visits were served from a cache that an "
                    f"earlier run had left: session {worst['session']} found {worst['cached_tokens']} tokens, at most "
                    f"{worst['expected_tokens']} had been sent before; use a fresh server or another salt")]


def balance_reasons(segments: Sequence[Document], requests: Sequence[RequestRecord]) -> list[Document]:
    found = [_reason("balance", "cell", f"the server's counters do not add up in "
                                        f"{_where(segment['segment'], segment['part'])}: "
                                        f"{'; '.join(segment['balance']['broken'])}")
             for segment in segments if segment["balance"]["verdict"] == "broken"]
    wrong = [(request, why) for request in requests if (why := _unbalanced(request))]
    if wrong:
        request, why = wrong[0]
        found.append(_reason("balance", "cell", f"the usage of {len(wrong)} requests does not add up, the first is "
                                                f"{request.session} turn {request.turn}: {why}"))
    return found


def foreign_reasons(segments: Sequence[Document]) -> list[Document]:
    """The server was at rest at both scrapes, so what it counted beyond this client's usage was somebody else's."""
    found = []
    for segment in segments:
        counted, used = segment["counters"].get("prompt_tokens"), segment["usage_prompt_tokens"]
        if counted is None or not segment["usage_complete"] or segment["counters"].get("preemptions"):
            continue
        if counted > used:
            found.append(_reason("foreign-traffic", "comparison",
                                 f"the server counted {counted:.0f} prompt tokens in "
                                 f"{_where(segment['segment'], segment['part'])}, this client sent {used}: somebody "
                                 "else used it"))
    return found


def _unbalanced(request: RequestRecord) -> str:
    """Why one request's own account is impossible; empty where it is not, or not told."""
    prompt, cached = request.prompt_tokens, request.cached_tokens
    if prompt is None or cached is None:
        return ""
    if not 0 <= cached <= prompt:
        return f"{cached} cached of {prompt} prompt tokens"
    if request.recomputed is not None and cached + sum(request.recomputed.values()) != prompt:
        return f"{cached} cached + {sum(request.recomputed.values())} recomputed ≠ {prompt} prompt tokens"
    parts = (request.device_tokens, request.host_tokens)
    if None not in parts and sum(part or 0 for part in parts) != cached:
        return f"{parts[0]} device + {parts[1]} host ≠ {cached} cached tokens"
    return ""


# --- proof ----------------------------------------------------------------------------------------------------------


def evicted(segment: Document, segments: Sequence[Document], own: Sequence[RequestRecord]) -> Document:
    """Proof that pages really left the device before or while this was measured (B4). `evictions`: pages and snapshots,
    whichever the server counts; `served_from_host`: requests, or tokens where requests do not say."""
    earlier = [each for each in segments if each["opened_s"] is not None and segment["opened_s"] is not None
               and each["opened_s"] <= segment["opened_s"]]
    counted = [each["counters"][name] for each in earlier for name in ("evicted_pages", "evicted_snapshots")
               if name in each["counters"]]
    from_host = sum((request.host_tokens or 0) > 0 for request in own) or segment["counters"].get("host_tokens", 0)
    lost = sum(request.role == "revisit" and request.shared_tokens is not None and request.cached_tokens is not None
               and 2 * request.cached_tokens < request.shared_tokens for request in own)
    evictions = sum(counted) if counted else None
    proof = ("counter" if evictions else "served from the host" if from_host
             else "revisits that lost their prefix" if lost and evictions is None else None)
    return {"evictions": evictions, "served_from_host": from_host, "lost_prefixes": lost, "proof": proof}


def restored(segment: Document, own: Sequence[RequestRecord]) -> bool:
    return bool(segment["counters"].get("restores") or segment["counters"].get("host_tokens")
                or any((request.host_tokens or 0) > 0 for request in own))


