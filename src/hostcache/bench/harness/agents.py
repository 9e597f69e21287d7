"""Agents: a closed loop of K conversations, each with a pause after every answer, and a ramp over K.

What an agent says stands in a script (here: the shape of the seed's section 3; in replay.py: profiles and traces). The
loop is the same for all: the next request is due the script's pause after the last answer.

    prime    every agent's first turn; who is early goes on. It ends when all have been answered once
    window   for `duration_s`: what is sent in it counts however late it ends
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from hostcache.bench.harness.cell import Cell, Kind, Playable, Workload
from hostcache.bench.harness.cellfile import Place
from hostcache.bench.harness.load import Cast, Client, Order, Question, Shift, beside
from hostcache.bench.harness.texts import Prompt, Talk
from hostcache.client.openai import Heard
from hostcache.errors import ConfigError, ServerError
from hostcache.records import RequestRecord, Role
from hostcache.workload.agents import COMPACTED_SHARE, stream

PAUSE_AFTER_FAILURE_S = 1.0
"""Never at once: a turn that failed in no time would be repeated without end."""
PREPARE_S = 0.25
"""A request is put together so long before it is due: then it is not late, and those that wait take no memory."""
PRIME_ATTEMPTS = 3
"""Failed turns after which a window no longer waits for an agent's first answer."""


class Script(Protocol):
    """What one agent says: conversations one after the other, drawn from streams named after it."""

    @property
    def begins_s(self) -> float:
        """When its first turn is due, from the start of the load."""
        ...

    @property
    def session(self) -> str: ...

    @property
    def turn(self) -> int:
        """Of the session, from 0."""
        ...

    @property
    def prompt(self) -> Prompt: ...

    @property
    def shared_tokens(self) -> int | None: ...

    @property
    def reply_tokens(self) -> int: ...

    def heard(self, heard: Heard) -> float | None:
        """Seconds until its next turn, which is ready now; None: it has no more to say."""
        ...

    def pause_s(self) -> float:
        """An ordinary pause, for an agent whose turn fell due while nobody might send."""
        ...


class Agent:
    """Ask, hear, pause, ask again; over all orders of its crew."""

    side = False

    def __init__(self, number: int, script: Script, cast: Cast) -> None:
        self._number = number
        self._script = script
        self._cast = cast
        self._due_s: float | None = None
        self._through = False
        self._primed: set[str] = set()

    async def work(self, shift: Shift) -> None:
        script, start_s = self._script, shift.order.start_s
        if self._due_s is None:
            self._due_s = start_s + script.begins_s
        elif self._due_s < start_s:  # so that not all begin a window at once
            self._due_s = start_s + script.pause_s()
        while not self._through and await shift.until(self._due_s - PREPARE_S):
            session = script.session
            question = Question(
                prompt=script.prompt, role=self._role(), client=self._number, session=session, turn=script.turn,
                due_s=self._due_s, max_tokens=script.reply_tokens, shared_tokens=script.shared_tokens,
                extra={"user": self._cast.user(session)})
            letter = await shift.prepare(question)
            if not await shift.until(self._due_s):
                return
            heard = await shift.ask(question, letter)
            del question, letter
            pause_s = script.heard(heard)
            self._through = pause_s is None
            if heard.outcome == "ok":
                self._primed.add(session)
            elif pause_s is not None:
                pause_s = max(pause_s, PAUSE_AFTER_FAILURE_S)
            self._due_s = heard.ended_s + (pause_s or 0.0)

    def _role(self) -> Role:
        if self._script.session in self._primed:
            return "revisit"
        return "prime" if self._script.turn == 0 else "visit"


# -- the shape of the seed's section 3 -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsParameters(Workload):
    """A prefix, then per turn a reply and a tool result; pauses uniform from `gap_min_s` to `gap_max_s`.

    One turn in `compact_one_in` (0: none) cuts the conversation to `compact_share`; after `cold_share` of the turns a
    new conversation takes the place; after `resume_share` of them the agent is away for `resume_gap_s`, give or take
    half of it.
    """

    KIND: ClassVar[Kind] = "agents"
    NAME: ClassVar[str] = "agents"
    NOT_IDENTITY: ClassVar[frozenset[str]] = frozenset({"duration_s"})

    points: tuple[int, ...] = (8,)
    prefix_tokens: int = 1000
    tool_tokens: int = 64
    reply_tokens: int = 16
    gap_min_s: float = 1.0
    gap_max_s: float = 6.0
    compact_one_in: int = 200
    compact_share: float = COMPACTED_SHARE
    cold_share: float = 0.0
    resume_share: float = 0.0
    resume_gap_s: float = 600.0
    duration_s: float = 60.0

    def __post_init__(self) -> None:
        check_points(self.points)
        for name in ("prefix_tokens", "reply_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; an agent needs at least 1")
        for name in ("tool_tokens", "compact_one_in", "resume_gap_s", "duration_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give 0 or more")
        for name in ("compact_share", "cold_share", "resume_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a share from 0 to 1")
        if not 0 <= self.gap_min_s <= self.gap_max_s:
            raise ConfigError(f"gaps from {self.gap_min_s} to {self.gap_max_s} s are no range; give 0 <= min <= max")

    def corpus_tokens(self) -> int:
        return 2 * self.prefix_tokens + 64 * max(self.points)

    def keeps(self, finished: frozenset[Place]) -> frozenset[Place]:
        return whole_points(finished)

    def players(self, cast: Cast) -> Sequence[Client]:
        check_room(self.prefix_tokens + self.reply_tokens, cast)
        return [Agent(number, _ShapedScript(self, number, cast), cast) for number in cast.mine]

    async def run(self, cell: Cell) -> None:
        await run_ramp(cell, self, self.points, self.duration_s)


