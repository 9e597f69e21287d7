"""Who asks: agent loops, rotations over many sessions, traces with and without their own clock. Knows no tier.

Every client retries a refused request with the backoff of a real one and writes one `Visit` a turn. What a client will
say comes from streams named after it, so that both arms of a comparison hear the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Protocol

from hostcache.client.backpressure import Backpressure
from hostcache.sim.fleet import Fleet, FleetStats
from hostcache.sim.loop import Loop
from hostcache.sim.requests import How, Live, Outcome
from hostcache.tier import Identity
from hostcache.workload.agents import COMPACTED_SHARE, AgentShape, stream
from hostcache.workload.conversations import Conversation, Turn
from hostcache.workload.profiles import Profile, draw

PATIENT = Backpressure()
IMPATIENT = Backpressure(budget=0)
"""A refusal is an error."""

Streams = Callable[[str, int], Random]
"""(what for, client) → a fresh random stream. What for: `gap`, `retry`, `agent`."""


class Backoff(Protocol):
    def wait_s(self, refusals: int, retry_after_s: float | None, rng: Random) -> float | None:
        """Seconds to wait after the `refusals`-th refusal in a row (from 0); None: give up."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One turn as its client saw it. `started_s`: first attempt; `sent_s`: the last one. Tokens as the server says.

    `counted`: it was started inside the window, and counts however late it ends.
    """

    client: int
    turn: int
    counted: bool
    how: How
    started_s: float
    sent_s: float
    first_s: float | None
    ended_s: float
    prompt_tokens: int
    reply_tokens: int
    device_tokens: int
    host_tokens: int
    retries: int
    deferred: bool

    @property
    def ttft_s(self) -> float | None:
        """Of the last attempt."""
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens after the first one over the time after it; None for answers of one token."""
        if self.first_s is None or self.reply_tokens < 2 or self.ended_s <= self.first_s:
            return None
        return self.reply_tokens / (self.ended_s - self.first_s)


class Clients:
    """What all clients share: sending with retries, and the list of visits."""

    def __init__(
        self, fleet: Fleet, loop: Loop, *, seed: int, backoff: Backoff, streams: Streams | None = None
    ) -> None:
        self.streams: Streams = streams if streams is not None else partial(stream, seed)
        self.fleet = fleet
        self.loop = loop
        self.visits: list[Visit] = []
        self.live: dict[int, Live] = {}
        """Requests that are in the fleet now, by client."""
        self.opened_s: float | None = None
        self.opened: FleetStats | None = None
        """What the fleet said when the window opened; None where there is none."""
        self._backoff = backoff
        self._retry_rngs: dict[int, Random] = {}

    def start(self) -> None:
        """Schedule the first requests."""
        raise NotImplementedError

    def _open(self) -> None:
        """The window opens now: from here on it counts, and every client's backoff begins anew."""
        self.opened_s = self.fleet.clock.now()
        self.opened = self.fleet.stats()
        self._retry_rngs.clear()

    def visit(self, client: int, number: int, turn: Turn, counted: bool, done: Callable[[Visit], None]) -> None:
        """Send, wait out refusals, note the visit, call `done`."""
        clock = self.fleet.clock
        started_s = clock.now()
        retries = 0

        def send() -> None:
            live = self.fleet.send(turn, heard)
            if live is not None:
                self.live[client] = live

        def heard(outcome: Outcome) -> None:
            nonlocal retries
            self.live.pop(client, None)
            if outcome.how is How.REFUSED:
                if client not in self._retry_rngs:
                    self._retry_rngs[client] = self.streams("retry", client)
                wait = self._backoff.wait_s(retries, outcome.retry_after_s or None, self._retry_rngs[client])
                if wait is not None:
                    retries += 1
                    self.loop.at(clock.now() + wait, "retry", send, client)
                    return
            visit = Visit(
                client=client, turn=number, counted=counted, how=outcome.how, started_s=started_s,
                sent_s=outcome.sent_s, first_s=outcome.first_s, ended_s=outcome.ended_s,
                prompt_tokens=outcome.prompt_tokens, reply_tokens=outcome.reply_tokens,
                device_tokens=outcome.device_tokens, host_tokens=outcome.host_tokens, retries=retries,
                deferred=outcome.deferred)  # fmt: skip
            self.visits.append(visit)
            done(visit)

        send()


