"""Runs a sealed probe: servers, gates, replays, attempts; then the certificate. Every attempt is kept, with its reason.

Nothing is sent before the probe and the trace are what was sealed and every prompt of every run has passed the bridge's
gates. An attempt that ends early leaves its folder with what there is and why it ended; the next one gets a new number.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hostcache.client.adapters import Adapter
from hostcache.clock import Clock, unix_time
from hostcache.errors import ConfigError, HostCacheError
from hostcache.lab.certificate import write_certificate
from hostcache.lab.judging import Judged, judge
from hostcache.lab.measured import check_control, check_replay
from hostcache.lab.probe import Probe, ProbeArm
from hostcache.lab.prompts import Planned, Prompts
from hostcache.lab.replay import WORKER, Load, Replay, Scraper, due_times, planned, replay
from hostcache.lab.replay_worker import Manner
from hostcache.lab.replayed import ProbeVoid
from hostcache.lab.sealing import Sealed, check_probe, check_trace, prompts_of, slice_of
from hostcache.lab.serving import Serving, confirm, named, serving
from hostcache.workload.bridge import BridgeRefused, GateReport, Tokenize
from hostcache.workload.traces import open_trace

CERTIFICATE = "certificate.json"
ATTEMPT = "attempt.json"

_KILLED = ("failed", "killed", "it was ended before it could say why")
"""What stands of an attempt until it says otherwise; its time and cost are those of its finished runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a run is made with; tests hand in others. `scraper`: of an adapter. `prompts`: of what was sealed."""

    clock: Clock
    unix_now: Callable[[], float] = unix_time
    worker: Sequence[str] = WORKER
    api_key: str | None = None
    scraper: Callable[[Adapter], Scraper] = lambda adapter: adapter.scrape
    prompts: Callable[[Prompts], Prompts] = lambda prompts: prompts
    progress: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """One replay that is to be: `load` is the ladder's `point`-th."""

    arm: ProbeArm
    pair: int
    point: int
    load: Load
    requests: tuple[Planned, ...]
    prompts: Prompts


async def run_probe(probe: Probe, sealed: Sealed, trace: Path, out: Path, means: Means) -> tuple[Path, Judged]:
    """The certificate's path. `out`: a folder, new or of earlier attempts at the same seal.

    Raises SealBroken before anything is started, ProbeVoid or ServerError out of an attempt.
    """
    check_probe(sealed, probe)
    check_trace(sealed, trace)
    earlier = _earlier(out, sealed)
    number = len(earlier) + 1
    folder = out / f"attempt-{number:03d}"
    folder.mkdir(parents=True)
    began_s, began_unix_s = means.clock.now(), means.unix_now()
    runs: list[dict[str, Any]] = []

    def note(outcome: str, fault: str | None, reason: str | None) -> dict[str, Any]:
        wall_s = means.clock.now() - began_s
        attempt = {"number": number, "seal": sealed.sha256, "began_unix_s": round(began_unix_s, 3),
                "wall_s": round(wall_s, 3), "outcome": outcome, "fault": fault, "reason": reason, "runs": len(runs),
                "cost": round(sealed.probe.cost_per_hour * wall_s / 3600, 6), "currency": sealed.probe.currency}
        _write(folder / ATTEMPT, attempt)
        return attempt

    def ran(run: dict[str, Any]) -> None:
        runs.append(run)
        _write(folder / f"run-{len(runs):03d}.json", run)
        note(*_KILLED)

    note(*_KILLED)
    try:
        async with asyncio.timeout(60 * sealed.probe.budget_minutes):
            await _attempt(sealed, trace, folder, number, means, ran)
        judged = judge(sealed, trace, runs, progress=means.progress)
    except BaseException as error:
        note("failed", _fault(error), _reason(error, sealed.probe))
        if isinstance(error, TimeoutError):
            raise ProbeVoid("over_budget", _reason(error, sealed.probe)) from error
        raise
    this = note("completed", None, None)
    path = out / CERTIFICATE
    write_certificate(path, parts_of(sealed, [*earlier, this], runs, judged))
    return path, judged


