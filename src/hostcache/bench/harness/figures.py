"""Every figure of a cell from its records alone. Pure: a second command over the same file gives the same document.
Knows nothing of servers, pages or charts.

A *point* is one measured segment of one part: a ramp's step, a rotation's steady window, a ladder's rung. Its `values`
are flat, name → number; comparisons and bars read those and nothing else. What is unknown is None, never 0.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hostcache.bench.figures import ratio
from hostcache.bench.harness.answers import UNMEASURED, equivalence, ladder, restore_histogram, rung_values
from hostcache.bench.harness.bars import Bars, first_failing, judge, judge_goals, parse_bars
from hostcache.bench.harness.comparing import compare
from hostcache.bench.harness.refusals import (
    LAG_BAR_S,
    arm_reasons,
    balance_reasons,
    end_reasons,
    evicted,
    foreign_reasons,
    lag_bar,
    lag_reasons,
    reset_reasons,
    restored,
    start_reasons,
    start_state,
)
from hostcache.bench.harness.summaries import FORMULAS, parse_goodput, stats, summary
from hostcache.client.counters import GAUGES, balance
from hostcache.records import CellRecord, EndRecord, Record, RequestRecord, SegmentRecord

__all__ = ["LAG_BAR_S", "bench_document", "cell_figures", "compare", "parse_goodput", "ramp_stop"]

Document = dict[str, Any]

_MEASURED = {"rotate": ("steady",), "agents": ("window",), "replay": ("window",), "ladder": ("rung",),
             "equivalence": ("compare",)}
_GROUPS = {"turns": ("prime", "visit", "revisit"), "revisits": ("revisit",), "never_primed": ("visit",),
           "first_visits": ("prime",)}
_MAIN = {"rotate": "revisits", "agents": "turns", "replay": "turns"}


def cell_figures(records: Iterable[Record], *, lag_bar_s: float | None = None,
                 goodput: Mapping[str, float] | None = None) -> Document:
    """The figures of one cell's file. `lag_bar_s`: default the cell's own `lag_bar_ms`, else `LAG_BAR_S`; `goodput`:
    default the cell's own.

    Raises ValueError when the records do not hold exactly one cell.
    """
    every = list(records)
    heads = [record for record in every if isinstance(record, CellRecord)]
    if len(heads) != 1:
        raise ValueError(f"the records hold {len(heads)} cells, not one; this is not the file of one cell")
    (cell,) = heads
    end = next((record for record in reversed(every) if isinstance(record, EndRecord)), None)
    limits = goodput or cell.parameters.get("goodput") or None
    brackets, requests = _sorted(every)
    segments = _segments(brackets, requests, limits)
    measured = [request for request in requests if request.segment not in UNMEASURED]
    lag = {"bar_s": lag_bar(cell, lag_bar_s), **stats(request.sent_s - request.due_s for request in measured)}
    start = start_state(requests)
    reasons = [*end_reasons(end), *arm_reasons(cell), *lag_reasons(lag), *reset_reasons(brackets),
               *start_reasons(start), *balance_reasons(segments, requests), *foreign_reasons(segments)]
    points = _points(cell.workload, segments, requests)
    return {
        "version": 1,
        "cell": cell.cell, "workload": cell.workload, "arm": cell.arm, "attempt": cell.attempt, "seed": cell.seed,
        "salt": cell.salt, "identity": cell.identity, "parameters": cell.parameters, "target": cell.target,
        "environment": cell.environment, "inputs": cell.inputs, "command": list(cell.command),
        "started_unix_s": cell.started_unix_s, "hostcache_version": cell.hostcache_version,
        "outcome": end.outcome if end else "cut short", "detail": end.detail if end else "the file has no last line",
        "reasons": reasons,
        "void": any(reason["refuses"] == "cell" for reason in reasons),
        "lag": lag,
        "state": {"start": start, **{name: _bracket_state(segments, name) for name in ("before", "after")}},
        "segments": segments,
        "points": points,
        "ladder": ladder(requests) if cell.workload == "ladder" else None,
        "equivalence": equivalence(cell, requests, segments) if cell.workload == "equivalence" else None,
        "restore_histogram": restore_histogram(brackets, measured),
        "requests": _rows(requests, brackets),
        "formulas": dict(FORMULAS),
    }


def bench_document(files: Iterable[Iterable[Record]], *, bars: Mapping[str, Bars] | None = None,
                   baseline: str = "off", lag_bar_s: float | None = None,
                   goodput: Mapping[str, float] | None = None) -> Document:
    """What `bench report` writes as JSON: every cell, their comparison and the verdicts.

    `bars`: cell → bars; a cell that is not in it is judged by the `bars` and `goals` of its own parameters, if any.
    """
    cells = [cell_figures(records, lag_bar_s=lag_bar_s, goodput=goodput) for records in files]
    cells.sort(key=lambda cell: (cell["started_unix_s"], cell["cell"], cell["arm"], cell["attempt"]))
    comparison = compare(cells, baseline=baseline)
    asked = {**{cell["cell"]: own for cell in cells if (own := _own_bars(cell["parameters"]))}, **(bars or {})}
    verdicts = [verdict.as_json() for cell in cells if cell["cell"] in asked
                for verdict in judge(cell, asked[cell["cell"]])]
    verdicts += [verdict.as_json() for name, wanted in sorted(asked.items())
                 for verdict in judge_goals(name, comparison, wanted)]
    return {"version": 1, "cells": cells, "comparison": comparison, "verdicts": verdicts, "formulas": dict(FORMULAS)}


def ramp_stop(workload: str, bars: Bars) -> Callable[[str, Sequence[Record]], str | None]:
    """For a ramp under way (`Cell.stop`): (point, its records) → the first bar that it fails, or None."""

    def stop(part: str, records: Sequence[Record]) -> str | None:
        brackets, requests = _sorted(records)
        points = [point for point in _points(workload, _segments(brackets, requests, None), requests)
                  if point["part"] == part]
        # A server without a counter of failed restores must not end a ramp; the report says that it was not measured.
        failing = first_failing({"cell": "", "arm": "", "attempt": None, "void": False, "reasons": [],
                                 "target": {"tier": {"on": False}}, "points": points}, bars)
        return None if failing is None else f"{failing.bar}: {failing.why}"

    return stop


def _own_bars(parameters: Mapping[str, Any]) -> Bars | None:
    bars, goals = parameters.get("bars"), parameters.get("goals")
    return parse_bars(bars or {}, goals or {}) if bars or goals else None


def _sorted(records: Iterable[Record]) -> tuple[list[SegmentRecord], list[RequestRecord]]:
    every = list(records)
    return (sorted((record for record in every if isinstance(record, SegmentRecord)),
                   key=lambda record: (record.opened_s, record.closed_s)),
            sorted((record for record in every if isinstance(record, RequestRecord)), key=_order))


def _order(request: RequestRecord) -> tuple[Any, ...]:
    return (request.due_s, request.sent_s, request.session, request.turn, request.client, request.role,
            request.ended_s, request.prompt_sha256)


# --- segments -------------------------------------------------------------------------------------------------------


def _segments(brackets: Sequence[SegmentRecord], requests: Sequence[RequestRecord],
              goodput: Mapping[str, float] | None) -> list[Document]:
    """Every bracket in order of time, then whatever was sent under a bracket that was never closed."""
    sent: dict[int, list[RequestRecord]] = defaultdict(list)
    unclosed: dict[tuple[str, str], list[RequestRecord]] = defaultdict(list)
    for request in requests:
        own = [i for i, bracket in enumerate(brackets)
               if (bracket.segment, bracket.part) == (request.segment, request.part)]
        if own:  # a segment that was bracketed twice: the later one from its opening on
            sent[max((i for i in own if brackets[i].opened_s <= request.due_s), default=own[0])].append(request)
        else:
            unclosed[request.segment, request.part].append(request)
    return [*(_segment(bracket, sent[i], goodput) for i, bracket in enumerate(brackets)),
            *(_segment(None, left, goodput) for left in unclosed.values())]


def _segment(bracket: SegmentRecord | None, requests: Sequence[RequestRecord],
             goodput: Mapping[str, float] | None) -> Document:
    window_s = None if bracket is None else bracket.window_s or (bracket.closed_s - bracket.opened_s) or None
    grouped = {role for roles in _GROUPS.values() for role in roles}
    groups: dict[str, tuple[str, ...]] = dict(_GROUPS)
    groups.update((role, (role,)) for role in sorted({request.role for request in requests} - grouped))
    counters = _changes(bracket)
    return {
        "segment": bracket.segment if bracket else requests[0].segment,
        "part": bracket.part if bracket else requests[0].part,
        "bracketed": bracket is not None,
        "window_s": window_s,
        "opened_s": bracket.opened_s if bracket else None, "closed_s": bracket.closed_s if bracket else None,
        "drained_s": None if bracket is None or bracket.window_s is None
        else bracket.closed_s - bracket.opened_s - bracket.window_s,
        "requests": len(requests),
        "groups": {name: summary(chosen, window_s=window_s, goodput=goodput) for name, roles in groups.items()
                   if (chosen := [request for request in requests if request.role in roles])},
        "counters": counters,
        "levels": {} if bracket is None else {name: bracket.closing[name] for name in sorted(GAUGES)
                                              if name in bracket.closing},
        "resets": list(bracket.resets) if bracket else [],
        "counter_hit_share": ratio(counters.get("cached_tokens"), counters.get("prompt_tokens")),
        "balance": _balance(bracket),
        "usage_prompt_tokens": sum(request.prompt_tokens or 0 for request in requests),
        "usage_complete": all(request.outcome == "ok" and request.prompt_tokens is not None for request in requests),
    }


def _changes(bracket: SegmentRecord | None) -> dict[str, float]:
    """Counters that both scrapes have. After a reset nothing can be said."""
    if bracket is None or bracket.resets:
        return {}
    return {name: bracket.closing[name] - bracket.opening[name] for name in sorted(bracket.closing)
            if name in bracket.opening and name not in GAUGES}


def _balance(bracket: SegmentRecord | None) -> Document:
    """Whether the server's sums hold in this bracket."""
    if bracket is None or bracket.resets:
        return {"verdict": "not available", "broken": [], "checked": [], "skipped": []}
    found = balance(bracket.opening, bracket.closing)
    verdict = ("broken" if found.broken else "balanced" if found.checked else "not judged" if found.skipped
               else "not available")
    return {"verdict": verdict, "broken": list(found.broken), "checked": list(found.checked),
            "skipped": list(found.skipped)}


