"""Bars and verdicts: what a point must reach, and what one arm must gain over another. Pure; reads figures.

A *bar* stops a ramp: TTFT p95, decode rate, errors, restore failures of one point. A *goal* is of two arms: a cell that
is neutral where it must win has failed, even at zero errors, and so has one whose gain nobody can prove (nothing was
evicted, nothing restored). What was not measured is no pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from hostcache.errors import ConfigError

Document = dict[str, Any]
Outcome: TypeAlias = Literal["pass", "miss", "not measured", "void"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A limit on one of a point's values (`figures.points[…].values`), or for a goal on the arm ÷ baseline ratio."""

    name: str
    value: str
    at_least: float | None = None
    at_most: float | None = None

    def wants(self) -> str:
        return f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"

    def holds(self, value: float) -> bool:
        return not ((self.at_least is not None and value < self.at_least)
                    or (self.at_most is not None and value > self.at_most))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """`point`: judged at each point of each arm. `goals`: of every point of the comparison that `goal_parts` names
    (empty: the last point alone, which is where a ramp's pressure is)."""

    point: tuple[Bar, ...] = ()
    goals: tuple[Bar, ...] = ()
    goal_parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`arm` of a goal is the arm that must win. `why`: empty on a pass."""

    cell: str
    arm: str
    attempt: int | None
    part: str
    kind: Literal["point", "goal"]
    bar: str
    wants: str
    value: float | None
    verdict: Outcome
    why: str

    def as_json(self) -> Document:
        return dataclasses.asdict(self)


POINT_BARS: Mapping[str, tuple[str, Literal["at_least", "at_most"]]] = {
    "ttft_p95_s": ("ttft_s_p95", "at_most"),
    "ttft_p50_s": ("ttft_s_p50", "at_most"),
    "turn_p95_s": ("turn_s_p95", "at_most"),
    "decode_tok_s": ("decode_tok_s_p50", "at_least"),
    "errors": ("errors", "at_most"),
    "restore_failures": ("restore_failures", "at_most"),
    "hit_share": ("hit_share", "at_least"),
    "goodput_per_s": ("goodput_per_s", "at_least"),
}
"""Name in a matrix file → (value of a point, which way)."""
GOALS: Mapping[str, tuple[str, Literal["at_least", "at_most"]]] = {
    "turns": ("served_per_s", "at_least"),
    "average_time": ("answered_s_mean", "at_most"),
    "turn_time": ("turn_s_mean", "at_most"),
    "ttft_p50": ("ttft_s_p50", "at_most"),
    "ttft_p95": ("ttft_s_p95", "at_most"),
    "recomputed": ("recomputed_share", "at_most"),
    "decode": ("decode_tok_s_p50", "at_least"),
    "restore": ("after_evict_ttft_s", "at_most"),
}
"""Name in a matrix file → (value whose arm ÷ baseline ratio is judged, which way)."""
WITHIN = ("within",)
"""`within = 0.05` under goals: the cost bar of a cell without pressure. Each ratio of served rate, prefill and decode
lies within so much of 1, or within the measured noise where that is wider. No proof of eviction is asked of it."""
_NEUTRAL_VALUES = ("served_per_s", "prefill_tok_s", "decode_tok_s_mean", "decode_tok_s_p50")


def parse_bars(bars: Mapping[str, Any], goals: Mapping[str, Any] | None = None) -> Bars:
    """`{"ttft_p95_s": 10, "errors": 0}` and `{"turns": 3.1, "parts": ["32"]}`. Raises ConfigError."""
    wanted = dict(goals or {})
    parts = wanted.pop("parts", [])
    parts = [parts] if isinstance(parts, str) else parts
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str | int) for part in parts):
        raise ConfigError(f"goals.parts is {parts!r}; give a list of parts, for example [\"32\", \"48\"]")
    goal_bars = [*_parse(wanted, GOALS, "goal", skip=WITHIN)]
    if "within" in wanted:
        width = _limit("goal", "within", wanted["within"])
        goal_bars += [Bar(name=f"within ({value})", value=value, at_least=1 - width, at_most=1 + width)
                      for value in _NEUTRAL_VALUES]
    return Bars(point=tuple(_parse(bars, POINT_BARS, "bar")), goals=tuple(goal_bars),
                goal_parts=tuple(str(part) for part in parts))


def _parse(given: Mapping[str, Any], known: Mapping[str, tuple[str, str]], kind: str,
           skip: Sequence[str] = ()) -> Iterable[Bar]:
    for name, limit in given.items():
        if name in skip:
            continue
        if name not in known:
            raise ConfigError(f"{kind} {name!r} is not known; known are {', '.join([*known, *skip])}")
        value, way = known[name]
        number = _limit(kind, name, limit)
        yield (Bar(name=name, value=value, at_least=number) if way == "at_least" else
               Bar(name=name, value=value, at_most=number))


def _limit(kind: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigError(f"{kind} {name!r} is {value!r}; give a number of at least 0")
    return float(value)


def judge(figures: Document, bars: Bars) -> list[Verdict]:
    """Every point of one cell's figures against the point bars, in order of the points."""
    return [_judge_point(figures, point, bar) for point in figures["points"] for bar in bars.point]


