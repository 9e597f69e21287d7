"""A probe's figures, gaps and verdict from its seal, its trace and its runs as they were written down. Pure.

`run` judges with it what it has just measured, `verify` what a certificate holds: the same function of raw counter
lines, records and the trace. A rate above the bound is `impossible` whatever the branches say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from hostcache.lab.branches import decide
from hostcache.lab.gap import Gap, Model, gap
from hostcache.lab.knee import Goal, knee, point, ratio
from hostcache.lab.measured import arm_figures, check_control, counted
from hostcache.lab.probe import ProbeArm
from hostcache.lab.reconcile import Reconciled, reconcile
from hostcache.lab.replayed import ProbeVoid, Replayed
from hostcache.lab.sealing import Sealed, modelled, slice_of
from hostcache.lab.stream import Stream

Run = Mapping[str, Any]
"""One replay of one arm: `arm`, `pair`, `point`, and what `Replay.as_json` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """`gaps`: by run, in their order (None: a control). `cause`: of an impossible rate."""

    figures: dict[str, float]
    gaps: tuple[Gap | None, ...]
    knees: dict[str, Any]
    reconciled: dict[str, Reconciled]
    verdict: str
    cause: str | None

    def figures_part(self) -> dict[str, Any]:
        return {"figures": self.figures, "gaps": [None if each is None else each.as_json() for each in self.gaps],
                "knees": self.knees, "reconciled": {name: each.as_json() for name, each in self.reconciled.items()}}

    def verdict_part(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "cause": self.cause}


def judge(sealed: Sealed, trace: Path, runs: Sequence[Run], *,
          progress: Callable[[str], None] = lambda text: None) -> Judged:
    """Raises ProbeVoid where the runs make no figures, ConfigError where a branch needs one that is not there."""
    probe = sealed.probe
    streams: dict[int, Stream] = {}
    oracle = sealed.body["oracle"]
    figures: dict[str, float] = {name: oracle[name] for name in ("bound", "possible", "lru", "optimum")}
    gaps: list[Gap | None] = [None] * len(runs)
    knees: dict[str, Any] = {}
    reconciled: dict[str, Reconciled] = {}
    impossible: list[str] = []
    for arm in probe.arms:
        mine = [(place, run) for place, run in enumerate(runs) if run["arm"] == arm.name]
        if not mine:
            raise ProbeVoid("arm_missing", f"no run of the arm {arm.name}")
        figures |= arm_figures(arm.name, [run for _, run in mine])
        if arm.control:
            for _, run in mine:
                check_control(arm.name, counted(run["engine"], run["opening"], run["closing"]), fresh=arm.fresh)
            continue
        count = arm.requests or probe.requests
        if count not in streams:
            streams[count] = slice_of(trace, probe, count)
        stream = streams[count]
        for place, run in mine:
            progress(f"{arm.name}: model and engine, request by request")
            totals = counted(run["engine"], run["opening"], run["closing"])
            records = [Replayed.from_json(each) for each in run["requests"]]
            gaps[place] = found = gap(stream, modelled(probe, arm, run["engine"]), records,
                                      preemptions=totals.preemptions)
            if totals.cached_tokens > (Model(stream, modelled(probe, arm)).bound_tokens if found.left_out
                                       else found.bound):
                impossible.append(arm.name)
        _gap_figures(figures, arm, [each for place, _ in mine if (each := gaps[place]) is not None])
        reconciled[arm.name] = outcome = reconcile(
            stream, capacity_blocks=modelled(probe, arm).capacity_tokens // stream.block_tokens, touch=probe.touch,
            hits=figures[f"{arm.name}_cached_tokens"], progress=progress,
            # Of requests that failed nobody knows how far they came: what was held is put over all that was sent.
            queries=len(mine) * int(stream.input_tokens.sum()) if figures[f"{arm.name}_failed"] else
            figures[f"{arm.name}_prompt_tokens"])
        if outcome.verdict == "impossible":
            impossible.append(arm.name)
    if probe.ladder:
        for arm in probe.swept:
            knees[arm.name] = _knees(sealed, arm, runs, figures)
    _ratios(sealed, runs, knees, figures)
    if impossible:
        cause = reconciled[impossible[0]].cause or "unknown"
        return Judged(figures=figures, gaps=tuple(gaps), knees=knees, reconciled=reconciled, verdict="impossible",
                      cause=cause)
    return Judged(figures=figures, gaps=tuple(gaps), knees=knees, reconciled=reconciled,
                  verdict=decide(probe.branches, figures), cause=None)


def _gap_figures(figures: dict[str, float], arm: ProbeArm, gaps: Sequence[Gap]) -> None:
    prompt = sum(each.prompt_tokens for each in gaps)
    # Where a server tells no request its cached tokens, the model is of all requests.
    model = sum(each.model if each.compared else each.possible - each.capacity for each in gaps)
    figures[f"{arm.name}_model"] = model / prompt
    figures[f"{arm.name}_gap"] = figures[f"{arm.name}_hit_rate"] - model / prompt
    figures[f"{arm.name}_unexplained_tokens"] = sum(each.unexplained for each in gaps)


def _knees(sealed: Sealed, arm: ProbeArm, runs: Sequence[Run], figures: dict[str, float]) -> list[dict[str, Any]]:
    """One of each pair; their medians are the figures."""
    goal = sealed.probe.goal or Goal()
    found = []
    for pair in range(sealed.probe.pairs):
        rng = Random(f"{sealed.sha256}/{arm.name}/{pair}")
        mine = sorted((run for run in runs if run["arm"] == arm.name and run["pair"] == pair),
                      key=lambda run: int(run["point"]))
        found.append(knee([point([Replayed.from_json(each) for each in run["requests"]],
                                 rate_factor=run["load"]["rate_factor"], goal=goal, rng=rng,
                                 drained_cleanly=run["drained_cleanly"], lateness_p99_s=run["lateness_p99_s"])
                           for run in mine], goal))
    middle = sorted(each.throughput_per_s for each in found)
    figures[f"{arm.name}_throughput_knee"] = middle[len(middle) // 2]
    good = sorted(each.goodput_per_s for each in found if each.goodput_per_s is not None)
    if len(good) == len(found):
        figures[f"{arm.name}_goodput_knee"] = good[len(good) // 2]
    return [each.as_json() for each in found]


def _ratios(sealed: Sealed, runs: Sequence[Run], knees: Mapping[str, Any], figures: dict[str, float]) -> None:
    """Of every two arms that are swept the median over pairs: of goodput knees, else of requests a second."""
    def value(arm: ProbeArm, pair: int) -> float:
        if sealed.probe.ladder:
            return float(knees[arm.name][pair]["goodput_per_s"] or 0.0)
        mine = [run for run in runs if run["arm"] == arm.name and run["pair"] == pair]
        seconds = sum(max(each["ended_s"] for each in run["requests"]) for run in mine)
        return sum(len(run["requests"]) for run in mine) / seconds if seconds else 0.0

    swept = sealed.probe.swept
    for a in swept:
        for b in swept:
            pairs = [(value(a, pair), value(b, pair)) for pair in range(sealed.probe.pairs)]
            if a is not b and all(second > 0 for _, second in pairs):
                figures[f"{a.name}_over_{b.name}"] = ratio(pairs, Random(sealed.sha256)).median