class AgentLoops(Clients):
    """`count` agents: all send at once until each was served its first turn (or gave up), then the window opens and all
    send at once again; from then on each waits a tool's gap after every answer. No turn starts after the window."""

    def __init__(
        self,
        fleet: Fleet,
        loop: Loop,
        shape: AgentShape,
        *,
        count: int,
        window_s: float,
        identity: Identity,
        seed: int,
        backoff: Backoff = PATIENT,
        compact_one_in: int = 200,
        limit_tokens: int = 1 << 62,
        shared_tokens: int = 0,
        streams: Streams | None = None,
    ) -> None:
        """One turn in `compact_one_in` (0: none) the agent compacts first, and also when the next prompt would pass
        `limit_tokens`. `shared_tokens`: length of a system prompt that all begin with."""
        super().__init__(fleet, loop, seed=seed, backoff=backoff, streams=streams)
        self._shape = shape
        self._compact_one_in = compact_one_in
        self._limit = limit_tokens
        self._window_s = window_s
        self._warming = count
        head = Conversation(identity, seed, start_tokens=shared_tokens) if shared_tokens else None
        self._agents = [
            Conversation(identity, seed * 1_000_003 + 1 + number, start_tokens=shape.prefix_tokens + shape.tool_tokens,
                         head=head, head_tokens=shared_tokens)
            for number in range(count)
        ]  # fmt: skip
        self._gaps = [self.streams("gap", number) for number in range(count)]
        self._rngs = [self.streams("agent", number) for number in range(count)]
        self._turns = [0] * count

    def start(self) -> None:
        for number in range(len(self._agents)):
            self.loop.at(self.fleet.clock.now(), "warm-up", partial(self._send, number), number)

    def _send(self, number: int) -> None:
        turn = self._agents[number].turn(self._shape.reply_tokens)
        self.visit(number, self._turns[number], turn, self.opened_s is not None, partial(self._heard, number))

    def _heard(self, number: int, visit: Visit) -> None:
        agent, rng = self._agents[number], self._rngs[number]
        if visit.how is How.SERVED:
            agent.answered()
            if self._compact_one_in and rng.random() * self._compact_one_in < 1:
                agent.compact(COMPACTED_SHARE)
            agent.hear(self._shape.tool_tokens)
            if agent.tokens + self._shape.reply_tokens > self._limit:
                agent.compact(COMPACTED_SHARE)
        self._turns[number] += 1
        now = self.fleet.clock.now()
        if self._turns[number] == 1 and self.opened_s is None:
            self._warming -= 1
            if not self._warming:
                self._open()
                for each in range(len(self._agents)):
                    self.loop.at(now, "turn", partial(self._send, each), each)
            return
        gap = round(self._gaps[number].uniform(self._shape.gap_min_s, self._shape.gap_max_s), 3)
        if self.opened_s is not None and now + gap < self.opened_s + self._window_s:
            self.loop.at(now + gap, "turn", partial(self._send, number), number)


class ProfileLoops(Clients):
    """`profile.sessions` conversations at a time, drawn from a profile; one that has had its turns gives place to a
    cold one. Turns that start in `window_s` count, from the beginning."""

    def __init__(
        self,
        fleet: Fleet,
        loop: Loop,
        profile: Profile,
        *,
        window_s: float,
        identity: Identity,
        seed: int,
        backoff: Backoff = PATIENT,
        limit_tokens: int = 1 << 62,
    ) -> None:
        super().__init__(fleet, loop, seed=seed, backoff=backoff)
        self._profile = profile
        self._window_s = window_s
        self._identity = identity
        self._seed = seed
        self._limit = limit_tokens
        self._begun = 0
        shared = profile.shared_tokens
        self._head = Conversation(identity, seed, start_tokens=shared) if shared else None

    def start(self) -> None:
        for number in range(self._profile.sessions):
            wait = draw(self._profile.gap_s, stream(self._seed, "start", number))
            self.loop.at(self.fleet.clock.now() + wait, "session", partial(self._begin, number), number)

    def _begin(self, number: int) -> None:
        self._begun += 1
        rng = stream(self._seed, "session", self._begun)
        profile = self._profile
        start = max(1, min(int(draw(profile.start_tokens, rng)), self._limit - int(profile.reply_tokens[-1])))
        talk = Conversation(self._identity, self._seed * 1_000_003 + self._begun, start_tokens=start, head=self._head,
                            head_tokens=profile.shared_tokens)
        self._ask(number, talk, rng, 0, max(1, round(draw(profile.turns, rng))))

    def _ask(self, number: int, talk: Conversation, rng: Random, done: int, turns: int) -> None:
        turn = talk.turn(max(1, int(draw(self._profile.reply_tokens, rng))))

        def heard(visit: Visit) -> None:
            profile, now = self._profile, self.fleet.clock.now()
            if visit.how is How.SERVED:
                talk.answered()
            if profile.compact_one_in and rng.random() * profile.compact_one_in < 1:
                talk.compact(profile.compact_share)
            talk.hear(int(draw(profile.growth_tokens, rng)))
            if talk.tokens + profile.reply_tokens[-1] > self._limit:
                talk.compact(profile.compact_share)
            due = now + draw(profile.gap_s, rng)
            if due >= self._window_s:
                return
            if done + 1 < turns:
                self.loop.at(due, "turn", partial(self._ask, number, talk, rng, done + 1, turns), number)
            else:
                self.loop.at(due, "session", partial(self._begin, number), number)

        self.visit(number, done, turn, True, heard)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotationShape:
    """`sessions` of `tokens` each, visited round-robin by `users` clients without a gap; a probe of a cold prompt runs
    beside them, `probe_every_s` after its last answer."""

    sessions: int
    tokens: int
    users: int
    new_tokens: int
    reply_tokens: int
    probe_tokens: int = 0
    probe_reply_tokens: int = 0
    probe_every_s: float = 60.0


