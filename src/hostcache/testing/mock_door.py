"""So many requests at a time, the others in order of arrival. Knows no request and no time."""

from __future__ import annotations

import asyncio
from collections import deque


class Door:
    """`slots` at a time, the others in order of arrival."""

    def __init__(self, slots: int, waiting: int) -> None:
        self._slots, self._limit = slots, waiting
        self._queue: deque[asyncio.Future[None]] = deque()
        self.running = 0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def open(self) -> bool:
        return self.running < self._slots

    @property
    def full(self) -> bool:
        return not self.open and self.waiting >= self._limit

    async def enter(self) -> None:
        if self.open:
            self.running += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn in self._queue:
                self._queue.remove(turn)
            elif not turn.cancelled():  # the slot came in the same moment
                self.leave()
            raise

    def leave(self) -> None:
        """Hands the slot to the next in line."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1
