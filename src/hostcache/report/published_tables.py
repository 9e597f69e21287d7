"""Every table of the published benchmark, with this run's numbers beside it. Knows no server and no record.

`document` is what `bench report` writes as JSON; `published` is the published fleet's figures as their JSON file holds
them, handed in. Absolute figures of two machines are not comparable, so what stands beside each other are ratios.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from hostcache.report import published_rows as seed
from hostcache.report.bench_tables import (
    Document,
    allowed,
    per_minute,
    quotient,
    rate,
    seconds,
    span,
    times,
    two,
)
from hostcache.report.tables import MISSING, Table, number, share

_KINDS = (("Equivalence", r"equiv"), ("Large rung", r"large|\b1m\b"), ("Pilot", r"pilot|thrash"),
          ("B3", r"\bb3\b|recovery"), ("B4", r"\bb4\b|ceiling"), ("B5", r"\bb5\b|agent"),
          ("B1", r"\bb1\b|overhead|ladder"), ("B2", r"\bb2\b|\br[1-9]\b|rotat"))


def kind_of(cell: str) -> str:
    """Which cell of the published benchmark this is a form of, by its name; empty where it is none."""
    name = cell.lower().replace("_", "-").replace("-", " ")
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name)), "")


class Lookup:
    """Cells and comparison rows of one document by kind of cell, arm and point."""

    def __init__(self, document: Document) -> None:
        self.baseline: str = document["comparison"]["baseline"]
        self.rows: Sequence[Document] = document["comparison"]["rows"]
        self.cells: Sequence[Document] = [cell for cell in document["cells"] if allowed(cell)]

    def of(self, kind: str, arm: str | None = None, match: str = "") -> list[Document]:
        return [cell for cell in self.cells if kind_of(cell["cell"]) == kind and (arm is None or cell["arm"] == arm)
                and re.search(match, cell["cell"].lower())]

    def compared(self, kind: str, match: str = "") -> list[Document]:
        return [row for row in self.rows if kind_of(row["cell"]) == kind and re.search(match, row["cell"].lower())]

    def at(self, cells: Iterable[Document], part: str, value: str) -> float | None:
        """The median over the cells' points of that part."""
        known = [found for cell in cells for point in cell["points"] if point["part"] == part
                 and (found := point["values"].get(value)) is not None]
        return median(known) if known else None


def published_tables(document: Document, published: Document) -> list[Table]:
    """Every table of the published benchmark. One without cells of this run says so in its rows."""
    look = Lookup(document)
    return [overview_table(document, look), restore_table(look, published), rotation_table(look, published),
            ladder_table(look), passes_table(look), *decode_tables(look), ramp_table(look, published),
            ramp_ratio_table(look, published)]


def overview_table(document: Document, look: Lookup) -> Table:
    rows = []
    for kind, question, result in seed.CELLS:
        cells = look.of(kind)
        ours = _OVERVIEW[kind](look) if cells else "not run"
        void = sum(kind_of(cell["cell"]) == kind and not allowed(cell) for cell in document["cells"])
        verdicts = [each["verdict"] for each in document["verdicts"] if kind_of(each["cell"]) == kind]
        said = f"{verdicts.count('pass')} of {len(verdicts)} passed" if verdicts else MISSING
        rows.append((kind, question, ours + (f"; {void} runs refused" if void else ""), result, said))
    return Table(title="Cells: the published benchmark and this run", rows=tuple(rows),
                 columns=("cell", "question", "this run", "published", "bars"))


def _mean_of(rows: Iterable[Document], value: str) -> float | None:
    known = [found for row in rows if (found := row["values"].get(value, {}).get("ratio")) is not None]
    return sum(known) / len(known) if known else None


def _say_overhead(look: Lookup) -> str:
    rows = look.compared("B1")
    ratios = [row["values"]["prefill_tok_s"]["ratio"] for row in rows
              if row["values"].get("prefill_tok_s", {}).get("ratio") is not None]
    if not ratios:
        return "no pair of arms"
    mean = times(_mean_of(rows, "prefill_tok_s"))
    return f"prefill {mean} on average, {min(ratios):.2f} to {max(ratios):.2f} per rung"