def parts_of(sealed: Sealed, attempts: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]],
             judged: Judged) -> dict[str, Any]:
    """Of the certificate; each is bound by a digest of its own."""
    body = sealed.body
    return {
        "probe": body["probe"], "seal": {**body, "sha256": sealed.sha256}, "trace": body["trace"],
        "bridge": {name: body["bridge"][name] for name in ("send", "block_tokens", "engine_block_tokens", "alphabet")},
        "oracle": body["oracle"], "attempts": list(attempts), "arms": list(runs), "figures": judged.figures_part(),
        "verdict": judged.verdict_part(), "does_not_prove": list(sealed.probe.does_not_prove),
        "prior_art": list(sealed.probe.prior_art), "retracts": [dict(each) for each in sealed.probe.retracts],
        "cost": {"attempts": len(attempts), "currency": sealed.probe.currency,
                 "total": round(sum(each["cost"] for each in attempts), 6)},
    }


async def _attempt(sealed: Sealed, trace: Path, folder: Path, number: int, means: Means,
                   ran: Callable[[dict[str, Any]], None]) -> None:
    probe = sealed.probe
    turns = _turns(sealed, trace, number, means)
    reports = [_gated(turn, probe) for turn in turns]
    means.progress(f"{len(turns)} replays, every prompt through the gates")
    at = 0
    while at < len(turns):
        same = [turn for turn in turns[at:] if (turn.arm, turn.pair) == (turns[at].arm, turns[at].pair)]
        arm = same[0].arm
        means.progress(f"{arm.name}: starting its server" if arm.start else f"{arm.name}: {arm.url}")
        async with serving(url=arm.url, start=arm.start, env=arm.env, model=sealed.model, api_key=means.api_key,
                           clock=means.clock, log=folder / f"server-{arm.name}-{same[0].pair}.log") as server:
            confirmed = confirm(arm.name, server.described, tier=arm.tier, block_tokens=probe.engine_block_tokens,
                                capacity_tokens=None if arm.control else probe.capacity_tokens)
            for place, turn in enumerate(same):
                report = reports[at + place]
                if probe.send == "text":
                    report = await _gated_as_text(turn, probe, server)
                ran(await _run(turn, probe, server, report, confirmed, number, folder, means))
        at += len(same)


def _turns(sealed: Sealed, trace: Path, number: int, means: Means) -> list[_Turn]:
    """Short arms first, once; then the others, in turned order with every pair."""
    probe = sealed.probe
    stream = slice_of(trace, probe)
    arrivals = None
    found = []
    order = [(arm, 0) for arm in probe.arms if probe.short(arm)]
    for pair in range(probe.pairs):
        order += [(arm, pair) for arm in (probe.swept if pair % 2 == 0 else probe.swept[::-1])]
    for arm, pair in order:
        for point, load in enumerate(probe.loads[:1] if probe.short(arm) else probe.loads):
            due_s = None
            if load.rate_factor is not None:
                arrivals = arrivals or list(islice(open_trace(trace), probe.requests))
                due_s = due_times(arrivals, load.rate_factor)
            prompts = means.prompts(prompts_of(sealed, attempt=number, pair=pair, point=point, arm=arm))
            found.append(_Turn(arm=arm, pair=pair, point=point, load=load, prompts=prompts,
                               requests=planned(stream, requests=arm.requests, due_s=due_s)))
    return found


def _gated(turn: _Turn, probe: Probe, tokenize: Tokenize | None = None) -> GateReport:
    try:
        return turn.prompts.gates(turn.requests, engine_block_tokens=probe.engine_block_tokens, tokenize=tokenize)
    except BridgeRefused as error:
        collided = turn.prompts.collide(turn.requests, probe.engine_block_tokens)
        raise ProbeVoid("bridge_collision" if collided else "bridge_refused", str(error)) from error


async def _gated_as_text(turn: _Turn, probe: Probe, server: Serving) -> GateReport:
    """The server's own tokenizer gives every prompt back as it is to be read."""
    known = {text: await server.client.tokenize(text) for text in map(turn.prompts.text, turn.requests)}
    return _gated(turn, probe, known.__getitem__)


