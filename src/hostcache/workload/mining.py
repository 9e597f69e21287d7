"""A request log's profile: which requests were one conversation, how it began, grew, paused and was cut.

Works on `LoggedRequest`s alone, which hold no text. A request is joined to a conversation by the first of these that
speaks, and each is counted:

* `hint`: the log names a conversation, and names it more than once;
* `prefix`: it begins with the whole last prompt of exactly one conversation, or with more than `KEPT_SHARE` of it where
  that conversation is not continued otherwise later (a compaction, or history that was edited);
* `growth`: without any digests, it is at least as long as the last prompt and its reply of a conversation that is not
  waiting for an answer, and the nearest such by length; it may be longer by half or `GROWTH_TOKENS`.

What is joined to nothing starts a conversation. Knows no servers and no caches.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from hostcache.errors import ConfigError
from hostcache.workload.profiles import Profile, RecordedSession, RecordedTurn, quantile_at, quantiles
from hostcache.workload.request_logs import LoggedRequest
from hostcache.workload.traces import TraceSession

Joined = Literal["hint", "prefix", "growth", "none"]

QUANTILES = 101
"""A percent apart."""
RESUME_S = 600.0
"""A conversation that comes back after this long is resumed, not continued warm (the seed's section 3: ten minutes)."""
KEPT_SHARE = 0.5
GROWTH_TOKENS = 8192
MOST_TURNS = 20_000
"""Recorded in a profile; of a longer log, every n-th conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MinedFacts:
    """What was counted. Times are the workload's: the log's, times `speed`.

    `requests` = `cold_starts` + `warm` + `resumes` + `compactions`: a first request; one that continues its
    conversation; one that does so after `RESUME_S`; one whose prompt is shorter than the last one, or keeps less of it
    than all but its last tenth.
    """

    requests: int
    sessions: int
    joined: dict[Joined, int]
    """Requests by what told their conversation; `none`: first requests that nothing joined."""
    cold_starts: int
    warm: int
    resumes: int
    compactions: int
    in_flight_p50: float
    in_flight_p90: float
    hit_share: float | None
    """Cached over prompt tokens, of the requests where the server said; None where it never did."""
    span_s: float
    speed: float
    shared_tokens: int
    recorded_sessions: int
    """Of them are in the profile one by one."""
    notes: tuple[str, ...]
    """What a reader must know of how this was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mined:
    profile: Profile
    facts: MinedFacts


def mine(
    requests: Sequence[LoggedRequest],
    *,
    name: str,
    source: str = "",
    speed: float = 1.0,
    replies_return: bool = True,
    record: bool = True,
    most_turns: int = MOST_TURNS,
) -> Mined:
    """The profile of answered requests, ordered by start.

    `speed`: how many times faster than life the log was recorded; every pause and start is stretched by it (answers
    took as long as they took). `replies_return`: a prompt that begins with the whole last one goes on with its reply,
    as far as there is room; a log shows prompts only, and a client may leave out what the model thought. `record`: put
    the conversations into the profile one by one (sizes and pauses), not only their distributions. Raises ConfigError
    for no requests or a speed that is none.
    """
    if not requests:
        raise ConfigError("no answered request to mine; give a log that holds some")
    if not 0 < speed < float("inf"):
        raise ConfigError(f"speed is {speed}; give how many times faster than life the log was recorded, over 0")
    sessions, joined, notes = _sessions(requests)
    shared = _shared(sessions)
    recorded = [_recorded(session, sessions[0].requests[0].started_s, speed, shared, replies_return)
                for session in sessions]
    turns = [(before, turn) for session in recorded for before, turn in zip(session.turns, session.turns[1:],
                                                                           strict=False)]
    cut = [_is_cut(before, turn) for before, turn in turns]
    cuts = [turn.kept_tokens / (before.prompt_tokens + before.reply_tokens)
            for (before, turn), is_cut in zip(turns, cut, strict=True) if is_cut]
    growth = [turn.prompt_tokens - turn.kept_tokens for (_, turn), is_cut in zip(turns, cut, strict=True) if not is_cut]
    gaps = [turn.gap_s for _, turn in turns]
    resumes = sum(gap >= RESUME_S and not is_cut for gap, is_cut in zip(gaps, cut, strict=True))
    in_flight = quantiles(_in_flight(requests), QUANTILES)
    kept = _thinned(recorded, most_turns) if record else []
    if record and len(kept) < len(recorded):
        notes.append(f"{len(kept)} of {len(recorded)} conversations are recorded one by one, evenly chosen")
    told = [request for request in requests if request.cached_tokens is not None]
    profile = Profile(
        name=name,
        start_tokens=_listed([float(session.turns[0].prompt_tokens) for session in recorded]),
        growth_tokens=_listed([float(each) for each in growth] or [0.0]),
        reply_tokens=_listed([float(max(1, turn.reply_tokens)) for session in recorded for turn in session.turns]),
        gap_s=_listed(gaps or [0.0]),
        turns=_listed([float(len(session.turns)) for session in recorded]),
        sessions=max(1, round(_at_a_time(recorded))), shared_tokens=shared,
        compact_one_in=round(len(turns) / len(cuts)) if cuts else 0,
        compact_share=round(min(1.0, max(0.001, sum(cuts) / len(cuts))), 4) if cuts else 0.72,
        source=source, in_flight=in_flight, recorded=tuple(kept),
    )  # fmt: skip
    facts = MinedFacts(
        requests=len(requests), sessions=len(sessions), joined=joined, cold_starts=len(sessions),
        warm=len(turns) - resumes - len(cuts), resumes=resumes, compactions=len(cuts),
        in_flight_p50=quantile_at(in_flight, 0.5), in_flight_p90=quantile_at(in_flight, 0.9),
        hit_share=sum(each.cached_tokens or 0 for each in told) / sum(each.prompt_tokens for each in told)
        if told else None,
        span_s=speed * (max(each.ended_s for each in requests) - requests[0].started_s), speed=speed,
        shared_tokens=shared, recorded_sessions=len(kept), notes=tuple(notes))  # fmt: skip
    return Mined(profile=profile, facts=facts)


def ideal_log(
    sessions: Sequence[TraceSession], *, block_tokens: int, longest_gap_s: float = 0.0
) -> list[LoggedRequest]:
    """What a proxy would log of a trace's closed-loop replay by a client that is never late and a server that needs no
    time: mined, it is what mining the log of a real replay should give.

    `longest_gap_s`: longer pauses are cut to that (0: none is).
    """
    log: list[LoggedRequest] = []
    for session in sessions:
        at_s = session.requests[0].arrival_s or 0.0
        for turn, request in enumerate(session.requests):
            if turn:
                at_s += min(request.think_s, longest_gap_s) if longest_gap_s else request.think_s
            ends = np.arange(1, len(request.blocks) + 1, dtype=np.uint64) * np.uint64(block_tokens)
            log.append(LoggedRequest(
                line=request.number, started_s=at_s, ended_s=at_s, prompt_tokens=max(1, request.input_tokens),
                completion_tokens=max(1, request.output_tokens), session=session.name, prefix=request.blocks,
                prefix_ends=np.minimum(ends, max(1, request.input_tokens)).astype(np.uint32)))  # fmt: skip
    return sorted(log, key=lambda request: (request.started_s, request.line))


# Conversations ------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Session:
    requests: list[LoggedRequest] = field(default_factory=list)
    kept: list[int | None] = field(default_factory=list)
    """Tokens of the last prompt that begin this one, by digests; None where they do not tell."""
    branch_of: _Session | None = None
    branch_kept: int = 0
    head_tokens: int = 0
    """What the first prompt begins with that another conversation begins with, too."""
    alike: list[tuple[_Session, int]] = field(default_factory=list)
    """Who had said that before, and how much of it in a first prompt."""

    @property
    def last(self) -> LoggedRequest:
        return self.requests[-1]

    def add(self, request: LoggedRequest) -> None:
        self.kept.append(_common(self.last, request) if self.requests else None)
        self.requests.append(request)


def _common(before: LoggedRequest, after: LoggedRequest) -> int | None:
    """Tokens of `before`'s prompt that begin `after`'s. A last piece that is no whole one counts with the others."""
    if not len(before.prefix) or not len(after.prefix):
        return None
    same = _begun_alike(before, after)
    return same if same < before.prefix_ends[-1] else min(before.prompt_tokens, after.prompt_tokens)


def _begun_alike(one: LoggedRequest, other: LoggedRequest) -> int:
    """Tokens of the pieces that both begin with."""
    pieces = min(len(one.prefix), len(other.prefix))
    differ = np.flatnonzero(one.prefix[:pieces] != other.prefix[:pieces])
    same = int(differ[0]) if len(differ) else pieces
    return int(one.prefix_ends[same - 1]) if same else 0


def _sessions(requests: Sequence[LoggedRequest]) -> tuple[list[_Session], dict[Joined, int], list[str]]:
    """The conversations by their first request."""
    named = Counter(request.session for request in requests if request.session is not None)
    hints = {name for name, count in named.items() if count > 1}
    digests = any(len(request.prefix) for request in requests)
    joined: dict[Joined, int] = {"hint": 0, "prefix": 0, "growth": 0, "none": 0}
    notes: list[str] = []
    if named and not hints:
        notes.append("no conversation's name in the log comes twice; the names were not used")
    by_name: dict[str, _Session] = {}
    chains = _Chains()
    lengths = _Lengths()
    sessions: list[_Session] = []
    for request in requests:
        how: Joined = "none"
        session: _Session | None = None
        fresh = _Session()
        if request.session in hints:
            session = by_name.get(request.session)
            how = "hint"
        elif len(request.prefix):
            session, fresh = chains.find(request)
            how = "prefix" if session is not None else "none"
        elif not digests and not hints:
            session = lengths.take(request)
            how = "growth" if session is not None else "none"
        if session is None:
            session = fresh
            sessions.append(session)
            if request.session in hints:
                by_name[request.session] = session
                if len(request.prefix):
                    chains.begin(session, request)
        session.add(request)
        if len(request.prefix):
            chains.put(session, request)
        if not digests and not hints:
            lengths.put(session)
        joined[how] += 1
    sessions = _rejoined(sessions, joined)
    for session in sessions:
        for owner, tokens in session.alike:  # who says a system prompt first begins with it, too
            owner.head_tokens = max(owner.head_tokens, tokens)
    if joined["growth"]:
        notes.append("the log has neither names nor digests: conversations were told by growing lengths, and a "
                     "compaction looks like a new one")
    if joined["prefix"] and joined["hint"]:
        notes.append("requests without a name that comes twice were joined by prefix")
    return sessions, joined, notes


class _Chains:
    """Which conversations have said a chain of digests. A digest is chained: who knows the n-th knows those before."""

    def __init__(self) -> None:
        self._owners: dict[int, list[_Session]] = {}
        """At most two: the first, and another one (several are as good as two)."""
        self._ends: dict[int, list[_Session]] = {}
        """By the last digest of a conversation's last prompt."""

    def _known(self, request: LoggedRequest) -> int:
        """How many of its digests were seen before."""
        low, high = 0, len(request.prefix)
        while low < high:
            middle = (low + high + 1) // 2
            if int(request.prefix[middle - 1]) in self._owners:
                low = middle
            else:
                high = middle - 1
        return low

    def begin(self, session: _Session, request: LoggedRequest) -> None:
        """Notes what the first prompt of `session` begins with that was said before, and by whom."""
        known = self._known(request)
        if known:
            session.head_tokens = int(request.prefix_ends[known - 1])
            session.alike = [(owner, _begun_alike(owner.requests[0], request))
                             for owner in self._owners[int(request.prefix[known - 1])]]

    def find(self, request: LoggedRequest) -> tuple[_Session | None, _Session]:
        """The conversation that it continues, or else a fresh one that remembers where it may have branched off."""
        known = self._known(request)
        for at in range(known, 0, -1):
            free = [each for each in self._ends.get(int(request.prefix[at - 1]), ())
                    if each.last.ended_s <= request.started_s and each.last.prompt_tokens <= request.prompt_tokens]
            if free:
                return max(free, key=lambda each: each.last.ended_s), _Session()
        fresh = _Session()
        self.begin(fresh, request)
        if known:
            owners = self._owners[int(request.prefix[known - 1])]
            if len(owners) == 1 and owners[0].last.ended_s <= request.started_s:
                kept = _common(owners[0].last, request) or 0
                if kept > KEPT_SHARE * owners[0].last.prompt_tokens:
                    fresh.branch_of, fresh.branch_kept = owners[0], kept
        return None, fresh

    def put(self, session: _Session, request: LoggedRequest) -> None:
        """`request` is `session`'s last one now."""
        if len(session.requests) > 1 and len(session.requests[-2].prefix):
            before = int(session.requests[-2].prefix[-1])
            if session in self._ends.get(before, ()):
                self._ends[before].remove(session)
        self._ends.setdefault(int(request.prefix[-1]), []).append(session)
        for digest in request.prefix[::-1].tolist():
            owners = self._owners.setdefault(digest, [])
            if session in owners:
                break
            if len(owners) < 2:
                owners.append(session)


class _Lengths:
    """Conversations by what their next prompt has at least, for logs that say nothing else."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int]] = []
        self._sessions: dict[int, _Session] = {}
        self._number = 0

    def take(self, request: LoggedRequest) -> _Session | None:
        at = bisect_left(self._waiting, (request.prompt_tokens + 1, -1)) - 1
        while at >= 0:
            least, number = self._waiting[at]
            if request.prompt_tokens - least > max(GROWTH_TOKENS, least // 2):
                return None
            if self._sessions[number].last.ended_s <= request.started_s:
                del self._waiting[at]
                return self._sessions.pop(number)
            at -= 1
        return None

    def put(self, session: _Session) -> None:
        self._number += 1
        self._sessions[self._number] = session
        insort(self._waiting, (session.last.prompt_tokens + session.last.completion_tokens, self._number))


def _rejoined(sessions: list[_Session], joined: dict[Joined, int]) -> list[_Session]:
    """Branches whose origin went silent are its continuation: what came after a cut."""
    alive: list[_Session] = []
    became: dict[int, _Session] = {}
    for session in sessions:
        origin = session.branch_of
        while origin is not None and id(origin) in became:
            origin = became[id(origin)]
        if origin is not None and origin.last.ended_s <= session.requests[0].started_s:
            origin.kept += [session.branch_kept, *session.kept[1:]]
            origin.requests += session.requests
            became[id(session)] = origin
            joined["prefix"] += 1
            joined["none"] -= 1
        else:
            alive.append(session)
    return alive


def _shared(sessions: Sequence[_Session]) -> int:
    """The system prompt that conversations begin with: the median of what their first prompts share with another's,
    where at least half of them share something."""
    heads = sorted(session.head_tokens for session in sessions[1:])
    return heads[len(heads) // 2] if heads else 0


def _recorded(session: _Session, from_s: float, speed: float, shared: int, replies: bool) -> RecordedSession:
    turns: list[RecordedTurn] = []
    before: LoggedRequest | None = None
    for request, said in zip(session.requests, session.kept, strict=True):
        if before is None:
            gap_s, kept = 0.0, min(shared, session.head_tokens, request.prompt_tokens)
        else:
            gap_s = max(0.0, request.started_s - before.ended_s)
            whole = min(before.prompt_tokens + before.completion_tokens * replies, request.prompt_tokens)
            kept = whole if said is None or said >= before.prompt_tokens else min(said, whole)
            if said is None and request.prompt_tokens < before.prompt_tokens:
                kept = request.prompt_tokens
        turns.append(RecordedTurn(gap_s=round(gap_s * speed, 3), kept_tokens=kept,
                                  prompt_tokens=request.prompt_tokens, reply_tokens=request.completion_tokens))
        before = request
    return RecordedSession(start_s=round((session.requests[0].started_s - from_s) * speed, 3), turns=tuple(turns))


def _is_cut(before: RecordedTurn, turn: RecordedTurn) -> bool:
    return turn.prompt_tokens < before.prompt_tokens or turn.kept_tokens < 0.9 * before.prompt_tokens


# Distributions ------------------------------------------------------------------------------------------------------


def _listed(values: list[float]) -> tuple[float, ...]:
    return tuple(round(each, 3) for each in quantiles(values, QUANTILES))


def _in_flight(requests: Sequence[LoggedRequest]) -> list[float]:
    """Seen at each request's start, itself among them."""
    starts = np.array([each.started_s for each in requests])
    ends: npt.NDArray[np.float64] = np.sort(np.array([each.ended_s for each in requests]))
    begun = np.arange(1, len(starts) + 1)
    over = np.searchsorted(ends, starts, side="right")
    return [float(each) for each in np.maximum(1, begun - over)]


def _at_a_time(sessions: Sequence[RecordedSession]) -> float:
    """Conversations between first and last request, seen at every conversation's start."""
    starts = np.array([each.start_s for each in sessions])
    ends = np.sort(starts + np.array([sum(turn.gap_s for turn in each.turns) for each in sessions]))
    open_ = np.arange(1, len(starts) + 1) - np.searchsorted(ends, starts, side="left")
    return float(np.mean(np.maximum(1, open_)))


def _thinned(sessions: Sequence[RecordedSession], most_turns: int) -> list[RecordedSession]:
    """Every n-th, brought together in time by n, so that as many are under way at a time."""
    step = -(-sum(len(each.turns) for each in sessions) // max(1, most_turns))
    if step <= 1:
        return list(sessions)
    return [RecordedSession(start_s=round(each.start_s / step, 3), turns=each.turns) for each in sessions[::step]]
