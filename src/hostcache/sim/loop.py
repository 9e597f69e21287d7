"""What happens next: events on a virtual clock, in order of time or in an order that somebody chooses. Knows no fleet.

A run is its choices. With one candidate at a time (`width` 1) events happen in order of (due time, order of
scheduling) and nothing is chosen. With more, the chooser takes any of the first `width`: an event taken early moves
the clock to its due time, and those it overtook happen late, as they would on a machine that was busy elsewhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from hostcache.clock import VirtualClock


class Chooser(Protocol):
    """Makes every choice of a run."""

    def choose(self, options: int) -> int:
        """One of 0 … options - 1; `options` is at least 2."""
        ...


@dataclass(slots=True, eq=False)
class Event:
    """`action` runs once, unless the event was cancelled before."""

    due_s: float
    kind: str
    who: int
    action: Callable[[], None] = field(repr=False)
    cancelled: bool = False


class EventLog:
    """Everything that happened, as one digest and, when `keep` is set, as lines: equal digests, equal runs."""

    def __init__(self, *, keep: bool = False) -> None:
        self.lines: list[str] = []
        self.events = 0
        self._keep = keep
        self._state = blake2b(digest_size=16)

    def note(self, line: str) -> None:
        self._state.update(line.encode())
        self._state.update(b"\n")
        if self._keep:
            self.lines.append(line)

    @property
    def digest(self) -> str:
        return self._state.hexdigest()


class Loop:
    """`after` is called after every event: the place for proofs."""

    def __init__(
        self,
        clock: VirtualClock,
        log: EventLog,
        *,
        chooser: Chooser | None = None,
        width: int = 1,
        after: Callable[[Event], None] | None = None,
    ) -> None:
        self.clock = clock
        self.log = log
        self._chooser = chooser
        self._width = width if chooser is not None else 1
        self._after = after
        self._pending: list[tuple[float, int, Event]] = []
        self._number = 0

    def at(self, due_s: float, kind: str, action: Callable[[], None], who: int = 0) -> Event:
        """Schedule an event at `due_s`, at once when that is past. `kind` and `who` name it in the log."""
        event = Event(max(due_s, self.clock.now()), kind, who, action)
        self._number += 1
        heapq.heappush(self._pending, (event.due_s, self._number, event))
        return event

    def step(self) -> bool:
        """Let one event happen. False: nothing is left."""
        event = self._take()
        if event is None:
            return False
        if event.due_s > self.clock.now():
            self.clock.advance(event.due_s - self.clock.now())
        self.log.events += 1
        self.log.note(f"{self.clock.now():.9f} {event.kind} {event.who}")
        event.action()
        if self._after is not None:
            self._after(event)
        return True

    def run(self, *, until_s: float = float("inf"), events: int | None = None) -> None:
        """Until nothing is left, the next event is due after `until_s`, or so many events have happened."""
        last = None if events is None else self.log.events + events
        while (last is None or self.log.events < last) and self._next_due_s() <= until_s:
            if not self.step():
                return

    def _next_due_s(self) -> float:
        while self._pending and self._pending[0][2].cancelled:
            heapq.heappop(self._pending)
        return self._pending[0][0] if self._pending else float("-inf")

    def _take(self) -> Event | None:
        if self._width == 1:
            while self._pending:
                event = heapq.heappop(self._pending)[2]
                if not event.cancelled:
                    return event
            return None
        first: list[tuple[float, int, Event]] = []
        while self._pending and len(first) < self._width:
            entry = heapq.heappop(self._pending)
            if not entry[2].cancelled:
                first.append(entry)
        if not first:
            return None
        chooser = self._chooser
        chosen = chooser.choose(len(first)) if chooser is not None and len(first) > 1 else 0
        event = first.pop(chosen)[2]
        for entry in first:
            heapq.heappush(self._pending, entry)
        return event
