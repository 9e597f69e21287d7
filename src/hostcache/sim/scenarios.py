"""What a scenario is, and how it runs: faults, clients, proofs, the memory it takes. Knows no particular one."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from hostcache.copiers.faults import FaultAction, Hold, Wedge, random_faults
from hostcache.copiers.virtual import CopySpeed
from hostcache.errors import InvariantBroken
from hostcache.sim.clients import PATIENT, Clients
from hostcache.sim.costs import Costs
from hostcache.sim.fleet import Fleet
from hostcache.sim.loop import Loop
from hostcache.sim.play import Churn, ChurnShape, Play, Story
from hostcache.sim.shape import FleetShape
from hostcache.sim.stage import Run, identity, simulate
from hostcache.tier import CopyJob, Direction, TierConfig
from hostcache.workload.agents import stream

SOAK_EVENTS = 200_000
"""What a soak is made of unless more is asked for."""

PAGE = 16
COSTS = Costs(prefill_token_s=1.25e-4, decode_step_s=((1, 0.005), (8, 0.008)))
"""A page is computed in 2 ms, a decode step takes 5 ms and more."""
SPEED = CopySpeed(store_bytes_per_s=10_000.0, restore_bytes_per_s=10_000.0)
"""With pages of one byte: ten pages a millisecond."""


def fleet_shape(pages: int, frames: int, *, tier: Mapping[str, Any] = {}, **changes: Any) -> FleetShape:
    """A small fleet: `pages` on the device, `frames` on the host, 16 tokens and one byte a page. `tier` and `changes`
    are fields of TierConfig and FleetShape."""
    settings: dict[str, Any] = {"restore_budget_s": 0.05, "copy_budget_s": 0.2, **tier}
    config = TierConfig(host_cache_bytes=frames, page_bytes=1, page_tokens=PAGE, **settings)
    return replace(FleetShape(tier=config, costs=COSTS, speed=SPEED, pool_tokens=pages * PAGE, reach_entries=0),
                   **changes)  # fmt: skip


# ---- faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probabilities a copy job; at most one fault each. `up_to_s`: how long delays, wedges and late reports take.

    `for_ever`: of the wedges, the share that does not end by itself. `held_s`: what would be held for ever is let go
    after so long (None: never). `only`: of jobs in this direction. `at`: a fault of its own for the n-th job of a
    direction, from 0.
    """

    fail: float = 0.0
    delay: float = 0.0
    hold: float = 0.0
    wedge: float = 0.0
    late: float = 0.0
    twice: float = 0.0
    up_to_s: float = 0.3
    for_ever: float = 0.0
    held_s: float | None = None
    only: Direction | None = None
    at: tuple[tuple[Direction, int, Callable[[], FaultAction]], ...] = ()


MIXED = Faults(fail=0.05, delay=0.04, hold=0.03, wedge=0.03, late=0.05, twice=0.05, for_ever=0.3, held_s=2.0)
MANY = Faults(fail=0.12, delay=0.08, hold=0.06, wedge=0.06, late=0.09, twice=0.09, for_ever=0.3, held_s=2.0)
"""Every second job has a fault: for stories that see few."""


