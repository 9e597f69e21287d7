"""Decides who may come in: a bounded number of slots, a bounded queue, a bounded wait, then 429 with Retry-After.

`AdmissionQueue` is pure, on a clock given to it. `FrontDoor` puts it before any ASGI app. Knows nothing of engines,
models or tokens: `vllm serve --middleware hostcache.frontdoor.FrontDoor` gets the same door.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hostcache.clock import Clock, WallClock
from hostcache.errors import ConfigError, InvariantBroken
from hostcache.settings import Settings, settle

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions")
_RECENT_SERVICES = 32
_LONGEST_RETRY_S = 600


class TicketState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    REFUSED = "refused"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Ticket:
    """One request at the door.

    (arrive) → waiting, running or refused
    waiting → running   a slot came free (`end` of another one)
    waiting → refused   `expire` after deadline_s, or `close`
    waiting → ended     `end`: the client left
    running → ended     `end`
    """

    state: TicketState
    since_s: float
    deadline_s: float
    retry_after_s: int = 0
    """Whole seconds, at least 1; set when refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontDoorStats:
    """`arrived` == `served` + `refused` + `left_waiting` + `running` + `waiting`, always."""

    slots: int
    running: int
    waiting: int
    waiting_limit: int
    arrived: int
    served: int
    refused: int
    left_waiting: int
    closed: bool


class AdmissionQueue:
    """First come, first served, in three bounds: `slots` run, `waiting` wait, each at most `wait_s`.

    Not thread-safe: one thread (or event loop) owns it. Nothing here waits: the caller asks `expire` when it is time.
    """

    def __init__(self, *, slots: int, waiting: int, wait_s: float, clock: Clock) -> None:
        if slots < 1 or waiting < 0 or wait_s < 0:
            raise ConfigError(f"a front door of {slots} slots, {waiting} waiting and {wait_s} s of wait cannot work; "
                              "give at least 1 slot, 0 waiting, 0 s")
        self.slots = slots
        self.waiting = waiting
        self.wait_s = wait_s
        self._clock = clock
        self._running: dict[Ticket, None] = {}
        self._waiting: dict[Ticket, None] = {}
        self._services_s: deque[float] = deque(maxlen=_RECENT_SERVICES)
        self._arrived = self._served = self._refused = self._left_waiting = 0
        self._closed_for_s: float | None = None

    def arrive(self) -> Ticket:
        """A new request: running when a slot is free, waiting when there is room, else refused at once."""
        now = self._clock.now()
        self._arrived += 1
        ticket = Ticket(TicketState.WAITING, now, now + self.wait_s)
        if self._closed_for_s is None and not self._waiting and len(self._running) < self.slots:
            self._start(ticket, now)
        elif self._closed_for_s is None and len(self._waiting) < self.waiting:
            self._waiting[ticket] = None
        else:
            self._refuse(ticket)
        return ticket

    def end(self, ticket: Ticket) -> list[Ticket]:
        """The request is over (running) or its client left (waiting). Returns those that run now because of it.

        Raises InvariantBroken for a ticket that was refused or ended before: a slot is released exactly once.
        """
        if ticket in self._waiting:
            del self._waiting[ticket]
            ticket.state = TicketState.ENDED
            self._left_waiting += 1
            return []
        if ticket not in self._running:
            raise InvariantBroken(f"a ticket was ended twice (it is {ticket.state.value})")
        now = self._clock.now()
        del self._running[ticket]
        ticket.state = TicketState.ENDED
        self._served += 1
        self._services_s.append(now - ticket.since_s)
        promoted = []
        while self._waiting and len(self._running) < self.slots:
            nxt = next(iter(self._waiting))
            del self._waiting[nxt]
            self._start(nxt, now)
            promoted.append(nxt)
        return promoted

    def expire(self) -> list[Ticket]:
        """Refuse those whose wait is over (deadline_s <= now), and return them."""
        now = self._clock.now()
        late = []
        for ticket in self._waiting:  # in order of arrival, so in order of deadline
            if ticket.deadline_s > now:
                break
            late.append(ticket)
        for ticket in late:
            del self._waiting[ticket]
            self._refuse(ticket)
        return late

    def close(self, retry_after_s: float) -> list[Ticket]:
        """Let nobody in from now on; the waiting are refused and returned, the running go on."""
        self._closed_for_s = retry_after_s
        refused = list(self._waiting)
        self._waiting.clear()
        for ticket in refused:
            self._refuse(ticket)
        return refused

    @property
    def idle(self) -> bool:
        """Nobody runs and nobody waits."""
        return not self._running and not self._waiting

    def retry_after_s(self) -> int:
        """When a slot is likely to be free for one more: the queue ahead times the mean of recent services."""
        if self._closed_for_s is not None:
            seconds = self._closed_for_s
        else:
            # Before the first service has ended the age of those that run is the best that is known.
            now = self._clock.now()
            known = self._services_s or [now - ticket.since_s for ticket in self._running]
            mean_s = math.fsum(known) / len(known) if known else 0.0
            seconds = mean_s * (len(self._waiting) + 1) / self.slots
        return max(1, min(_LONGEST_RETRY_S, math.ceil(seconds)))

    def stats(self) -> FrontDoorStats:
        return FrontDoorStats(
            slots=self.slots, running=len(self._running), waiting=len(self._waiting), waiting_limit=self.waiting,
            arrived=self._arrived, served=self._served, refused=self._refused, left_waiting=self._left_waiting,
            closed=self._closed_for_s is not None)

    def check(self) -> None:
        """Raises InvariantBroken when the bounds or the balance do not hold."""
        now = self.stats()
        if now.running > now.slots or now.waiting > now.waiting_limit:
            raise InvariantBroken(f"the front door holds more than it may: {now}")
        if now.arrived != now.served + now.refused + now.left_waiting + now.running + now.waiting:
            raise InvariantBroken(f"the front door lost or invented a request: {now}")
        if now.waiting and (now.running < now.slots or now.closed):
            raise InvariantBroken(f"somebody waits although a slot is free or the door is closed: {now}")
        if any(ticket.state is not TicketState.RUNNING for ticket in self._running) or any(
                ticket.state is not TicketState.WAITING for ticket in self._waiting):
            raise InvariantBroken("a ticket's state differs from the place it is kept in")

    def _start(self, ticket: Ticket, now: float) -> None:
        ticket.state = TicketState.RUNNING
        ticket.since_s = now  # service time counts from here
        self._running[ticket] = None

    def _refuse(self, ticket: Ticket) -> None:
        ticket.state = TicketState.REFUSED
        ticket.retry_after_s = self.retry_after_s()
        self._refused += 1


