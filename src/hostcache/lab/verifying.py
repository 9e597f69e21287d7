"""Does a certificate hold, with nothing but the trace? Each part is recomputed, and the first that does not hold named.

Offline: no server, no tokenizer, no stored number taken on trust. The seal's digest gives the seed of the bridge, the
seed and the trace give every prompt, and each record says which prompt was sent; raw counter lines and records give the
figures, the figures and the sealed branches give the verdict. What a run says besides (its gate, load, command, what
its server was held to, its lateness) is made again of what it rests on.

What is left to believe is the raw lines and records themselves, with their times, where they contradict nothing; what a
server said of itself; and of failed attempts all but their number, seal and cost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hostcache import __version__
from hostcache.errors import HostCacheError
from hostcache.lab.certificate import CertificateRefused, canonical, check
from hostcache.lab.judging import Judged, judge
from hostcache.lab.measured import check_answers, check_control, check_records, counted, scrape_again
from hostcache.lab.probe import ProbeArm
from hostcache.lab.prompts import Planned
from hostcache.lab.replay import Load
from hostcache.lab.replayed import Replayed
from hostcache.lab.running import asked_of, check_attempt, parts_of
from hostcache.lab.sealing import Sealed, check_trace, prompts_of, same, sealed_of
from hostcache.lab.serving import command_of, confirm, named

_MOMENT_S = 1e-3
"""By how much a time may stand before the one it follows: clocks are read, then written down."""
_GROW = ("prompt_tokens", "generated_tokens", "preemptions")
"""Counters that no engine tells from one source at first and from another later (`client.adapters`)."""


def verify(document: Any, trace: Path, *, holds: Callable[[str], None] = lambda text: None) -> str:
    """The verdict. `holds` hears of each thing that was shown. Raises CertificateRefused naming the part."""
    parts = check(document)
    holds("every part is what its digest says")
    sealed = _part("seal", lambda: sealed_of(parts["seal"], "the certificate's seal"))
    holds(f"seal {sealed.sha256[:16]}…")
    _part("trace", lambda: check_trace(sealed, trace))
    holds("trace and oracle are the sealed ones")
    runs: Sequence[Mapping[str, Any]] = _part("arms", lambda: [{**run} for run in parts["arms"]])
    _part("attempts", lambda: _attempts(sealed, parts["attempts"], runs))
    holds(f"{len(parts['attempts'])} attempts, the last one completed")
    _part("arms", lambda: _arms(sealed, trace, runs))
    holds("every prompt follows from the seal's digest and the trace, and passes the gates")
    judged: Judged = _part("figures", lambda: judge(sealed, trace, runs))
    again = _part("figures", lambda: json.loads(canonical(parts_of(sealed, parts["attempts"], runs, judged))))
    for name in sorted(again.keys() | parts.keys()):
        if not same(again.get(name), parts.get(name)):
            made_by = "" if sealed.body["by"] == __version__ else (
                f" (sealed by version {sealed.body['by']}, this is {__version__}: verify it with that one)")
            raise CertificateRefused(f"part {name!r} does not follow from the others: {_first(again, parts, name)}"
                                     f"{made_by}")
    holds("figures and verdict follow from raw counter lines, records and the sealed branches")
    return judged.verdict


def _part(name: str, what: Callable[[], Any]) -> Any:
    try:
        return what()
    except CertificateRefused:
        raise
    except KeyError as error:
        raise CertificateRefused(f"part {name!r} does not hold: there is no {error}") from error
    except (HostCacheError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError,
            MemoryError) as error:
        raise CertificateRefused(f"part {name!r} does not hold: {' '.join(str(error).split()) or type(error).__name__}"
                                 ) from error


def _attempts(sealed: Sealed, attempts: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> None:
    if not attempts:
        raise CertificateRefused("part 'attempts' does not hold: there is none")
    for number, each in enumerate(attempts, start=1):
        check_attempt(each, sealed, number, completed=number == len(attempts))
    if any(run["attempt"] != len(attempts) for run in runs):
        raise CertificateRefused("part 'arms' does not hold: a run is of another attempt than the one that completed")
    last = attempts[-1]
    if last["runs"] != len(runs) or last["wall_s"] + _MOMENT_S < sum(run["wall_s"] for run in runs):
        raise CertificateRefused(f"part 'attempts' does not hold: the last one had {last['runs']} runs in "
                                 f"{last['wall_s']} s, part 'arms' has {len(runs)} of "
                                 f"{sum(run['wall_s'] for run in runs):.3f} s")


def _arms(sealed: Sealed, trace: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    probe = sealed.probe
    wanted = [(arm.name, pair, point) for arm, pair, point in probe.runs]
    if (found := [(run["arm"], run["pair"], run["point"]) for run in runs]) != wanted:
        at = next((at for at, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]),
                  min(len(found), len(wanted)))
        raise CertificateRefused(f"part 'arms' does not hold: {len(found)} runs, the probe asks for {len(wanted)}; "
                                 f"run {at + 1} is {_run_name(found, at)}, the probe asks for {_run_name(wanted, at)}")
    asked = asked_of(probe, trace)
    for (arm, _, point), run in zip(probe.runs, runs, strict=True):
        _run(sealed, arm, asked(arm, point), run)


def _run_name(runs: Sequence[tuple[str, int, int]], at: int) -> str:
    return "{} of pair {} at load {}".format(*runs[at]) if at < len(runs) else "none"


def _run(sealed: Sealed, arm: ProbeArm, asked: Sequence[Planned], run: Mapping[str, Any]) -> None:
    probe, load = sealed.probe, sealed.probe.loads[run["point"]]
    prompts = prompts_of(sealed, attempt=run["attempt"], pair=run["pair"], point=run["point"], arm=arm)
    report = asdict(prompts.gates(asked, engine_block_tokens=probe.engine_block_tokens))
    records = [Replayed.from_json(each) for each in run["requests"]]
    if [each.index for each in records] != [each.index for each in asked]:
        raise CertificateRefused(f"part 'arms' does not hold: the requests of {arm.name} are not the trace's")
    totals = counted(run["engine"], run["opening"], run["closing"])
    check_records(records, totals)
    check_answers(arm.name, load, asked, records, totals)
    for request, record in zip(asked, records, strict=True):
        _sent(request, record, prompts.digest(request), arm.name)
    _in_time(arm, load, asked, records, run)
    late = [each.sent_s - each.due_s for each in records]
    again = {
        "arm": arm.name, "pair": run["pair"], "point": run["point"], "attempt": run["attempt"], "load": load.as_json(),
        "gate": {**report, "prompts": len(asked) if probe.send == "text" else 0},
        "control": check_control(arm.name, totals, fresh=arm.fresh) if arm.control else None,
        "engine": run["described"]["engine"],
        "confirmed": confirm(arm.name, run["described"], tier=arm.tier, block_tokens=probe.engine_block_tokens,
                             capacity_tokens=None if arm.control else probe.capacity_tokens),
        "command": _command(arm, sealed.model, run["command"]),
        "offered_window_s": None if load.rate_factor is None else max(each.due_s or 0.0 for each in asked),
        "drained_cleanly": load.rate_factor is None or (
            run["drained_cleanly"] and all(each.outcome != "aborted" for each in records)),
        "lateness_p50_s": float(np.quantile(late, 0.5)), "lateness_p99_s": float(np.quantile(late, 0.99)),
    }
    believed = {name: run[name] for name in ("described", "opening", "closing", "timeline", "wall_s", "requests")}
    whole = json.loads(canonical({**again, **believed}))
    for name in sorted(whole.keys() | run.keys()):
        if not same(whole.get(name), run.get(name)):
            raise CertificateRefused(f"part 'arms' does not hold: {name} of {arm.name} does not follow from the rest "
                                     f"of it: {_first(whole, run, name)}")


def _command(arm: ProbeArm, model: str | None, given: Sequence[str]) -> Sequence[str]:
    """`given`, where it is the command that the seal asks for, at any port; else that command."""
    if arm.url is not None:
        return []
    wanted = named(command_of(arm.start, arm.env, model=model))
    return given if len(given) == len(wanted) and all(
        re.fullmatch(re.escape(asked).replace(r"\{port\}", "[0-9]+"), word)
        for asked, word in zip(wanted, given, strict=True)) else wanted


def _in_time(arm: ProbeArm, load: Load, asked: Sequence[Planned], records: Sequence[Replayed],
             run: Mapping[str, Any]) -> None:
    """Times follow each other as they must: due, sent, first token, end; the trace's own due times; never more on their
    way than the load has; counters that only grow, between the first scrape and the last."""
    def refuse(what: str) -> CertificateRefused:
        return CertificateRefused(f"part 'arms' does not hold: {what} of {arm.name}")

    for request, each in zip(asked, records, strict=True):
        times = [each.due_s, each.sent_s, each.sent_s if each.first_token_s is None else each.first_token_s,
                 each.ended_s, run["wall_s"]]
        if any(later < earlier - _MOMENT_S for earlier, later in pairwise(times[each.outcome == "aborted":])) or (
                request.due_s is not None and abs(each.due_s - request.due_s) > _MOMENT_S):
            raise refuse(f"the times of request {each.index} ({', '.join(f'{each:.3f}' for each in times)}) contradict "
                         "each other or the trace in a run")
    on_the_way, most = 0, len(records) if load.at_once is None else load.at_once
    for _, change in sorted([*((each.sent_s + _MOMENT_S, 1) for each in records),
                             *((each.ended_s, -1) for each in records)]):
        if (on_the_way := on_the_way + change) > most:
            raise refuse(f"more than {most} requests are on their way at once in a run")
    first, last = scrape_again(run["engine"], run["opening"]), scrape_again(run["engine"], run["closing"])
    told: dict[str, float] = dict(first.counters)
    before_s = 0.0
    for at_s, counters in [*run["timeline"], [run["wall_s"], last.counters]]:
        if at_s < before_s - _MOMENT_S or any(value < told.get(name, 0.0) for name, value in counters.items()
                                              if name in last.counters and name in _GROW):
            raise refuse(f"the timeline goes backwards at {at_s:.3f} s in a run")
        before_s, told = at_s, {**told, **counters}


def _sent(request: Planned, record: Replayed, wanted: str, arm: str) -> None:
    if record.prompt_sha256 != wanted and not (record.outcome == "aborted" and not record.prompt_sha256):
        raise CertificateRefused(f"part 'arms' does not hold: request {request.index} of {arm} was sent another prompt "
                                 "than follows from the seal and the trace")


def _first(again: Mapping[str, Any], parts: Mapping[str, Any], name: str) -> str:
    a, b = again.get(name), parts.get(name)
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            if not same(a.get(key), b.get(key)):
                return _first(a, b, key)
    return f"{name} is {_short(b)}, recomputed {_short(a)}"


def _short(value: Any) -> str:
    text = canonical(value).decode()
    return text if len(text) <= 80 else f"{text[:77]}..."
