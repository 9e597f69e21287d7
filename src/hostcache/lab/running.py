"""Runs a sealed probe: servers, gates, replays, attempts; then the certificate. Every attempt is kept, with its reason.

Nothing is sent before the probe and the trace are what was sealed and every prompt of every run has passed the bridge's
gates. An attempt that ends early leaves its folder with what there is and why it ended; the next one gets a new number.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hostcache.client.adapters import Adapter
from hostcache.clock import Clock, unix_time
from hostcache.errors import ConfigError, HostCacheError, ServerError
from hostcache.lab.certificate import write_certificate
from hostcache.lab.judging import Judged, judge
from hostcache.lab.measured import check_answers, check_control, check_replay
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
_SAYS = frozenset({"number", "seal", "began_unix_s", "wall_s", "outcome", "fault", "reason", "runs", "cost",
                   "currency"})

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

    Raises SealBroken or ConfigError before anything is started, ProbeVoid or ServerError out of an attempt.
    """
    check_probe(sealed, probe)
    check_trace(sealed, trace)
    earlier = _earlier(out, sealed)
    number = len(earlier) + 1
    folder = out / f"attempt-{number:03d}"
    began_s, began_unix_s = means.clock.now(), round(means.unix_now(), 3)
    if began_unix_s < (last_s := max(sealed.body["sealed_unix_s"], *(each["began_unix_s"] or 0.0 for each in earlier),
                                     0.0)):
        raise ConfigError(f"this machine's clock says {began_unix_s:.0f}, before the seal or an earlier attempt at "
                          f"{last_s:.0f} (unix seconds); set it, or which came first cannot be told")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}; another run of this probe is under way, or give "
                          "another --out") from None
    runs: list[dict[str, Any]] = []

    def attempt(outcome: str, fault: str | None, reason: str | None) -> dict[str, Any]:
        wall_s = round(means.clock.now() - began_s, 3)
        return {"number": number, "seal": sealed.sha256, "began_unix_s": began_unix_s, "wall_s": wall_s,
                "outcome": outcome, "fault": fault, "reason": reason, "runs": len(runs),
                "cost": cost_of(sealed.probe, wall_s), "currency": sealed.probe.currency}

    def note(outcome: str, fault: str | None, reason: str | None) -> None:
        _write(folder / ATTEMPT, attempt(outcome, fault, reason))

    def ran(run: dict[str, Any]) -> None:
        runs.append(run)
        _write(folder / f"run-{len(runs):03d}.json", run)
        note(*_KILLED)

    note(*_KILLED)
    path = out / CERTIFICATE
    budget = asyncio.timeout(60 * sealed.probe.budget_minutes)
    try:
        async with budget:
            await _attempt(sealed, trace, folder, number, means, ran)
        judged = judge(sealed, trace, runs, progress=means.progress)
        # The certificate first: an attempt that says it was completed has one.
        this = attempt("completed", None, None)
        write_certificate(path, parts_of(sealed, [*earlier, this], runs, judged))
    except BaseException as error:
        if isinstance(error, TimeoutError) and budget.expired():
            void = ProbeVoid("over_budget", f"the budget of {sealed.probe.budget_minutes:g} minutes was spent; raise "
                             "it in a new probe, or ask for less")
            note("failed", void.fault, str(void))
            raise void from error
        note("failed", _fault(error), _reason(error))
        raise
    _write(folder / ATTEMPT, this)
    return path, judged


def cost_of(probe: Probe, wall_s: float) -> float:
    return round(probe.cost_per_hour * wall_s / 3600, 6)


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
                try:
                    ran(await _run(turn, probe, server, report, confirmed, number, folder, means))
                except ServerError as error:
                    raise ServerError(f"{arm.name}: its server ended or stopped answering: {error}") from error
        at += len(same)


def _turns(sealed: Sealed, trace: Path, number: int, means: Means) -> list[_Turn]:
    asked = asked_of(sealed.probe, trace)
    return [_Turn(arm=arm, pair=pair, point=point, load=sealed.probe.loads[point], requests=asked(arm, point),
                  prompts=means.prompts(prompts_of(sealed, attempt=number, pair=pair, point=point, arm=arm)))
            for arm, pair, point in sealed.probe.runs]