def _judge_point(figures: Document, point: Document, bar: Bar) -> Verdict:
    value = point["values"].get(bar.value)
    outcome: Outcome
    if figures["void"]:
        outcome, why = "void", "; ".join(each["text"] for each in figures["reasons"] if each["refuses"] == "cell")
    elif value is None and bar.value == "restore_failures" and _says_no_tier(figures):
        outcome, why, value = "pass", "", 0.0
    elif value is None:
        outcome, why = "not measured", f"{bar.value} is not known at this point"
    elif bar.holds(value):
        outcome, why = "pass", ""
    else:
        outcome, why = "miss", f"{bar.value} {value:.4g}, wanted {bar.wants()}"
    return Verdict(cell=figures["cell"], arm=figures["arm"], attempt=figures["attempt"], part=point["part"],
                   kind="point", bar=bar.name, wants=bar.wants(), value=value, verdict=outcome, why=why)


def _says_no_tier(figures: Document) -> bool:
    """The server itself says that it has none; one that does not say may have had failures."""
    tier = figures["target"].get("tier")
    return isinstance(tier, Mapping) and tier.get("on") is False


def first_failing(figures: Document, bars: Bars) -> Verdict | None:
    """Where a ramp stops: the first verdict that is not a pass. An unmeasured figure stops it too."""
    return next((verdict for verdict in judge(figures, bars) if verdict.verdict != "pass"), None)


def judge_goals(cell: str, comparison: Document, bars: Bars) -> list[Verdict]:
    """The goals of one cell against the rows of `compare`. A cell without a comparable pair has missed its goals."""
    if not bars.goals:
        return []
    rows = [row for row in comparison["rows"] if row["cell"] == cell]
    if not rows:
        why = "; ".join(each["why"] for each in comparison["refused"] if each["cell"] == cell) or "no pair of arms"
        return [Verdict(cell=cell, arm="", attempt=None, part="", kind="goal", bar=bar.name, wants=_ratio_wants(bar),
                        value=None, verdict="not measured", why=why) for bar in bars.goals]
    judged = [verdict for row in _goal_rows(rows, bars) for bar in bars.goals
              if (verdict := _judge_goal(row, bar)) is not None]
    reached = {str(row["number"]) for row in rows} | {row["part"] for row in rows}
    missing = [(part, bar, "this point was not reached by both arms") for part in bars.goal_parts
               if part not in reached for bar in bars.goals]
    if not judged and not missing:
        missing = [("", bar, f"{bar.value} has no ratio at any point") for bar in bars.goals]
    return judged + [
        Verdict(cell=cell, arm="", attempt=None, part=part, kind="goal", bar=bar.name, wants=_ratio_wants(bar),
                value=None, verdict="not measured", why=why) for part, bar, why in missing]


def _goal_rows(rows: Sequence[Document], bars: Bars) -> list[Document]:
    if bars.goal_parts:
        return [row for row in rows if row["part"] in bars.goal_parts or str(row["number"]) in bars.goal_parts]
    if any(bar.name.startswith("within") for bar in bars.goals):
        return list(rows)
    return list({row["arm"]: row for row in rows}.values())


def _judge_goal(row: Document, bar: Bar) -> Verdict | None:
    found = row["values"].get(bar.value)
    value = found["ratio"] if found else None
    outcome: Outcome
    why = ""
    if bar.name.startswith("within"):
        if value is None:  # this kind of point has no such figure
            return None
        noise = found["noise"] or [1.0, 1.0]
        inside = bar.holds(value) or noise[0] <= value <= noise[1]
        outcome, why = ("pass", "") if inside else ("miss", f"{value:.3f}×, outside the bar and the measured noise")
    elif row["benefit"] != "measured":
        outcome, why = "miss", f"neutral where it must win: {row['benefit']}"
    elif value is None:
        outcome, why = "not measured", f"{bar.value} has no ratio"
    elif bar.holds(value):
        outcome = "pass"
    else:
        outcome, why = "miss", f"{value:.3g}×, wanted {_ratio_wants(bar)}"
    return Verdict(cell=row["cell"], arm=row["arm"], attempt=None, part=row["part"], kind="goal", bar=bar.name,
                   wants=_ratio_wants(bar), value=value, verdict=outcome, why=why)


def _ratio_wants(bar: Bar) -> str:
    if bar.at_least is not None and bar.at_most is not None:
        return f"{bar.at_least:g}× to {bar.at_most:g}×"
    return f"{bar.wants()}×"


def failed(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Those that `--strict` does not let pass."""
    return [verdict for verdict in verdicts if verdict.verdict != "pass"]