def _say_load(kind: str) -> Callable[[Lookup], str]:
    def say(look: Lookup) -> str:
        rows = look.compared(kind)
        if not rows:
            return "no pair of arms"
        told = [f"{row['cell']} {row['part']}".strip() + f": {times(_ratio(row, 'served_per_s'))} the turns, "
                f"TTFT p50 {times(_ratio(row, 'ttft_s_p50'))}"
                + ("" if row["benefit"] == "measured" else " (no benefit claimed)") for row in rows]
        errors = sum(point["values"].get("errors") or 0 for cell in look.of(kind) for point in cell["points"])
        return f"{'; '.join(told)}; {errors} errors"
    return say


def _ratio(row: Document, value: str) -> float | None:
    found: float | None = row["values"].get(value, {}).get("ratio")
    return found


def _say_ramp(look: Lookup) -> str:
    rows = look.compared("B5")
    if not rows:
        return "no pair of arms"
    last = rows[-1]
    return (f"{times(_ratio(last, 'served_per_s'))} the turns at {times(_inverse(_ratio(last, 'answered_s_mean')))} "
            f"lower average time at {last['number']} agents"
            + ("" if last["benefit"] == "measured" else f" ({last['benefit']})"))


def _inverse(value: float | None) -> float | None:
    return quotient(1.0, value)


def _say_recovery(look: Lookup) -> str:
    told = []
    for cell in look.of("B3", "on") or look.of("B3"):
        for each in cell["segments"]:
            if each["segment"] in ("recovery", "observe") and (found := each["groups"].get("revisits")):
                spent = found["tokens"]
                device = f" and {spent['device_requests']} still on the device" if spent["device_requests"] else ""
                told.append(f"{each['segment']}: {found['served']} revisits, {spent['restored_requests'] or 0} restored"
                            f"{device}, {share(spent['hit_share'])} hits, TTFT p50 "
                            f"{seconds(found['from_answered']['ttft_s']['p50'])}, "
                            f"{found['errors'] + found['refused']} errors")
    return "; ".join(told) or "no recovery segment"


def _say_rung(look: Lookup) -> str:
    rows = [row for row in _restores(look) if row["kind"] == "Large rung"]
    if not rows:
        return "no restored rung"
    best = max(rows, key=lambda row: row["tokens"])
    return f"{best['tokens']:,.0f} tokens: {seconds(best['cold'])} cold, {seconds(best['restored'])} restored " \
           f"({times(best['ratio'])})"


def _say_same(look: Lookup) -> str:
    found = [cell["equivalence"] for cell in look.of("Equivalence") if cell["equivalence"]]
    if not found:
        return "no equivalence cell"
    total, same = (sum(each[name] for each in found) for name in ("total", "identical"))
    cold = sum(each["cold_vs_cold_identical"] for each in found)
    compared = sum(each["cold_vs_cold_compared"] for each in found)
    return (f"{same} of {total} identical, {sum(each['different'] for each in found)} different, "
            f"{sum(each['unproven'] for each in found)} without proof; cold against cold {cold} of {compared}")


_OVERVIEW: Mapping[str, Callable[[Lookup], str]] = {
    "B1": _say_overhead, "Pilot": _say_load("Pilot"), "B2": _say_load("B2"), "B3": _say_recovery, "B4": _say_load("B4"),
    "B5": _say_ramp, "Large rung": _say_rung, "Equivalence": _say_same,
}


def _restores(look: Lookup) -> list[dict[str, Any]]:
    """Conversations that were seen cold and restored, by size; the median of those of one name."""
    found: list[dict[str, Any]] = []
    for cell in look.cells:
        kind = kind_of(cell["cell"])
        for row in (cell["equivalence"] or {}).get("rows", ()):
            if row["verdict"] != "unproven" and row["ttft_ratio"] is not None and row["prompt_tokens"]:
                found.append({"kind": kind, "name": f"{row['prompt_tokens']:,} tokens ({cell['cell']})",
                              "tokens": row["prompt_tokens"], "cold": row["cold_ttft_s"],
                              "restored": row["restored_ttft_s"], "ratio": row["ttft_ratio"]})
        for row in cell["ladder"] or ():
            if row["restore_ratio"] is not None:
                name = f"{row['prompt_tokens']:,.0f} tokens ({cell['cell']}, {row['part']})"
                found.append({"kind": kind, "name": name, "tokens": row["prompt_tokens"],
                              "cold": row["cold_ttft_s"], "restored": row["after_evict_ttft_s"],
                              "ratio": row["restore_ratio"]})
    named = {name: [row for row in found if row["name"] == name] for name in {row["name"] for row in found}}
    merged = [{**rows[0], **{key: median([row[key] for row in rows]) for key in ("cold", "restored", "ratio")}}
              for rows in named.values()]
    return sorted(merged, key=lambda row: (row["tokens"], row["name"]))