class FrontDoor:
    """ASGI middleware: at most `slots` generation requests are inside `app`; the others wait or get 429.

    With neither `queue` nor any option the settings HOSTCACHE_FRONT_DOOR_* (and HOSTCACHE_CONCURRENCY) are read, which
    is how a foreign server gets its door. Only POSTs to `paths` are limited. What a waiting client sends meanwhile is
    kept, up to `max_waiting_body_bytes` each, and handed on; one that leaves gives up its place.
    """

    def __init__(self, app: App, *, queue: AdmissionQueue | None = None, slots: int | None = None,
                 waiting: int | None = None, wait_s: float | None = None, clock: Clock | None = None,
                 paths: Sequence[str] = GENERATION_PATHS, max_waiting_body_bytes: int = 1024**2) -> None:
        if queue is None:
            given = slots is not None or waiting is not None or wait_s is not None
            settings = Settings() if given else settle().settings
            slots = settings.slots if slots is None else slots
            queue = AdmissionQueue(
                slots=slots,
                waiting=waiting if waiting is not None else 4 * slots if given else settings.waiting,
                wait_s=settings.front_door_wait_s if wait_s is None else wait_s,
                clock=clock or WallClock())
        self.queue = queue
        self._app = app
        self._clock = clock or WallClock()
        self._paths = frozenset(paths)
        self._max_waiting_body_bytes = max_waiting_body_bytes
        self._calls: dict[Ticket, asyncio.Future[None]] = {}
        """One per waiting ticket; done when its state changed."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_limited(scope):
            await self._app(scope, receive, send)
            return
        ticket = self.queue.arrive()
        try:
            if ticket.state is TicketState.WAITING:
                receive = await self._wait(ticket, receive)
            if ticket.state is TicketState.RUNNING:
                await self._app(scope, receive, send)
        finally:
            if ticket.state in (TicketState.RUNNING, TicketState.WAITING):
                self._call(self.queue.end(ticket))
            if isinstance(receive, _Replay):
                receive.close()
        if ticket.state is TicketState.REFUSED:
            await _refuse(send, ticket, closed=self.queue.stats().closed)

    def close(self, retry_after_s: float) -> None:
        """Refuse everybody who is not inside yet, now and from now on."""
        self._call(self.queue.close(retry_after_s))

    def _is_limited(self, scope: Scope) -> bool:
        if scope["type"] != "http" or scope["method"] != "POST":
            return False
        path: str = scope["path"]
        root: str = scope.get("root_path", "")
        if root and path.startswith(root):
            path = path[len(root):]
        return (path.rstrip("/") or "/") in self._paths

    async def _wait(self, ticket: Ticket, receive: Receive) -> _Replay:
        """Until the ticket's state changed or the client left (the state is still WAITING then)."""
        called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls[ticket] = called
        timer = asyncio.ensure_future(self._clock.sleep_until(ticket.deadline_s))
        replay = _Replay(receive, self._max_waiting_body_bytes)
        try:
            while ticket.state is TicketState.WAITING and not replay.left:
                pending: set[asyncio.Future[Any]] = {called, timer}
                listening = replay.listen()
                if listening is not None:
                    pending.add(listening)
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if timer.done():
                    timer.result()
                    self._call(self.queue.expire())
                    timer = asyncio.ensure_future(self._clock.sleep_until(ticket.deadline_s))
                replay.take()
            return replay
        except BaseException:
            replay.close()
            raise
        finally:
            timer.cancel()
            del self._calls[ticket]

    def _call(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            called = self._calls.get(ticket)
            if called is not None and not called.done():
                called.set_result(None)


class _Replay:
    """Listens to a client that waits, without losing a message: what came is handed to the app in order later.

    A `receive` that is under way when the wait ends is handed on too, never cancelled, so no server has to promise
    that a cancelled `receive` loses nothing.
    """

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive = receive
        self._room = max_bytes
        self._kept: deque[Message] = deque()
        self._pending: asyncio.Future[Message] | None = None
        self.left = False
        """The client has disconnected."""

    def listen(self) -> asyncio.Future[Message] | None:
        """The message to come, or None when enough is kept (the client's departure then shows later)."""
        if self._pending is None and self._room > 0 and not self.left:
            self._pending = asyncio.ensure_future(self._receive())
        return self._pending

    def take(self) -> None:
        """Keep the message that has come, if one has."""
        if self._pending is None or not self._pending.done():
            return
        message = self._pending.result()
        self._pending = None
        self._kept.append(message)
        self._room -= len(message.get("body", b""))
        self.left = message["type"] == "http.disconnect"

    def close(self) -> None:
        if self._pending is not None:
            self._pending.cancel()

    async def __call__(self) -> Message:
        if self._kept:
            message = self._kept.popleft()
            if message["type"] == "http.disconnect":
                self._kept.append(message)  # gone stays gone, however often the app asks
            return message
        if self._pending is not None:
            # Shielded: an app that gives up listening must not take the message with it.
            message = await asyncio.shield(self._pending)
            self._pending = None
            return message
        return await self._receive()


async def _refuse(send: Send, ticket: Ticket, *, closed: bool) -> None:
    why = "the server is stopping" if closed else "every slot is taken and the queue is full or the wait was too long"
    body = error_body(f"{why}; try again in {ticket.retry_after_s} s", kind="rate_limit_error",
                      code="server_stopping" if closed else "rate_limit_exceeded")
    await send({"type": "http.response.start", "status": 429, "headers": [
        (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(ticket.retry_after_s).encode())]})
    await send({"type": "http.response.body", "body": body})


def error_body(message: str, *, kind: str, code: str | None = None, param: str | None = None) -> bytes:
    """OpenAI's error shape, as JSON."""
    shape: Mapping[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return json.dumps(shape).encode()
