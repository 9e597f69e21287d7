"""Rotation: C clients visit S sessions in turn, and a lone probe decodes beside them.

Client c of C visits sessions c, c + C, c + 2C … without end. A visit's prompt is an exact descendant of the last: the
real reply is fed back and `growth_tokens` of new text follow it. A session that would outgrow the server starts anew.

    nopressure   each client visits its first session only, a few times: everything fits
    warmup       every session once
    steady       in turn, for `duration_s`: once the sessions exceed the device, every visit meets an eviction
    recovery     after an idle pause, each session of the steady segment once
    observe      after another pause, the same again
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hostcache.bench.harness.cell import Cell, Kind, Workload
from hostcache.bench.harness.load import Cast, Client, Order, Question, Shift
from hostcache.bench.harness.texts import Talk, Texts
from hostcache.errors import ConfigError
from hostcache.records import Role, SegmentName

PAUSE_AFTER_FAILURE_S = 1.0
"""Never at once: a visit that failed in no time would be repeated without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RotateParameters(Workload):
    """A 0 leaves a segment or the probe out. `gap_s`: between a client's visits."""

    KIND: ClassVar[Kind] = "rotate"
    NAME: ClassVar[str] = "rotate"
    NOT_IDENTITY: ClassVar[frozenset[str]] = frozenset({"duration_s"})

    clients: int = 3
    sessions: int = 12
    tokens: int = 1000
    growth_tokens: int = 64
    reply_tokens: int = 16
    gap_s: float = 0.0
    nopressure_visits: int = 3
    warmup_laps: int = 1
    duration_s: float = 60.0
    recovery_idle_s: float = 10.0
    observe_idle_s: float = 20.0
    probe_prompt_tokens: int = 32
    probe_tokens: int = 32
    probe_every_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("clients", "sessions", "tokens", "reply_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; a rotation needs at least 1")
        for name in ("growth_tokens", "gap_s", "nopressure_visits", "warmup_laps", "duration_s", "recovery_idle_s",
                     "observe_idle_s", "probe_prompt_tokens", "probe_tokens", "probe_every_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give 0 or more")
        if self.sessions < self.clients:
            raise ConfigError(f"{self.clients} clients cannot share {self.sessions} sessions; give each at least one")

    def corpus_tokens(self) -> int:
        return 2 * self.tokens + self.sessions * 64

    def players(self, cast: Cast) -> Sequence[Client]:
        if cast.limit_tokens is not None and self.tokens + self.reply_tokens > cast.limit_tokens:
            raise ConfigError(f"sessions of {self.tokens} tokens and a reply of {self.reply_tokens} exceed the "
                              f"server's {cast.limit_tokens}; use smaller ones")
        sessions = {client: [_Session(number, self, cast) for number in range(client, self.sessions, cast.count)]
                    for client in cast.mine}
        visitors: list[Client] = [Visitor(client, self, own) for client, own in sessions.items()]
        if 0 in cast.mine and self.probe_tokens and self.probe_prompt_tokens:
            visitors.append(Probe(self, cast.texts))
        return visitors

    async def run(self, cell: Cell) -> None:
        async with cell.crew(self, count=self.clients) as crew:

            async def segment(name: SegmentName, window_s: float | None = None) -> None:
                async with cell.segment(name, window_s=window_s):
                    start_s = cell.clock.now()
                    await crew.obey(Order(segment=name, part="", start_s=start_s,
                                          until_s=None if window_s is None else start_s + window_s))

            if self.nopressure_visits:
                await segment("nopressure")
            if self.warmup_laps:
                await segment("warmup")
            if self.duration_s:
                await segment("steady", self.duration_s)
            for name, idle_s in _AFTERWARDS:
                pause_s = getattr(self, idle_s)
                if pause_s:
                    cell.note(f"idle for {pause_s:g} s before {name}")
                    await cell.clock.sleep_until(cell.clock.now() + pause_s)
                    await segment(name)