def restore_table(look: Lookup, published: Document) -> Table:
    ours = _restores(look)
    theirs = sorted(published["restore"], key=lambda row: row["tokens"])
    padded = [None] * max(0, len(ours) - len(theirs)) + theirs[-len(ours):] if ours else theirs
    rows: list[tuple[str, ...]] = [
        (row["name"], seconds(row["cold"]), seconds(row["restored"]), times(row["ratio"]), *_published_restore(other))
        for row, other in zip(ours, padded, strict=False)]
    rows = rows or [("not run", MISSING, MISSING, MISSING, *_published_restore(other)) for other in theirs]
    revisits = [row for row in look.compared("Pilot") + look.compared("B2", r"r1\b") if row["benefit"] == "measured"]
    for row in revisits[:1]:
        value = row["values"]["answered_ttft_s_p50"]
        rows.insert(0, (f"revisits of {row['cell']}, p50, the new turn in it", seconds(value[row["baseline"]]),
                        seconds(value[row["arm"]]), times(_inverse(value["ratio"])), "~10k tokens", "4.5×"))
    return Table(title="Restore against cold prefill", rows=tuple(rows), columns=(
        "conversation", "cold prefill", "restored", "cold ÷ restored", "published conversation", "published ratio"),
        note="TTFT of the attempt that was answered. The published conversations stand beside ours by size, the "
             "largest beside the largest.")


def _published_restore(row: Document | None) -> tuple[str, str]:
    return (MISSING, MISSING) if row is None else (f"{row['tokens']:,} tokens", times(float(row["ratio"])))


def rotation_table(look: Lookup, published: Document) -> Table:
    rows = []
    for other in published["rotation"]:
        name = other["cell"]
        match = rf"\b{name.lower()}\b"
        cells = {arm: look.of("B2", arm, match) for arm in (look.baseline, "on")}
        compared = next(iter(look.compared("B2", match)), None)
        theirs = (times(quotient(other["revisits_on"] / other["window_on_s"],
                                  other["revisits_off"] / other["window_off_s"])),
                  times(quotient(float(other["ttft_p50_off"]), other["ttft_p50_on"])), share(other["hit_share_on"]))
        if not any(cells.values()):
            rows.append((name, "not run", *[MISSING] * 9, theirs[0], MISSING, theirs[1], MISSING, theirs[2]))
            continue

        def both(value: str, write: Callable[[float | None], str], cells: Any = cells) -> str:
            return two(*(write(_over_parts(look, chosen, value)) for chosen in cells.values()))

        rows.append((
            name, _working_set([*cells["on"], *cells[look.baseline]]), both("served", number),
            both("served_per_s", lambda value: rate(per_minute(value))), both("answered_ttft_s_p50", seconds),
            both("answered_ttft_s_p95", seconds), both("decode_tok_s_p50", rate), both("hit_share", share),
            share(_over_parts(look, cells["on"], "host_share")), _restore_mean(cells["on"]),
            times(_ratio(compared, "served_per_s") if compared else None), theirs[0],
            times(_inverse(_ratio(compared, "answered_ttft_s_p50")) if compared else None), theirs[1],
            share(_over_parts(look, cells["on"], "hit_share")), theirs[2]))
    return Table(title="Steady rotation R1 to R5", rows=tuple(rows), columns=(
        "cell", "working set", "revisits off / on", "a minute off / on", "TTFT p50 off / on", "TTFT p95 off / on",
        "decode p50 off / on", "hit share off / on", "tier hits on", "restore mean", "revisits on ÷ off", "published",
        "TTFT p50 off ÷ on", "published", "hit share on", "published"),
        note="Revisits of primed sessions in the steady segment, as rates where the windows differ (published: 300 s "
             "off, 600 s on). TTFT of the attempt that was answered. The published hit share of a rotation is host "
             "hits ÷ device-miss lookups; ours is total coverage, tier hits beside it.")


def _over_parts(look: Lookup, cells: Sequence[Document], value: str) -> float | None:
    parts = dict.fromkeys(point["part"] for cell in cells for point in cell["points"])
    known = [found for part in parts if (found := look.at(cells, part, value)) is not None]
    return median(known) if known else None


