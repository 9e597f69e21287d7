"""Every figure of a demo from its records alone: `demo.json`. Pure: `demo --from DIR` runs exactly this.

Definitions. A turn counts when it was started in the window and served. Its time is the client's wall time from the
first attempt to the last byte, waits and retries included; TTFT likewise to the first token. Percentiles interpolate
linearly between ranks. Hit share = Σ prompt_cache_hit_tokens ÷ Σ prompt_tokens of the counted turns' usage. Share of
the bound = Δ(device + host) ÷ Δ bound of /v1/stats between the opening and the closing scrape (this includes turns
that were under way when the window opened). Ratios are on ÷ off over all windows of an arm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from statistics import fmean, median
from typing import Any, Literal

from hostcache.client.counters import delta, delta_by_name, read
from hostcache.records import (
    ArmRecord,
    EndRecord,
    EquivalenceRecord,
    Record,
    RunRecord,
    TracedAnswer,
    TurnRecord,
)

NEAR_TIE_MARGIN = 1e-4
NOISE_WIDTH = 0.10
AA_RATIOS_NEEDED = 3
RESTORED_TTFT_BAR = 1 / 50
RESTORED_TTFT_TOKENS = 5_900
"""The TTFT bar speaks of a 6,000-token conversation: one that ends a page before it counts."""

Document = dict[str, Any]
Comparison = Literal["identical", "near_tie", "different"]


def percentile(values: Sequence[float], share: float) -> float | None:
    """Linear interpolation between the closest ranks; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or not denominator else numerator / denominator


def demo_document(records: Iterable[Record]) -> Document:
    """The content of demo.json. Raises ValueError when the records do not start with a run."""
    every = list(records)
    run = next((record for record in every if isinstance(record, RunRecord)), None)
    if run is None:
        raise ValueError("the records hold no run; this is not the folder of a demo")
    arms = [record for record in every if isinstance(record, ArmRecord)]
    turns = [record for record in every if isinstance(record, TurnRecord)]
    rows = [record for record in every if isinstance(record, EquivalenceRecord)]
    end = next((record for record in every if isinstance(record, EndRecord)), None)
    document: Document = {
        "form": run.form,
        "workload": {"model": run.model, "seed": run.seed, **run.workload},
        "pressure": _pressure([arm for arm in arms if arm.stage == "pressure"],
                              [turn for turn in turns if turn.stage == "pressure"]),
        "no_pressure": _no_pressure([arm for arm in arms if arm.stage == "no-pressure"],
                                    [turn for turn in turns if turn.stage == "no-pressure"]),
        "equivalence": _equivalence(rows),
        "version": 1,
        "outcome": end.outcome if end else "cut short",
        "detail": end.detail if end else "the records have no last line",
        "stages": list(run.stages),
        "environment": dict(run.environment),
        "inputs": dict(run.inputs),
        "commands": list(run.commands),
        "hostcache_version": run.hostcache_version,
        "servers": [_server(arm) for arm in arms],
    }
    document["bars"] = _bars(document, run)
    return document


def _server(arm: ArmRecord) -> Document:
    return {"stage": arm.stage, "arm": arm.arm, "index": arm.index, "command": " ".join(arm.command), "log": arm.log,
            "model_revision": arm.model_revision, "pool_tokens": arm.pool_tokens, "page_tokens": arm.page_tokens,
            "host_cache_bytes": arm.host_cache_bytes, "peak_rss_bytes": arm.peak_rss_bytes}


# --- pressure -------------------------------------------------------------------------------------------------------


def _pressure(arms: Sequence[ArmRecord], turns: Sequence[TurnRecord]) -> Document:
    windows = [_window(arm, [turn for turn in turns if turn.arm_index == arm.index]) for arm in arms]
    pooled = {name: _pool(name, [window for window in windows if window["arm"] == name],
                          [turn for turn in turns if turn.arm == name and any(turn.arm_index == a.index for a in arms)])
              for name in ("off", "on")}
    errors = sum(turn.error is not None for turn in turns)
    document: Document = {
        "turns_ratio": None, "avg_time_ratio": None, "hit_share_on": None, "hit_share_over_bound": None,
        "recomputed_share_ratio": None, "errors": errors if arms else None,
        "benefit": _benefit(windows, pooled), "arms": pooled, "windows": windows,
    }
    if document["benefit"] == "measured":
        off, on = pooled["off"], pooled["on"]
        document["turns_ratio"] = ratio(on["turns_per_window"], off["turns_per_window"])
        document["avg_time_ratio"] = ratio(on["avg_s"], off["avg_s"])
        document["hit_share_on"] = on["hit_share"]
        document["hit_share_over_bound"] = on["hit_share_over_bound"]
        document["recomputed_share_ratio"] = ratio(on["recomputed_share"], off["recomputed_share"])
    return document


