"""Arms of one cell beside each other: which may be compared, by how much they differ, and is that more than noise.
Works on the figures of cells; knows nothing of records or servers.

Only runs of one identity (corpus, model, seed, parameters) and one starting state of the cache are compared. A pair is
the same attempt of two arms; with several pairs the figure is their median and the spread their range. The noise floor
is the range of the same ratio between repeated runs of one arm. Windows of unequal length meet as rates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import Any

from hostcache.bench.figures import percentile, ratio

Document = dict[str, Any]

SHARES = ("hit_share", "device_share", "host_share", "recomputed_share", "counter_hit_share", "counter_host_share",
          "after_evict_hit_share")
"""Compared by difference too: a ratio says little of a share near 0 or 1."""
HIGHER_IS_BETTER = ("served", "served_per_s", "hit_share", "decode_tok_s_p50", "decode_tok_s_mean", "prefill_tok_s",
                    "aggregate_decode_tok_s", "goodput_per_s", "restore_ratio")
_COUNTS = ("served", "retries", "refused", "restores", "restored_bytes", "written_bytes", "evicted_pages")
"""Grow with the window, so their ratio is taken per second."""


def compare(cells: Iterable[Document], *, baseline: str = "off") -> Document:
    """`rows`: one a point and arm beside `baseline`. `refused`: cells and pairs that may not be compared, and why."""
    rows: list[Document] = []
    refused: list[Document] = []
    by_cell: dict[str, list[Document]] = defaultdict(list)
    for cell in cells:
        by_cell[cell["cell"]].append(cell)
    for name, group in by_cell.items():
        allowed = []
        for cell in group:
            why = [reason["text"] for reason in cell["reasons"] if reason["refuses"] in ("cell", "comparison")]
            if why:
                refused.append({"cell": name, "arm": cell["arm"], "attempt": cell["attempt"], "why": "; ".join(why)})
            else:
                allowed.append(cell)
        by_identity: dict[str, list[Document]] = defaultdict(list)
        for cell in allowed:
            by_identity[cell["identity"]].append(cell)
        for same in by_identity.values():
            made, apart = _rows(name, same, baseline)
            rows += made
            refused += apart
            lonely = {cell["arm"] for cell in same}
            if len(by_identity) > 1 and (baseline not in lonely or len(lonely) == 1):
                refused += [{"cell": name, "arm": cell["arm"], "attempt": cell["attempt"],
                             "why": f"unequal identity: {cell['identity'][:12]} has no other arm to stand beside; "
                                    "corpus, model, seed and parameters must be the same"} for cell in same]
    return {"baseline": baseline, "rows": rows, "refused": refused}


def _rows(name: str, cells: Sequence[Document], baseline: str) -> tuple[list[Document], list[Document]]:
    by_arm: dict[str, list[Document]] = defaultdict(list)
    for cell in sorted(cells, key=lambda cell: (cell["attempt"], cell["started_unix_s"])):
        by_arm[cell["arm"]].append(cell)
    rows, refused = [], []
    base = by_arm.pop(baseline, [])
    for arm, others in by_arm.items() if base else ():
        pairs = []
        for one, other in _paired(base, others):
            states = [each["state"]["start"]["verdict"] for each in (one, other)]
            if states[0] == states[1]:
                pairs.append((one, other))
            else:
                refused.append({"cell": name, "arm": arm, "attempt": other["attempt"],
                                "why": f"unequal start: {baseline} began {states[0]}, {arm} {states[1]}"})
        rows += [_row(name, baseline, arm, key, pairs, base, others) for key in _points(pairs)]
    return rows, refused


def _paired(base: Sequence[Document], others: Sequence[Document]) -> list[tuple[Document, Document]]:
    """By attempt where both have it, else in the order run."""
    attempts = {cell["attempt"]: cell for cell in base}
    if len(attempts) == len(base) and all(cell["attempt"] in attempts for cell in others):
        return [(attempts[cell["attempt"]], cell) for cell in others]
    return list(zip(base, others, strict=False))


Key = tuple[str, str]


def _points(pairs: Sequence[tuple[Document, Document]]) -> list[Key]:
    """(segment, part) of every point that both arms of some pair have, in the baseline's order."""
    found: dict[Key, None] = {}
    for one, other in pairs:
        there = {_key(point) for point in other["points"]}
        found.update({_key(point): None for point in one["points"] if _key(point) in there})
    return list(found)


def _key(point: Document) -> Key:
    return point["segment"], point["part"]


def _at(cell: Document, key: Key) -> Document | None:
    return next((point for point in cell["points"] if _key(point) == key), None)


