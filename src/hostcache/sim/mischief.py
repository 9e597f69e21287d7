"""A case of the fuzz: all that may differ between two runs, as values that can be left out one by one. Runs nothing.

A case is drawn from (seed, number) alone. Sizes are tiny and times of one scale, so that everything meets everything: a
pool of some dozen pages, a host of fewer, copies about as long as the engine's rounds, budgets in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from random import Random

from hostcache.copiers.faults import Delay, Fail, Late, Twice
from hostcache.copiers.virtual import CopySpeed
from hostcache.sim.costs import Costs
from hostcache.sim.requests import State
from hostcache.sim.shape import FleetShape, Lane
from hostcache.tier import Mode, TierConfig
from hostcache.workload.agents import stream

PAGE_BYTES = 1000
_JOBS = 400
"""Copies of a run that may be given a fault."""
_EVENTS = 300
"""Mischief begins within so many events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A conversation. It begins with the first `head_tokens` of what all have in common; `salted`: it is the
    conversation before it once more, under another salt."""

    start_tokens: int
    head_tokens: int = 0
    salted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One turn of a client: `pause_s` after its last answer (in an open loop, after its last turn)."""

    pause_s: float
    session: int
    hears_tokens: int
    reply_tokens: int
    store_pages: int | None = None
    load: bool = True
    compacts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a client does. `again`: from the start when it is through, until the run has had enough."""

    steps: tuple[Step, ...]
    again: bool = True
    open_loop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stick:
    """A copy that starts and stands still: for `seconds`, or, when None, to the end of the run. `blocks`: and with it
    all that waits behind it."""

    seconds: float | None
    blocks: bool = False


CopyFault = Fail | Delay | Late | Twice | Stick


class Kind(Enum):
    """What may be done to a fleet from outside."""

    ABORT = "abort"
    PREEMPT = "preempt"
    FORGET = "forget"
    DISTRUST = "distrust"
    BURST = "burst"
    CLOSE = "close"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mischief:
    """From event `event` on, as soon as it can be done. `state`: of the request it is done to (None: any, or none);
    `pick`: which one."""

    event: int
    kind: Kind
    state: State | None = None
    pick: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`faults`: by the number of the copy, in order of their starts. `limit_tokens`: no conversation grows beyond.

    `choices`: n-th choice among candidates → which, where that is not the first (None: drawn from the seed).
    """

    seed: int
    number: int
    shape: FleetShape
    width: int
    sessions: tuple[Session, ...]
    clients: tuple[Script, ...]
    limit_tokens: int
    retries: int
    faults: Mapping[int, CopyFault]
    mischief: tuple[Mischief, ...]
    choices: Mapping[int, int] | None = None


def draw(seed: int, number: int) -> Case:
    """Case `number` under `seed`: the same in every process."""
    rng = stream(seed, "case", number)
    shape = _shape(rng)
    page = shape.page
    count = shape.turn_entries + rng.randint(2, 6)
    # What is longer than the pool never runs, what is longer than the host is never written, and what all of it
    # together cannot hold is gone before anybody returns.
    host = max(8, shape.tier.frames) * page
    room = min(shape.pool_tokens * rng.uniform(0.25, 0.8), host * rng.uniform(0.3, 0.8),
               (shape.pool_tokens + host) / count * rng.uniform(0.5, 1.8))  # fmt: skip
    limit = max(2 * page, int(room))
    largest = max(2, int(limit * rng.uniform(0.3, 0.9)))
    heads = rng.choice((0, 0, 1, 2, 4)) * page + rng.randrange(page)
    sessions = tuple(
        Session(start_tokens=rng.randint(1, largest), head_tokens=heads, salted=at > 0 and rng.random() < 0.06)
        for at in range(count)
    )
    return Case(
        seed=seed,
        number=number,
        shape=shape,
        width=rng.randint(1, 6),
        sessions=sessions,
        clients=_clients(rng, shape, len(sessions)),
        limit_tokens=limit,
        retries=rng.randint(0, 3),
        faults=_faults(rng),
        mischief=_mischief(rng),
    )


