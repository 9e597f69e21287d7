"""One run from start to end: a fleet, its clients, a seed, and how often everything is proved. Knows no figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hostcache.clock import VirtualClock
from hostcache.copiers.faults import Fault
from hostcache.sim.clients import Clients
from hostcache.sim.fleet import Fleet
from hostcache.sim.loop import Chooser, Event, EventLog, Loop
from hostcache.sim.shape import FleetShape
from hostcache.tier import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that is over. `log.digest` is the same for the same scenario and seed, everywhere."""

    fleet: Fleet
    clients: Clients
    log: EventLog


def identity(page_tokens: int, *, model: str = "simulated", salt: str = "") -> Identity:
    """What the pages of a simulated model are kept under."""
    return Identity(model=model, revision="1", dtype="none", layout="prints", page_tokens=page_tokens, salt=salt)


def simulate(
    shape: FleetShape,
    make: Callable[[Fleet, Loop], Clients],
    *,
    seed: int = 0,
    fault: Fault | None = None,
    chooser: Chooser | None = None,
    width: int = 1,
    check_every: int = 0,
    keep_log: bool = False,
    events: int | None = None,
) -> Run:
    """Build a fleet, let the clients of `make` loose on it until nothing is left to happen (or `events` have).

    `check_every`: prove everything after every so many events (0: only at the end). Raises InvariantBroken.
    """
    clock, log = VirtualClock(), EventLog(keep=keep_log)

    def after(_event: Event) -> None:
        if check_every and log.events % check_every == 0:
            fleet.check()

    loop = Loop(clock, log, chooser=chooser, width=width, after=after if check_every else None)
    fleet = Fleet(shape, loop, clock, seed=seed, fault=fault)
    clients = make(fleet, loop)
    clients.start()
    loop.run(events=events)
    fleet.check()
    if events is None:
        fleet.watch.at_rest()
    return Run(fleet=fleet, clients=clients, log=log)