def asked_of(probe: Probe, trace: Path) -> Callable[[ProbeArm, int], tuple[Planned, ...]]:
    """The requests of an arm at a point of the ladder, with their due times where the load is open."""
    stream = slice_of(trace, probe)
    arrivals = [] if all(load.rate_factor is None for load in probe.loads) else list(
        islice(open_trace(trace), probe.requests))

    def asked(arm: ProbeArm, point: int) -> tuple[Planned, ...]:
        factor = probe.loads[point].rate_factor
        return planned(stream, requests=arm.requests, due_s=None if factor is None else due_times(arrivals, factor))

    return asked


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
    check_answers(turn.arm.name, turn.load, turn.requests, outcome.requests, totals)
    return check_control(turn.arm.name, totals, fresh=turn.arm.fresh) if turn.arm.control else None


def _earlier(out: Path, sealed: Sealed) -> list[dict[str, Any]]:
    """The attempts that are in the folder. Raises ConfigError where it is another seal's, or has its certificate."""
    if (out / CERTIFICATE).exists():
        raise ConfigError(f"{out / CERTIFICATE} exists; a probe that was decided is not run again under the same seal: "
                          "seal it anew, under a new name")
    found: list[dict[str, Any]] = []
    for number, folder in enumerate(sorted(out.glob("attempt-*")), start=1):
        if folder.name != f"attempt-{number:03d}":
            raise ConfigError(f"{folder} stands where attempt {number} is to be; every attempt is kept: bring back "
                              "what is missing")
        try:
            attempt = json.loads((folder / ATTEMPT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            outcome, fault, reason = _KILLED
            attempt = {"number": number, "seal": sealed.sha256, "began_unix_s": None, "wall_s": 0.0,
                       "outcome": outcome, "fault": fault, "reason": reason, "runs": 0, "cost": 0.0,
                       "currency": sealed.probe.currency}
        seal = attempt.get("seal") if isinstance(attempt, dict) else None
        if seal != sealed.sha256:
            raise ConfigError(f"{folder} is an attempt at another seal ({str(seal)[:16]}…); give another --out")
        check_attempt(attempt, sealed, number, completed=False)
        found.append(attempt)
    return found


def check_attempt(attempt: Mapping[str, Any], sealed: Sealed, number: int, *, completed: bool) -> None:
    """It says what an attempt says, at this seal and at what the probe lets it cost. Raises ConfigError."""
    def refuse(what: str) -> ConfigError:
        return ConfigError(f"attempt {number} {what}; what an attempt said of itself was changed")

    if differing := sorted(_SAYS ^ attempt.keys()):
        raise refuse(f"has no {differing[0]}" if differing[0] in _SAYS else f"says {differing[0]}, which none says")
    if attempt["number"] != number or attempt["seal"] != sealed.sha256:
        raise refuse(f"says it is number {attempt['number']} at the seal {str(attempt['seal'])[:16]}…")
    if attempt["outcome"] != ("completed" if completed else "failed"):
        raise refuse(f"has the outcome {attempt['outcome']!r}, and the last one alone is completed and has the "
                     "certificate")
    if [type(attempt[name]) for name in ("fault", "reason")] != 2 * [type(None) if completed else str]:
        raise refuse(f"{attempt['outcome']} with the fault {attempt['fault']!r} and the reason {attempt['reason']!r}")
    began_s, wall_s, cost = attempt["began_unix_s"], attempt["wall_s"], cost_of(sealed.probe, attempt["wall_s"])
    if not (wall_s >= 0 and abs(attempt["cost"] - cost) <= 1e-6 and attempt["currency"] == sealed.probe.currency):
        raise refuse(f"of {wall_s} s cost {attempt['cost']} {attempt['currency']}, the probe makes it {cost} "
                     f"{sealed.probe.currency}")
    if (began_s is None and completed) or (began_s is not None and not began_s >= sealed.body["sealed_unix_s"]):
        raise refuse(f"began at {began_s}, it was sealed at {sealed.body['sealed_unix_s']}")


def _fault(error: BaseException) -> str:
    if isinstance(error, ProbeVoid):
        return error.fault
    return "interrupted" if isinstance(error, (asyncio.CancelledError, KeyboardInterrupt)) else type(error).__name__


def _reason(error: BaseException) -> str:
    if isinstance(error, HostCacheError):
        return str(error)
    if isinstance(error, (asyncio.CancelledError, KeyboardInterrupt)):
        return "it was interrupted: Ctrl-C, or SIGTERM"
    return f"{type(error).__name__}: {str(error)[:300]}"


def _write(path: Path, value: Mapping[str, Any]) -> None:
    """All of it, or what was there before."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)
