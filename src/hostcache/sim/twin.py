"""The published fleet, simulated: few coefficients fitted on the rows that may be fitted, the other rows predicted.

What was published, which rows may be fitted and how near a prediction must come is `published`'s; here is what is done
with it. Every mechanism and every coefficient is explained in docs/simulator.md, with what stays unexplained.

A fit is a fixed point: each coefficient is moved by the one observable that it decides, all from the same simulations,
for a fixed number of rounds. The forms of the curves are fixed; no predicted row is read by anything but the judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from multiprocessing import get_context
from random import Random
from statistics import fmean

from hostcache import __version__
from hostcache.copiers.virtual import CopySpeed
from hostcache.records import Arm, TwinCoefficient, TwinRecord
from hostcache.sim.clients import AgentLoops, Clients, Rotation, RotationShape, Visit
from hostcache.sim.costs import Costs
from hostcache.sim.fleet import Fleet
from hostcache.sim.loop import Loop
from hostcache.sim.published import REQUEUE, FleetFacts, judge_all, published, summary
from hostcache.sim.requests import How
from hostcache.sim.shape import FleetShape, Lane
from hostcache.sim.stage import identity, simulate
from hostcache.tier import Direction, TierConfig
from hostcache.workload.agents import AgentShape

SEEDS = 8
ROUND_TOKENS = (1, 6)
"""A decode round verifies one token and up to five drafts of a stream: 3.5 on average."""
AGENTS = (8, 16, 32, 48)
REQUEUE_TOKENS = 700_000
"""Of R4's sessions in the requeue smoke: 'three 700k-token sessions' (section 7.4 of the report). With the 679,000 of
the table three contexts never exceed the pool, and nothing is ever deferred."""
CODE_PROMPT, PROSE_PROMPT = 1960, 2300
"""Tokens of the ladder's decode prompt of 8,192 characters, at the corpora's characters per token."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """The device of one corpus. Seconds a token, but `admission_s`."""

    prefill_token_s: float
    prefill_square_s: float
    admission_s: float
    prompt_token_s: float
    step_1: float
    step_6: float
    step_16: float

    @property
    def costs(self) -> Costs:
        return Costs(
            prefill_token_s=self.prefill_token_s, prefill_square_s=self.prefill_square_s, admission_s=self.admission_s,
            prompt_token_s=self.prompt_token_s, round_tokens=ROUND_TOKENS,
            decode_step_s=((1, self.step_1), (6, self.step_6), (16, self.step_16)))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run: `agents` loops (one value), or a rotation cell of the publication."""

    arm: Arm
    agents: int = 0
    rotation: str = ""
    requeue: bool = False


Measured = Mapping[str, float]
"""Quantity, as `published` names it → value."""


# --- one run --------------------------------------------------------------------------------------------------------


def fleet_shape(coefficients: Coefficients, arm: Arm) -> FleetShape:
    """The published fleet with one arm's quota. Tails have a bound of their own, of the same size."""
    facts = published().fleet
    page = facts.page_tokens
    tier = TierConfig(
        host_cache_bytes=facts.host_quota_bytes if arm == "on" else 0, page_bytes=page * facts.kv_bytes_per_token,
        page_tokens=page, copy_budget_s=facts.copy_budget_s, restore_budget_s=facts.restore_budget_s,
        store_pace_s=facts.store_pace_s)  # fmt: skip
    return FleetShape(
        tier=tier, costs=coefficients.costs, speed=copy_speed(facts), pool_tokens=facts.pool_tokens,
        slots=facts.max_concurrency, prompt_entries=facts.prompt_bank_entries, turn_entries=facts.turn_bank_entries,
        lane=Lane.EXCLUSIVE, door_slots=published().agent_workload.front_door_slots, door_waiting=0, door_wait_s=0.0,
        hand_off=True, prompts_first=True, supersede=False, look_behind_match=False, keep_restored=True,
        tail_bytes=facts.tail_bytes_per_snapshot, tail_quota_bytes=facts.host_quota_bytes)  # fmt: skip


def copy_speed(facts: FleetFacts) -> CopySpeed:
    """The slower of the two published bandwidths; a job also moves one tail."""
    rate = facts.copy_bytes_per_s_per_segment
    return CopySpeed(store_bytes_per_s=rate, restore_bytes_per_s=rate,
                     submission_s=facts.tail_bytes_per_snapshot / rate)


