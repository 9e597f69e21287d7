"""The harness's document → tables: what ran, what was compared, refused, counted and judged. Knows no server, no
record and nothing of the published benchmark (`published_tables` does).

`document` is what `bench report` writes as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hostcache.report.tables import MISSING, Table, number, share

Document = Mapping[str, Any]

# --- writing --------------------------------------------------------------------------------------------------------


def seconds(value: float | None) -> str:
    if value is None:
        return MISSING
    return number(value, 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3, " s")


def times(value: float | None) -> str:
    return MISSING if value is None else number(value, 2 if value < 10 else 1 if value < 100 else 0, "×")


def rate(value: float | None) -> str:
    return number(value, 0 if value is not None and value >= 1000 else 1)


def two(one: str, other: str) -> str:
    return f"{one} / {other}"


def quotient(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def label(cell: Document) -> str:
    return f"{cell['cell']} {cell['arm']} {cell['attempt']}"


# --- looking up -----------------------------------------------------------------------------------------------------


def allowed(cell: Document) -> bool:
    """May this cell stand in a table of two arms?"""
    return not any(reason["refuses"] in ("cell", "comparison") for reason in cell["reasons"])


def _group(cell: Document, segment: str, part: str, group: str) -> Document | None:
    return next((each["groups"].get(group) for each in cell["segments"]
                 if (each["segment"], each["part"]) == (segment, part)), None)


# --- what ran -------------------------------------------------------------------------------------------------------


def cells_table(document: Document) -> Table:
    rows = []
    for cell in document["cells"]:
        target, lag = cell["target"], cell["lag"]
        served = sum(group["served"] for each in cell["segments"] for name, group in each["groups"].items()
                     if name not in ("turns",))
        state = cell["state"]
        rows.append((
            label(cell), cell["outcome"], "VOID" if cell["void"] else "yes" if allowed(cell) else "alone",
            " ".join(str(target.get(key) or "") for key in ("engine", "version")).strip() or MISSING,
            str(target.get("arm_confirmed_by") or MISSING), state["start"]["verdict"],
            share((state["before"] or {}).get("hit_share")), share((state["after"] or {}).get("hit_share")),
            number(served), number(None if lag["p99"] is None else 1000 * lag["p99"], 1, " ms"),
            "; ".join(reason["code"] for reason in cell["reasons"]) or MISSING))
    return Table(title="Cells: what ran", rows=tuple(rows), columns=(
        "cell, arm, attempt", "ended", "counts", "engine", "arm confirmed by", "cache at start", "hits before",
        "hits after", "served", "lag p99", "reasons"),
        note="Counts: yes, alone (its figures stand, but in no comparison), VOID (no figure counts).")


def loads_table(document: Document) -> Table | None:
    """Every point of every run by itself, for who measures one server."""
    rows = []
    for cell in document["cells"]:
        for point in cell["points"]:
            found = _group(cell, point["segment"], point["part"], point["population"] or "")
            if found is None:
                continue
            due, hits, decode = found["from_due"], found["tokens"], found["aggregate_decode_tok_s"]
            rows.append((
                f"{label(cell)} {point['part']}".strip(), seconds(found["window_s"]), number(found["served"]),
                number(found["errors"] + found["refused"]), number(found["retries"]),
                rate(per_minute(found["served_per_s"])),
                *(seconds(due["ttft_s"][each]) for each in ("p50", "p95", "p99")),
                *(seconds(due["e2e_s"][each]) for each in ("p50", "p95")), seconds(found["tpot_s"]["p50"]),
                two(seconds(found["itl_s"]["p50"]), seconds(found["itl_s"]["p99"])),
                rate(found["decode_tok_s"]["p50"]), rate(decode),
                share(hits["hit_share"]), two(share(hits["device_share"]), share(hits["host_share"])),
                number(point["values"].get("goodput_per_s"), 2)))
    return Table(
        title="Loads: each run by itself", rows=tuple(rows),
        columns=("cell, arm, attempt, point", "window", "served", "errors", "retries", "a minute", "TTFT p50", "p95",
                 "p99", "E2E p50", "p95", "TPOT p50", "ITL p50 / p99", "decode tok/s", "together", "hit share",
                 "device / host", "goodput/s"),
        note="Times from when a request was due. Decode: p50 over replies, and all streams together. Hit share: of "
             "prompt tokens, by the usage of each request.") if rows else None


def rungs_table(document: Document) -> Table | None:
    """Ladders, each run by itself."""
    rows = [(f"{label(cell)} {rung['part']}", number(rung["prompt_tokens"]), seconds(rung["cold_ttft_s"]),
             rate(rung["prefill_tok_s"]), seconds(rung["reuse_ttft_s"]), seconds(rung["after_evict_ttft_s"]),
             share(rung["after_evict_hit_share"]), number(rung["streams"]), rate(rung["decode_tok_s_p50"]),
             rate(rung["aggregate_decode_tok_s"]))
            for cell in document["cells"] for rung in cell["ladder"] or ()]
    return Table(title="Ladders: each run by itself", rows=tuple(rows), columns=(
        "cell, arm, attempt, rung", "prompt tokens", "TTFT cold", "prefill tok/s", "TTFT again", "TTFT after eviction",
        "hits then", "streams", "decode tok/s", "together")) if rows else None


def answers_table(document: Document) -> Table | None:
    """Equivalence, conversation by conversation."""
    rows = []
    for cell in document["cells"]:
        for row in (cell["equivalence"] or {}).get("rows", ()):
            same = ("–" if each["same"] is None else "yes" if each["same"] else f"no, from token {each['at']}"
                    for each in (row["cold_vs_cold"], row["device_vs_cold"], row["restored_vs_cold"]))
            rows.append((f"{label(cell)} {row['session']}", number(row["prompt_tokens"]), *same,
                         two(number(row["device_tokens"]), number(row["host_tokens"])), seconds(row["cold_ttft_s"]),
                         seconds(row["restored_ttft_s"]), row["verdict"], row["why"] or MISSING))
    return Table(title="Answers: are they the same", rows=tuple(rows), columns=(
        "cell, arm, attempt, conversation", "prompt tokens", "cold = cold", "device = cold", "restored = cold",
        "restored from device / host", "TTFT cold", "restored", "verdict", "why")) if rows else None


def refusals_table(document: Document) -> Table | None:
    rows = [(label(cell), reason["code"], reason["refuses"], reason["text"])
            for cell in document["cells"] for reason in cell["reasons"]]
    explained = {label(cell) for cell in document["cells"] if not allowed(cell)}
    rows += [(name, "not compared", "comparison", each["why"]) for each in document["comparison"]["refused"]
             if (name := f"{each['cell']} {each['arm']} {each['attempt']}") not in explained]
    seen = dict.fromkeys(rows)
    return Table(title="Refused, and why", columns=("cell, arm, attempt", "reason", "refuses", "text"),
                 rows=tuple(seen)) if seen else None


def comparison_table(document: Document) -> Table | None:
    comparison = document["comparison"]
    rows = []
    for row in comparison["rows"]:
        if not row["population"]:
            continue
        values, base, arm = row["values"], row["baseline"], row["arm"]

        def ratio(name: str, values: Document = values) -> str:
            found = values.get(name)
            return times(found["ratio"] if found else None)

        turns, hits = values.get("served_per_s", {}), values.get("hit_share", {})
        paired = row["paired"]
        rows.append((
            f"{row['cell']} {row['part']}".strip(), arm, f"{row['pairs']}",
            two(seconds(row["windows_s"][base]), seconds(row["windows_s"][arm])),
            two(rate(per_minute(turns.get(base))), rate(per_minute(turns.get(arm)))),
            times(turns.get("ratio")), span(turns.get("spread")), span(turns.get("noise")),
            ratio("turn_s_mean"), ratio("ttft_s_p50"), ratio("ttft_s_p95"), ratio("decode_tok_s_p50"),
            two(share(hits.get(base)), share(hits.get(arm))),
            _tier_hits(values, arm),
            points_of(paired["coverage_gain"]), points_of(paired["coverage_noise"], sign=False),
            "measured" if row["benefit"] == "measured" else row["benefit"].partition(":")[0]))
    return Table(
        title=f"Arms against {comparison['baseline']}: loads", rows=tuple(rows),
        columns=("cell, point", "arm", "pairs", "windows", "turns a minute", "turns", "spread", "A/A noise",
                 "turn mean", "TTFT p50", "TTFT p95", "decode", "total coverage", "of it tier hits",
                 "gain, same requests", "its A/A noise", "benefit"),
        note="Turns, times and decode are arm ÷ baseline, from the time a request was due; windows of unequal length "
             "meet as rates. Spread: range over the pairs. Noise: the same ratio between repeated runs of one arm. A "
             "benefit is claimed only where pages were evicted in both arms and restored in one.") if rows else None


def per_minute(value: float | None) -> float | None:
    return None if value is None else 60 * value


def span(pair: Sequence[float] | None) -> str:
    return MISSING if pair is None else f"{pair[0]:.2f} … {pair[1]:.2f}"


def points_of(value: float | None, *, sign: bool = True) -> str:
    return MISSING if value is None else f"{100 * value:{'+' if sign else ''}.1f} pt"


def _tier_hits(values: Document, arm: str) -> str:
    """Of the usage; of the counters, probes and all, where the usage does not say."""
    told, counted = (values.get(name, {}).get(arm) for name in ("host_share", "counter_host_share"))
    return share(counted) + " (counters)" if told is None and counted is not None else share(told)


def readings_table(document: Document, *, brief: bool = False) -> Table | None:
    """Refusals as retries, and as errors. `brief`: where there was one."""
    rows = []
    for cell in document["cells"]:
        for point in cell["points"]:
            found = _group(cell, point["segment"], point["part"], point["population"])
            if found is None or (brief and not (found["retries"] or found["refused"])):
                continue
            retried, wrong = (found["readings"][name] for name in ("as_retries", "as_errors"))
            rows.append((f"{label(cell)} {point['part']}".strip(), number(found["retries"]),
                         number(retried["served"]), number(retried["errors"]), seconds(retried["turn_s_mean"]),
                         number(wrong["served"]), number(wrong["errors"]), seconds(wrong["turn_s_mean"])))
    return Table(
        title="Refusals read both ways", rows=tuple(rows),
        columns=("cell, arm, attempt, point", "retries", *("served", "errors", "turn mean") * 2),
        note="First three: a refusal that was waited out is a retry. Last three: whoever was refused at all is an "
             "error, as for a client that never retries (a lower bound).") if rows else None


def unprimed_table(document: Document) -> Table | None:
    """Sessions that were never primed, apart from the revisits."""
    rows = [(f"{label(cell)} {each['segment']} {each['part']}".strip(), number(found["n"]), number(found["served"]),
             seconds(found["from_due"]["ttft_s"]["p50"]), share(found["tokens"]["hit_share"]),
             number(revisits["n"] if revisits else None),
             seconds(revisits["from_due"]["ttft_s"]["p50"] if revisits else None),
             share(revisits["tokens"]["hit_share"] if revisits else None))
            for cell in document["cells"] for each in cell["segments"]
            if (found := each["groups"].get("never_primed")) for revisits in [each["groups"].get("revisits")]]
    return Table(title="Sessions that were never primed, apart", rows=tuple(rows), columns=(
        "cell, arm, attempt, segment", "visits", "served", "TTFT p50", "hits", "primed: revisits", "TTFT p50", "hits")
        ) if rows else None


def verdicts_table(document: Document, *, brief: bool = False) -> Table | None:
    """`brief`: without the bars of single points that passed."""
    listed = [each for each in document["verdicts"]
              if not (brief and each["kind"] == "point" and each["verdict"] == "pass")]
    rows = tuple((f"{each['cell']} {each['arm']} {each['attempt'] or ''}".strip(), each["part"], each["kind"],
                  each["bar"], each["wants"], number(each["value"], 3),
                  each["verdict"] if each["verdict"] == "pass" else each["verdict"].upper(), each["why"] or MISSING)
                 for each in listed)
    if not rows:
        return None
    left_out = len(document["verdicts"]) - len(listed)
    return Table(title="Verdicts", rows=rows, columns=(
        "cell, arm, attempt", "point", "kind", "bar", "wanted", "value", "verdict", "why"),
        note="A goal is of two arms: a cell that is neutral where it must win has failed, even at zero errors."
             + (f" Not listed: {left_out} bars of single points that passed." if left_out else ""))


_COUNTERS = ("prompt_tokens", "cached_tokens", "device_tokens", "host_tokens", "recomputed_tokens", "generated_tokens",
             "requests", "restores", "restore_failures", "restored_bytes", "written_bytes", "evicted_pages",
             "evicted_snapshots", "refused", "preemptions")


def counters_tables(document: Document) -> list[Table]:
    """One table a cell: what the server counted in each segment, tokens where nothing else is named."""
    made = []
    for cell in document["cells"]:
        named = [name for name in _COUNTERS if any(name in each["counters"] for each in cell["segments"])]
        rows = tuple((f"{each['segment']} {each['part']}".strip(), seconds(each["window_s"]),
                      *(number(each["counters"].get(name)) for name in named), share(each["counter_hit_share"]),
                      "RESET" if each["resets"] else each["balance"]["verdict"],
                      number(each["usage_prompt_tokens"])) for each in cell["segments"] if each["bracketed"])
        if rows:
            short = [name.removesuffix("_tokens").replace("_", " ") for name in named]
            made.append(Table(title=label(cell), rows=rows, columns=(
                "segment", "window", *short, "hits", "balance", "usage: prompt")))
    return made


def environment_tables(document: Document) -> list[Table]:
    """Each different machine once, with the cells that ran on it; then inputs and their digests."""
    machines: dict[tuple[tuple[str, str], ...], list[str]] = {}
    inputs: dict[tuple[str, str], None] = {}
    for cell in document["cells"]:
        machines.setdefault(tuple((key, str(value)) for key, value in sorted(cell["environment"].items())), []).append(
            label(cell))
        inputs.update(dict.fromkeys(cell["inputs"].items()))
    made = [Table(title=f"Machine of {len(cells)} cells" if len(machines) == 1 else f"Machine of {', '.join(cells)}",
                  columns=("", "value"), rows=machine) for machine, cells in machines.items() if machine]
    if inputs:
        made.append(Table(title="Inputs", columns=("input", "sha256"), rows=tuple(inputs)))
    targets = tuple((label(cell), cell["identity"][:12], _pairs(cell["target"]), _pairs(cell["parameters"]))
                    for cell in document["cells"])
    return [*made, Table(title="Targets and parameters", rows=targets,
                         columns=("cell, arm, attempt", "identity", "target", "parameters"))]


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} ({_pairs(value)})" if isinstance(value, Mapping) else f"{key} {value}"
                     for key, value in sorted(values.items()) if value not in (None, "", [], {}))


def formulas_table(document: Document) -> Table:
    return Table(title="Formulas", columns=("figure", "is"), rows=tuple(document["formulas"].items()))