class Rotation(Clients):
    """Client c of C visits sessions c, c + C, c + 2C … in turn. Each session is visited once before the window."""

    def __init__(
        self,
        fleet: Fleet,
        loop: Loop,
        shape: RotationShape,
        *,
        window_s: float,
        identity: Identity,
        seed: int,
        backoff: Backoff = PATIENT,
    ) -> None:
        super().__init__(fleet, loop, seed=seed, backoff=backoff)
        self._shape = shape
        self._window_s = window_s
        self._identity = identity
        self._seed = seed
        self._sessions = [
            Conversation(identity, seed * 1_000_003 + 1 + number, start_tokens=shape.tokens)
            for number in range(shape.sessions)
        ]
        self._visits = [0] * shape.users
        self._turns = [0] * shape.sessions
        self._warming = shape.users
        self._probes = 0

    def start(self) -> None:
        for user in range(self._shape.users):
            self.loop.at(self.fleet.clock.now(), "warm-up", partial(self._send, user), user)

    def _own(self, user: int) -> int:
        """Sessions of this user."""
        return len(range(user, self._shape.sessions, self._shape.users))

    def _send(self, user: int) -> None:
        session = user + self._visits[user] % self._own(user) * self._shape.users
        turn = self._sessions[session].turn(self._shape.reply_tokens)
        self.visit(user, self._turns[session], turn, self.opened_s is not None,
                   partial(self._heard, user, session))  # fmt: skip

    def _heard(self, user: int, session: int, visit: Visit) -> None:
        if visit.how is How.SERVED:
            self._sessions[session].answered()
            self._sessions[session].hear(self._shape.new_tokens)
        self._turns[session] += 1
        self._visits[user] += 1
        now = self.fleet.clock.now()
        if self.opened_s is None and self._visits[user] == self._own(user):
            self._warming -= 1
            if self._warming:
                return
            self._open()
            for each in range(self._shape.users):
                self.loop.at(now, "visit", partial(self._send, each), each)
            if self._shape.probe_tokens:
                self.loop.at(now, "probe", self._probe)
        elif self.opened_s is None or now < self.opened_s + self._window_s:
            # Never at once: a refused visit that took no time would be repeated without end.
            self.loop.at(now + 1e-3, "visit", partial(self._send, user), user)

    def _probe(self) -> None:
        self._probes += 1
        seed = -self._seed * 1_000_003 - self._probes
        cold = Conversation(self._identity, seed, start_tokens=self._shape.probe_tokens)
        turn = cold.turn(self._shape.probe_reply_tokens)
        self.visit(-1, self._probes, turn, False, lambda visit: self._probed())

    def _probed(self) -> None:
        due = self.fleet.clock.now() + self._shape.probe_every_s
        if self.opened_s is not None and due < self.opened_s + self._window_s:
            self.loop.at(due, "probe", self._probe)


class OpenLoop(Clients):
    """Requests at their own times, whatever became of those before. `arrivals` ascend; one is drawn at a time."""

    def __init__(
        self,
        fleet: Fleet,
        loop: Loop,
        arrivals: Iterable[tuple[float, Turn]],
        *,
        seed: int = 0,
        backoff: Backoff = IMPATIENT,
    ) -> None:
        super().__init__(fleet, loop, seed=seed, backoff=backoff)
        self._arrivals: Iterator[tuple[float, Turn]] = iter(arrivals)
        self._number = 0

    def start(self) -> None:
        self._next()

    def _next(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            due_s, turn = arrival
            self.loop.at(due_s, "arrival", partial(self._arrive, turn), self._number + 1)

    def _arrive(self, turn: Turn) -> None:
        self._number += 1
        self.visit(self._number, 1, turn, True, lambda visit: None)
        self._next()


class Sessions(Clients):
    """Recorded sessions: each starts at its time, and every later turn comes a pause after the last answer."""

    def __init__(
        self,
        fleet: Fleet,
        loop: Loop,
        sessions: Sequence[tuple[float, Iterable[tuple[float, Turn]]]],
        *,
        seed: int = 0,
        backoff: Backoff = PATIENT,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        """`sessions`: (start in seconds, its turns as (pause before it in seconds, turn)); turns are drawn one by one.
        `progress` hears of the number of turns that ended."""
        super().__init__(fleet, loop, seed=seed, backoff=backoff)
        self._sessions = [(start_s, iter(turns)) for start_s, turns in sessions]
        self._progress = progress

    def start(self) -> None:
        for number, (start_s, turns) in enumerate(self._sessions):
            self._next(number, 0, start_s, turns)

    def _next(self, number: int, count: int, after_s: float, turns: Iterator[tuple[float, Turn]]) -> None:
        following = next(turns, None)
        if following is None:
            return
        pause_s, turn = following

        def heard(visit: Visit) -> None:
            self._progress(len(self.visits))
            self._next(number, count + 1, visit.ended_s, turns)

        self.loop.at(after_s + pause_s, "turn", lambda: self.visit(number, count, turn, True, heard), number)


