"""Faults a copier can be asked to have, for tests and drills. Values only: each copier says how it acts them out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

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


class Hold:
    """The job starts and then does nothing until `release()`, if ever; the copier goes on with others.

    On release its bytes move, however late, and it is reported: what quarantine is there for.
    """

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

    def then(self, go: Callable[[], None]) -> None:
        """For copiers: call `go` at release, at once when that has been."""
        with self._lock:
            if not self._released:
                self._on_release.append(go)
                return
        go()


FaultAction = Fail | Delay | Hold


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