async def _run(turn: _Turn, probe: Probe, server: Serving, report: GateReport, confirmed: Sequence[str], number: int,
               folder: Path, means: Means) -> dict[str, Any]:
    arm, able = turn.arm, server.capabilities
    if not able.completions or (probe.send == "ids" and not able.token_ids):
        raise ProbeVoid("arm_not_confirmed", f"{arm.name}: the server takes no completions of "
                        f"{'token ids; send text' if able.completions else 'any kind'}")
    longest = max(each.tokens for each in turn.requests) + probe.max_tokens
    if able.max_context is not None and longest > able.max_context:
        raise ConfigError(f"{arm.name}: the longest prompt and its answer have {longest} tokens, the server takes "
                          f"{able.max_context}; scale the trace's blocks down (trace: block_tokens)")
    outcome = await replay(
        turn.requests, turn.prompts,
        Manner(url=server.url, api_key=means.api_key, model=server.model, send=probe.send, max_tokens=probe.max_tokens,
               ignore_eos=able.ignore_eos), turn.load, scrape=means.scraper(server.adapter), clock=means.clock,
        log_dir=folder, worker=means.worker, progress=lambda text: means.progress(f"{arm.name}: {text}"))
    reading = _check(turn, outcome)
    return {"arm": arm.name, "pair": turn.pair, "point": turn.point, "attempt": number,
            "described": json.loads(json.dumps(dict(server.described))), "confirmed": list(confirmed),
            "command": list(named(server.command)), "gate": asdict(report), "control": reading, **outcome.as_json()}


def _check(turn: _Turn, outcome: Replay) -> str | None:
    """A control's reading. Raises ProbeVoid."""
    totals = check_replay(outcome)
    for asked, got in zip(turn.requests, outcome.requests, strict=True):
        if got.outcome != "ok" and turn.load.rate_factor is None:
            raise ProbeVoid("request_failed", f"request {got.index} of {turn.arm.name}: {got.reason}")
        if got.outcome == "ok" and got.prompt_tokens != asked.tokens:
            raise ProbeVoid("prompt_changed", f"request {got.index} of {turn.arm.name} was sent as {asked.tokens} "
                            f"tokens, the server read {got.prompt_tokens}; does it put tokens of its own before it?")
    return check_control(turn.arm.name, totals, fresh=turn.arm.fresh) if turn.arm.control else None


def _earlier(out: Path, sealed: Sealed) -> list[dict[str, Any]]:
    """The attempts that are in the folder. Raises ConfigError where it is another seal's, or has its certificate."""
    if (out / CERTIFICATE).exists():
        raise ConfigError(f"{out / CERTIFICATE} exists; a probe that was decided is not run again under the same seal: "
                          "seal it anew, or give another --out")
    found: list[dict[str, Any]] = []
    while (folder := out / f"attempt-{len(found) + 1:03d}").is_dir():
        path = folder / ATTEMPT
        try:
            attempt = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            outcome, fault, reason = _KILLED
            attempt = {"number": len(found) + 1, "seal": sealed.sha256, "began_unix_s": None, "wall_s": 0.0,
                       "outcome": outcome, "fault": fault, "reason": reason, "runs": 0, "cost": 0.0,
                       "currency": sealed.probe.currency}
        if attempt.get("seal") != sealed.sha256:
            raise ConfigError(f"{folder} is an attempt at another seal ({str(attempt.get('seal'))[:16]}…); give "
                              "another --out")
        found.append(attempt)
    return found


def _fault(error: BaseException) -> str:
    if isinstance(error, ProbeVoid):
        return error.fault
    if isinstance(error, TimeoutError):
        return "over_budget"
    return "interrupted" if isinstance(error, (asyncio.CancelledError, KeyboardInterrupt)) else type(error).__name__


def _reason(error: BaseException, probe: Probe) -> str:
    if isinstance(error, TimeoutError):
        return f"the budget of {probe.budget_minutes:g} minutes was spent; raise it in a new probe, or ask for less"
    if isinstance(error, HostCacheError):
        return str(error)
    return f"{type(error).__name__}: {str(error)[:300]}"


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