def _benefit(windows: Sequence[Document], pooled: Mapping[str, Document]) -> str:
    """`measured`, or why no benefit may be reported."""
    if not windows:
        return "not run"
    if not pooled["off"]["windows"] or not pooled["on"]["windows"]:
        return "one arm only: nothing to compare with"
    if any(not window["device_evictions"] for window in windows):
        return "nothing was evicted from the device in one of the windows: no benefit is reported"
    if not pooled["on"]["restores"]:
        return "nothing was restored: no benefit is reported"
    return "measured"


def _window(arm: ArmRecord, turns: Sequence[TurnRecord]) -> Document:
    """One window of one arm, from its own turns and its own scrapes."""
    counted = [turn for turn in turns if turn.phase == "window"]
    opening, closing = arm.opening, arm.closing
    accounting = {name: delta(opening, closing, "accounting", name)
                  for name in ("requests", "prompt_tokens", "device_tokens", "host_tokens", "recomputed_tokens",
                               "bound_tokens")}
    served = _sum(accounting["device_tokens"], accounting["host_tokens"])
    settled_prompt = sum(turn.prompt_tokens for turn in turns
                         if turn.ttft_s is not None and turn.started_s + turn.ttft_s > arm.opened_s)
    return {
        "arm": arm.arm, "index": arm.index, "window_s": arm.window_s,
        "drained_s": arm.settled_s - arm.opened_s - (arm.window_s or 0.0),
        **_turn_figures(counted),
        "errors": sum(turn.error is not None for turn in turns),
        "retries": sum(len(turn.retries) for turn in turns),
        "resent_loss_tokens": sum(turn.resent_loss_tokens for turn in turns),
        "accounting": accounting,
        "served_tokens": served,
        "hit_share_over_bound": ratio(served, accounting["bound_tokens"]),
        "bound_exact": closing.get("accounting", {}).get("bound_exact"),
        "recomputed_by_reason": delta_by_name(opening, closing, "accounting", "recomputed"),
        "usage_prompt_tokens": settled_prompt,
        "device_evictions": delta(opening, closing, "engine", "device_evictions"),
        "deferred_admissions": delta(opening, closing, "engine", "deferred_admissions"),
        "preemptions": delta(opening, closing, "engine", "preemptions"),
        **_tier(opening, closing),
        "peak_rss_bytes": arm.peak_rss_bytes,
    }


def _turn_figures(turns: Sequence[TurnRecord]) -> Document:
    served = [turn for turn in turns if turn.error is None]
    times = [turn.duration_s for turn in served]
    firsts = [turn.ttft_s for turn in served if turn.ttft_s is not None]
    prompt = sum(turn.prompt_tokens for turn in served)
    hit = _total(turn.hit_tokens for turn in served)
    device, host = _total(turn.device_tokens for turn in served), _total(turn.host_tokens for turn in served)
    by_reason: Counter[str] = Counter()
    for turn in served:
        by_reason.update(turn.recomputed or {})
    recomputed = None if hit is None else prompt - hit
    return {
        "turns": len(served), "avg_s": fmean(times) if times else None, "p95_s": percentile(times, 0.95),
        "ttft_p50_s": percentile(firsts, 0.5), "ttft_p95_s": percentile(firsts, 0.95),
        "prompt_tokens": prompt, "hit_tokens": hit, "device_tokens": device, "host_tokens": host,
        "recomputed_tokens": recomputed, "recomputed": dict(sorted(by_reason.items())),
        "hit_share": ratio(hit, prompt), "recomputed_share": ratio(recomputed, prompt),
    }


def _pool(name: str, windows: Sequence[Document], turns: Sequence[TurnRecord]) -> Document:
    """All windows of one arm together."""
    figures = _turn_figures([turn for turn in turns if turn.phase == "window"])
    restores, restore_s = (_total(window[key] for window in windows) for key in ("restores", "restore_s"))
    return {
        "arm": name, "windows": len(windows), **figures,
        "turns_per_window": ratio(figures["turns"], len(windows)),
        "hit_share_over_bound": ratio(_total(window["served_tokens"] for window in windows),
                                      _total(window["accounting"]["bound_tokens"] for window in windows)),
        "restores": restores, "restore_s": restore_s,
        "restore_mean_ms": None if restore_s is None or not restores else 1000 * restore_s / restores,
        **{key: _total(window[key] for window in windows)
           for key in ("store_bytes", "restore_bytes", "bytes_moved", "errors", "retries", "resent_loss_tokens",
                       "device_evictions")},
    }


