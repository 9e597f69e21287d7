"""A request's life in a fleet, and what its client hears of it. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from hostcache.frontdoor import Ticket
from hostcache.sim.loop import Event
from hostcache.sim.memory import Pages
from hostcache.tier import Account, Reservation
from hostcache.workload.conversations import Turn


class State(Enum):
    WAITING = "waiting"
    QUEUED = "queued"
    RESTORING = "restoring"
    COMPUTING = "computing"
    DECODING = "decoding"
    ENDED = "ended"


class How(Enum):
    """How a request ended."""

    SERVED = "served"
    REFUSED = "refused"
    """by the front door; come again after `retry_after_s`"""
    ABORTED = "aborted"
    """its client left"""
    TOO_LARGE = "too large"
    """it can never fit the pool"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a client sees, and where its prompt came from. Tokens; seconds on the run's clock."""

    number: int
    how: How
    sent_s: float
    first_s: float | None
    ended_s: float
    prompt_tokens: int
    reply_tokens: int
    device_tokens: int = 0
    host_tokens: int = 0
    retry_after_s: int = 0
    deferred: bool = False


@dataclass(slots=True, eq=False)
class Live:
    """A request between `send` and its end. `hit_tokens` leave off at a frontier in a fleet with tails; the tier's
    accounts know whole pages only."""

    number: int
    turn: Turn
    ticket: Ticket
    sent_s: float
    done: Callable[[Outcome], None]
    state: State = State.WAITING
    pages: Pages = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    published: int = 0
    computed: int = 0
    produced: int = 0
    device_tokens: int = 0
    hit_tokens: int = 0
    """of device and host, where it was placed last"""
    device_pages: int = 0
    host_pages: int = 0
    booked: tuple[int, int] = (0, 0)
    """device and host tokens when its account was settled"""
    account: Account | None = None
    reservation: Reservation | None = None
    promised: int = 0
    """hit_tokens once its restore is in place"""
    deadline: Event | None = None
    first_s: float | None = None
    set_up: bool = False
    load: bool = True
    deferred: bool = False
    stale: bool = False
    """what it computes belongs to weights that are gone: never published, never retained"""

    @property
    def target(self) -> int:
        """Tokens to have on the device before the next token can be produced."""
        return self.turn.prompt_tokens + self.produced
