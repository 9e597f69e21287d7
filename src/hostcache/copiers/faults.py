"""Faults a copier can be asked to have, for tests and drills. Values only: each copier says how it acts them out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from hostcache.errors import ConfigError
from hostcache.tier.copying import CopyJob, Direction


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The job ends with `error` after `after_pages` of its pages were copied."""

    error: str = "injected fault"
    after_pages: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """The copier's clock passes `seconds` before the first byte moves; the worker is busy meanwhile."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """The bytes move in time and the worker goes on; the report comes `seconds` after the end."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Twice:
    """The job is reported at its end, as it should be, and once more `after_s` later."""

    after_s: float


class _Stuck:
    """What two faults share: somebody may end them, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._released = False
        self._on_release: list[Callable[[], None]] = []

    def release(self) -> None:
        """Let every job held by this go on. Any thread; twice is once."""
        with self._lock:
            self._released = True
            waiting, self._on_release = self._on_release, []
        for go in waiting:
            go()

    @property
    def released(self) -> bool:
        return self._released

    def then(self, go: Callable[[], None]) -> None:
        """For copiers: call `go` at release, at once when that has been."""
        with self._lock:
            if not self._released:
                self._on_release.append(go)
                return
        go()


class Hold(_Stuck):
    """The job starts and then does nothing until `release()`, if ever; the copier goes on with others.

    On release its bytes move, however late, and it is reported: what quarantine is there for.
    """


class Wedge(_Stuck):
    """The job sticks amid its bytes, and all that waits behind it in its queue stands still: for `seconds`, or for ever
    when None, or until `release()`."""

    def __init__(self, seconds: float | None = None) -> None:
        super().__init__()
        self.seconds = seconds


FaultAction = Fail | Delay | Hold | Wedge | Late | Twice


class Fault(Protocol):
    """Asked once for each job, on the copier's own thread, as the job starts; None means none.

    An exception it raises is the job's error. It may block: then so does that worker, as a wedged copy would.
    """

    def __call__(self, job: CopyJob, /) -> FaultAction | None: ...


def fault_at(number: int, action: FaultAction, *, direction: Direction | None = None) -> Fault:
    """`action` for the `number`-th job to start (from 0), counting only those in `direction` when it is given."""
    lock = threading.Lock()
    started = 0

    def fault(job: CopyJob) -> FaultAction | None:
        nonlocal started
        if direction is not None and job.direction is not direction:
            return None
        with lock:
            started += 1
            return action if started - 1 == number else None

    return fault


def random_faults(
    rng: Random,
    *,
    fail: float = 0.0,
    delay: float = 0.0,
    hold: float = 0.0,
    wedge: float = 0.0,
    late: float = 0.0,
    twice: float = 0.0,
    up_to_s: float = 1.0,
    for_ever: float = 0.0,
    stuck: Callable[[Hold | Wedge], None] | None = None,
) -> Fault:
    """At most one fault a job, each with its probability; times are uniform up to `up_to_s`.

    `for_ever`: of the wedges, the share without an end of their own. `stuck` is told of every hold and wedge as it
    begins: nobody else could release them. One number is drawn for a job without a fault. For one thread.
    """
    chances = (fail, delay, hold, wedge, late, twice)
    if any(not 0.0 <= chance <= 1.0 for chance in (*chances, for_ever)) or sum(chances) > 1.0:
        raise ConfigError(f"fault probabilities {chances}, for ever {for_ever}; give 0 to 1 each and 1 at most in all")
    if not 0.0 <= up_to_s < float("inf"):
        raise ConfigError(f"faults of up to {up_to_s} s; give a finite time of at least 0")
    any_fault = sum(chances)

    def fault(job: CopyJob) -> FaultAction | None:
        drawn = rng.random()
        if drawn >= any_fault:
            return None
        if (drawn := drawn - fail) < 0.0:
            return Fail(after_pages=rng.randint(0, job.pages))
        if (drawn := drawn - delay) < 0.0:
            return Delay(seconds=rng.uniform(0.0, up_to_s))
        if (drawn := drawn - late) < 0.0:
            return Late(seconds=rng.uniform(0.0, up_to_s))
        if (drawn := drawn - twice) < 0.0:
            return Twice(after_s=rng.uniform(0.0, up_to_s))
        wedged = drawn >= hold
        action = Wedge(None if rng.random() < for_ever else rng.uniform(0.0, up_to_s)) if wedged else Hold()
        if stuck is not None:
            stuck(action)
        return action

    return fault
