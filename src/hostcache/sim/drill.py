"""Runs one case of the fuzz, with everything proved after every event. Draws no case, shrinks none, prints nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random

from hostcache.client.backpressure import Backpressure
from hostcache.clock import VirtualClock
from hostcache.copiers.faults import FaultAction, Hold, Wedge
from hostcache.errors import InvariantBroken
from hostcache.sim.clients import Clients, Visit
from hostcache.sim.fleet import Fleet
from hostcache.sim.loop import Chooser, Event, EventLog, Loop
from hostcache.sim.mischief import Case, Kind, Mischief, Script, Stick
from hostcache.sim.requests import How, Live, State
from hostcache.sim.stage import identity
from hostcache.tier import CopyJob
from hostcache.workload.agents import stream
from hostcache.workload.conversations import Conversation

ENOUGH_EVENTS = 300
MOST_EVENTS = 900
"""No turn starts after `ENOUGH_EVENTS`, or after this many while an eviction, a restore or a fault is still missing."""
_NEVER_EVENTS = 8_000
"""A run that is not at rest by then never will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What came of a case. `turns[c]`: how many client c began; `choices` and `jobs`: made and begun, for a rerun."""

    number: int
    events: int
    digest: str
    violation: str | None
    covered: tuple[str, ...]
    turns: tuple[int, ...] = ()
    choices: Mapping[int, int] | None = None
    jobs: int = 0
    lines: tuple[str, ...] = ()


class Choices:
    """Prefers the first candidate, draws or repeats the exceptions, and keeps them."""

    def __init__(self, rng: Random, given: Mapping[int, int] | None) -> None:
        self._rng = rng
        self._given = given
        self._number = 0
        self.made: dict[int, int] = {}

    def choose(self, options: int) -> int:
        self._number += 1
        if self._given is not None:
            chosen = min(self._given.get(self._number, 0), options - 1)
        else:
            chosen = 0 if self._rng.random() < 0.7 else self._rng.randrange(options)
        if chosen:
            self.made[self._number] = chosen
        return chosen


class Cast(Clients):
    """The clients of a case. They begin no turn once they have `enough`."""

    def __init__(self, fleet: Fleet, loop: Loop, case: Case) -> None:
        backoff = Backpressure(base_s=0.02, cap_s=0.5, budget=case.retries)
        super().__init__(fleet, loop, seed=case.seed, backoff=backoff)
        self.enough = False
        self.turns = [0] * len(case.clients)
        self._scripts = case.clients
        self._limit = case.limit_tokens
        self._number = case.number
        self._bursts = 0
        self.sessions = list(_conversations(case))

    def start(self) -> None:
        for client in range(len(self._scripts)):
            self._later(client, 0.0)

    def burst(self, count: int) -> None:
        """Requests that nobody expects, all at once."""
        page = self.fleet.shape.page
        for _ in range(count):
            self._bursts += 1
            seed = -(self._number * 1000 + self._bursts)
            turn = Conversation(identity(page), seed, start_tokens=1 + 2 * page * (self._bursts % 4)).turn(2)
            self.visit(-self._bursts, 1, turn, False, lambda visit: None)

    def _later(self, client: int, after_s: float) -> None:
        script, at = self._scripts[client], self.turns[client]
        if not self.enough and script.steps and (script.again or at < len(script.steps)):
            due_s = self.fleet.clock.now() + after_s + script.steps[at % len(script.steps)].pause_s
            self.loop.at(due_s, "turn", partial(self._send, client, script), client)

    def _send(self, client: int, script: Script) -> None:
        if self.enough:
            return
        at = self.turns[client]
        self.turns[client] += 1
        step = script.steps[at % len(script.steps)]
        session = self.sessions[step.session]
        if at:
            session.hear(step.hears_tokens)
        if step.compacts or session.tokens + step.reply_tokens > self._limit:
            session.compact(0.6)
        turn = session.turn(step.reply_tokens, store_pages=step.store_pages, load=step.load)
        if script.open_loop:
            session.answered()
            self.visit(1000 * (client + 1) + at, at, turn, True, lambda visit: None)
            self._later(client, 0.02)
            return

        def heard(visit: Visit) -> None:
            if visit.how is How.SERVED:
                session.answered()
            self._later(client, 0.0 if visit.how is How.SERVED else 0.05)

        self.visit(client, at, turn, True, heard)


def _conversations(case: Case) -> Iterator[Conversation]:
    page = case.shape.page
    seed = case.seed * 1_000_003 + case.number * 64
    shared = max((each.head_tokens for each in case.sessions), default=0)
    salts = [identity(page, salt=salt) for salt in ("", "other")]
    heads = [Conversation(salt, seed, start_tokens=max(1, shared)) for salt in salts]
    at = 0
    for number, each in enumerate(case.sessions):
        salted = each.salted and at == number - 1  # a twin of a twin is a conversation of its own
        at = at if salted else number
        own = case.sessions[at]
        yield Conversation(
            salts[salted], seed + 1 + at, start_tokens=own.start_tokens,
            head=heads[salted] if own.head_tokens else None, head_tokens=own.head_tokens)  # fmt: skip


class Meddler:
    """Does to a fleet what its case has planned."""

    def __init__(self, fleet: Fleet, loop: Loop, cast: Cast, planned: tuple[Mischief, ...]) -> None:
        self._fleet = fleet
        self._loop = loop
        self._cast = cast
        self._planned = list(planned)
        self.done: set[str] = set()

    def look(self, event: int) -> None:
        """After that event: schedule what can be done now."""
        for each in [planned for planned in self._planned if planned.event <= event]:
            live = self._whom(each)
            if live is not None or (each.state is None and each.kind is not Kind.PREEMPT):
                self._planned.remove(each)
                who = each.pick if live is None else live.number
                self._loop.at(self._fleet.clock.now(), each.kind.value, partial(self._do, each, live), who)

    def _whom(self, each: Mischief) -> Live | None:
        found: list[Live] = []
        if each.kind is Kind.PREEMPT:
            found = [x for x in self._fleet.active.values() if x.state in (State.COMPUTING, State.DECODING)]
        elif each.state is not None:
            found = [x for x in self._cast.live.values() if x.state is each.state]
        return found[each.pick % len(found)] if found else None

    def _do(self, each: Mischief, live: Live | None) -> None:
        fleet = self._fleet
        name = each.kind.value
        match each.kind, live:
            case Kind.ABORT, Live():
                name = f"abort of one {live.state.value}"
                fleet.abort(live)
            case Kind.PREEMPT, Live():
                fleet.preempt(live)
            case Kind.FORGET, _:
                fleet.forget()
            case Kind.DISTRUST, _:
                session = self._cast.sessions[each.pick % len(self._cast.sessions)]
                chain = session.turn(0).chain if live is None else live.turn.chain
                fleet.distrust(chain.keys[each.pick % 4 :][:3])
            case Kind.BURST, _:
                self._cast.burst(2 + each.pick)
            case Kind.CLOSE, _:
                fleet.close(retry_after_s=1.0)
        if name != "abort of one ended":
            self.done.add(name)


class _Faults:
    """The copier's faults of a case, and who lets go of what they hold."""

    def __init__(self, case: Case, clock: VirtualClock) -> None:
        self._given = case.faults
        self._clock = clock
        self._stuck: list[Hold | Wedge] = []
        self.loop: Loop | None = None
        self.fleet: Fleet | None = None
        self.jobs = 0
        self.done: set[str] = set()

    def __call__(self, job: CopyJob) -> FaultAction | None:
        given = self._given.get(self.jobs)
        self.jobs += 1
        if given is None:
            return None
        self.done.add(_name(given))
        if not isinstance(given, Stick):
            return given
        action = Wedge() if given.blocks else Hold()
        if given.seconds is None:
            self._stuck.append(action)
        elif self.loop is not None:
            due_s = self._clock.now() + given.seconds
            self.loop.at(due_s, "release", partial(self._release, action), job.job_id)
        return action

    def lift(self) -> None:
        """What stands still to the end of the run goes on."""
        for action in self._stuck:
            self._release(action)
        self._stuck.clear()

    def _release(self, action: Hold | Wedge) -> None:
        action.release()
        if self.fleet is not None:
            self.fleet.copier_changed()


