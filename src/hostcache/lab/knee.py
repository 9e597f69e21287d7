"""Where throughput and goodput stop following the load, with intervals; and the ratio of paired arms. Sends nothing.

    point              an open replay at one rate factor: so many requests offered a second, so many good
    good               answered, first token within `ttft_s` of its due time, its tokens within `tpot_s` each
    goodput knee       the highest offered rate at which at least `share` of the requests are good, between two points
                       by interpolation; its interval from the Wilson bounds of each point's share (Wilson 1927)
    throughput knee    the most requests answered a second at any point; its interval by resampling the times between
                       answers, and no more than arrived
    beyond             the highest load was still followed, so that a knee lies above what was offered
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from random import Random
from statistics import median
from typing import Any

from hostcache.errors import ConfigError
from hostcache.lab.replayed import Replayed

Z_95 = 1.959963984540054
"""The standard normal's 97.5th percentile."""
RESAMPLES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What makes a request good. None: not asked."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    share: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"share is {self.share}; give a share above 0 and up to 1")
        for name in ("ttft_s", "tpot_s"):
            if (value := getattr(self, name)) is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} is {value}; give a number of seconds above 0")

    def good(self, each: Replayed) -> bool:
        """From the due time on, so that a client's or server's queue counts. One token meets any `tpot_s`; an answer
        of which nobody says how many it has meets none."""
        if each.outcome != "ok" or each.first_token_s is None:
            return False
        if self.ttft_s is not None and each.first_token_s - each.due_s > self.ttft_s:
            return False
        if self.tpot_s is None:
            return True
        if each.completion_tokens is None:
            return False
        after = each.completion_tokens - 1
        return after < 1 or (each.ended_s - each.first_token_s) / after <= self.tpot_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """`throughput_per_s`: answered requests over the time from the first due one to the last answer."""

    rate_factor: float
    offered_per_s: float
    throughput_per_s: float
    throughput_low: float
    throughput_high: float
    good: int
    requests: int
    good_share: float
    good_low: float
    good_high: float
    drained_cleanly: bool
    lateness_p99_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """Rates in requests a second; None where even the lowest point is not good enough. `beyond`: every point was, so
    the goodput knee lies above what was offered. `throughput_beyond`: so may that of throughput, since within its
    interval as much was answered at the highest load as was offered."""

    goodput_per_s: float | None
    goodput_low: float | None
    goodput_high: float | None
    beyond: bool
    throughput_per_s: float
    throughput_low: float
    throughput_high: float
    throughput_beyond: bool
    points: tuple[Point, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Of pairs a ÷ b. `low`, `high`: of the median, by resampling the pairs; with one pair all are the same."""

    median: float
    low: float
    high: float
    least: float
    most: float
    pairs: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def wilson(good: int, count: int, z: float = Z_95) -> tuple[float, float]:
    """Bounds of a share of which `good` of `count` were seen."""
    if count < 1 or not 0 <= good <= count:
        raise ConfigError(f"{good} of {count} is no share")
    share, square = good / count, z * z
    centre = (share + square / (2 * count)) / (1 + square / count)
    half = z / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    return (0.0 if good == 0 else max(0.0, centre - half)), (1.0 if good == count else min(1.0, centre + half))


def check_ladder(factors: Sequence[float]) -> None:
    """Before anything is sent. Raises ConfigError for factors that make no ladder."""
    for each in factors:
        if not 0 < each < float("inf"):
            raise ConfigError(f"the rate factor {each:g} is none; give numbers above 0")
    if len(set(factors)) < len(factors) or len(factors) < 2:
        raise ConfigError(f"{', '.join(f'{each:g}' for each in factors)} is no ladder; give at least two rate factors, "
                          "each once")


def point(records: Sequence[Replayed], *, rate_factor: float, goal: Goal, rng: Random, drained_cleanly: bool,
          lateness_p99_s: float) -> Point:
    """One load. Raises ConfigError for fewer than two requests: they have no rate; and where `goal` asks for a time per
    token and no answer has a count of them."""
    if len(records) < 2:
        raise ConfigError(f"{len(records)} request has no rate; give at least 2")
    window_s = max(each.due_s for each in records) - min(each.due_s for each in records)
    if window_s <= 0:
        raise ConfigError("all requests of this load fall due at the same moment; a ladder needs a trace with arrivals")
    answered = [each for each in records if each.outcome == "ok"]
    if goal.tpot_s is not None and answered and all(each.completion_tokens is None for each in answered):
        raise ConfigError("the server says of no answer how many tokens it has (no usage), so tpot_s cannot be judged; "
                          "leave it out")
    good = sum(goal.good(each) for each in records)
    low, high = wilson(good, len(records))
    ended = sorted(each.ended_s for each in answered)
    gaps = [b - a for a, b in pairwise((min(each.due_s for each in records), *ended))]
    through = _rate(gaps)
    drawn = sorted(_rate([gaps[rng.randrange(len(gaps))] for _ in gaps]) for _ in range(RESAMPLES)) if gaps else [0.0]
    most = max(through, len(records) / window_s)  # bursts: a sample without the times between them has no bound
    return Point(
        rate_factor=rate_factor, offered_per_s=(len(records) - 1) / window_s, throughput_per_s=through,
        throughput_low=_quantile(drawn, 0.025), throughput_high=min(_quantile(drawn, 0.975), most), good=good,
        requests=len(records), good_share=good / len(records), good_low=low, good_high=high,
        drained_cleanly=drained_cleanly, lateness_p99_s=lateness_p99_s)


def knee(points: Sequence[Point], goal: Goal) -> Knee:
    """Points in any order. Raises ConfigError without two different loads."""
    ordered = sorted(points, key=lambda each: each.offered_per_s)
    if len({each.offered_per_s for each in ordered}) < 2:
        raise ConfigError(f"{len(ordered)} loads of the same rate are no ladder; give at least two rate factors")
    best = max(ordered, key=lambda each: each.throughput_per_s)
    return Knee(
        goodput_per_s=_crossing([(each.offered_per_s, each.good_share) for each in ordered], goal.share),
        goodput_low=_crossing([(each.offered_per_s, each.good_low) for each in ordered], goal.share),
        goodput_high=_crossing([(each.offered_per_s, each.good_high) for each in ordered], goal.share),
        beyond=all(each.good_share >= goal.share for each in ordered), throughput_per_s=best.throughput_per_s,
        throughput_low=best.throughput_low, throughput_high=best.throughput_high,
        throughput_beyond=ordered[-1].throughput_high >= ordered[-1].offered_per_s, points=tuple(ordered))


def ratio(pairs: Sequence[tuple[float, float]], rng: Random) -> Ratio:
    """The median of a ÷ b over pairs that were measured one after the other. Raises ConfigError for a b of 0."""
    if not pairs or any(b <= 0 for _, b in pairs):
        raise ConfigError("a ratio needs pairs, and a second value above 0 in each")
    values = sorted(a / b for a, b in pairs)
    drawn = sorted(median(values[rng.randrange(len(values))] for _ in values) for _ in range(RESAMPLES))
    return Ratio(median=median(values), low=_quantile(drawn, 0.025), high=_quantile(drawn, 0.975), least=values[0],
                 most=values[-1], pairs=len(values))


def compare(a: Sequence[Knee], b: Sequence[Knee], seed: str) -> tuple[dict[str, Ratio], dict[str, str]]:
    """The median ratios of a's knees ÷ b's, pair by pair; and of those that cannot be formed, why."""
    ratios: dict[str, Ratio] = {}
    none: dict[str, str] = {}
    pairs = list(zip(a, b, strict=True))
    if any(not each.throughput_per_s for each in b):
        none["throughput"] = "of the second none was answered at any load"
    else:
        ratios["throughput"] = ratio([(one.throughput_per_s, two.throughput_per_s) for one, two in pairs],
                                     Random(f"{seed}/throughput"))
    rates = [(one.goodput_per_s, two.goodput_per_s) for one, two in pairs]
    known = [(one, two) for one, two in rates if one is not None and two is not None]
    if len(known) < len(rates):
        none["goodput"] = "too few were good at the lowest load already; give lower rate factors"
    elif any(each.beyond for each in (*a, *b)):
        none["goodput"] = "enough were good at the highest load still; give higher rate factors"
    else:
        ratios["goodput"] = ratio(known, Random(f"{seed}/goodput"))
    return ratios, none


def _crossing(curve: Sequence[tuple[float, float]], share: float) -> float | None:
    """The highest rate up to which the share holds, without a break from the lowest one on; None: not even there."""
    if curve[0][1] < share:
        return None
    for (rate, value), (next_rate, next_value) in pairwise(curve):
        if next_value < share:
            return rate + (next_rate - rate) * (value - share) / (value - next_value)
    return curve[-1][0]


def _rate(gaps: Sequence[float]) -> float:
    total = sum(gaps)
    return len(gaps) / total if total > 0 else 0.0


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