class _Injector:
    """Acts out `faults`; knows the fleet from `attach` on, before the first job starts."""

    def __init__(self, faults: Faults, rng: Random) -> None:
        self._faults = faults
        self.acted = 0
        self._fleet: Fleet | None = None
        self._started = dict.fromkeys(Direction, 0)
        self._random = random_faults(
            rng, fail=faults.fail, delay=faults.delay, hold=faults.hold, wedge=faults.wedge, late=faults.late,
            twice=faults.twice, up_to_s=faults.up_to_s, for_ever=faults.for_ever, stuck=self._stuck)  # fmt: skip

    def attach(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def __call__(self, job: CopyJob) -> FaultAction | None:
        number = self._started[job.direction]
        self._started[job.direction] += 1
        action = None if self._faults.only not in (None, job.direction) else self._random(job)
        for direction, which, make in self._faults.at:
            if (direction, which) == (job.direction, number):
                action = make()
                if isinstance(action, Hold | Wedge):
                    self._stuck(action)
        self.acted += action is not None
        return action

    def _stuck(self, action: Hold | Wedge) -> None:
        fleet, held_s = self._fleet, self._faults.held_s
        if fleet is None or held_s is None or (isinstance(action, Wedge) and action.seconds is not None):
            return

        def release() -> None:
            action.release()
            fleet.copier_changed()

        fleet.loop.at(fleet.clock.now() + held_s, "release", release)


# ---- scenarios


Proof = tuple[str, Callable[[Run], bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """What a scenario's clients are made from."""

    fleet: Fleet
    loop: Loop
    seed: int
    calm: bool
    events: int
    meter: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`shows`, in one line. `faults` are those of the run with faults; `always` has faults in both (they are what the
    scenario is about). `width`: of how many next events the seed chooses one."""

    name: str
    suite: str
    shows: str
    shape: FleetShape
    clients: Callable[[Cast], Clients]
    faults: Faults = MANY
    always: Faults | None = None
    proofs: tuple[Proof, ...] = ()
    """hold at the end of a run without faults"""
    fault_proofs: tuple[Proof, ...] = ()
    """hold at the end of a run with faults"""
    check_every: int = 1
    width: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """At one moment of a run: events so far, memory blocks the interpreter holds, the process' peak RSS in bytes."""

    events: int
    blocks: int
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A run of a scenario that is over: what was proved, the memory it took on its way, faults acted out."""

    run: Run
    proved: tuple[str, ...]
    memory: tuple[MemoryUse, ...]
    faults: int


def run_scenario(
    scenario: Scenario,
    *,
    seed: int = 0,
    faults: bool = False,
    events: int = SOAK_EVENTS,
    check: bool = True,
    keep_log: bool = False,
    progress: Callable[[int], None] = lambda events: None,
) -> Played:
    """One run of a scenario. Raises InvariantBroken.

    `events`: of a soak. `check`: prove everything as often as the scenario says; else only at its end.
    """
    plan = scenario.faults if faults else scenario.always
    if faults and scenario.always is not None:
        plan = replace(scenario.faults, at=scenario.always.at)
    injector = _Injector(plan, stream(seed, scenario.name, "faults")) if plan is not None else None
    chooser = _Seeded(stream(seed, scenario.name, "order")) if scenario.width > 1 else None
    samples: list[MemoryUse] = []

    def make(fleet: Fleet, loop: Loop) -> Clients:
        if injector is not None:
            injector.attach(fleet)
        meter = _Meter(loop, events, samples, progress)
        return scenario.clients(
            Cast(fleet=fleet, loop=loop, seed=seed, calm=not faults, events=events, meter=meter))  # fmt: skip

    run = simulate(scenario.shape, make, seed=seed, fault=injector, chooser=chooser, width=scenario.width,
                   check_every=scenario.check_every if check else 0, keep_log=keep_log)  # fmt: skip
    proved = []
    if isinstance(run.clients, Play):
        run.clients.finished()
        proved += run.clients.proved
    for what, holds in scenario.fault_proofs if faults else scenario.proofs:
        if not holds(run):
            raise InvariantBroken(f"not true: {what}")
        proved.append(what)
    acted = injector.acted if injector is not None else 0
    if faults and scenario.suite != "functional":
        if not acted:
            raise InvariantBroken("no copy met a fault")
        proved.append("copies met faults")
    if samples:
        proved.append(flat(samples))
    return Played(run=run, proved=tuple(proved), memory=tuple(samples), faults=acted)


class _Seeded:
    """Chooses as the seed says; more often than not what is due first."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, options: int) -> int:
        return min(self._rng.randrange(options), self._rng.randrange(options))


class _Meter:
    """Takes a sample of the memory after every twentieth of a soak."""

    def __init__(self, loop: Loop, events: int, samples: list[MemoryUse], progress: Callable[[int], None]) -> None:
        self._loop = loop
        self._every = max(1, events // 20)
        self._next = self._every
        self._samples = samples
        self._progress = progress

    def __call__(self) -> None:
        events = self._loop.log.events
        if events < self._next:
            return
        self._next = events - events % self._every + self._every
        gc.collect()
        self._samples.append(MemoryUse(events=events, blocks=sys.getallocatedblocks(), peak_bytes=_peak_bytes()))
        self._progress(events)


def _peak_bytes() -> int:
    """Of this process since its start; 0 where the system does not say."""
    try:
        resource = importlib.import_module("resource")
    except ImportError:
        return 0
    peak = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return peak if sys.platform == "darwin" else 1024 * peak


GROWTH_SHARE = 0.05
GROWTH_BLOCKS = 150_000
GROWTH_BYTES = 8 << 20
"""What a soak may grow by from its first tenth to its end: a share, and what it takes until the tier's history is full
(65,536 pages under two names each, which a short soak reaches after its first tenth only)."""


def flat(samples: list[MemoryUse]) -> str:
    """Raises InvariantBroken when memory grew after the first tenth."""
    last = samples[-1]
    first = next(each for each in samples if each.events >= last.events / 10)
    for name, slack in (("blocks", GROWTH_BLOCKS), ("peak_bytes", GROWTH_BYTES)):
        before, after = getattr(first, name), getattr(last, name)
        if after > before * (1 + GROWTH_SHARE) + slack:
            raise InvariantBroken(f"memory grew from {before} {name} after {first.events} events to {after} after "
                                  f"{last.events}")
    return (f"memory flat: {first.blocks} → {last.blocks} blocks, peak RSS {first.peak_bytes >> 20} → "
            f"{last.peak_bytes >> 20} MiB")


# ---- proofs over a whole run


def balanced(run: Run) -> bool:
    """Every counter that has a partner equals it, and nothing is held when nothing is alive."""
    fleet = run.fleet
    stats, books, fleets = fleet.cache.stats(), fleet.accounting.stats(), fleet.stats()
    counters = stats.counters
    alive = fleet.copier.in_flight + len(fleet.late)
    ended = fleets.served + fleets.refused + fleets.aborted
    ways = counters.restores + counters.restore_failures + counters.restore_timeouts
    door = fleet.door.stats()
    return (
        (alive > 0 or (stats.pinned_pages, stats.live_reservations, stats.live_stores) == (0, 0, 0))
        and (alive > 0 or counters.pins_taken == counters.pins_released)
        and counters.stores_completed + counters.stores_failed + stats.live_stores == counters.stores_issued
        and ways <= counters.reservations
        and books.requests + books.aborted_before_admission <= ended
        and fleet.accounting.open_accounts == 0
        and door.running == door.waiting == 0
        and fleet.memory.pool.free + _held_pages(fleet) == fleet.memory.pool.total
    )  # fmt: skip


def _held_pages(fleet: Fleet) -> int:
    """Device pages that snapshots and copies which may still run keep."""
    held: set[int] = set()
    for snapshot in fleet.memory.snapshots.values():
        held.update(snapshot.pages.tolist())
    for pages in (*fleet.late.values(), *fleet.stores.values()):
        held.update(pages.tolist())
    return len(held)


def computed_once(run: Run) -> bool:
    """What a hit served was not computed as well (where nobody left and nobody was preempted): prefilled tokens and
    hits are the prompts. In a fleet with tails hits end between pages, which the accounts do not see."""
    books, fleets = run.fleet.accounting.stats(), run.fleet.stats()
    return fleets.prefill_tokens + books.device_tokens + books.host_tokens == books.prompt_tokens


# ---- clients


def told(tell: Callable[[Play], Story]) -> Callable[[Cast], Clients]:
    """The clients of a story."""

    def make(cast: Cast) -> Clients:
        return Play(cast.fleet, cast.loop, tell, identity=identity(PAGE), seed=cast.seed, calm=cast.calm)

    return make


def churned(shape: ChurnShape, turns: int | None) -> Callable[[Cast], Clients]:
    """The clients of a churn of so many turns (None: of the events that are asked for)."""

    def make(cast: Cast) -> Clients:
        return Churn(
            cast.fleet, cast.loop, shape, identity=identity(PAGE), seed=cast.seed, turns=turns, backoff=PATIENT,
            until=(lambda: cast.loop.log.events >= cast.events) if turns is None else lambda: False,
            tick=cast.meter if turns is None else lambda: None)  # fmt: skip

    return make