def _name(fault: object) -> str:
    if isinstance(fault, Stick):
        return "copy that blocks the others" if fault.blocks else "copy that stands still"
    return f"copy fault: {type(fault).__name__.lower()}"


def run(
    case: Case, *, chooser: Chooser | None = None, keep_log: bool = False, most_events: int = _NEVER_EVENTS
) -> Ran:
    """To its end, the first violation or `most_events`. `chooser`: instead of the case's own choices."""
    clock, log = VirtualClock(), EventLog(keep=keep_log)
    choices = Choices(stream(case.seed, "choices", case.number), case.choices)
    faults = _Faults(case, clock)

    def after(_event: Event) -> None:
        fleet.check()
        meddler.look(log.events)
        if log.events >= ENOUGH_EVENTS and not cast.enough:
            seen = fleet.watch.evictions and fleet.watch.restores and faults.done
            cast.enough = bool(seen) or log.events >= MOST_EVENTS

    loop = Loop(clock, log, chooser=chooser or choices, width=case.width, after=after)
    fleet = Fleet(case.shape, loop, clock, seed=case.seed * 1_000_003 + case.number, fault=faults)
    faults.loop, faults.fleet = loop, fleet
    cast = Cast(fleet, loop, case)
    meddler = Meddler(fleet, loop, cast, case.mischief)
    violation = None
    try:
        cast.start()
        loop.run(events=most_events)
        faults.lift()
        loop.run(events=most_events - log.events)
        if log.events >= _NEVER_EVENTS:
            raise InvariantBroken(f"{log.events} events and no end: something moves although nobody asks")
        if log.events < most_events:
            fleet.check()
            fleet.watch.at_rest()
    except Exception as error:  # a crash of the tier is as much a finding as a broken invariant
        said = " ".join(str(error).split())
        violation = said if isinstance(error, InvariantBroken) else f"{type(error).__name__}: {said}"
    covered = {*_covered(case, fleet), *faults.done, *meddler.done}
    return Ran(
        number=case.number,
        events=log.events,
        digest=log.digest,
        violation=violation,
        covered=tuple(sorted(covered | {"fault"} if faults.done else covered)),
        turns=tuple(cast.turns),
        choices=choices.made,
        jobs=faults.jobs,
        lines=tuple(log.lines),
    )