def _shape(rng: Random) -> FleetShape:
    page, pool = rng.randint(4, 8), rng.randint(12, 60)
    tails = rng.random() < 0.12
    return FleetShape(
        tier=_tier(rng, page),
        costs=Costs(
            prefill_token_s=rng.choice((3e-4, 1e-3, 3e-3)),
            prefill_square_s=rng.choice((0.0, 1e-6)),
            admission_s=rng.choice((0.0, 0.002)),
            decode_step_s=((1, 0.002), (4, 0.004)),
            round_tokens=rng.choice(((1, 1), (1, 3))),
        ),
        speed=CopySpeed(
            store_bytes_per_s=10 ** rng.uniform(5.9, 7),
            restore_bytes_per_s=10 ** rng.uniform(6, 7),
            submission_s=rng.choice((0.0, 5e-4)),
            extent_s=rng.choice((0.0, 1e-4)),
            jitter=rng.choice((0.0, 0.3)),
        ),
        pool_tokens=pool * page + rng.randrange(page),
        slots=rng.randint(1, 6),
        prompt_entries=rng.randint(1, 6),
        turn_entries=rng.randint(1, 6),
        lane=rng.choice((Lane.CHUNKED, Lane.CHUNKED, Lane.EXCLUSIVE)),
        chunk_tokens=rng.randint(page, 6 * page),
        door_slots=rng.randint(1, 6),
        door_waiting=rng.randint(0, 6),
        door_wait_s=rng.choice((0.0, 0.05, 0.5)),
        hand_off=rng.random() < 0.4,
        reach_pages=rng.randint(0, pool // 2),
        reach_entries=rng.randint(0, 3),
        prompts_first=rng.random() < 0.5,
        supersede=rng.random() < 0.6,
        reserve_reply=rng.random() < 0.5,
        look_ahead_tokens=rng.choice((0, 0, 3)),
        tail_bytes=100 if tails else 0,
        tail_quota_bytes=100 * rng.randint(3, 10) if tails else 0,
        replay_tokens=rng.choice((0, page, 2 * page + 1)),
        lanes=rng.choice((1, 2, 2)),
    )


def _tier(rng: Random, page: int) -> TierConfig:
    host = rng.random()
    frames = 0 if host < 0.005 else rng.randint(1, 6) if host < 0.015 else rng.randint(8, 40)
    mode = rng.choice((Mode.ON_PRESSURE, Mode.ON_PRESSURE, Mode.ON_RETAIN, Mode.ON_EVICT))
    slow = mode is not Mode.ON_EVICT and rng.random() < 0.04
    return TierConfig(
        host_cache_bytes=frames * PAGE_BYTES + rng.randrange(PAGE_BYTES),
        page_bytes=PAGE_BYTES,
        page_tokens=page,
        mode=Mode.OFF if rng.random() < 0.005 else mode,
        copy_budget_s=rng.choice((0.0, 0.005)) if slow else rng.choice((0.02, 0.05, 0.2)),
        restore_budget_s=rng.choice((0.01, 0.05, 0.1, 0.5)),
        store_pace_s=rng.choice((0.0, 0.0, 0.0, 0.005)),
        max_job_pages=rng.choice((1, 2, 3, 5, 64)),
        eviction=rng.choice(("scan-resistant", "scan-resistant", "lru")),
        quarantine_limit=0.25 if rng.random() < 0.1 else 1.0,
    )


def _clients(rng: Random, shape: FleetShape, sessions: int) -> tuple[Script, ...]:
    count = rng.randint(2, 5)
    busy_s = rng.choice((0.002, 0.02, 0.1))
    capped, opted_out, compacts = rng.choice((0.0, 0.1)), rng.choice((0.0, 0.08)), rng.choice((0.0, 0.05))
    clients = []
    for client in range(count):
        own = range(client % sessions, sessions, count)
        rotates = rng.random() < 0.6
        steps = tuple(
            Step(
                pause_s=rng.uniform(0.001, busy_s),
                session=own[at % len(own)] if rotates else rng.choice(own),
                hears_tokens=rng.randint(1, 2 * shape.page),
                reply_tokens=rng.randint(1, shape.page + 2),
                store_pages=rng.randint(0, 4) if rng.random() < capped else None,
                load=rng.random() >= opted_out,
                compacts=rng.random() < compacts,
            )
            for at in range(rng.randint(6, 14))
        )
        clients.append(Script(steps=steps, open_loop=rng.random() < 0.15))
    return tuple(clients)


def _faults(rng: Random) -> dict[int, CopyFault]:
    rate = rng.choice((0.05, 0.1, 0.2, 0.4))
    up_to_s = rng.choice((0.01, 0.05, 0.3))
    stuck = rng.choice((0.0, 0.1, 0.3))
    first = rng.randrange(4)
    faults: dict[int, CopyFault] = {}
    for job in range(_JOBS):
        if rng.random() >= rate and job != first:
            continue
        seconds = rng.uniform(0.0, up_to_s)
        if rng.random() < stuck:
            # A lane that never moves again is the end of all restores: not too early.
            for_ever = rng.random() < 0.2
            faults[job] = Stick(seconds=None if for_ever else seconds,
                                blocks=rng.random() < 0.3 and (job > 60 or not for_ever))  # fmt: skip
            continue
        faults[job] = (Fail(after_pages=rng.randrange(4)), Delay(seconds=seconds), Late(seconds=seconds),
                       Twice(after_s=seconds))[rng.randrange(4)]  # fmt: skip
    return faults


_STATES = (State.WAITING, State.QUEUED, State.RESTORING, State.RESTORING, State.COMPUTING, State.DECODING)
_TO_SOMEBODY = (Kind.ABORT, Kind.DISTRUST)
_KINDS = (Kind.ABORT,) * 10 + (Kind.PREEMPT,) * 3 + (Kind.DISTRUST,) * 2 + (Kind.BURST,) * 2


def _mischief(rng: Random) -> tuple[Mischief, ...]:
    planned = []
    for _ in range(rng.randint(0, 12)):
        kind = rng.choice(_KINDS)
        state = rng.choice(_STATES) if kind is Kind.ABORT else State.RESTORING if rng.random() < 0.5 else None
        planned.append(Mischief(
            event=rng.randrange(_EVENTS), kind=kind, state=state if kind in _TO_SOMEBODY else None,
            pick=rng.randrange(8)))  # fmt: skip
    if rng.random() < 0.15:
        planned.append(Mischief(event=rng.randrange(_EVENTS), kind=Kind.FORGET, pick=rng.randrange(8)))
    if rng.random() < 0.03:
        planned.append(Mischief(event=rng.randrange(_EVENTS - 20, _EVENTS), kind=Kind.CLOSE))
    return tuple(sorted(planned, key=lambda each: each.event))