class _ShapedScript:
    """An agent after `AgentsParameters`."""

    begins_s = 0.0

    def __init__(self, shape: AgentsParameters, number: int, cast: Cast) -> None:
        self._shape = shape
        self._number = number
        self._part = cast.part
        self._texts = cast.texts
        self._limit = cast.limit_tokens
        self._rng = stream(cast.texts.seed, "agent", number)
        self._said = 0
        self.reply_tokens = shape.reply_tokens
        self._begin(0)

    def _begin(self, life: int) -> None:
        self._life = life
        self.session = f"a{self._number}" + (f".{life}" if life else "")
        self._talk: Talk = self._texts.talk(
            self._texts.head(self._shape.prefix_tokens, "agent", self._part, self.session))
        self.turn = 0

    @property
    def prompt(self) -> Prompt:
        return self._talk.prompt

    @property
    def shared_tokens(self) -> int | None:
        return self._talk.shared_tokens

    def heard(self, heard: Heard) -> float:
        shape, talk = self._shape, self._talk
        talk.heard(heard)
        self.turn += 1
        # All are drawn every time and in one order, so that a failure does not change what comes after it.
        gap_s = self.pause_s()
        compacts, ends, leaves, away = (self._rng.random() for _ in range(4))
        if heard.outcome == "ok":
            self._said += 1
            if compacts * shape.compact_one_in < 1 and shape.compact_one_in:
                talk.cut(shape.compact_share)
            if shape.tool_tokens:
                talk.append(self._texts.piece(shape.tool_tokens, "tool", self._number, self._said))
            if self._limit is not None and talk.tokens + shape.reply_tokens > self._limit:
                talk.cut(shape.compact_share)
            if ends < shape.cold_share:
                self._begin(self._life + 1)
        return shape.resume_gap_s * (0.5 + away) if leaves < shape.resume_share else gap_s

    def pause_s(self) -> float:
        return self._rng.uniform(self._shape.gap_min_s, self._shape.gap_max_s)


# -- the ramp --------------------------------------------------------------------------------------------------------


async def run_ramp(cell: Cell, workload: Playable, points: Sequence[int], duration_s: float) -> None:
    """One point after the other, each with agents of its own, until the cell's `stop` has a reason to end it."""
    for count in points:
        part = str(count)
        if cell.done("window", part):
            cell.note(f"{part} agents: measured by an earlier run")
            if cell.stop(part) is not None:
                return
            continue
        async with cell.crew(workload, count=count, part=part) as crew:
            first = FirstTurns(count)
            async with cell.segment("prime", part):
                with cell.hearing(first.heard):
                    async with beside(_halt_after(first, crew.halt)):
                        await crew.obey(Order(segment="prime", part=part, start_s=cell.clock.now()))
            if not first.primed:
                raise ServerError(f"none of {count} agents was answered: {first.why}")
            if first.given_up:
                cell.note(f"{len(first.given_up)} of {count} agents were not answered: {first.why}")
            async with cell.segment("window", part, window_s=duration_s):
                start_s = cell.clock.now()
                await crew.obey(Order(segment="window", part=part, start_s=start_s, until_s=start_s + duration_s))
        if cell.stop(part) is not None:
            return


class FirstTurns:
    """Who has been answered once, and who failed too often to be waited for. `all`: that is everybody."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._failed: dict[int, int] = {}
        self.primed: set[int] = set()
        self.all = asyncio.Event()
        self.why = ""

    @property
    def given_up(self) -> set[int]:
        return {client for client, times in self._failed.items() if times >= PRIME_ATTEMPTS} - self.primed

    def heard(self, record: RequestRecord) -> None:
        if record.outcome == "ok":
            self.primed.add(record.client)
        else:
            self._failed[record.client] = self._failed.get(record.client, 0) + 1
            self.why = record.reason or record.outcome
        if len(self.primed) + len(self.given_up) >= self._count:
            self.all.set()


async def _halt_after(first: FirstTurns, halt: Callable[[], None]) -> None:
    await first.all.wait()
    halt()


def whole_points(finished: frozenset[Place]) -> frozenset[Place]:
    """Both segments of the points whose window finished."""
    return frozenset(place for place in finished if ("window", place[1]) in finished)


def check_points(points: Sequence[int]) -> None:
    if not points or min(points) < 1 or len(set(points)) < len(points):
        raise ConfigError(f"points are {list(points)}; give different numbers of agents, each at least 1")


def check_room(tokens: int, cast: Cast) -> None:
    if cast.limit_tokens is not None and tokens > cast.limit_tokens:
        raise ConfigError(f"a first prompt and its reply of {tokens} tokens exceed the server's {cast.limit_tokens}; "
                          "use smaller ones")
