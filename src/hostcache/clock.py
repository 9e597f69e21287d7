"""One clock, both halves: what time is it, and wait until then. The only module that imports `time`."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds from an arbitrary origin that never go back."""

    def now(self) -> float:
        """The current time in seconds."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block the calling thread for `seconds` (nothing when not positive)."""
        ...

    async def sleep_until(self, due_s: float) -> None:
        """Wait until `now() >= due_s` without blocking the event loop."""
        ...


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)

    async def sleep_until(self, due_s: float) -> None:
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))


class VirtualClock:
    """A clock that moves only when told to; sleeping moves it."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now = start_s

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward. Raises ValueError for a negative step: time never goes back."""
        if seconds < 0:
            raise ValueError(f"cannot move a clock by {seconds} s; steps are at least 0")
        self._now += seconds

    def sleep(self, seconds: float) -> None:
        self.advance(max(0.0, seconds))

    async def sleep_until(self, due_s: float) -> None:
        self.advance(max(0.0, due_s - self._now))


def unix_time() -> float:
    """Seconds since 1970, for labels in records only; never for differences."""
    return time.time()