def _covered(case: Case, fleet: Fleet) -> Iterator[str]:
    """What a run went through."""
    watch, seen, tier = fleet.watch, fleet.stats(), fleet.cache.stats()
    count = tier.counters
    yield f"mode {case.shape.tier.mode.value}"
    yield f"eviction rule {case.shape.tier.eviction}"
    yield f"{case.shape.lane.value} lane"
    yield from (f"reason {reason.value}" for reason in fleet.accounting.stats().recomputed)
    for name, happened in (
        ("eviction", watch.evictions),
        ("restore", watch.restores),
        ("write-back", count.stores_completed),
        ("write-back failed", count.stores_failed),
        ("write-back skipped", count.stores_skipped),
        ("host eviction", count.host_evictions),
        ("pages without the page before", count.orphaned_pages),
        ("eviction waited", watch.waits),
        ("eviction dropped pages", watch.drops),
        ("late store in quarantine", watch.late_stores),
        ("late restore", watch.late_restores),
        ("completion told twice", watch.repeats),
        ("one copy for several", watch.joins),
        ("tier turned itself off", fleet.cache.off_reason is not None and case.shape.tier.frames),
        ("refused at the door", seen.refused),
        ("deferred", seen.deferred),
        ("preempted", seen.preemptions),
        ("recovered from host", fleet.accounting.stats().recovery_host_tokens),
        ("tail restored", seen.tail_hits),
        ("tail evicted", seen.tail_evictions),
    ):
        if happened:
            yield name