def _working_set(cells: Sequence[Document]) -> str:
    """Sessions × median prompt over the users of the steady segment."""
    for cell in cells:
        for each in cell["segments"]:
            found = each["groups"].get("revisits") if each["segment"] == "steady" else None
            if found and found["served"] and found["tokens"]["prompt"]:
                mean = found["tokens"]["prompt"] / found["served"]
                return f"{found['sessions']} × {mean:,.0f}, {found['clients']} users"
    return MISSING


def _restore_mean(cells: Sequence[Document]) -> str:
    known = [found["mean_s"] for cell in cells if (found := cell["restore_histogram"])
             and found["source"].startswith("counter") and found["mean_s"] is not None]
    return number(1000 * median(known), 1, " ms") if known else MISSING


def _rungs(look: Lookup, kind: str = "B1") -> list[Document]:
    """Rows of the comparison that are prompt rungs."""
    return [row for row in look.compared(kind) if row["values"].get("prefill_tok_s", {}).get("ratio") is not None]


def _corpus(part: str) -> str:
    return next((name for name in ("prose", "code") if name in part.lower()), part)


def ladder_table(look: Lookup) -> Table:
    """Cold rungs off and on. With several passes: the medians."""
    rows = []
    for corpus in ("prose", "code", ""):
        ours = sorted((row for row in _rungs(look) if _corpus(row["part"]) == corpus
                       or (not corpus and _corpus(row["part"]) not in ("prose", "code"))),
                      key=lambda row: row["values"]["prompt_tokens"][row["arm"]] or 0)
        theirs = [other for other in seed.NO_OVERHEAD if other[0] == corpus]
        for i in range(max(len(ours), len(theirs))):
            own = _rung_cells(ours[i]) if i < len(ours) else ("not run", *[MISSING] * 5)
            rows.append((corpus or own[0], *own[1:], *_published_rung(theirs[i] if i < len(theirs) else None)))
    return Table(title="No overhead: cold ladders", rows=tuple(rows), columns=(
        "corpus", "prompt tokens", "TTFT off", "TTFT on", "on ÷ off", "prefill off / on tok/s", "published prompt",
        "published on ÷ off", "published prefill off / on"),
        note=f"Rungs stand beside the published ones by order of size. Prefill on ÷ off: {_prefill_mean(look)} on "
             "average; published 0.99× over the matched passes.")


def _prefill_mean(look: Lookup) -> str:
    return times(_mean_of(_rungs(look), "prefill_tok_s"))


def _rung_cells(row: Document) -> tuple[str, ...]:
    base, arm, values = row["baseline"], row["arm"], row["values"]
    return (row["part"], number(values["prompt_tokens"][arm]), seconds(values["cold_ttft_s"][base]),
            seconds(values["cold_ttft_s"][arm]), times(values["cold_ttft_s"]["ratio"]),
            two(rate(values["prefill_tok_s"][base]), rate(values["prefill_tok_s"][arm])))


def _published_rung(row: tuple[str, int, float, float, int, int] | None) -> tuple[str, str, str]:
    if row is None:
        return (MISSING, MISSING, MISSING)
    return (number(row[1]), times(row[3] / row[2]), two(number(row[4]), number(row[5])))