def _tier(opening: Mapping[str, Any], closing: Mapping[str, Any]) -> Document:
    """What the tier did between two scrapes. With the tier off there is none: None, and 0 bytes moved."""
    if closing.get("host_cache") is None:
        return {"restores": None, "restore_s": None, "store_bytes": None, "restore_bytes": None, "bytes_moved": 0,
                "waits": 0, "restore_failures": None, "restore_timeouts": None, "evict_drops_uncached": None}
    counters = {name: delta(opening, closing, "host_cache", name)
                for name in ("restores", "store_bytes", "restore_bytes", "restore_failures", "restore_timeouts",
                             "evict_drops_uncached", "evict_waits", "prefill_holds")}
    waits = _sum(counters.pop("evict_waits"), counters.pop("prefill_holds"))
    return {**counters, "waits": waits, "restore_s": _restore_seconds(opening, closing),
            "bytes_moved": _sum(counters["store_bytes"], counters["restore_bytes"])}


def _restore_seconds(opening: Mapping[str, Any], closing: Mapping[str, Any]) -> float | None:
    """Seconds spent in restores: the sum of the restore latency histogram, in ms or s as the server names it."""
    tier = closing.get("host_cache") or {}
    for name, value in tier.items():
        if not (isinstance(name, str) and name.startswith("restore") and isinstance(value, Mapping)):
            continue
        for key, scale in (("sum_s", 1.0), ("sum_ms", 1e-3), ("sum", 1e-3 if name.endswith("_ms") else 1.0)):
            if read(closing, "host_cache", name, key) is not None:
                seconds = delta(opening, closing, "host_cache", name, key)
                return None if seconds is None else seconds * scale
    return None


# --- no pressure ----------------------------------------------------------------------------------------------------


def _no_pressure(arms: Sequence[ArmRecord], turns: Sequence[TurnRecord]) -> Document:
    fixed = [turn for turn in turns if turn.phase == "fixed"]
    servers = []
    for arm in arms:
        own = [turn for turn in fixed if turn.arm_index == arm.index]
        servers.append({"arm": arm.arm, "index": arm.index, "turns": len(own),
                        "work_s": sum(turn.duration_s for turn in own),
                        "errors": sum(turn.error is not None for turn in own),
                        "device_evictions": delta(arm.opening, arm.closing, "engine", "device_evictions"),
                        **_tier(arm.opening, arm.closing), "replies": [turn.reply_sha256 for turn in own]})
    off = [server["work_s"] for server in servers if server["arm"] == "off" and server["work_s"]]
    on = [server for server in servers if server["arm"] == "on"]
    aa = [a / b for a, b in permutations(off, 2)]
    replies = [server.pop("replies") for server in servers]
    return {
        "ratio": ratio(median([server["work_s"] for server in on]), median(off)) if on and off else None,
        "noise": [min(aa), max(aa)] if aa else None,
        "aa_ratios": sorted(a / b for i, a in enumerate(off) for b in off[i + 1:]),
        "bytes_moved": _total(server["bytes_moved"] for server in on) if on else None,
        "waits": _total(server["waits"] for server in on) if on else None,
        "identical": (bool(on) and all(reply == replies[0] and "" not in reply for reply in replies)
                      if servers else None),
        "servers": servers,
    }


# --- equivalence ----------------------------------------------------------------------------------------------------


def compare_text(one: TracedAnswer, other: TracedAnswer) -> tuple[Comparison, int | None, float | None]:
    """How two greedy answers compare; the position and margin of the first divergence.

    The margin is the larger of the two: a near-tie is one on both sides.
    """
    for position, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=False)):
        if a != b:
            margin = max(one.margins[position], other.margins[position])
            return ("near_tie" if margin < NEAR_TIE_MARGIN else "different"), position, margin
    if len(one.token_ids) != len(other.token_ids) or not one.token_ids:
        return "different", min(len(one.token_ids), len(other.token_ids)), None
    return "identical", None, None


