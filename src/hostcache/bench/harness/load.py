"""Load: clients as tasks, in this process or in several. Every request becomes a record, whatever became of it.

A cell gives an `Order` (which segment, from when, until when); a crew of clients obeys it and is idle again when
`obey` returns. Clients decide what is said (rotate.py, agents.py); a `Shift` sends it when it is due and writes down
what came. Due times are absolute, on the monotonic clock that all processes of a machine share; a late send delays
nobody else and is seen as `sent_s - due_s`. Knows no workload and no figure.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from random import Random
from typing import Any, Protocol

from hostcache.bench.harness.texts import Mode, Prompt, Texts
from hostcache.client.openai import Ask, Heard, OpenAIClient
from hostcache.clock import Clock
from hostcache.records import RequestRecord, Role, SegmentName
from hostcache.workload.agents import stream

Emit = Callable[[RequestRecord], None]

EARLY_S = 0.0015
"""Sleepers are woken so much early and look at the clock until it is time: an event loop rounds its waits up to whole
milliseconds (asyncio's selectors do), which would be the larger part of the lag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Work from `start_s` on. Nothing is sent that falls due at or after `until_s` (None: until the clients are
    through, or are told to halt); what was sent before is waited for."""

    segment: SegmentName
    part: str
    start_s: float
    until_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request, before it is sent."""

    prompt: Prompt
    role: Role
    client: int
    session: str
    turn: int
    due_s: float
    max_tokens: int
    shared_tokens: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A question ready to be sent: what takes milliseconds of a long prompt is done."""

    ask: Ask
    body: bytes
    digest: str
    """of the prompt"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Which clients one process plays: `mine` of `count`, with these texts. `part`: names the ramp's point.

    `limit_tokens`: longest prompt + answer that the server takes; None: unknown.
    """

    part: str
    count: int
    mine: tuple[int, ...]
    texts: Texts
    limit_tokens: int | None

    def user(self, session: str) -> str:
        """What its requests call themselves (OpenAI's `user`), so that a proxy's log tells conversations apart: the
        session's name, behind what is this run's alone."""
        run = blake2b(self.texts.salt.encode(), digest_size=4).hexdigest()
        return "/".join(name for name in (run, self.part, session) if name)


class Client(Protocol):
    """One client of a workload, the same object for all orders of a crew."""

    side: bool
    """It works beside the others and stops when they are through."""

    async def work(self, shift: Shift) -> None:
        """Obey the shift's order; return when there is no more to do in it."""
        ...


class Crew(Protocol):
    async def obey(self, order: Order) -> None:
        """Returns when every client is through and nothing is in flight. Raises ServerError when a process died."""
        ...

    def halt(self) -> None:
        """The order under way ends: nothing more is sent, what is in flight is waited for."""
        ...


class Desk:
    """Sends questions and writes down what became of them."""

    def __init__(self, client: OpenAIClient, *, model: str, mode: Mode, seed: int, clock: Clock, emit: Emit,
                 ignore_eos: bool = True, want_ids: bool = False) -> None:
        self.clock = clock
        self._client = client
        self._model = model
        self._mode = mode
        self._seed = seed
        self._emit = emit
        self._ignore_eos = ignore_eos
        self._want_ids = want_ids
        self._retry: dict[int, Random] = {}

    async def prepare(self, question: Question) -> Letter:
        """Ahead of time, for who wants to be punctual with long prompts."""
        ask = Ask(endpoint="chat" if self._mode == "chat" else "completions", prompt=question.prompt,
                  max_tokens=question.max_tokens, extra=question.extra, ignore_eos=self._ignore_eos,
                  want_ids=self._want_ids)
        digest = prompt_sha256(question.prompt)
        await asyncio.sleep(0)  # others may be due in between
        return Letter(ask=ask, body=self._client.encoded(ask, self._model), digest=digest)

    async def ask(self, question: Question, segment: SegmentName, part: str, letter: Letter | None = None) -> Heard:
        """Sends when it is due. Never raises for a bad answer; cancelled, it writes the record as aborted first.
        `letter`: of this question, where it was prepared."""
        if question.client not in self._retry:
            self._retry[question.client] = stream(self._seed, "retry", question.client)
        letter = letter or await self.prepare(question)
        await self._until(question.due_s)
        sent_s = self.clock.now()
        try:
            heard = await self._client.ask(letter.ask, model=self._model, rng=self._retry[question.client],
                                           body=letter.body)
        except asyncio.CancelledError:
            heard = aborted(sent_s, self.clock.now())
            self._emit(record_of(question, heard, segment, part, letter.digest))
            raise
        self._emit(record_of(question, heard, segment, part, letter.digest))
        return heard

    async def _until(self, due_s: float) -> None:
        await self.clock.sleep_until(due_s - EARLY_S)
        while self.clock.now() < due_s:  # noqa: ASYNC110  # nobody sets an event when it is time
            await asyncio.sleep(0)


class Shift:
    """An order under way: the time until it is over, and the desk."""

    def __init__(self, order: Order, desk: Desk) -> None:
        self.order = order
        self.clock = desk.clock
        self._desk = desk
        self._halted = False
        self._sleepers: set[asyncio.Task[None]] = set()

    def halt(self) -> None:
        """Nothing more is sent; who waits is woken."""
        self._halted = True
        for sleeper in self._sleepers:
            sleeper.cancel()

    async def until(self, due_s: float) -> bool:
        """Wait until just before that, so that `ask` is in time. False at once when it is not in this shift, or as
        soon as the shift is halted."""
        if self._halted or (self.order.until_s is not None and due_s >= self.order.until_s):
            return False
        if due_s - EARLY_S > self.clock.now():
            sleeper = asyncio.create_task(self.clock.sleep_until(due_s - EARLY_S))
            self._sleepers.add(sleeper)
            try:
                await asyncio.wait((sleeper,))
            finally:
                sleeper.cancel()
                self._sleepers.discard(sleeper)
        return not self._halted

    async def prepare(self, question: Question) -> Letter:
        return await self._desk.prepare(question)

    async def ask(self, question: Question, letter: Letter | None = None) -> Heard:
        return await self._desk.ask(question, self.order.segment, self.order.part, letter)

    async def play(self, clients: Sequence[Client]) -> None:
        """All of them at once; a client that breaks ends the others and raises."""
        side = [asyncio.create_task(client.work(self)) for client in clients if client.side]
        try:
            await together(client.work(self) for client in clients if not client.side)
            self.halt()
            await together(_joined(task) for task in side)
        finally:
            for task in side:
                task.cancel()
            await asyncio.gather(*side, return_exceptions=True)


class LocalCrew:
    """Clients as tasks of this process."""

    def __init__(self, clients: Sequence[Client], desk: Desk) -> None:
        self._clients = clients
        self._desk = desk
        self._shift: Shift | None = None

    async def obey(self, order: Order) -> None:
        self._shift = Shift(order, self._desk)
        try:
            await self._shift.play(self._clients)
        finally:
            self._shift = None

    def halt(self) -> None:
        if self._shift is not None:
            self._shift.halt()


async def together(jobs: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All at once; the first that raises ends the others. None is left running, on any way out."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _joined(task: asyncio.Task[None]) -> None:
    await task


@asynccontextmanager
async def beside(job: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """A task that runs as long as the body, and no longer."""
    task = asyncio.create_task(job)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def shares(count: int, processes: int) -> list[tuple[int, ...]]:
    """Clients 0 … count - 1 over at most so many processes, none of them idle."""
    return [tuple(range(first, count, min(processes, count))) for first in range(min(processes, count))]


def prompt_sha256(prompt: Prompt) -> str:
    """Ids as little-endian 64-bit integers, text as UTF-8, messages as role and content, each ended by a zero byte."""
    if isinstance(prompt, str):
        return sha256(prompt.encode()).hexdigest()
    digest = sha256()
    if prompt and isinstance(prompt[0], int):
        digest.update(array("q", prompt).tobytes())
    else:
        for message in prompt:
            assert isinstance(message, Mapping)
            digest.update(f"{message['role']}\0{message['content']}\0".encode())
    return digest.hexdigest()


def aborted(sent_s: float, now_s: float) -> Heard:
    """What is heard of a request that the run's own end cut off."""
    return Heard(outcome="aborted", reason="the run stopped while it was on its way", text="", reasoning="",
                 token_ids=(), finish_reason=None, usage=None, sent_s=sent_s, answered_attempt_s=None,
                 first_token_s=None, ended_s=now_s, chunk_s=(), retries=())


def record_of(question: Question, heard: Heard, segment: SegmentName, part: str, prompt_digest: str) -> RequestRecord:
    usage = heard.usage
    said = bool(heard.text or heard.token_ids)
    return RequestRecord(
        segment=segment, part=part, role=question.role, client=question.client, session=question.session,
        turn=question.turn, due_s=question.due_s, sent_s=heard.sent_s, answered_attempt_s=heard.answered_attempt_s,
        first_token_s=heard.first_token_s, ended_s=heard.ended_s, chunk_s=heard.chunk_s,
        prompt_tokens=usage.prompt_tokens if usage else None,
        completion_tokens=usage.completion_tokens if usage else None,
        cached_tokens=usage.hit_tokens if usage else None, device_tokens=usage.device_tokens if usage else None,
        host_tokens=usage.host_tokens if usage else None, recomputed=usage.recomputed if usage else None,
        shared_tokens=question.shared_tokens, max_tokens=question.max_tokens, finish_reason=heard.finish_reason,
        prompt_sha256=prompt_digest,
        reply_sha256=prompt_sha256(heard.token_ids or heard.text) if said else "",
        reply_ids=heard.token_ids, retries=heard.retries, outcome=heard.outcome, reason=heard.reason)