class _HarnessBackoff:
    """The harness' own: the n-th wait is 0.5 s · 2^(n-1), jittered by a quarter, at most 8 s, at most 20 of them."""

    def wait_s(self, refusals: int, retry_after_s: float | None, rng: Random) -> float | None:
        load = published().agent_workload
        if refusals >= load.backoff_max_retries:
            return None
        jitter = rng.uniform(1 - load.backoff_jitter, 1 + load.backoff_jitter)
        return min(load.backoff_cap_s, load.backoff_first_s * load.backoff_factor**refusals * jitter)


def harness_stream(run: str, what: str, client: int) -> Random:
    """The harness draws every client's gaps and backoffs from its run's name: a published point is one fixed draw."""
    digest = sha256(f"{run}-{what}-c{client}".encode()).digest()
    return Random(int.from_bytes(digest[:8], "big"))


def measure(coefficients: Coefficients, cell: Cell, seed: int) -> Measured:
    """One run of a cell. The seed decides what a round of decoding yields, and what the conversations say."""
    make = _rotation if cell.rotation else _agents
    run = simulate(fleet_shape(coefficients, cell.arm), partial(make, cell, seed), seed=seed)
    counted = [visit for visit in run.clients.visits if visit.counted and visit.client >= 0]
    served = [visit for visit in counted if visit.how is How.SERVED]
    found = _figures(served)
    opened, now = run.clients.opened, run.fleet.stats()
    assert opened is not None
    if cell.rotation:
        misses = now.device_misses - opened.device_misses
        found["hit_share"] = (now.host_hits - opened.host_hits) / misses if misses else 0.0
        watch = run.fleet.watch
        found["restore_mean_ms"] = 1e3 * watch.restore_s / watch.restores if watch.restores else 0.0
        found["revisits"] = found["served"] = found.pop("turns")
        found["refused"] = float(sum(visit.how is not How.SERVED for visit in counted))
        found["deferred"] = float(now.deferred - opened.deferred)
    return found


def _agents(cell: Cell, seed: int, fleet: Fleet, loop: Loop) -> Clients:
    load = published().agent_workload
    shape = AgentShape(
        prefix_tokens=load.start_tokens, tool_tokens=load.new_tokens_per_turn, reply_tokens=load.reply_tokens_per_turn,
        gap_min_s=load.tool_gap_s[0], gap_max_s=load.tool_gap_s[1])  # fmt: skip
    return AgentLoops(
        fleet, loop, shape, count=cell.agents, window_s=load.window_s, identity=identity(fleet.shape.page), seed=seed,
        backoff=_HarnessBackoff(), compact_one_in=0,
        streams=partial(harness_stream, f"b5-agentic-{cell.arm}"))  # fmt: skip


def _rotation(cell: Cell, seed: int, fleet: Fleet, loop: Loop) -> Clients:
    row, load = published().rotation_row(cell.rotation), published().rotation_workload
    shape = RotationShape(
        sessions=row.sessions, tokens=REQUEUE_TOKENS if cell.requeue else row.tokens, users=row.users,
        new_tokens=load.new_tokens_per_visit, reply_tokens=load.reply_tokens_per_visit,
        probe_tokens=load.probe_prompt_tokens, probe_reply_tokens=load.probe_decode_tokens,
        probe_every_s=load.probe_every_s)  # fmt: skip
    window_s = row.window_on_s if cell.arm == "on" else row.window_off_s
    return Rotation(fleet, loop, shape, window_s=window_s, identity=identity(fleet.shape.page), seed=seed,
                    backoff=_HarnessBackoff())


def _figures(served: Sequence[Visit]) -> dict[str, float]:
    firsts = sorted(visit.ttft_s for visit in served if visit.ttft_s is not None)
    rates = sorted(visit.decode_tok_s for visit in served if visit.decode_tok_s is not None)
    prompt = sum(visit.prompt_tokens for visit in served)
    return {
        "turns": float(len(served)), "avg_s": fmean(visit.ended_s - visit.sent_s for visit in served),
        "ttft_p50": _nearest_rank(firsts, 50), "ttft_p95": _nearest_rank(firsts, 95),
        "hit_share": sum(visit.device_tokens + visit.host_tokens for visit in served) / prompt,
        "decode_p50": _nearest_rank(rates, 50), "retries": float(sum(visit.retries for visit in served))}