def judge_row(row: EquivalenceRecord) -> Document:
    """One row of the equivalence table. `verdict` is identical, near_tie, different, or refused (with the reason)."""
    judged: Document = {
        "conversation": row.conversation, "shape": row.shape, "boundary": row.boundary, "tokens": row.tokens,
        "verdict": "refused", "reason": None, "bit_for_bit": None, "restored_vs_cold": None, "divergence": None,
        "margin": None, "cold_vs_cold": None, "device_tokens": None, "host_tokens": None,
        "cold_ttft_s": row.cold.ttft_s if row.cold else None,
        "restored_ttft_s": row.restored.ttft_s if row.restored else None, "ttft_ratio": None,
        "restores": row.restores, "restore_submissions": row.restore_submissions,
        "kept_tokens": row.kept_tokens, "kept_expected_tokens": row.kept_expected_tokens,
    }
    if row.cold is None or row.cold_again is None or row.device is None or row.restored is None:
        judged["reason"] = row.error or "an answer is missing"
        return judged
    judged["device_tokens"], judged["host_tokens"] = row.restored.device_tokens, row.restored.host_tokens
    judged["cold_vs_cold"] = compare_text(row.cold, row.cold_again)[0]
    if reason := _no_proof(row, row.cold, row.cold_again, row.device, row.restored):
        judged["reason"] = reason
        return judged
    judged["ttft_ratio"] = ratio(row.restored.ttft_s, row.cold.ttft_s)
    judged["bit_for_bit"] = (row.restored.digests == row.device.digests
                             and row.restored.token_ids == row.device.token_ids)
    judged["restored_vs_cold"], judged["divergence"], judged["margin"] = compare_text(row.restored, row.cold)
    judged["verdict"] = judged["restored_vs_cold"] if judged["bit_for_bit"] else "different"
    if not judged["bit_for_bit"]:
        judged["reason"] = "restored and device-hit logits differ"
    return judged


def _no_proof(row: EquivalenceRecord, cold: TracedAnswer, cold_again: TracedAnswer, device: TracedAnswer,
              restored: TracedAnswer) -> str | None:
    """Why the row proves nothing; None when every answer came from where it must."""
    if any(answer.device_tokens or answer.host_tokens for answer in (cold, cold_again)):
        return "a cold answer was not cold"
    if device.host_tokens or not device.device_tokens:
        return "the device reference was not served from the device"
    if restored.device_tokens >= row.page_tokens:
        return f"{restored.device_tokens} tokens were still on the device: not a restore"
    if not restored.host_tokens:
        return f"nothing was restored ({', '.join(sorted(restored.recomputed)) or 'no reason given'})"
    if restored.host_tokens + restored.device_tokens != device.device_tokens:
        return (f"restored {restored.host_tokens} tokens, the device hit was {device.device_tokens}: "
                "not the same batch shape")
    if not restored.digests or len(restored.digests) != len(restored.token_ids):
        return "the server traced no logits"
    if row.kept_expected_tokens is not None and (row.kept_tokens or 0) < row.kept_expected_tokens:
        return f"the answer was not kept: {row.kept_tokens} of {row.kept_expected_tokens} tokens"
    return None


def _equivalence(rows: Sequence[EquivalenceRecord]) -> Document:
    judged = [judge_row(row) for row in rows]
    verdicts = Counter(row["verdict"] for row in judged)
    plain = [row for row in judged if row["ttft_ratio"] is not None and row["shape"] == "plain"]
    longest = max(plain, key=lambda row: row["tokens"], default=None)
    submissions = [row["restore_submissions"] / row["restores"] for row in judged
                   if row["restores"] and row["restore_submissions"] is not None]
    return {
        "identical": verdicts["identical"] if rows else None,
        "near_ties": verdicts["near_tie"] if rows else None,
        "total": len(rows) if rows else None,
        "different": verdicts["different"] if rows else None,
        "refused": verdicts["refused"] if rows else None,
        "bit_for_bit": sum(row["bit_for_bit"] is True for row in judged) if rows else None,
        "cold_vs_cold_identical": sum(row["cold_vs_cold"] == "identical" for row in judged) if rows else None,
        "longest": None if longest is None else {
            key: longest[key] for key in ("tokens", "cold_ttft_s", "restored_ttft_s", "ttft_ratio")},
        "submissions_per_restore": {"mean": fmean(submissions), "max": max(submissions)} if submissions else None,
        "rows": judged,
    }


# --- bars -----------------------------------------------------------------------------------------------------------


