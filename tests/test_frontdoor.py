"""The queue against a model that counts, and the middleware against apps and clients that misbehave."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hostcache.clock import VirtualClock
from hostcache.errors import ConfigError, InvariantBroken
from hostcache.frontdoor import AdmissionQueue, FrontDoor, Message, Receive, Scope, Send, Ticket, TicketState


def make_queue(slots: int = 2, waiting: int = 2, wait_s: float = 10.0) -> tuple[AdmissionQueue, VirtualClock]:
    clock = VirtualClock()
    return AdmissionQueue(slots=slots, waiting=waiting, wait_s=wait_s, clock=clock), clock


class QueueMachine(RuleBasedStateMachine):
    """Whatever comes and goes, in whatever order: bounds, balance, first come first served."""

    @initialize(slots=st.integers(1, 4), waiting=st.integers(0, 5), wait_s=st.sampled_from([0.0, 1.0, 7.5]))
    def open(self, slots: int, waiting: int, wait_s: float) -> None:
        self.queue, self.clock = make_queue(slots, waiting, wait_s)
        self.inside: list[Ticket] = []
        self.line: deque[Ticket] = deque()
        self.over: list[Ticket] = []
        self.closed = False

    @rule()
    def somebody_arrives(self) -> None:
        ticket = self.queue.arrive()
        if self.closed:
            expected = TicketState.REFUSED
        elif len(self.inside) < self.queue.slots:
            expected = TicketState.RUNNING
        else:
            expected = TicketState.WAITING if len(self.line) < self.queue.waiting else TicketState.REFUSED
        assert ticket.state is expected
        places: dict[TicketState, Callable[[Ticket], None]] = {
            TicketState.RUNNING: self.inside.append, TicketState.WAITING: self.line.append,
            TicketState.REFUSED: self.over.append}
        places[ticket.state](ticket)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def somebody_finishes(self, data: st.DataObject) -> None:
        ticket = self.inside.pop(data.draw(st.integers(0, len(self.inside) - 1)))
        promoted = self.queue.end(ticket)
        expected = [self.line.popleft()] if self.line else []
        assert promoted == expected
        self.inside += promoted
        self.over.append(ticket)

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def a_waiting_client_leaves(self, data: st.DataObject) -> None:
        ticket = self.line[data.draw(st.integers(0, len(self.line) - 1))]
        self.line.remove(ticket)
        assert self.queue.end(ticket) == []
        self.over.append(ticket)

    @rule(seconds=st.floats(0, 10))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        late = self.queue.expire()
        assert late == [ticket for ticket in self.line if ticket.deadline_s <= self.clock.now()]
        for ticket in late:
            assert ticket.state is TicketState.REFUSED
            self.line.remove(ticket)
            self.over.append(ticket)

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def nobody_ends_twice(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.over))
        with pytest.raises(InvariantBroken):
            self.queue.end(ticket)

    @rule()
    def the_door_closes(self) -> None:
        assert self.queue.close(5.0) == list(self.line)
        self.over += self.line
        self.line.clear()
        self.closed = True

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "queue"):
            return
        self.queue.check()
        now = self.queue.stats()
        assert (now.running, now.waiting) == (len(self.inside), len(self.line))
        assert all(1 <= ticket.retry_after_s <= 600 for ticket in self.over if ticket.state is TicketState.REFUSED)


QueueMachine.TestCase.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAdmissionQueue = QueueMachine.TestCase


def test_retry_after_is_the_queue_ahead_times_the_recent_services() -> None:
    queue, clock = make_queue(slots=2, waiting=3)
    for _ in range(4):
        ticket = queue.arrive()
        clock.advance(6.0)
        queue.end(ticket)
    for _ in range(5):
        queue.arrive()
    refused = queue.arrive()
    assert refused.retry_after_s == 12  # (3 waiting + itself) × 6 s ÷ 2 slots


def test_retry_after_before_any_service_ended_is_at_least_one_second_and_grows_with_those_inside() -> None:
    queue, clock = make_queue(slots=1, waiting=0)
    queue.arrive()
    assert queue.arrive().retry_after_s == 1
    clock.advance(40.0)
    assert queue.arrive().retry_after_s == 40


@pytest.mark.parametrize(("slots", "waiting", "wait_s"), [(0, 1, 1.0), (1, -1, 1.0), (1, 1, -0.5)])
def test_a_door_that_cannot_work_is_refused(slots: int, waiting: int, wait_s: float) -> None:
    with pytest.raises(ConfigError, match="front door"):
        make_queue(slots, waiting, wait_s)


# -- the middleware --------------------------------------------------------------------------------------------------


class HandClock:
    """Time stands still until the test moves it; whoever sleeps wakes then."""

    def __init__(self) -> None:
        self._now = 0.0
        self._moved = asyncio.Event()

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here may block the loop")

    async def sleep_until(self, due_s: float) -> None:
        while self._now < due_s:
            await self._moved.wait()

    def advance(self, seconds: float) -> None:
        self._now += seconds
        self._moved.set()
        self._moved = asyncio.Event()


class Client:
    """One HTTP request, message by message."""

    def __init__(self, path: str = "/v1/completions", method: str = "POST") -> None:
        self.scope: Scope = {"type": "http", "method": method, "path": path, "headers": []}
        self.inbox: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []

    def says(self, body: bytes, more: bool = False) -> None:
        self.inbox.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leaves(self) -> None:
        self.inbox.put_nowait({"type": "http.disconnect"})

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    def calls(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> asyncio.Task[None]:
        async def call() -> None:
            await app(self.scope, self.inbox.get, self.send)

        return asyncio.create_task(call())

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None


class EchoApp:
    """Reads the body, waits until the test lets it go, answers with what it read (or does as told)."""

    def __init__(self) -> None:
        self.inside = 0
        self.entered: asyncio.Queue[str] = asyncio.Queue()
        self.go = asyncio.Event()
        self.error: BaseException | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.inside += 1
        try:
            body = b""
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                body += message.get("body", b"")
                if not message.get("more_body"):
                    break
            self.entered.put_nowait(body.decode())
            await self.go.wait()
            if self.error is not None:
                raise self.error
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": body})
        finally:
            self.inside -= 1


class House:
    """A door of one slot and one waiting place before an EchoApp."""

    def __init__(self, slots: int = 1, waiting: int = 1, **options: Any) -> None:
        self.clock = HandClock()
        self.app = EchoApp()
        self.door = FrontDoor(self.app, slots=slots, waiting=waiting, wait_s=5.0, clock=self.clock, **options)

    async def occupied(self) -> asyncio.Task[None]:
        """The one slot taken by a request that stays until `app.go`."""
        client = Client()
        client.says(b"first")
        task = client.calls(self.door)
        assert await self.app.entered.get() == "first"
        return task

    async def settled(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    def check(self) -> None:
        self.door.queue.check()
        assert self.door.queue.idle
        assert not self.door._calls


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def test_a_waiting_request_gets_in_with_its_whole_body_when_a_slot_is_freed() -> None:
    async def story() -> None:
        house = House()
        first = await house.occupied()
        second = Client()
        second.says(b"a", more=True)
        waiting = second.calls(house.door)
        await house.settled()
        second.says(b"b", more=True)
        await house.settled()
        assert house.door.queue.stats().waiting == 1
        house.app.go.set()
        await first
        second.says(b"c")
        await waiting
        assert second.sent[-1]["body"] == b"abc"
        house.check()

    run(story())


def test_a_full_queue_answers_429_at_once_with_retry_after_in_openai_shape() -> None:
    async def story() -> None:
        house = House()
        tasks = [await house.occupied()]
        second = Client()
        second.says(b"second")
        tasks.append(second.calls(house.door))
        await house.settled()
        third = Client()
        await third.calls(house.door)
        assert third.status == 429
        headers = dict(third.sent[0]["headers"])
        assert int(headers[b"retry-after"]) >= 1
        error = json.loads(third.sent[1]["body"])["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == "rate_limit_exceeded"
        house.app.go.set()
        await asyncio.gather(*tasks)
        assert second.status == 200
        house.check()

    run(story())


def test_a_wait_ends_with_429_when_its_time_is_over_and_not_before() -> None:
    async def story() -> None:
        house = House()
        first = await house.occupied()
        second = Client()
        second.says(b"second")
        waiting = second.calls(house.door)
        await house.settled()
        house.clock.advance(4.9)
        await house.settled()
        assert second.status is None
        house.clock.advance(0.1)
        await waiting
        assert second.status == 429
        house.app.go.set()
        await first
        house.check()

    run(story())


def test_a_waiting_client_that_leaves_gives_up_its_place() -> None:
    async def story() -> None:
        house = House()
        first = await house.occupied()
        second = Client()
        second.says(b"second")
        waiting = second.calls(house.door)
        await house.settled()
        second.leaves()
        await waiting
        assert second.sent == []
        now = house.door.queue.stats()
        assert (now.waiting, now.left_waiting, now.running) == (0, 1, 1)
        house.app.go.set()
        await first
        assert house.app.entered.empty()
        house.check()

    run(story())


@pytest.mark.parametrize("error", [RuntimeError("the app fails"), asyncio.CancelledError(), KeyError("x")])
def test_a_slot_comes_back_once_whatever_the_app_raises(error: BaseException) -> None:
    async def story() -> None:
        house = House()
        house.app.error = error
        first = await house.occupied()
        house.app.go.set()
        with pytest.raises(type(error)):
            await first
        assert house.door.queue.stats().served == 1
        house.check()

    run(story())


@pytest.mark.parametrize("inside", [True, False], ids=["running", "waiting"])
def test_a_cancelled_request_leaves_nothing_behind(inside: bool) -> None:
    async def story() -> None:
        house = House()
        first = await house.occupied()
        second = Client()
        second.says(b"second")
        waiting = second.calls(house.door)
        await house.settled()
        victim, other = (first, waiting) if inside else (waiting, first)
        victim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await victim
        house.app.go.set()
        await other
        house.check()

    run(story())


def test_a_client_that_leaves_while_running_frees_its_slot_when_the_app_notices() -> None:
    async def story() -> None:
        house = House()
        client = Client()
        client.says(b"half", more=True)
        task = client.calls(house.door)
        await house.settled()
        client.leaves()
        await task
        house.check()

    run(story())


def test_closing_refuses_the_waiting_and_the_new_and_lets_the_running_finish() -> None:
    async def story() -> None:
        house = House()
        first = await house.occupied()
        second, third = Client(), Client()
        second.says(b"second")
        waiting = second.calls(house.door)
        await house.settled()
        house.door.close(9.0)
        await waiting
        await third.calls(house.door)
        for client in (second, third):
            assert client.status == 429
            assert dict(client.sent[0]["headers"])[b"retry-after"] == b"9"
        house.app.go.set()
        await first
        house.check()

    run(story())


def test_only_generation_posts_are_limited() -> None:
    async def story() -> None:
        house = House(waiting=0)
        first = await house.occupied()
        house.app.go.set()
        for path, method in [("/v1/models", "GET"), ("/v1/completions", "GET"), ("/tokenize", "POST")]:
            client = Client(path, method)
            client.says(b"x")
            await client.calls(house.door)
            assert client.status == 200
        await first

    run(story())


def test_a_large_waiting_body_is_not_kept_beyond_its_bound() -> None:
    async def story() -> None:
        house = House(max_waiting_body_bytes=10)
        first = await house.occupied()
        second = Client()
        for _ in range(8):
            second.says(b"12345", more=True)
        second.says(b"end")
        waiting = second.calls(house.door)
        await house.settled()
        assert second.inbox.qsize() == 7  # two messages reach the bound; the rest stays with the server
        house.app.go.set()
        await first
        await waiting
        assert second.sent[-1]["body"] == b"12345" * 8 + b"end"
        house.check()

    run(story())


def test_a_mounted_app_is_limited_below_its_root_path() -> None:
    async def story() -> None:
        house = House(waiting=0)
        first = await house.occupied()
        client = Client("/api/v1/completions")
        client.scope["root_path"] = "/api"
        await client.calls(house.door)
        assert client.status == 429
        house.app.go.set()
        await first

    run(story())


@contextmanager
def environment(patch: pytest.MonkeyPatch, **values: str) -> Iterator[None]:
    with patch.context() as inner:
        for name, value in values.items():
            inner.setenv(name, value)
        yield


def test_without_options_the_environment_sizes_the_door(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    async def app(scope: Scope, receive: Receive, send: Send) -> None: ...

    with environment(monkeypatch, HOSTCACHE_FRONT_DOOR_SLOTS="3", HOSTCACHE_FRONT_DOOR_WAIT_S="1.5"):
        queue = FrontDoor(app).queue
    assert (queue.slots, queue.waiting, queue.wait_s) == (3, 12, 1.5)
    with environment(monkeypatch, HOSTCACHE_FRONT_DOOR_SLOTS="none"), pytest.raises(ConfigError, match="SLOTS"):
        FrontDoor(app)