_AFTERWARDS: tuple[tuple[SegmentName, str], ...] = (("recovery", "recovery_idle_s"), ("observe", "observe_idle_s"))


class _Session:
    """One session over all its lives: a new one begins when the last outgrew the server."""

    def __init__(self, number: int, shape: RotateParameters, cast: Cast) -> None:
        self._number = number
        self._shape = shape
        self._texts = cast.texts
        self._limit = cast.limit_tokens
        self._life = 0
        self._grown = 0
        self.steady = False
        self._begin()

    def _begin(self) -> None:
        shape, name = self._shape, f"s{self._number}" if not self._life else f"s{self._number}.{self._life}"
        self.name = name
        self.talk: Talk = self._texts.talk(self._texts.head(shape.tokens, "session", name))
        self.turn = 0
        self.primed = False

    def heard(self, ok: bool) -> None:
        """After `talk.heard`: grow, or begin anew."""
        self.turn += 1
        if not ok:
            return
        self.primed = True
        self._grown += 1
        self.talk.append(self._texts.piece(self._shape.growth_tokens, "growth", self._number, self._grown))
        if self._limit is not None and self.talk.tokens + self._shape.reply_tokens > self._limit:
            self._life += 1
            self._begin()


class Visitor:
    """One client and its own sessions."""

    side = False

    def __init__(self, number: int, shape: RotateParameters, sessions: Sequence[_Session]) -> None:
        self._number = number
        self._shape = shape
        self._sessions = sessions
        self._next = 0

    async def work(self, shift: Shift) -> None:
        segment, due_s = shift.order.segment, shift.order.start_s
        for session in self._round(segment):
            if not await shift.until(due_s):
                return
            ok, ended_s = await self._visit(session, shift, due_s)
            session.steady |= segment == "steady"
            due_s = ended_s + (self._shape.gap_s if ok else max(self._shape.gap_s, PAUSE_AFTER_FAILURE_S))

    def _round(self, segment: SegmentName) -> Iterator[_Session]:
        own = self._sessions
        if segment == "nopressure":
            yield from [own[0]] * self._shape.nopressure_visits
        elif segment == "warmup":
            yield from [*own] * self._shape.warmup_laps
        elif segment == "steady":
            while True:
                session, self._next = own[self._next], (self._next + 1) % len(own)
                yield session
        else:
            yield from [session for session in own if session.steady]

    async def _visit(self, session: _Session, shift: Shift, due_s: float) -> tuple[bool, float]:
        heard = await shift.ask(Question(
            prompt=session.talk.prompt, role=self._role(session, shift.order.segment), client=self._number,
            session=session.name, turn=session.turn, due_s=due_s, max_tokens=self._shape.reply_tokens,
            shared_tokens=session.talk.shared_tokens))
        session.talk.heard(heard)
        session.heard(heard.outcome == "ok")
        return heard.outcome == "ok", heard.ended_s

    def _role(self, session: _Session, segment: SegmentName) -> Role:
        if session.primed:
            return "revisit"
        return "prime" if segment in ("nopressure", "warmup") and not session.turn else "visit"


class Probe:
    """A short prompt of its own and a long answer, every so often: how fast does the server decode beside the load?"""

    side = True

    def __init__(self, shape: RotateParameters, texts: Texts) -> None:
        self._shape = shape
        self._texts = texts
        self._turn = 0

    async def work(self, shift: Shift) -> None:
        due_s = shift.order.start_s
        while await shift.until(due_s):
            head = self._texts.head(self._shape.probe_prompt_tokens, "probe", self._turn)
            heard = await shift.ask(Question(
                prompt=self._texts.prompt(head), role="probe", client=-1, session="probe", turn=self._turn, due_s=due_s,
                max_tokens=self._shape.probe_tokens, shared_tokens=0))
            self._turn += 1
            due_s = max(due_s, heard.ended_s) + self._shape.probe_every_s