def passes_table(look: Lookup) -> Table:
    """Each pair of arms of each rung: the alternated passes. A pass stands beside a published one, its first corpus's
    rungs beside the published rungs by order of size."""
    rows: list[tuple[str, ...]] = []
    passes = sorted({attempt for row in _rungs(look) for attempt in row["attempts"]})
    for index, attempt in enumerate(passes):
        theirs = [row for row in seed.PASSES if row[0] == index + seed.PASSES[0][0]]
        own = sorted((row for row in _rungs(look) if attempt in row["attempts"]), key=_corpus_and_size)
        for i, row in enumerate(own):
            sides = {arm: [cell for cell in look.of("B1", arm) if cell["cell"] == row["cell"]
                           and cell["attempt"] == attempt] for arm in (row["baseline"], row["arm"])}
            prefill, ttft = ([look.at(cells, row["part"], value) for cells in sides.values()]
                             for value in ("prefill_tok_s", "cold_ttft_s"))
            other = theirs[i] if i < len(theirs) and _corpus(row["part"]) == _corpus(own[0]["part"]) else None
            rows.append((f"{attempt} {row['part']}", number(look.at(sides[row["arm"]], row["part"], "prompt_tokens")),
                         two(*map(rate, prefill)), times(quotient(prefill[1], prefill[0])), two(*map(seconds, ttft)),
                         *_published_pass(other)))
        rows += _pass_decode(look, attempt, theirs[0][0] if theirs else None)
    for their_pass, known in seed.PASS_DECODE.items() if len(passes) < len(seed.PASS_DECODE) else ():
        if their_pass >= seed.PASSES[0][0] + len(passes):
            rows += [("not run", *[MISSING] * 4, *_published_pass(row)) for row in seed.PASSES if row[0] == their_pass]
            rows.append(("not run: single-stream decode", *[MISSING] * 4, f"pass {their_pass}",
                         times(known[1] / known[0])))
    return Table(title="A/B/A passes: the arms alternated", rows=tuple(rows), columns=(
        "pass, rung", "prompt tokens", "prefill off / on tok/s", "on ÷ off", "TTFT off / on", "published pass, prompt",
        "published on ÷ off"))


def _corpus_and_size(row: Document) -> tuple[bool, str, float]:
    corpus = _corpus(row["part"])
    return (corpus != "prose", corpus, row["values"]["prompt_tokens"][row["arm"]] or 0)


def _published_pass(row: tuple[int, int, int, int, float, float] | None) -> tuple[str, str]:
    return (MISSING, MISSING) if row is None else (f"{row[0]}, {row[1]:,}", times(row[3] / row[2]))


def _pass_decode(look: Lookup, attempt: int, published_pass: int | None) -> list[tuple[str, ...]]:
    """One stream's decode of this pass."""
    for row in look.compared("B1"):
        if row["values"].get("streams", {}).get(row["arm"]) != 1 or attempt not in row["attempts"]:
            continue
        ratios = row["values"]["decode_tok_s_mean"]["ratios"]
        place = row["attempts"].index(attempt)
        known = None if published_pass is None else seed.PASS_DECODE.get(published_pass)
        return [(f"{attempt} single-stream decode", MISSING, MISSING,
                 times(ratios[place] if place < len(ratios) else None), MISSING,
                 MISSING if known is None else f"pass {published_pass}",
                 MISSING if known is None else times(known[1] / known[0]))]
    return []


def decode_tables(look: Lookup) -> list[Table]:
    """Decode at 1, 3 and 6 streams."""
    rows = []
    for row in look.compared("B1"):
        streams = row["values"].get("streams", {}).get(row["arm"])
        if not streams:
            continue
        base, arm = row["baseline"], row["arm"]
        each, together = row["values"]["decode_tok_s_p50"], row["values"]["aggregate_decode_tok_s"]
        theirs = ", ".join(f"{corpus} {times(on / off)}" for corpus, (off, on) in seed.SIX_STREAMS.items()) \
            if streams == 6 else MISSING
        rows.append((f"{streams:.0f}", row["part"], two(rate(each[base]), rate(each[arm])), times(each["ratio"]),
                     two(rate(together[base]), rate(together[arm])), times(together["ratio"]), theirs))
    return [Table(title="No overhead: decode", rows=tuple(rows), columns=(
        "streams", "rung", "per stream off / on tok/s", "on ÷ off", "together off / on tok/s", "on ÷ off",
        "published, together"))] if rows else []


# --- the ramp -------------------------------------------------------------------------------------------------------


def ramp_points(look: Lookup) -> list[Document]:
    """One point a part of the ramp's cells, by number."""
    found = {point["part"]: point for cell in look.of("B5") for point in cell["points"]}
    return sorted(found.values(), key=lambda point: (point["number"] or 0, point["part"]))


def beside(look: Lookup, published: Document | None) -> tuple[dict[str, int], str]:
    """Part → the published number of agents that it stands for, and by what: the number itself where every point of the
    ramp was published, else their order."""
    points = ramp_points(look)
    known = sorted({row["agents"] for row in published["agentic_ramp"]}) if published else []
    if points and {point["number"] for point in points} <= set(known):
        return {point["part"]: point["number"] for point in points}, "the number of agents"
    return {point["part"]: count for point, count in zip(points, known, strict=False)}, \
        "their order (this ramp is scaled: its agents and its pool are smaller)"