def _nearest_rank(ordered: Sequence[float], percent: int) -> float:
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def restored_s(coefficients: Coefficients, tokens: int) -> float:
    """From a prompt's arrival until its `tokens` tokens are back on the device: tokenised, matched, copied."""
    facts = published().fleet
    whole = tokens // facts.page_tokens * facts.page_tokens
    copy = copy_speed(facts).seconds(Direction.RESTORE, whole * facts.kv_bytes_per_token, 1)
    return coefficients.prompt_token_s * tokens + copy


# --- the fit --------------------------------------------------------------------------------------------------------

Runs = Callable[[Coefficients, Sequence[tuple[Cell, int]]], Sequence[Measured]]
"""Simulates (cell, seed) pairs."""

START = Coefficients(prefill_token_s=1.35e-4, prefill_square_s=0.0, admission_s=0.23, prompt_token_s=0.0,
                     step_1=7e-3, step_6=48e-3, step_16=68e-3)
"""Near where earlier fits on the same rows ended: saves rounds, decides nothing."""
START_PROSE = replace(START, prefill_token_s=1.41e-4, admission_s=0.41)


def closed_form(start: Coefficients) -> Coefficients:
    """What needs no simulation: the square term from the slope of the cold prefill table, the cost a prompt token from
    the one restore row that may be fitted."""
    table = published().fleet.cold_prefill_tok_s
    sizes, times = [n for n, _ in table], [1 / rate for _, rate in table]
    mean_n, mean_s = fmean(sizes), fmean(times)
    slope = sum((n - mean_n) * (s - mean_s) for n, s in zip(sizes, times, strict=True)) / sum(
        (n - mean_n) ** 2 for n in sizes)
    row = next(row for row in published().restores if published().roles[f"restore {row.tokens}"] == "fitted")
    bare = replace(start, prefill_square_s=slope, prompt_token_s=0.0)
    return replace(bare, prompt_token_s=(row.restored_s - restored_s(bare, row.tokens)) / row.tokens)


def six_streams(coefficients: Coefficients, aggregates_tok_s: Sequence[float], prompt_tokens: int) -> float:
    """Seconds a token and stream with six active. The published aggregate is six replies of 200 tokens over the wall
    time of the group, and that holds the six exclusive cold prefills of their prompts."""
    costs = coefficients.costs
    aggregate = len(aggregates_tok_s) / sum(1 / rate for rate in aggregates_tok_s)  # of equal work: averaged as times
    prefills = 6 * (costs.setup_s(prompt_tokens) + costs.prefill_s(0, prompt_tokens))
    return (6 * 200 / aggregate - prefills) / 199


def fit_code(runs: Runs, *, rounds: int, seeds: int, progress: Progress) -> Coefficients:
    """K = 8 decides the cost of an admission (TTFT) and a lone stream's step (average and decode), K = 48 off the
    prefill rate (average), K = 48 on the step of sixteen streams (average), the six-stream aggregate that of six."""
    facts = published()
    eight = [facts.agent_row(8, arm) for arm in ("off", "on")]
    off48, on48 = (facts.agent_row(48, arm) for arm in ("off", "on"))
    wanted_avg, wanted_first, wanted_rate = (
        fmean(getattr(row, name) for row in eight) for name in ("avg_s", "ttft_p50_s", "decode_p50_tok_s"))
    found = closed_form(START)
    for number in range(rounds):
        damping = 1.0 if number < rounds // 2 else 0.6
        found = replace(found, step_6=six_streams(found, facts.fleet.six_streams_code_tok_s, CODE_PROMPT))
        tasks = [(Cell(agents=k, arm=arm), 100 + s) for k in (8, 48) for arm in ("off", "on") for s in range(seeds)]
        got = dict(zip(tasks, runs(found, tasks), strict=True))

        def mean(name: str, cells: Iterable[Cell], got: Mapping[tuple[Cell, int], Measured] = got) -> float:
            return fmean(got[cell, 100 + s][name] for cell in cells for s in range(seeds))

        k8 = [Cell(agents=8, arm="off"), Cell(agents=8, arm="on")]
        avg_off, avg_on = (mean("avg_s", [Cell(agents=48, arm=arm)]) for arm in ("off", "on"))
        progress(f"fit {number + 1}/{rounds}, code: K=8 {mean('avg_s', k8):.2f} s of {wanted_avg:.2f}, "
                 f"K=48 {avg_off:.1f} / {avg_on:.1f} s of {off48.avg_s:.1f} / {on48.avg_s:.1f}")
        slow = mean("decode_p50", k8) / wanted_rate - 1 + 2 * (wanted_avg / mean("avg_s", k8) - 1)
        found = replace(
            found,
            prefill_token_s=found.prefill_token_s * (1 + damping * 0.9 * (off48.avg_s / avg_off - 1)),
            admission_s=max(0.0, found.admission_s + 0.8 * (wanted_first - mean("ttft_p50", k8))),
            step_1=max(2e-3, found.step_1 * (1 + damping * 0.4 * slow)),
            step_16=max(found.step_6, found.step_16 * (1 + damping * 1.2 * (on48.avg_s / avg_on - 1))))
    return replace(found, step_6=six_streams(found, facts.fleet.six_streams_code_tok_s, CODE_PROMPT))