def _bracket_state(segments: Sequence[Document], name: str) -> Document | None:
    """What the server counted while nothing of this cell ran; None where it was not bracketed."""
    found = [segment for segment in segments if segment["segment"] == name]
    if not found:
        return None
    last = found[-1]
    return {"hit_share": last["counter_hit_share"], "prompt_tokens": last["counters"].get("prompt_tokens"),
            "cached_tokens": last["counters"].get("cached_tokens"), **last["levels"]}


# --- points ---------------------------------------------------------------------------------------------------------


def _points(workload: str, segments: Sequence[Document], requests: Sequence[RequestRecord]) -> list[Document]:
    return [_point(workload, segment, segments, requests) for segment in segments
            if segment["segment"] in _MEASURED[workload]]


def _point(workload: str, segment: Document, segments: Sequence[Document],
           requests: Sequence[RequestRecord]) -> Document:
    own = [request for request in requests
           if (request.segment, request.part) == (segment["segment"], segment["part"])]
    population = _MAIN.get(workload, "")
    figures = segment["groups"].get(population)
    return {
        "segment": segment["segment"], "part": segment["part"], "window_s": segment["window_s"],
        "number": part_number(segment["part"], own), "population": population,
        "requests": segment["requests"],
        "values": {**_load_values(figures, segment, own), **(rung_values(own) if workload == "ladder" else {})},
        "evicted": evicted(segment, segments, own),
        "restored": restored(segment, own),
    }


