"""The four suites: named scenarios that prove the tier on virtual time, with and without faults. Nothing is measured.

    functional    each mechanism alone, as a short story in which every step is told what it must see
    concurrency   many actors and their interleavings
    stability     long pressure while copies fail, stick, come late and twice
    soak          as long as asked for: memory stays flat, the counters balance

A scenario is a frozen record; with a seed it is one run, whose digest is the same everywhere. Its story or its `proofs`
must hold when no faults are about; with faults, the invariants of `check()` and of Watch must hold all the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

from hostcache.copiers.faults import Fail, FaultAction, Hold, Late, Twice, Wedge
from hostcache.copiers.virtual import CopySpeed
from hostcache.errors import ConfigError, HostCacheError
from hostcache.sim import stories
from hostcache.sim.play import ChurnShape, Play, Story
from hostcache.sim.scenarios import (
    COSTS,
    MANY,
    MIXED,
    PAGE,
    SOAK_EVENTS,
    Faults,
    MemoryUse,
    Proof,
    Scenario,
    balanced,
    churned,
    computed_once,
    fleet_shape,
    run_scenario,
    told,
)
from hostcache.sim.shape import FleetShape, Lane
from hostcache.sim.stage import Run
from hostcache.tier import Direction, Mode

SUITES = ("functional", "concurrency", "stability", "soak")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run of one scenario. `broken`: what did not hold, in one line. `memory`: ascending, of soaks only."""

    name: str
    suite: str
    shows: str
    faults: bool
    seed: int
    events: int
    digest: str
    simulated_s: float
    requests: int
    evictions: int
    restores: int
    faults_seen: int
    proved: tuple[str, ...]
    broken: str | None = None
    memory: tuple[MemoryUse, ...] = ()


def scenarios(suite: str = "all") -> tuple[Scenario, ...]:
    """Those of a suite, or of all, in their order."""
    if suite not in (*SUITES, "all"):
        raise ConfigError(f"there is no suite {suite!r}; choose one of {', '.join(SUITES)} or all")
    return tuple(each for each in _ALL if suite in (each.suite, "all"))