def fit_prose(runs: Runs, *, rounds: int, seeds: int, progress: Progress) -> Coefficients:
    """R1 off decides the prefill rate, R1 on the cost of an admission; the aggregate the step of six streams; the
    undisturbed one of the two single-stream rates that of one."""
    facts = published()
    row = facts.rotation_row("R1")
    found = replace(closed_form(START_PROSE), step_1=1 / max(facts.fleet.single_stream_decode_tok_s))
    for number in range(rounds):
        found = _prose_steps(found)
        tasks = [(Cell(rotation="R1", arm=arm), 100 + s) for arm in ("off", "on") for s in range(seeds)]
        got = runs(found, tasks)
        off, on = (fmean(each["revisits"] for each in half) for half in (got[:seeds], got[seeds:]))
        progress(f"fit {number + 1}/{rounds}, prose: R1 {off:.0f} / {on:.0f} revisits of {row.revisits_off} / "
                 f"{row.revisits_on}")
        found = replace(found, admission_s=max(0.0, found.admission_s + 0.6 * (on / row.revisits_on - 1)),
                        prefill_token_s=found.prefill_token_s * (1 + 0.9 * (off / row.revisits_off - 1)))
    return _prose_steps(found)


def _prose_steps(found: Coefficients) -> Coefficients:
    step = six_streams(found, published().fleet.six_streams_prose_tok_s, PROSE_PROMPT)
    return replace(found, step_6=step, step_16=1.8 * step)  # no rotation has more than seven streams


# --- all of it ------------------------------------------------------------------------------------------------------

CAUSES = {
    "rotation R2 off revisits": "the published row's own medians make a window of 225 s, not 300 (Little's law); with "
                                "240 s the twin serves 170",
    "agentic_ramp K=32 on ttft_p50": "a median between two humps: whether a turn finds a slot at once",
    "agentic_ramp K=16 off hit_share": "unexplained: here the prompt bank rescues more turns than in the fleet",
}  # fmt: skip
"""Of misses, should they miss."""

NOT_MODELLED = (
    "drafts: a round yields one token and five coin throws, whatever the text",
    "the network, the client's own time, replies that end early",
    "two decode lanes, and any traffic besides the harness' own",
    "compaction: at one turn in 200 it happens about once a run",
    "R4 with the tier on in the measured build, which fails what it cannot admit (135 served, 81 refused)",
    "host eviction: no published cell fills the quota",
)
UNEXPLAINED = (
    "K=16 off: the hit share comes out about 2 points high",
    "R2 on and R2 off: decode of three streams is slower here than in the fleet",
    "the forms of the curves were chosen by people who had seen all rows; only the numbers are fitted blind",
)


def twin(*, seeds: int = SEEDS, jobs: int = 1, commands: Sequence[str] = (), rounds: int = 5, fit_seeds: int = 3,
         wall_s: Callable[[], float] | None = None, progress: Progress = lambda line: None) -> TwinRecord:
    """Fit, predict, judge. `jobs`: processes; the result does not depend on it."""
    with ExitStack() as stack:
        pool: Executor | None = None
        if jobs > 1:
            pool = stack.enter_context(ProcessPoolExecutor(jobs, mp_context=get_context("forkserver")))
        runs = partial(_run_all, pool)
        code = fit_code(runs, rounds=rounds, seeds=fit_seeds, progress=progress)
        prose = fit_prose(runs, rounds=rounds, seeds=2, progress=progress)
        values = _predict(runs, code, prose, range(seeds), progress)
    values.update(_restores(code))
    rows = judge_all(values, CAUSES)
    return TwinRecord(
        source=published().source, seeds=tuple(range(seeds)), commands=tuple(commands),
        wall_s=None if wall_s is None else wall_s(), rows=rows, coefficients=_told(code, prose),
        summary=summary(rows, seeds=seeds), not_modelled=NOT_MODELLED, unexplained=UNEXPLAINED,
        hostcache_version=__version__)  # fmt: skip