def part_number(part: str, requests: Sequence[RequestRecord]) -> int | None:
    """The step of a ramp: the number in its name, else how many clients it had."""
    if found := re.search(r"\d+", part):
        return int(found.group())
    return len({request.client for request in requests}) or None


def _load_values(figures: Document | None, segment: Document,
                 own: Sequence[RequestRecord]) -> dict[str, float | None]:
    """Flat figures of a load's main population, all times from_due but for those that say `answered`. `errors` are of
    every role: failed, or refused until the retries were spent."""
    counters = segment["counters"]
    values: dict[str, float | None] = {
        "restores": counters.get("restores"), "restore_failures": counters.get("restore_failures"),
        "restored_bytes": counters.get("restored_bytes"), "written_bytes": counters.get("written_bytes"),
        "evicted_pages": counters.get("evicted_pages"), "evicted_snapshots": counters.get("evicted_snapshots"),
        "counter_hit_share": segment["counter_hit_share"],
        "counter_host_share": ratio(counters.get("host_tokens"), counters.get("prompt_tokens")),
        "errors": sum(request.outcome in ("error", "refused") for request in own),
    }
    if figures is None:
        return values
    due, answered, spent = figures["from_due"], figures["from_answered"], figures["tokens"]
    good = figures["goodput"]
    return {
        "served": figures["served"], "served_per_s": figures["served_per_s"],
        "turn_s_mean": due["e2e_s"]["mean"], "turn_s_p50": due["e2e_s"]["p50"], "turn_s_p95": due["e2e_s"]["p95"],
        "ttft_s_p50": due["ttft_s"]["p50"], "ttft_s_p95": due["ttft_s"]["p95"],
        "answered_s_mean": answered["e2e_s"]["mean"], "answered_ttft_s_p50": answered["ttft_s"]["p50"],
        "answered_ttft_s_p95": answered["ttft_s"]["p95"],
        "tpot_s_p50": figures["tpot_s"]["p50"], "decode_tok_s_p50": figures["decode_tok_s"]["p50"],
        "hit_share": spent["hit_share"], "device_share": spent["device_share"], "host_share": spent["host_share"],
        "recomputed_share": spent["recomputed_share"],
        "recomputed_per_served": ratio(spent["recomputed"], figures["served"]),
        "retries": figures["retries"], "refused": figures["refused"],
        "goodput_per_s": good["goodput_per_s"] if good else None, **values,
    }


# --- rows -----------------------------------------------------------------------------------------------------------


_COLUMNS = ("t_s", "segment", "part", "role", "client", "session", "turn", "outcome", "retries", "ttft_s", "e2e_s",
            "prompt_tokens", "cached_tokens", "device_tokens", "host_tokens")


def _rows(requests: Sequence[RequestRecord], brackets: Sequence[SegmentRecord]) -> Document:
    """Every request in short, times from_due, `t_s` since the cell began."""
    began = min([*(bracket.opened_s for bracket in brackets), *(request.due_s for request in requests)], default=0.0)
    rows = [[round(request.due_s - began, 6), request.segment, request.part, request.role, request.client,
             request.session, request.turn, request.outcome, len(request.retries),
             None if request.first_token_s is None else round(request.first_token_s - request.due_s, 6),
             round(request.ended_s - request.due_s, 6), request.prompt_tokens, request.cached_tokens,
             request.device_tokens, request.host_tokens] for request in requests]
    return {"columns": list(_COLUMNS), "rows": rows}