def run_suite(
    suite: str = "all",
    *,
    seed: int = 0,
    events: int = SOAK_EVENTS,
    progress: Callable[[str], None] = lambda line: None,
) -> Iterator[Result]:
    """Every scenario without and with faults, one result each as it is known. `events`: of each soak with faults; the
    soak without takes a tenth. `progress` hears what is running."""
    for scenario in scenarios(suite):
        for faults in (False, True):
            soak = scenario.suite == "soak"
            size = events if faults or not soak else max(1, events // 10)
            title = f"{scenario.suite} {scenario.name}{' with faults' if faults else ''}"
            progress(title)
            yield _judge(scenario, seed, faults, size, _counting(progress, title, size))


def _counting(progress: Callable[[str], None], title: str, size: int) -> Callable[[int], None]:
    return lambda done: progress(f"{title}: {done} of {size} events")


def _judge(scenario: Scenario, seed: int, faults: bool, events: int, progress: Callable[[int], None]) -> Result:
    common: dict[str, Any] = {"name": scenario.name, "suite": scenario.suite, "shows": scenario.shows,
                              "faults": faults, "seed": seed}  # fmt: skip
    try:
        played = run_scenario(scenario, seed=seed, faults=faults, events=events, progress=progress)
    except HostCacheError as error:
        return Result(**common, events=0, digest="", simulated_s=0.0, requests=0, evictions=0, restores=0,
                      faults_seen=0, proved=(), broken=str(error))  # fmt: skip
    run = played.run
    fleet, stats = run.fleet, run.fleet.stats()
    return Result(
        **common, events=run.log.events, digest=run.log.digest, simulated_s=fleet.clock.now(),
        requests=stats.served + stats.aborted + stats.refused, evictions=fleet.watch.evictions,
        restores=fleet.watch.restores, faults_seen=played.faults, proved=played.proved,
        memory=played.memory)  # fmt: skip


def add_suite_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("suite", nargs="?", default="all", choices=[*SUITES, "all"],
                        help="functional: each mechanism alone; concurrency: many actors and their interleavings; "
                             "stability: long pressure and every fault; soak: as long as you like (default: all)")
    parser.add_argument("--events", type=int, default=SOAK_EVENTS, metavar="N",
                        help="events of the soak with faults (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")


def run_suites(args: argparse.Namespace, *, out: TextIO, err: TextIO) -> int:
    """What `hostcache sim suite` does. Returns the exit code: 1 when anything did not hold."""
    if args.events < 1:
        raise ConfigError(f"--events is {args.events}; give at least 1")
    results = []
    for result in run_suite(args.suite, seed=args.seed, events=args.events, progress=lambda line: _say(err, line)):
        results.append(result)
        if not args.json:
            out.write(line_of(result) + "\n")
    broken = [each for each in results if each.broken is not None]
    if args.json:
        out.write(json.dumps({"seed": args.seed, "violations": len(broken), "scenarios": [
            asdict(each) for each in results]}, indent=2) + "\n")  # fmt: skip
    else:
        out.write(f"{len(results)} runs, {sum(each.events for each in results)} events, {len(broken)} violations\n")
    return 1 if broken else 0


def line_of(result: Result) -> str:
    """name, events, digest, what was proved."""
    name = f"{result.suite}/{result.name}{' +faults' if result.faults else ''}"
    if result.broken is not None:
        return f"{name:<48} BROKEN (seed {result.seed}): {result.broken}"
    counted = f"{result.evictions} evictions, {result.restores} restores, {result.faults_seen} faults"
    return f"{name:<48} {result.events:>8} events  {result.digest[:12]}  {'; '.join((*result.proved, counted))}"


def _say(err: TextIO, line: str) -> None:
    err.write(f"  {line}\n")


# ---- the scenarios


_SHAPE = ChurnShape(
    actors=12, start_tokens=(20, 160), hear_tokens=(5, 60), reply_tokens=(1, 24), turns=(2, 7), gap_s=(0.01, 0.4),
    shared_tokens=2 * PAGE, leave=0.06, compact=0.1, opted_out=0.05, capped=0.05)  # fmt: skip


def _evicts_and_restores(run: Run) -> bool:
    return run.fleet.watch.evictions > 20 and run.fleet.watch.restores > 5


def _nothing_wasted(run: Run) -> bool:
    """No page lost its head (E4)."""
    return run.fleet.cache.stats().counters.orphaned_pages == 0


def _is_off(run: Run) -> bool:
    return run.fleet.cache.off_reason is not None


def _is_on(run: Run) -> bool:
    return run.fleet.cache.off_reason is None


_WHOLE: Proof = ("no page lost its head", _nothing_wasted)
_PRESSED: Proof = ("evictions and restores", _evicts_and_restores)
_ON: Proof = ("the tier is on at the end", _is_on)


_BALANCED: Proof = ("counters balanced", balanced)
_ONCE: Proof = ("prefilled + hits = prompts", computed_once)


def _functional() -> Iterator[Scenario]:
    roomy, tight = fleet_shape(64, 64), fleet_shape(16, 64, reach_pages=6)
    base = Scenario(name="", suite="functional", shows="", shape=tight, clients=told(stories.restore),
                    proofs=(_BALANCED, _ONCE, _WHOLE), fault_proofs=(_BALANCED,))  # fmt: skip

    def one(name: str, shows: str, tell: Callable[[Play], Story], shape: FleetShape = tight, **more: Any) -> Scenario:
        return replace(base, name=name, shows=shows, clients=told(tell), shape=shape, **more)

    def at(direction: Direction, number: int, make: Callable[[], FaultAction], **more: Any) -> Faults:
        return Faults(at=((direction, number, make),), **more)

    store, restore = Direction.STORE, Direction.RESTORE
    yield one("no-pressure", "while all fits on the device not a byte moves", stories.no_pressure, roomy)
    yield one("write-back-on-pages", "as pages run out what goes next is written first", stories.on_pages,
              fleet_shape(16, 64, reach_pages=8))  # fmt: skip
    yield one("write-back-on-entries", "48 sessions over 24 entries in a roomy pool", stories.on_entries,
              fleet_shape(256, 64, reach_entries=2))  # fmt: skip
    yield one("restore", "an evicted conversation comes back instead of being computed", stories.restore)
    yield one("partial-restore", "what is left of a conversation comes back, the rest is computed",
              stories.partial_restore)
    yield one("growing", "a conversation that grows between evictions keeps its past", stories.growing)
    yield one("compaction", "a compacted prompt keeps what it shares with its past", stories.compaction)
    yield one("last-sample", "a page is kept only when every position of it was written (A3)", stories.last_sample)
    yield one("tails", "with tails a conversation resumes at exactly its frontier", stories.tails,
              replace(tight, tail_bytes=100, tail_quota_bytes=2000, replay_tokens=PAGE),
              proofs=(_BALANCED,))  # fmt: skip
    for mode in (Mode.ON_RETAIN, Mode.ON_EVICT):
        yield one(f"mode-{mode.value}", f"the mode {mode.value} writes when it says", stories.mode,
                  fleet_shape(16, 64, tier={"mode": mode}))  # fmt: skip
    yield one("mode-off", "off is the same as no frames", stories.off, fleet_shape(8, 64, tier={"mode": Mode.OFF}))
    yield one("no-frames", "a host without room changes nothing", stories.off, fleet_shape(8, 0))
    yield one("one-frame", "one frame is used, and never for more than a page", stories.one_frame, fleet_shape(8, 1))
    yield one("exclusive-lane", "restores with prefill that has the device to itself", stories.restore,
              replace(tight, lane=Lane.EXCLUSIVE))  # fmt: skip
    yield one("chunked-lane", "restores beside prefill in chunks of a page", stories.restore,
              replace(tight, chunk_tokens=PAGE))  # fmt: skip
    yield one("one-copy-lane", "both directions share a lane, restores first", stories.restore, replace(tight, lanes=1))
    yield one("lru", "plain recency serves what it can", stories.restore, fleet_shape(16, 64, tier={"eviction": "lru"}))
    yield one("small-jobs", "a conversation is written in many jobs", stories.restore,
              fleet_shape(16, 64, tier={"max_job_pages": 2}, reach_pages=6))  # fmt: skip
    yield one("preemption", "growing answers preempt the youngest, which is served later", stories.preempted,
              fleet_shape(20, 64, reserve_reply=False), proofs=(_BALANCED,))  # fmt: skip
    yield one("resume-from-host", "a preempted request goes on from cached pages", stories.resumed,
              fleet_shape(16, 64, reserve_reply=False, reach_pages=6), proofs=(_BALANCED,))  # fmt: skip
    yield one("deferred", "who finds no pages waits and is served", stories.deferred, fleet_shape(10, 16))
    yield one("door", "the front door bounds who is in, who waits and how long", stories.door,
              fleet_shape(64, 16, door_slots=2, door_waiting=2, door_wait_s=0.05))  # fmt: skip
    yield one("too-large", "a prompt that can never fit is refused at once", stories.too_large, fleet_shape(16, 16))
    yield one("late-restore", "a restore over budget costs the budget and nothing else", stories.late_restore,
              always=at(restore, 0, lambda: Wedge(0.5)))  # fmt: skip
    yield one("failed-restore", "a restore that fails is computed", stories.failed_restore, always=at(restore, 0, Fail))
    yield one("failed-store", "a write-back that fails keeps nothing", stories.failed_store,
              fleet_shape(16, 64), always=at(store, 0, Fail))  # fmt: skip
    yield one("wedged-store", "a write-back that sticks holds its frames until it is heard of", stories.wedged_store,
              fleet_shape(16, 64), always=at(store, 0, Hold, held_s=3.0),
              faults=replace(MANY, held_s=3.0))  # fmt: skip
    yield one("told-twice", "a copy that is reported twice counts once", stories.told_twice,
              always=Faults(at=((store, 0, lambda: Twice(after_s=1.0)), (restore, 0, lambda: Twice(after_s=1.0)))))
    yield one("late-report", "a restore whose word comes late is computed", stories.late_restore,
              always=at(restore, 0, lambda: Late(seconds=0.5)))  # fmt: skip
    yield one("opt-outs", "who does not want to be stored or restored is not", stories.opt_outs)
    yield one("store-caps", "what is stored ends at the cap", stories.caps)
    yield one("dearer", "a copy slower than prefill is not waited for", stories.dearer,
              replace(tight, speed=CopySpeed(store_bytes_per_s=1e4, restore_bytes_per_s=400.0)))  # fmt: skip
    yield one("new-weights", "after the weights changed nothing old is served", stories.forgotten)
    yield one("salts", "what is kept under one salt is not served under another", stories.salts)
    yield one("side-calls", "calls that never return do not displace what does (O7)", stories.side_calls,
              fleet_shape(20, 40, reach_pages=4))  # fmt: skip
    yield one("cycle", "nine conversations over room for eight (O7)", stories.cycle, fleet_shape(5, 32, turn_entries=1,
              prompt_entries=1))  # fmt: skip


def _concurrency() -> Iterator[Scenario]:
    shape = fleet_shape(48, 96, reach_pages=12, slots=6, door_slots=10)
    base = Scenario(name="", suite="concurrency", shows="", shape=shape, clients=told(stories.burst),
                    proofs=(_BALANCED,), fault_proofs=(_BALANCED,))  # fmt: skip
    yield replace(base, name="shared-prefix", shows="six requests for one prefix cause one copy",
                  clients=told(stories.shared_prefix), shape=fleet_shape(32, 64, reach_pages=8))  # fmt: skip
    yield replace(base, name="resident-prefix", shows="a prefix on the device waits for nobody's restore (B3)",
                  clients=told(stories.resident_never_waits), shape=fleet_shape(32, 64, reach_pages=8))  # fmt: skip
    yield replace(base, name="bursts", shows="twenty at once, three times", clients=told(stories.burst),
                  shape=replace(shape, door_slots=32))  # fmt: skip
    yield replace(base, name="leaving", shows="clients leave in every state of a request",
                  clients=told(stories.leaving),
                  shape=fleet_shape(24, 64, reach_pages=8, slots=3, door_slots=6))  # fmt: skip
    yield replace(base, name="preemption-storm", shows="answers outgrow the pool", clients=told(stories.storm),
                  shape=fleet_shape(20, 64, reserve_reply=False, reach_pages=4))  # fmt: skip
    churn = replace(base, faults=MIXED, clients=churned(_SHAPE, 80), proofs=(_PRESSED, _BALANCED, _WHOLE),
                    fault_proofs=(_BALANCED,))  # fmt: skip
    for lanes in (1, 2):
        yield replace(churn, name=f"copy-lanes-{lanes}", shows=f"many talk over {lanes} copy lane(s)",
                      shape=replace(shape, lanes=lanes))  # fmt: skip
    yield replace(churn, name="exclusive-prefill", shows="many talk, prefill one by one",
                  shape=replace(shape, lane=Lane.EXCLUSIVE))  # fmt: skip
    yield replace(churn, name="with-tails", shows="many talk in a fleet with tails",
                  shape=replace(shape, tail_bytes=10, tail_quota_bytes=200, replay_tokens=PAGE,
                                prompts_first=True, supersede=False))  # fmt: skip
    yield replace(churn, name="preempted", shows="many talk, some are preempted",
                  clients=churned(replace(_SHAPE, preempted=0.15), 80),
                  shape=replace(shape, reserve_reply=False))  # fmt: skip
    yield replace(churn, name="new-weights-amid", shows="the weights change while many talk",
                  clients=churned(replace(_SHAPE, forgotten=0.05), 80), proofs=(_BALANCED,),
                  fault_proofs=(_BALANCED,))  # fmt: skip
    for mode in (Mode.ON_PRESSURE, Mode.ON_RETAIN, Mode.ON_EVICT):
        yield replace(churn, name=f"interleaved-{mode.value}",
                      shows=f"any of four next events may be first, mode {mode.value}",
                      shape=replace(shape, tier=replace(shape.tier, mode=mode)), width=4)  # fmt: skip


def _stability() -> Iterator[Scenario]:
    shape = fleet_shape(48, 96, reach_pages=12, slots=6, door_slots=10, door_waiting=8)
    base = Scenario(name="", suite="stability", shows="", shape=shape, clients=churned(_SHAPE, 150),
                    proofs=(_PRESSED, _ON, _BALANCED, _WHOLE),
                    fault_proofs=(_PRESSED, _ON, _BALANCED),
                    check_every=50)  # fmt: skip
    short = replace(shape, tier=replace(shape.tier, copy_budget_s=0.05))
    yield replace(base, name="errors", shows="one copy in five fails", faults=Faults(fail=0.2))
    yield replace(base, name="slow", shows="one copy in five starts late", faults=Faults(delay=0.2, up_to_s=0.1))
    yield replace(base, name="late-words", shows="one word in five comes late", faults=Faults(late=0.2, up_to_s=0.5))
    yield replace(base, name="double-words", shows="one word in five comes twice", faults=Faults(twice=0.2))
    yield replace(base, name="wedged-a-while", shows="lanes stand still now and then",
                  faults=Faults(wedge=0.05, up_to_s=0.5), shape=short)  # fmt: skip
    yield replace(base, name="held", shows="copies are held and let go much later",
                  faults=Faults(hold=0.05, held_s=1.0), shape=short,
                  fault_proofs=(_PRESSED, _BALANCED))  # fmt: skip
    yield replace(base, name="wedged-for-ever", shows="a lane never moves again, and the fleet goes on",
                  faults=Faults(at=((Direction.STORE, 12, Wedge),)), shape=short,
                  fault_proofs=(_BALANCED,))  # fmt: skip
    yield replace(base, name="restores-wedged", shows="no restore comes back any more, and the fleet goes on",
                  faults=Faults(at=((Direction.RESTORE, 6, Wedge),)), shape=short,
                  fault_proofs=(_BALANCED,))  # fmt: skip
    yield replace(base, name="turned-off", shows="above the quarantine limit the tier turns itself off, and says so",
                  faults=Faults(hold=0.5, only=Direction.STORE), shape=short,
                  fault_proofs=(("the tier turned itself off", _is_off), _BALANCED))  # fmt: skip
    yield replace(base, name="everything", shows="every fault there is", faults=MIXED, shape=short,
                  fault_proofs=(_PRESSED, _BALANCED))  # fmt: skip
    yield replace(base, name="everything-interleaved", shows="every fault there is, in any order", faults=MIXED,
                  shape=short, width=4, fault_proofs=(_PRESSED, _BALANCED))  # fmt: skip


def _soak() -> Iterator[Scenario]:
    # Never turned off: in millions of events some moment would find too many copies held, and the rest test nothing.
    shape = fleet_shape(96, 160, reach_pages=24, slots=8, door_slots=16, costs=replace(COSTS, round_tokens=(1, 3)),
                        tier={"copy_budget_s": 0.05, "quarantine_limit": 1.0})  # fmt: skip
    yield Scenario(
        name="churn", suite="soak", shows="conversations come and go without end", shape=shape,
        clients=churned(replace(_SHAPE, actors=16, reply_tokens=(1, 80), forgotten=0.0002, preempted=0.01), None),
        faults=replace(MIXED, fail=0.02, delay=0.01, hold=0.002, wedge=0.002, late=0.02, twice=0.02, held_s=1.0),
        proofs=(_PRESSED, _BALANCED), fault_proofs=(_PRESSED, _ON, _BALANCED), check_every=1000)  # fmt: skip


_ALL: tuple[Scenario, ...] = (*_functional(), *_concurrency(), *_stability(), *_soak())
