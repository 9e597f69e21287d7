"""Agents that say what was recorded: after a mined profile, or after a trace with its own pauses.

Both are closed loops. A profile's sessions are drawn as the simulator draws them (workload.profiles.planned_sessions);
a trace's prompts are put together block by block: the same block id gives the same words, another one others. (Exact
bridges between block ids and text are another module's business.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np

from hostcache.bench.harness.agents import Agent, check_points, check_room, run_ramp, whole_points
from hostcache.bench.harness.cell import Cell, Kind, Workload
from hostcache.bench.harness.cellfile import Place
from hostcache.bench.harness.load import Cast, Client, Order
from hostcache.bench.harness.texts import Piece, Prompt, Talk, Texts, joined
from hostcache.client.openai import Heard
from hostcache.errors import ConfigError
from hostcache.workload.agents import stream
from hostcache.workload.profiles import (
    PlannedSession,
    PlannedTurn,
    Profile,
    draw,
    find_profile,
    planned_sessions,
    profile_json,
    scaled,
)
from hostcache.workload.traces import (
    Trace,
    TraceRequest,
    TraceSession,
    block_form,
    files_digest,
    open_trace,
    sessions_of,
)

NO_LIMIT = 1 << 62


# -- a profile -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileParameters(Workload):
    """Agents after a profile. `profile`: the name of one that ships, or a file; `divisor`: its token counts are divided
    by it, `speed`: its pauses. `points`: empty takes the profile's own number of sessions at a time, or, where it holds
    recorded sessions, each of them at its own time, once, for at most `duration_s`."""

    KIND: ClassVar[Kind] = "agents"
    NAME: ClassVar[str] = "profile"
    NOT_IDENTITY: ClassVar[frozenset[str]] = frozenset({"duration_s", "profile"})  # its digest is among the inputs

    profile: str = ""
    points: tuple[int, ...] = ()
    speed: float = 1.0
    divisor: float = 1.0
    duration_s: float = 60.0

    def __post_init__(self) -> None:
        check_points(self.points or (1,))
        check_speed(self.speed)

    def settled(self) -> Profile:
        """The profile, scaled. Raises ConfigError."""
        profile = find_profile(self.profile)
        return profile if self.divisor == 1 else scaled(profile, self.divisor)

    def inputs(self) -> dict[str, str]:
        return {"profile": sha256(profile_json(find_profile(self.profile)).encode()).hexdigest()}

    def corpus_tokens(self) -> int:
        profile = self.settled()
        return 2 * profile.longest_tokens + profile.shared_tokens

    def keeps(self, finished: frozenset[Place]) -> frozenset[Place]:
        return whole_points(finished) if self.points else frozenset()

    def players(self, cast: Cast) -> Sequence[Client]:
        profile = self.settled()
        own_times = bool(profile.recorded) and not self.points
        check_room(profile.shared_tokens + 2, cast)
        limit = NO_LIMIT if cast.limit_tokens is None else cast.limit_tokens
        players: list[Client] = []
        for number in cast.mine:
            sessions = planned_sessions(replace(profile, sessions=cast.count), seed=cast.texts.seed, limit_tokens=limit,
                                        laps=1 if own_times else None)
            own = islice(sessions, number, number + 1 if own_times else None, cast.count)
            script = _PlannedScript(profile, number, own, cast, self.speed, own_times=own_times)
            players.append(Agent(number, script, cast))
        return players

    async def run(self, cell: Cell) -> None:
        profile = self.settled()
        if profile.recorded and not self.points:
            await run_window(cell, self, len(profile.recorded), self.duration_s)
        else:
            await run_ramp(cell, self, self.points or (profile.sessions,), self.duration_s)


class _PlannedScript:
    """An agent that takes planned sessions, one after the other."""

    def __init__(self, profile: Profile, number: int, sessions: Iterator[PlannedSession], cast: Cast, speed: float, *,
                 own_times: bool) -> None:
        self._profile = profile
        self._sessions = sessions
        self._texts = cast.texts
        self._part = cast.part
        self._speed = speed
        self._rng = stream(cast.texts.seed, "pause", number)
        self._system: Piece | None = None
        if profile.shared_tokens:
            self._system = cast.texts.head(profile.shared_tokens, "system")
        first = next(self._sessions)
        self.begins_s = (first.start_s or 0.0) / speed if own_times else 0.0
        self._take(first)

    def _take(self, planned: PlannedSession) -> None:
        self.session = f"p{planned.number}"
        self._turns = planned.turns
        self.turn = -1
        self._say(next(self._turns), None)

    def _say(self, planned: PlannedTurn, before: PlannedTurn | None) -> None:
        """The next prompt: what is kept of the last, and what is new."""
        self.turn += 1
        self._planned = planned
        self.reply_tokens = planned.reply_tokens
        if before is None:
            head = self._texts.head(max(1, planned.new_tokens), "session", self._part, self.session)
            if self._system is not None and planned.kept_tokens:
                head = joined(self._texts.first(self._system, planned.kept_tokens), head)
            self._talk: Talk = self._texts.talk(head, shared_tokens=planned.kept_tokens)
            return
        had = before.prompt_tokens + before.reply_tokens
        if planned.kept_tokens < had:
            self._talk.cut(planned.kept_tokens / had)
        if planned.new_tokens:
            self._talk.append(self._texts.piece(planned.new_tokens, "growth", self._part, self.session, self.turn))

    @property
    def prompt(self) -> Prompt:
        return self._talk.prompt

    @property
    def shared_tokens(self) -> int | None:
        return self._talk.shared_tokens

    def heard(self, heard: Heard) -> float | None:
        self._talk.heard(heard)
        following = next(self._turns, None)
        if following is not None:
            self._say(following, self._planned)
            return following.gap_s / self._speed
        session = next(self._sessions, None)
        if session is None:
            return None
        self._take(session)
        return session.gap_s / self._speed

    def pause_s(self) -> float:
        return draw(self._profile.gap_s, self._rng) / self._speed


# -- a trace ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayParameters(Workload):
    """A trace's sessions, each from its own arrival on, each request its recorded pause after the last answer.

    `trace`: of any form that `lab trace` reads and that names blocks. `read_blocks`: the file's blocks where they are
    not its form's (`64:floor`). `spread_s`: sessions whose start nobody recorded begin within so long. `sessions`: the
    first so many (0: all). `speed`: arrivals and pauses are divided by it. `longest_gap_s`: longer
    pauses are cut to that, before (0: none is). `block_tokens`: how many tokens stand for a block (0: as many as the
    trace says); rests and answers shrink with it. `longest_tokens`: a session ends before its first prompt + answer
    beyond that (0: such a trace is refused when the server cannot take it). `duration_s`: 0 is to the end.
    """

    KIND: ClassVar[Kind] = "replay"
    NAME: ClassVar[str] = "replay"
    NOT_IDENTITY: ClassVar[frozenset[str]] = frozenset({"duration_s", "trace"})  # its digest is among the inputs

    trace: str = ""
    read_blocks: str = ""
    spread_s: float = 0.0
    sessions: int = 0
    speed: float = 1.0
    longest_gap_s: float = 0.0
    block_tokens: int = 0
    longest_tokens: int = 0
    duration_s: float = 0.0

    def __post_init__(self) -> None:
        check_speed(self.speed)
        for name in ("sessions", "spread_s", "longest_gap_s", "block_tokens", "longest_tokens", "duration_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give 0 or more")

    def inputs(self) -> dict[str, str]:
        path = Path(self.trace)
        try:
            return {"trace": files_digest(path)}
        except OSError as error:
            raise ConfigError(f"the trace {self.trace!r} cannot be read: {error.strerror}; give a file") from error

    def corpus_tokens(self) -> int:
        return 1 << 16

    def players(self, cast: Cast) -> Sequence[Client]:
        material = _Material(self)
        longest = max(material.tokens(request) + material.reply_tokens(request)
                      for session in material.sessions for request in session)
        if cast.limit_tokens is not None and longest > cast.limit_tokens:
            raise ConfigError(f"the trace has a prompt and answer of {longest} tokens and the server takes "
                              f"{cast.limit_tokens}; give --longest-tokens, or a smaller --block-tokens")
        return [Agent(number, _TraceScript(self, material, number, cast.texts), cast) for number in cast.mine]

    async def run(self, cell: Cell) -> None:
        material = _Material(self)
        if material.left_out:
            cell.note(f"{material.left_out} requests are left out: beyond --longest-tokens, or after one that is")
        await run_window(cell, self, len(material.sessions), self.duration_s)


class _Material:
    """A trace's sessions as they will be sent."""

    def __init__(self, parameters: ReplayParameters) -> None:
        blocks = block_form(parameters.read_blocks, "read_blocks") if parameters.read_blocks else None
        trace = open_trace(Path(parameters.trace), blocks=blocks, spread_s=parameters.spread_s)
        self.format = trace.format
        self.block_tokens = parameters.block_tokens or trace.format.block_tokens
        self.left_out = 0
        whole = _first_sessions(trace, parameters.sessions)
        self.sessions: list[tuple[TraceRequest, ...]] = []
        for session in whole:
            requests = session.requests
            if parameters.longest_tokens:
                requests = self._short_enough(requests, parameters.longest_tokens)
            self.left_out += len(session.requests) - len(requests)
            if requests:
                self.sessions.append(requests)
        if not self.sessions:
            raise ConfigError(f"no request of {parameters.trace} is within {parameters.longest_tokens} tokens; give a "
                              "larger --longest-tokens, or a smaller --block-tokens")
        self.first_s = min(requests[0].arrival_s or 0.0 for requests in self.sessions)
        self._first_row: dict[int, int] = {}
        """Block → the row that has it first; by row, for those that another session has too: 0."""
        owner: dict[int, int] = {}
        for number, requests in enumerate(self.sessions):
            for request in requests:
                for block in request.blocks.tolist():
                    self._first_row.setdefault(block, request.number)
                    if owner.setdefault(block, number) != number:
                        self._first_row[block] = 0

    def _short_enough(self, requests: tuple[TraceRequest, ...], longest: int) -> tuple[TraceRequest, ...]:
        for at, request in enumerate(requests):
            if self.tokens(request) + self.reply_tokens(request) > longest:
                return requests[:at]
        return requests

    def tokens(self, request: TraceRequest) -> int:
        whole = min(len(request.blocks), request.input_tokens // self.format.block_tokens)
        return max(1, whole * self.block_tokens + self.scaled(request.input_tokens - whole * self.format.block_tokens))

    def reply_tokens(self, request: TraceRequest) -> int:
        return max(1, self.scaled(request.output_tokens))

    def scaled(self, tokens: int) -> int:
        return round(tokens * self.block_tokens / self.format.block_tokens)

    def shared_tokens(self, request: TraceRequest) -> int:
        """Tokens of its leading blocks that an earlier row has, or another session."""
        shared = 0
        for block in request.blocks.tolist():
            if self._first_row[block] >= request.number:
                break
            shared += 1
        return min(shared * self.block_tokens, self.tokens(request))


def _first_sessions(trace: Trace, count: int) -> tuple[TraceSession, ...]:
    sessions = sessions_of(trace)
    return sessions[:count] if count else sessions


class _TraceScript:
    """One session of a trace. Its replies are what the trace says they were, not what the server said."""

    def __init__(self, parameters: ReplayParameters, material: _Material, number: int, texts: Texts) -> None:
        self._parameters = parameters
        self._material = material
        self._requests = material.sessions[number]
        self._texts = texts
        self.session = self._requests[0].session or f"row {self._requests[0].number}"
        self.turn = 0
        self._pieces: list[Piece] = []
        """of the blocks of the last prompt"""
        self.begins_s = ((self._requests[0].arrival_s or 0.0) - material.first_s) / parameters.speed

    @property
    def prompt(self) -> Prompt:
        material, request = self._material, self._requests[self.turn]
        whole = min(len(request.blocks), request.input_tokens // material.format.block_tokens)
        del self._pieces[self._kept() :]
        self._pieces += [self._texts.block(block, material.block_tokens)
                         for block in request.blocks[len(self._pieces) : whole].tolist()]
        pieces = self._pieces[:whole]
        rest = material.tokens(request) - whole * material.block_tokens
        if rest and whole < len(request.blocks):  # the last block, filled in part
            pieces.append(self._texts.first(self._texts.block(int(request.blocks[whole]), material.block_tokens), rest))
        elif rest:
            pieces.append(self._texts.piece(rest, "rest", self.session, request.number))
        return self._texts.prompt(joined(*pieces))

    def _kept(self) -> int:
        """How many of the last prompt's blocks this one begins with."""
        if not self.turn:
            return 0
        last, now = self._requests[self.turn - 1].blocks, self._requests[self.turn].blocks
        both = min(len(last), len(now), len(self._pieces))
        differ = np.flatnonzero(last[:both] != now[:both])
        return int(differ[0]) if len(differ) else both

    @property
    def shared_tokens(self) -> int | None:
        return self._material.shared_tokens(self._requests[self.turn]) if self._texts.mode == "ids" else None

    @property
    def reply_tokens(self) -> int:
        return self._material.reply_tokens(self._requests[self.turn])

    def heard(self, heard: Heard) -> float | None:
        if self.turn + 1 == len(self._requests):
            return None
        self.turn += 1
        return self.pause_s()

    def pause_s(self) -> float:
        pause_s, longest_s = self._requests[self.turn].think_s, self._parameters.longest_gap_s
        return (min(pause_s, longest_s) if longest_s else pause_s) / self._parameters.speed


async def run_window(cell: Cell, workload: ProfileParameters | ReplayParameters, count: int, duration_s: float) -> None:
    """Sessions that come at their own times need no priming: one window, from the first to the last."""
    async with cell.crew(workload, count=count) as crew, cell.segment("window", window_s=duration_s or None):
        start_s = cell.clock.now()
        await crew.obey(Order(segment="window", part="", start_s=start_s,
                              until_s=start_s + duration_s if duration_s else None))


def check_speed(speed: float) -> None:
    if not speed > 0:
        raise ConfigError(f"speed is {speed}; give more than 0")
