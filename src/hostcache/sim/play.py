"""Clients for proofs: a play, whose actors follow a script line by line, and a churn of conversations without end.

What they say is drawn from streams named after them. They know the fleet from its clients' side; a script may also look
at its counters.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from random import Random

from hostcache.client.backpressure import Backpressure
from hostcache.errors import InvariantBroken
from hostcache.sim.clients import IMPATIENT, PATIENT, Clients, Visit
from hostcache.sim.fleet import Fleet
from hostcache.sim.loop import Loop
from hostcache.sim.requests import How, Live, State
from hostcache.tier import Identity
from hostcache.workload.agents import stream
from hostcache.workload.conversations import Conversation


@dataclass(slots=True, eq=False)
class Asked:
    """A request that was sent, and its visit once that is over. Yield it to wait for it."""

    play: Play = field(repr=False)
    client: int
    visit: Visit | None = None
    then: list[Callable[[], None]] = field(default_factory=list, repr=False)

    @property
    def live(self) -> Live | None:
        """In the fleet now (not while it waits to be sent again)."""
        return self.play.live.get(self.client)

    @property
    def state(self) -> State:
        return State.ENDED if (live := self.live) is None else live.state

    @property
    def over(self) -> Visit:
        if self.visit is None:
            raise InvariantBroken(f"request {self.client} of the play has not ended")
        return self.visit

    @property
    def device(self) -> int:
        """Tokens that the device had."""
        return self.over.device_tokens

    @property
    def host(self) -> int:
        """Tokens that came back from the host."""
        return self.over.host_tokens

    def leave(self) -> None:
        """Its client goes away."""
        if (live := self.live) is not None:
            self.play.fleet.abort(live)


Story = Generator["Asked | float", None, None]
"""Yields a request to wait for its end, or seconds to let pass."""


class Play(Clients):
    """One story, and those it begins beside itself. Requests have numbers from 1 on, in the order they are asked."""

    def __init__(
        self,
        fleet: Fleet,
        loop: Loop,
        tell: Callable[[Play], Story],
        *,
        identity: Identity,
        seed: int = 0,
        calm: bool = True,
        backoff: Backpressure = IMPATIENT,
    ) -> None:
        """`calm`: no faults are on their way, so everything that is to be proved must hold."""
        super().__init__(fleet, loop, seed=seed, backoff=backoff)
        self.proved: list[str] = []
        self._identity = identity
        self._calm = calm
        self._seed = seed
        self._asked = self._conversations = self._untold = 0
        self._first = tell(self)

    def start(self) -> None:
        self.begin(self._first)

    def begin(self, story: Story) -> None:
        """Another actor, from now on."""
        self._untold += 1
        self._soon(story)

    def conversation(
        self, tokens: int, *, head: Conversation | None = None, head_tokens: int = 0, identity: Identity | None = None
    ) -> Conversation:
        """A new one, whose first prompt has so many tokens."""
        self._conversations += 1
        seed = self._seed * 1_000_003 + self._conversations
        return Conversation(identity or self._identity, seed, start_tokens=tokens, head=head, head_tokens=head_tokens)

    def ask(
        self, talk: Conversation, reply: int = 1, *, hear: int | None = None, store_pages: int | None = None,
        load: bool = True,
    ) -> Asked:  # fmt: skip
        """Send its next turn. With `hear`, what was answered belongs to it afterwards, and so many tokens more."""
        self._asked += 1
        asked = Asked(self, self._asked)
        turn = talk.turn(reply, store_pages=store_pages, load=load)
        self.loop.log.note(f"ask {self._asked} {turn.turn_end.print_:016x}")

        def done(visit: Visit) -> None:
            asked.visit = visit
            if hear is not None and visit.how is How.SERVED:
                talk.answered()
                talk.hear(hear)
            for go in asked.then:
                go()

        self.visit(self._asked, 1, turn, True, done)
        return asked

    def prove(self, what: str, holds: bool, *, always: bool = False) -> None:
        """Note what was proved. Raises InvariantBroken when it does not hold; with faults about, only if `always`."""
        if holds:
            if what not in self.proved:
                self.proved.append(what)
        elif self._calm or always:
            raise InvariantBroken(f"not true: {what}")

    def finished(self) -> None:
        """After the run: every story was told to its end."""
        if self._untold:
            raise InvariantBroken(f"{self._untold} stories stopped before their end")

    def _soon(self, story: Story, seconds: float = 0.0) -> None:
        self.loop.at(self.fleet.clock.now() + seconds, "story", lambda: self._go(story))

    def _go(self, story: Story) -> None:
        for wanted in story:
            if isinstance(wanted, float):
                self._soon(story, wanted)
                return
            if wanted.visit is None:
                wanted.then.append(lambda: self._soon(story))
                return
        self._untold -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnShape:
    """Actors that talk for a while each and are then someone else. Ranges are inclusive; shares are of the turns."""

    actors: int
    start_tokens: tuple[int, int]
    hear_tokens: tuple[int, int]
    reply_tokens: tuple[int, int]
    turns: tuple[int, int]
    gap_s: tuple[float, float]
    shared_tokens: int = 0
    leave: float = 0.0
    """the client goes away before its answer is complete, at any moment"""
    leave_within_s: float = 0.5
    compact: float = 0.0
    opted_out: float = 0.0
    """neither stored nor loaded"""
    capped: float = 0.0
    """the first page only is stored"""
    preempted: float = 0.0
    """somebody takes everything from the youngest request that runs"""
    forgotten: float = 0.0
    """the weights change"""


class Churn(Clients):
    """Sends turns until `turns` were sent or `until()` says so, then lets those that run come to their end. Keeps the
    visits of nobody: a run may be as long as it likes. `tick` hears of every end."""

    def __init__(
        self,
        fleet: Fleet,
        loop: Loop,
        shape: ChurnShape,
        *,
        identity: Identity,
        seed: int,
        turns: int | None = None,
        until: Callable[[], bool] = lambda: False,
        tick: Callable[[], None] = lambda: None,
        backoff: Backpressure = PATIENT,
    ) -> None:
        super().__init__(fleet, loop, seed=seed, backoff=backoff)
        self.sent = self.served = self.ended = 0
        self._shape = shape
        self._identity = identity
        self._seed = seed
        self._turns = turns
        self._until = until
        self._tick = tick
        self._born = 0
        self._head = Conversation(identity, -seed - 1, start_tokens=max(1, shape.shared_tokens))

    def start(self) -> None:
        for actor in range(self._shape.actors):
            self._act(actor, stream(self._seed, "churn", actor))

    def _act(self, actor: int, rng: Random) -> None:
        """A new conversation takes this actor's place."""
        shape = self._shape
        self._born += 1
        talk = Conversation(self._identity, self._seed * 1_000_003 + self._born,
                            start_tokens=shape.shared_tokens + rng.randint(*shape.start_tokens),
                            head=self._head, head_tokens=shape.shared_tokens)  # fmt: skip
        self._later(actor, rng, talk, rng.randint(*shape.turns))

    def _later(self, actor: int, rng: Random, talk: Conversation, left: int) -> None:
        due_s = self.fleet.clock.now() + rng.uniform(*self._shape.gap_s)
        self.loop.at(due_s, "turn", lambda: self._send(actor, rng, talk, left), actor)

    def _send(self, actor: int, rng: Random, talk: Conversation, left: int) -> None:
        if self._until() or (self._turns is not None and self.sent >= self._turns):
            return
        shape = self._shape
        self.sent += 1
        draw = rng.random()
        opted_out = draw < shape.opted_out
        capped = not opted_out and draw < shape.opted_out + shape.capped
        turn = talk.turn(rng.randint(*shape.reply_tokens), store_pages=0 if opted_out else 1 if capped else None,
                         load=not opted_out)  # fmt: skip
        self.loop.log.note(f"ask {actor} {turn.turn_end.print_:016x}")
        if rng.random() < shape.leave:
            due_s = self.fleet.clock.now() + rng.uniform(0.0, shape.leave_within_s)
            self.loop.at(due_s, "leave", lambda: self._leave(actor), actor)
        if rng.random() < shape.preempted:
            self.loop.at(self.fleet.clock.now() + rng.uniform(0.0, 0.1), "preempt", self._preempt, actor)
        if rng.random() < shape.forgotten:
            self.loop.at(self.fleet.clock.now() + rng.uniform(0.0, 0.1), "forget", self.fleet.forget, actor)
        self.visit(actor, left, turn, True, lambda visit: self._heard(actor, rng, talk, left, visit))

    def _leave(self, actor: int) -> None:
        if (live := self.live.get(actor)) is not None:
            self.fleet.abort(live)

    def _preempt(self) -> None:
        if self.fleet.active:
            self.fleet.preempt(next(reversed(self.fleet.active.values())))

    def _heard(self, actor: int, rng: Random, talk: Conversation, left: int, visit: Visit) -> None:
        self.visits.clear()
        self.ended += 1
        self.served += visit.how is How.SERVED
        self._tick()
        if left <= 1:
            self._act(actor, rng)
            return
        if visit.how is How.SERVED:
            talk.answered()
            if rng.random() < self._shape.compact:
                talk.compact(0.72)
            talk.hear(rng.randint(*self._shape.hear_tokens))
        self._later(actor, rng, talk, left - 1)