def _bars(document: Document, run: RunRecord) -> list[Document]:
    """Each bar of the issue beside its value. Bars on time and size are judged in the full form only; those that a
    noisy machine cannot excuse (errors, bytes, waits, sameness) in every form."""
    full = run.form == "full"
    pressure, calm, same = document["pressure"], document["no_pressure"], document["equivalence"]
    ran = set(run.stages)
    bars = []

    def bar(stage: str, name: str, want: str, value: Any, met: bool | None, *, always: bool = False,
            note: str | None = None) -> None:
        if stage not in ran:
            verdict = "not run"
        elif met is None:
            verdict = note or "not measured"
        elif not (full or always):
            verdict = "shown, not judged"
        else:
            verdict = "pass" if met else "miss"
        bars.append({"stage": stage, "name": name, "bar": want, "value": value, "verdict": verdict})

    def at_least(value: float | None, least: float) -> bool | None:
        return None if value is None else value >= least

    def at_most(value: float | None, most: float) -> bool | None:
        return None if value is None else value <= most

    why = pressure["benefit"]
    bar("pressure", "turns, on ÷ off", "at least 3.1", pressure["turns_ratio"], at_least(pressure["turns_ratio"], 3.1),
        note=why)
    bar("pressure", "average time per turn, on ÷ off", "at most 1/6.1 = 0.164", pressure["avg_time_ratio"],
        at_most(pressure["avg_time_ratio"], 1 / 6.1), note=why)
    bar("pressure", "hit share with the tier", "at least 0.95", pressure["hit_share_on"],
        at_least(pressure["hit_share_on"], 0.95), note=why)
    bar("pressure", "hit share over the bound", "at least 0.98", pressure["hit_share_over_bound"],
        at_least(pressure["hit_share_over_bound"], 0.98), note=why)
    bar("pressure", "recomputed share, on ÷ off", "at most 0.25", pressure["recomputed_share_ratio"],
        at_most(pressure["recomputed_share_ratio"], 0.25), note=why)
    bar("pressure", "errors", "0", pressure["errors"],
        None if pressure["errors"] is None else pressure["errors"] == 0, always=True)
    noise, measured = calm["noise"], calm["ratio"]
    enough = len(calm["aa_ratios"]) >= AA_RATIOS_NEEDED
    narrow = noise is not None and noise[1] - noise[0] <= NOISE_WIDTH
    inside = None if measured is None or noise is None else noise[0] <= measured <= noise[1]
    text = ("not measured" if noise is None else
            f"inside {noise[0]:.4f} … {noise[1]:.4f} ({len(calm['aa_ratios'])} A/A ratios)")
    bar("no-pressure", "time of the same work, on ÷ off", text, measured,
        inside if narrow and (enough or not full) else None,
        note="not measurable: the A/A range is wider than 10 %" if noise is not None and not narrow
        else "not measurable: fewer than 3 A/A ratios")
    bar("no-pressure", "bytes moved", "0", calm["bytes_moved"],
        None if calm["bytes_moved"] is None else calm["bytes_moved"] == 0, always=True)
    bar("no-pressure", "waits", "0", calm["waits"], None if calm["waits"] is None else calm["waits"] == 0, always=True)
    bar("no-pressure", "outputs identical", "yes", calm["identical"], calm["identical"], always=True)
    total = same["total"]
    bar("equivalence", "restored = device hit, bit for bit", "all", same["bit_for_bit"],
        None if total is None else same["bit_for_bit"] == total, always=True)
    bar("equivalence", "restored = cold, or a named near-tie", "all", _sum(same["identical"], same["near_ties"]),
        None if total is None else same["identical"] + same["near_ties"] == total, always=True)
    bar("equivalence", "conversations", "20", total, at_least(total, 20))
    longest = same["longest"]
    long_enough = longest is not None and longest["tokens"] >= RESTORED_TTFT_TOKENS
    bar("equivalence", "restored TTFT ÷ cold TTFT at 6,000 tokens", "at most 1/50 = 0.02",
        longest["ttft_ratio"] if longest else None,
        at_most(longest["ttft_ratio"], RESTORED_TTFT_BAR) if longest is not None and long_enough else None,
        note="not measured: no plain conversation of 6,000 tokens")
    return bars


def missed(document: Document) -> list[str]:
    """Names of the bars that --strict does not let pass: missed, or not measured although their stage ran."""
    return [bar["name"] for bar in document["bars"]
            if bar["verdict"] not in ("pass", "not run", "shown, not judged")
            and (document["form"] == "full" or bar["verdict"] == "miss")]


def _total(values: Iterable[float | None]) -> Any:
    """The sum; None when there is nothing or one of them is absent (absent is not 0)."""
    listed = list(values)
    if not listed or any(value is None for value in listed):
        return None
    return sum(value for value in listed if value is not None)


def _sum(*values: float | None) -> Any:
    return _total(values)