def _run_all(pool: Executor | None, coefficients: Coefficients, tasks: Sequence[tuple[Cell, int]]) -> list[Measured]:
    cells, seeds = [cell for cell, _ in tasks], [seed for _, seed in tasks]
    mapped = map if pool is None else partial(pool.map, chunksize=1)
    return list(mapped(partial(measure, coefficients), cells, seeds))


def _predict(runs: Runs, code: Coefficients, prose: Coefficients, seeds: Sequence[int], progress: Progress
             ) -> dict[str, list[float]]:
    """Figure name → one value a seed, of every row that was published: the fitted ones as well."""
    agents = {f"agentic_ramp K={k} {arm}": Cell(agents=k, arm=arm) for k in AGENTS for arm in _arms()}
    rotations = {
        f"rotation {row.cell} {arm}": Cell(rotation=row.cell, arm=arm)
        for row in published().rotations for arm in _arms() if not (row.cell == "R4" and arm == "on")}
    rotations[f"rotation {REQUEUE}"] = Cell(rotation="R4", arm="on", requeue=True)
    values: dict[str, list[float]] = {}
    known = {figure.name for figure in published().figures}
    for coefficients, rows in ((code, agents), (prose, rotations)):
        for name, cell in rows.items():
            got = runs(coefficients, [(cell, seed) for seed in seeds])
            progress(f"simulated {name}, {len(got)} seeds")
            for quantity in got[0]:
                if (figure := f"{name} {quantity}") in known:
                    values[figure] = [each[quantity] for each in got]
    return values


def _restores(code: Coefficients) -> dict[str, list[float]]:
    facts, costs = published().fleet, code.costs
    values = {}
    for row in published().restores:
        name = f"restore {row.tokens}"
        values[f"{name} restored_s"] = [restored_s(code, row.tokens)]
        values[f"{name} cold_s"] = [costs.setup_s(row.tokens) + costs.prefill_s(0, row.tokens)]
        if row.bytes_restored is not None:
            pages = row.tokens // facts.page_tokens
            moved = pages * facts.page_tokens * facts.kv_bytes_per_token + facts.tail_bytes_per_snapshot
            values[f"{name} bytes"] = [float(moved)]
    return values


def _arms() -> tuple[Arm, Arm]:
    return ("off", "on")


def _told(code: Coefficients, prose: Coefficients) -> tuple[TwinCoefficient, ...]:
    facts = published().fleet
    of_code = {
        "prefill_token_s": "K=48 off, average", "admission_s": "K=8, TTFT p50",
        "prompt_token_s": "the restore of 54,620 tokens", "step_1": "K=8, average and decode",
        "step_6": "aggregate of six streams, code", "step_16": "K=48 on, average",
        "prefill_square_s": "slope of the cold prefill table"}  # fmt: skip
    of_prose = {
        "prefill_token_s": "R1 off, revisits", "admission_s": "R1 on, revisits",
        "step_1": "single-stream decode, the undisturbed rate",
        "step_6": "aggregate of six streams, prose"}  # fmt: skip
    fixed = {"step_6", "prefill_square_s"}
    rows = [
        TwinCoefficient(name=f"{name} ({corpus})", value=getattr(values, name), unit=_UNITS[name], source=source,
                        fitted=name not in fixed and not (corpus == "prose" and name == "step_1"))
        for corpus, values, sources in (("code", code, of_code), ("prose", prose, of_prose))
        for name, source in sources.items()]  # fmt: skip
    rows.append(TwinCoefficient(name="copy bandwidth", value=facts.copy_bytes_per_s_per_segment, unit="bytes/s",
                                source="a constant of the fleet", fitted=False))
    return tuple(rows)


_UNITS = {"prefill_token_s": "s/token", "prefill_square_s": "s/token²", "admission_s": "s", "prompt_token_s": "s/token",
          "step_1": "s/token", "step_6": "s/token", "step_16": "s/token"}