def _row(name: str, baseline: str, arm: str, key: Key, pairs: Sequence[tuple[Document, Document]],
         base: Sequence[Document], others: Sequence[Document]) -> Document:
    there = [(one, other) for one, other in pairs if _at(one, key) and _at(other, key)]
    points = [(_at(one, key) or {}, _at(other, key) or {}) for one, other in there]
    repeats = [[point for cell in group if (point := _at(cell, key))] for group in (base, others)]
    names = dict.fromkeys(value for pair in points for point in pair for value in point["values"])
    benefits = [_benefit(one, other, baseline, arm) for one, other in points]
    return {
        "cell": name, "workload": there[0][0]["workload"], "segment": key[0], "part": key[1],
        "number": points[0][0]["number"], "population": points[0][0]["population"],
        "baseline": baseline, "arm": arm, "pairs": len(points), "attempts": [other["attempt"] for _, other in there],
        "repeats": {baseline: len(repeats[0]), arm: len(repeats[1])},
        "windows_s": {baseline: _median(one["window_s"] for one, _ in points),
                      arm: _median(other["window_s"] for _, other in points)},
        "values": {value: _value(value, points, repeats, baseline, arm) for value in names},
        "benefit": next((said for said in benefits if said != "measured"), "measured"),
        "paired": _paired_requests(key, there, [base, others]),
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _value(name: str, points: Sequence[tuple[Document, Document]], repeats: Sequence[Sequence[Document]],
           baseline: str, arm: str) -> Document:
    ratios = [found for one, other in points if (found := _ratio(name, one, other)) is not None]
    again = [found for group in repeats for one, other in combinations(group, 2)
             if (found := _ratio(name, one, other)) is not None and found > 0]
    both = [*again, *(1 / found for found in again)]
    middle = median(ratios) if ratios else None
    noise = [min(both), max(both)] if both else None
    sides = {side: _median(pair[i]["values"].get(name) for pair in points) for i, side in enumerate((baseline, arm))}
    return {
        **sides, "ratio": middle, "ratios": ratios, "spread": [min(ratios), max(ratios)] if len(ratios) > 1 else None,
        "noise": noise,
        "beyond_noise": None if noise is None or middle is None else not noise[0] <= middle <= noise[1],
        "difference": (sides[arm] or 0) - (sides[baseline] or 0)
        if name in SHARES and None not in sides.values() else None,
        "higher_is_better": name in HIGHER_IS_BETTER or (name in SHARES and name != "recomputed_share"),
    }


def _ratio(name: str, one: Document, other: Document) -> float | None:
    sides = [point["values"].get(name) for point in (one, other)]
    if name in _COUNTS:
        sides = [ratio(value, point["window_s"]) for value, point in zip(sides, (one, other), strict=True)]
    return ratio(sides[1], sides[0])


def _benefit(one: Document, other: Document, baseline: str, arm: str) -> str:
    """`measured`, or why a ratio of this pair is no benefit of the tier (B4)."""
    for point, name in ((one, baseline), (other, arm)):
        if point["evicted"]["proof"] is None:
            return f"nothing was evicted from the device in arm {name}: no benefit is claimed"
    if not other["restored"]:
        return f"nothing was restored in arm {arm}: no benefit is claimed"
    return "measured"


# --- identical requests ---------------------------------------------------------------------------------------------


def _paired_requests(key: Key, pairs: Sequence[tuple[Document, Document]],
                     repeats: Sequence[Sequence[Document]]) -> Document:
    """The same requests (session, turn, role) of both arms: total coverage beside tier hits, and the ratio of TTFTs.

    `coverage_noise`: how far the coverage of the same requests differs between repeated runs of one arm.
    """
    matched = [pair for one, other in pairs for pair in _matched(key, one, other)]
    covered = [pair for pair in matched if all(_known(row, "cached_tokens") for row in pair)]
    split = [other for _, other in covered if _known(other, "host_tokens")]
    faster = [found for one, other in matched if (found := ratio(other["ttft_s"], one["ttft_s"])) is not None]
    coverage = [_share([pair[i] for pair in covered], "cached_tokens") for i in (0, 1)]
    noise = [difference for group in repeats for one, other in combinations(group, 2)
             if (difference := _coverage_difference(_matched(key, one, other))) is not None]
    return {
        "n": len(matched), "coverage_n": len(covered), "coverage_baseline": coverage[0], "coverage_arm": coverage[1],
        "coverage_gain": None if coverage[0] is None or coverage[1] is None else coverage[1] - coverage[0],
        "coverage_noise": max(map(abs, noise)) if noise else None,
        "tier_hits_arm": _share(split, "host_tokens"),
        "ttft_ratio": {name: percentile(faster, share) for name, share in (("p10", .1), ("p50", .5), ("p90", .9))},
    }


def _matched(key: Key, one: Document, other: Document) -> list[tuple[Document, Document]]:
    left, right = (_by_turn(key, cell) for cell in (one, other))
    return [(left[turn], right[turn]) for turn in left if turn in right]


def _by_turn(key: Key, cell: Document) -> dict[tuple[Any, ...], Document]:
    columns = cell["requests"]["columns"]
    rows = (dict(zip(columns, row, strict=True)) for row in cell["requests"]["rows"])
    return {(row["session"], row["turn"], row["role"]): row for row in rows
            if (row["segment"], row["part"]) == key and row["outcome"] == "ok"}


def _known(row: Document, name: str) -> bool:
    return row[name] is not None and row["prompt_tokens"] is not None


def _share(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return ratio(sum(row[name] for row in rows), sum(row["prompt_tokens"] for row in rows)) if rows else None


def _coverage_difference(matched: Sequence[tuple[Document, Document]]) -> float | None:
    known = [pair for pair in matched if all(_known(row, "cached_tokens") for row in pair)]
    one, other = (_share([pair[i] for pair in known], "cached_tokens") for i in (0, 1))
    return None if one is None or other is None else other - one