def ramp_table(look: Lookup, published: Document) -> Table:
    rows: list[tuple[str, ...]] = []
    match, by = beside(look, published)
    theirs = {(row["agents"], row["arm"]): row for row in published["agentic_ramp"]}
    for point in ramp_points(look):
        for arm in dict.fromkeys(cell["arm"] for cell in look.of("B5")):
            cells = look.of("B5", arm)
            said = {value: look.at(cells, point["part"], value) for value in (
                "served", "answered_s_mean", "answered_ttft_s_p50", "answered_ttft_s_p95", "hit_share", "host_share",
                "decode_tok_s_p50", "retries", "turn_s_p95", "errors")}
            if said["served"] is None:
                continue
            other = theirs.get((match.get(point["part"], -1), arm))
            rows.append((
                f"{point['part']} {arm}", number(said["served"]), seconds(said["answered_s_mean"]),
                seconds(said["answered_ttft_s_p50"]), seconds(said["answered_ttft_s_p95"]), share(said["hit_share"]),
                share(said["host_share"]), rate(said["decode_tok_s_p50"]), number(said["retries"]),
                seconds(said["turn_s_p95"]), number(said["errors"]), *_published_point(other)))
    if not rows:
        rows = [("not run", *[MISSING] * 10, *_published_point(other)) for other in theirs.values()]
    return Table(title="The agents' ramp", rows=tuple(rows), columns=(
        "agents, arm", "turns served", "avg per turn", "TTFT p50", "TTFT p95", "hit share", "tier hits", "decode p50",
        "retries", "turn p95, waits in", "errors", "published agents", "turns", "avg", "TTFT p50", "hit share",
        "turn p95, waits in"),
        note="As published: a turn that was started in the window counts however late it ends; averages and TTFT are "
             f"of the attempt that was answered. Points stand beside the published ones by {by}.")


def _published_point(row: Document | None) -> tuple[str, ...]:
    if row is None:
        return (MISSING,) * 6
    return (f"{row['agents']} {row['arm']}", number(row["turns"]), seconds(row["avg_s"]), seconds(row["ttft_p50"]),
            share(row["hit_share"]), seconds(seed.TURN_LATENCY_P95_S.get((row["agents"], row["arm"]))))


def ramp_ratios(look: Lookup, published: Document | None) -> list[dict[str, Any]]:
    """Turns on ÷ off and average time off ÷ on of each point, ours and published; None where there is none."""
    match, _ = beside(look, published)
    theirs = {(row["agents"], row["arm"]): row for row in (published or {"agentic_ramp": ()})["agentic_ramp"]}
    found = []
    for row in sorted(look.compared("B5"), key=lambda row: row["number"] or 0):
        off, on = (theirs.get((match.get(row["part"], -1), arm)) for arm in ("off", "on"))
        base, arm, values = row["baseline"], row["arm"], row["values"]
        found.append({
            "part": row["part"], "arm": arm, "agents": match.get(row["part"]), "benefit": row["benefit"],
            "turns": _ratio(row, "served_per_s"), "turns_published": off and on and on["turns"] / off["turns"],
            "turns_spread": values["served_per_s"]["spread"], "turns_noise": values["served_per_s"]["noise"],
            "average": _inverse(_ratio(row, "answered_s_mean")),
            "average_published": off and on and off["avg_s"] / on["avg_s"],
            "recomputed": _inverse(_ratio(row, "recomputed_per_served")),
            "hits": [values["hit_share"][base], values["hit_share"][arm]],
            "hits_published": off and on and [off["hit_share"], on["hit_share"]]})
    return found


def ramp_ratio_table(look: Lookup, published: Document) -> Table:
    rows = [(f"{each['part']}", times(each["turns"]), span(each["turns_spread"]), span(each["turns_noise"]),
             times(each["turns_published"]), times(each["average"]), times(each["average_published"]),
             two(*map(share, each["hits"])), two(*map(share, each["hits_published"] or (None, None))),
             "measured" if each["benefit"] == "measured" else each["benefit"].partition(":")[0])
            for each in ramp_ratios(look, published)]
    return Table(title="The ramp as ratios, this run beside the published one", rows=tuple(rows), columns=(
        "agents", "turns on ÷ off", "spread", "A/A noise", "published", "avg off ÷ on", "published",
        "hit share off / on", "published", "benefit"))
