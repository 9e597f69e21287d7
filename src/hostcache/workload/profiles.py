"""A workload as distributions instead of requests: what one mined of a request log, without its content.

A profile is a JSON file. Every distribution is a list of its quantiles, evenly spaced from the least to the greatest
value (one value: a constant); a draw interpolates between neighbours. Version 2 may add `recorded`: whole sessions as
sizes and pauses, which keep what independent draws lose: long sessions grow otherwise than short ones, a few of them
carry most of the tokens, and they overlap as they did. `planned_sessions` says what a profile's sessions ask for, in
either case, and `conversation_turns` says it to the simulator. Knows no servers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from hostcache.errors import ConfigError
from hostcache.tier import Identity
from hostcache.workload.agents import stream
from hostcache.workload.conversations import Conversation, Turn

VERSIONS = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """One request of a recorded session, in tokens and seconds."""

    gap_s: float
    """From the end of the session's last answer; 0 for its first request."""
    kept_tokens: int
    """So many of the last prompt and its reply begin this prompt too; for a first request, of `shared_tokens`."""
    prompt_tokens: int
    reply_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSession:
    start_s: float
    """From the first session's start."""
    turns: tuple[RecordedTurn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Tokens and seconds. A session starts with `start_tokens` (the shared system prompt among them), each later prompt
    is the last one, its reply and `growth_tokens` more."""

    name: str
    start_tokens: tuple[float, ...]
    growth_tokens: tuple[float, ...]
    reply_tokens: tuple[float, ...]
    gap_s: tuple[float, ...]
    """between an answer and the session's next request"""
    turns: tuple[float, ...]
    """of a session, before a cold one takes its place"""
    sessions: int
    """at a time"""
    shared_tokens: int = 0
    """of a system prompt that every session begins with"""
    compact_one_in: int = 0
    """one turn in so many shortens the conversation (0: none)"""
    compact_share: float = 0.72
    """what is left then"""
    source: str = ""
    """where the figures come from"""
    in_flight: tuple[float, ...] = ()
    """version 2: requests in flight at the source, seen at every request's start, itself among them; () is unknown"""
    recorded: tuple[RecordedSession, ...] = ()
    """version 2: where there are any, sessions are these and the distributions only describe them"""

    def __post_init__(self) -> None:
        for name in ("start_tokens", "growth_tokens", "reply_tokens", "gap_s", "turns", "in_flight"):
            values = getattr(self, name)
            least = 0 if name in ("gap_s", "growth_tokens") else 1
            if name == "in_flight" and not values:
                continue
            if not values or list(values) != sorted(values) or not least <= values[0] <= values[-1] < float("inf"):
                raise ConfigError(f"profile {self.name}: {name} is {list(values)[:4]}…; give finite quantiles in "
                                  f"ascending order, the first at least {least}")
        for name, at_least in (("sessions", 1), ("shared_tokens", 0), ("compact_one_in", 0)):
            if getattr(self, name) < at_least:
                raise ConfigError(f"profile {self.name}: {name} is {getattr(self, name)}; give at least {at_least}")
        if not 0 < self.compact_share <= 1:
            raise ConfigError(f"profile {self.name}: compact_share is {self.compact_share}; give 0 < share <= 1")
        for number, session in enumerate(self.recorded):
            _check_recorded(f"profile {self.name}: recorded session {number}", session, self.shared_tokens)

    @property
    def longest_start_tokens(self) -> int:
        """Of a session's first prompt and its reply."""
        return int(self.start_tokens[-1] + self.reply_tokens[-1])

    @property
    def longest_tokens(self) -> int:
        """Of any prompt and its reply, where sessions are recorded; else of a first one."""
        recorded = [turn.prompt_tokens + turn.reply_tokens for session in self.recorded for turn in session.turns]
        return max(recorded, default=self.longest_start_tokens)

    @property
    def recorded_s(self) -> float:
        """How long the recorded sessions take, answers not counted."""
        return max((session.start_s + sum(turn.gap_s for turn in session.turns) for session in self.recorded),
                   default=0.0)


def _check_recorded(what: str, session: RecordedSession, shared_tokens: int) -> None:
    if not session.turns or not 0 <= session.start_s < float("inf"):
        raise ConfigError(f"{what} has {len(session.turns)} turns and starts at {session.start_s} s; give at least one "
                          "turn and a start of 0 or more")
    before = shared_tokens
    for at, turn in enumerate(session.turns):
        if not 0 <= turn.gap_s < float("inf") or turn.prompt_tokens < 1 or turn.reply_tokens < 0:
            raise ConfigError(f"{what}, turn {at}: gap {turn.gap_s} s, prompt {turn.prompt_tokens}, reply "
                              f"{turn.reply_tokens} tokens; give a finite gap and reply of 0 or more, a prompt of 1")
        if not 0 <= turn.kept_tokens <= min(before, turn.prompt_tokens):
            raise ConfigError(f"{what}, turn {at} keeps {turn.kept_tokens} tokens of {before} in a prompt of "
                              f"{turn.prompt_tokens}; it can keep no more than either")
        before = turn.prompt_tokens + turn.reply_tokens


# What sessions ask for ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTurn:
    """The next request of a session: cut the conversation (last prompt and reply) to `kept_tokens`, add `new_tokens`.

    `gap_s` from the last answer; 0 for a first request, whose `kept_tokens` are the shared system prompt's.
    """

    gap_s: float
    kept_tokens: int
    new_tokens: int
    reply_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return self.kept_tokens + self.new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSession:
    """`start_s` from the run's start; None: when one of the sessions before it is over, its last answer's `gap_s` later
    (a closed loop). `gap_s`: that pause."""

    number: int
    start_s: float | None
    gap_s: float
    turns: Iterator[PlannedTurn]


def planned_sessions(profile: Profile, *, seed: int, limit_tokens: int = 1 << 62, laps: int | None = 1,
                     ) -> Iterator[PlannedSession]:
    """What a profile's sessions ask for, the same for the same seed.

    Recorded sessions come at their own times, `laps` times over (None: without end); the pool of sessions at a time
    plays no part. Otherwise the first `profile.sessions` start after a gap each, then one for each that is over,
    without end. `limit_tokens`: longest prompt + reply; a conversation that would pass it is cut to `compact_share`.
    """
    if limit_tokens < 2:
        raise ConfigError(f"limit_tokens is {limit_tokens}; a prompt and its reply need at least 2")
    if profile.recorded:
        spread = profile.recorded[-1].start_s - profile.recorded[0].start_s
        lap_s = spread * len(profile.recorded) / max(1, len(profile.recorded) - 1) or profile.recorded_s or 1.0
        for lap in count() if laps is None else range(laps):
            for number, session in enumerate(profile.recorded):
                yield PlannedSession(
                    number=lap * len(profile.recorded) + number, start_s=lap * lap_s + session.start_s, gap_s=0.0,
                    turns=_within(limit_tokens, profile.compact_share, iter(session.turns)))  # fmt: skip
        return
    for number in count():
        rng = stream(seed, "session", number)
        gap_s = draw(profile.gap_s, rng)
        yield PlannedSession(
            number=number, start_s=gap_s if number < profile.sessions else None, gap_s=gap_s,
            turns=_within(limit_tokens, profile.compact_share, _drawn(profile, rng)))  # fmt: skip


def _drawn(profile: Profile, rng: Random) -> Iterator[RecordedTurn]:
    turns = max(1, round(draw(profile.turns, rng)))
    prompt = max(1, int(draw(profile.start_tokens, rng)))
    kept, gap_s = min(profile.shared_tokens, prompt), 0.0
    for _ in range(turns):
        reply = max(1, int(draw(profile.reply_tokens, rng)))
        yield RecordedTurn(gap_s=gap_s, kept_tokens=kept, prompt_tokens=prompt, reply_tokens=reply)
        kept = prompt + reply
        if profile.compact_one_in and rng.random() * profile.compact_one_in < 1:
            kept = max(1, int(kept * profile.compact_share))
        prompt = kept + int(draw(profile.growth_tokens, rng))
        gap_s = draw(profile.gap_s, rng)


def _within(limit: int, share: float, turns: Iterator[RecordedTurn]) -> Iterator[PlannedTurn]:
    """The turns with their prompts held under the limit: what is new stays, what is kept is cut."""
    over = 0  # tokens that this conversation has less than the plan's
    for turn in turns:
        reply = max(1, min(turn.reply_tokens, limit - 1))
        new = min(turn.prompt_tokens - turn.kept_tokens, limit - reply)
        kept = max(0, turn.kept_tokens - over)
        if kept + new + reply > limit:
            kept = min(int(kept * share), limit - reply - new)
        if kept + new < 1:
            new = 1
        over = turn.prompt_tokens - kept - new
        yield PlannedTurn(gap_s=turn.gap_s, kept_tokens=kept, new_tokens=new, reply_tokens=reply)


def conversation_turns(
    session: PlannedSession, identity: Identity, *, seed: int, head: Conversation | None = None
) -> Iterator[tuple[float, Turn]]:
    """(pause before it in seconds, turn) of each of a session's requests; asked for the next one, it takes the last one
    as answered. `head`: the shared system prompt."""
    talk: Conversation | None = None
    for turn in session.turns:
        if talk is None:
            talk = Conversation(identity, seed * 1_000_003 + 1 + session.number, start_tokens=turn.prompt_tokens,
                                head=head, head_tokens=turn.kept_tokens)
        else:
            talk.answered()
            if turn.kept_tokens < talk.tokens:
                talk.compact((turn.kept_tokens + 0.5) / talk.tokens)  # cuts to the whole token below
            if turn.prompt_tokens > talk.tokens:
                talk.hear(turn.prompt_tokens - talk.tokens)
        yield turn.gap_s, talk.turn(turn.reply_tokens)


def scaled(profile: Profile, divisor: float, *, gap_divisor: float = 1.0, name: str | None = None) -> Profile:
    """Every token count over `divisor`, every pause over `gap_divisor`, turns as they are: the same workload for a
    smaller machine."""
    for given in (divisor, gap_divisor):
        if not 1 <= given < float("inf"):
            raise ConfigError(f"a profile is scaled by {given}; give a divisor of at least 1")

    def less(values: tuple[float, ...], least: int) -> tuple[float, ...]:
        return tuple(max(least, round(value / divisor, 3)) for value in values)

    def smaller(session: RecordedSession) -> RecordedSession:
        turns: list[RecordedTurn] = []
        had = int(profile.shared_tokens // divisor)
        for turn in session.turns:
            prompt, reply = max(1, int(turn.prompt_tokens // divisor)), int(turn.reply_tokens // divisor)
            kept = min(int(turn.kept_tokens // divisor), had)  # two rounded parts may be less than their rounded sum
            turns.append(RecordedTurn(gap_s=round(turn.gap_s / gap_divisor, 3), kept_tokens=kept, prompt_tokens=prompt,
                                      reply_tokens=reply))
            had = prompt + reply
        return RecordedSession(start_s=round(session.start_s / gap_divisor, 3), turns=tuple(turns))

    return replace(
        profile, name=name or f"{profile.name} ÷ {divisor:g}", start_tokens=less(profile.start_tokens, 1),
        growth_tokens=less(profile.growth_tokens, 0), reply_tokens=less(profile.reply_tokens, 1),
        gap_s=tuple(round(gap_s / gap_divisor, 3) for gap_s in profile.gap_s),
        shared_tokens=int(profile.shared_tokens // divisor),
        source=f"{profile.source} Tokens over {divisor:g}, gaps over {gap_divisor:g}.".lstrip(),
        recorded=tuple(map(smaller, profile.recorded)),
    )  # fmt: skip


# Distributions ------------------------------------------------------------------------------------------------------


def draw(quantiles: Sequence[float], rng: Random) -> float:
    """One value of the distribution with these evenly spaced quantiles."""
    return quantile_at(quantiles, rng.random())


def quantile_at(quantiles: Sequence[float], share: float) -> float:
    """The value below which `share` (0 … 1) of the distribution lies."""
    at = share * (len(quantiles) - 1)
    low = int(at)
    high = min(low + 1, len(quantiles) - 1)
    return quantiles[low] + (quantiles[high] - quantiles[low]) * (at - low)


def quantiles(values: Sequence[float], count: int = 11) -> tuple[float, ...]:
    """`count` evenly spaced quantiles, the least and greatest value among them. Raises ValueError without values."""
    if not values:
        raise ValueError("no values have no quantiles")
    ordered = sorted(values)
    places = [i * (len(ordered) - 1) / (count - 1) for i in range(count)]
    return tuple(ordered[int(at)] + (ordered[min(int(at) + 1, len(ordered) - 1)] - ordered[int(at)]) * (at - int(at))
                 for at in places)


# Files --------------------------------------------------------------------------------------------------------------


def read_profile(path: Path) -> Profile:
    """Raises ConfigError with the file and the field that is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a profile: {error}") from error
    return _parsed(text, str(path))


def profile_names() -> tuple[str, ...]:
    """The profiles that ship, sorted."""
    return tuple(sorted(entry.name.removesuffix(".json") for entry in _shipped().iterdir()
                        if entry.name.endswith(".json")))


def named_profile(name: str) -> Profile:
    """A shipped profile. Raises ConfigError with the names there are."""
    if name not in profile_names():
        raise ConfigError(f"no profile is named {name!r}; there are {', '.join(profile_names())}, or give a file")
    return _parsed(_shipped().joinpath(f"{name}.json").read_text(encoding="utf-8"), name)


def find_profile(name: str) -> Profile:
    """What a user's word means: a shipped profile's name, else a file."""
    return named_profile(name) if name in profile_names() or not Path(name).exists() else read_profile(Path(name))


def _shipped() -> Any:
    return files("hostcache.workload") / "data"


def _parsed(text: str, path: str) -> Profile:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a profile: {error}") from error
    version = data.get("version") if isinstance(data, dict) else None
    if type(version) is not int or version not in VERSIONS:
        raise ConfigError(f"{path} is not a profile of version {' or '.join(map(str, VERSIONS))}; it needs \"version\"")
    known = {field.name: field for field in fields(Profile) if version > 1 or field.name not in _SINCE_2}
    given = {name: value for name, value in data.items() if name != "version"}
    if unknown := sorted(given.keys() - known.keys()):
        raise ConfigError(f"{path}: {unknown[0]!r} is no field of a profile of version {version}; they are "
                          f"{', '.join(known)}")
    values: dict[str, object] = {}
    for name, value in given.items():
        reads, wanted = _READERS[str(known[name].type)]
        try:
            values[name] = reads(value)
        except (TypeError, ValueError, KeyError):
            shown = json.dumps(value)
            raise ConfigError(f"{path}: {name} is {shown[:60]}{'…' * (len(shown) > 60)}; give {wanted}") from None
    try:
        return Profile(**values)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(f"{path} is not a profile: {error}") from error


_SINCE_2 = ("in_flight", "recorded")


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    return float(value)


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _numbers(value: object) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise TypeError
    return tuple(map(_number, value))


def _sessions(value: object) -> tuple[RecordedSession, ...]:
    if not isinstance(value, list):
        raise TypeError
    sessions = []
    for each in value:
        if not isinstance(each, dict) or each.keys() != {"start_s", "turns"} or not isinstance(each["turns"], list):
            raise TypeError
        sessions.append(RecordedSession(start_s=_number(each["start_s"]), turns=tuple(
            RecordedTurn(gap_s=_number(gap), kept_tokens=_whole(kept), prompt_tokens=_whole(prompt),
                         reply_tokens=_whole(reply))
            for gap, kept, prompt, reply in each["turns"])))  # fmt: skip
    return tuple(sessions)


_READERS: dict[str, tuple[Callable[[Any], object], str]] = {
    "str": (_text, "text"), "int": (_whole, "one of type int"), "float": (_number, "one of type float"),
    "tuple[float, ...]": (_numbers, "a list of numbers"),
    "tuple[RecordedSession, ...]": (
        _sessions, 'a list of {"start_s": s, "turns": [[gap s, kept, prompt, reply tokens], …]}'),
}  # fmt: skip


def profile_json(profile: Profile) -> str:
    """The file's content: version 1 where nothing in it needs 2."""
    version = 2 if any(getattr(profile, name) for name in _SINCE_2) else 1
    names = [field.name for field in fields(profile)
             if field.name != "recorded" and (version > 1 or field.name not in _SINCE_2)]
    lines = [f'"version": {version}', *(f'"{name}": {json.dumps(getattr(profile, name), ensure_ascii=False)}'
                                        for name in names)]  # fmt: skip
    if profile.recorded:  # a session a line: thousands of turns stay readable
        sessions = [
            json.dumps({"start_s": session.start_s, "turns": [
                [turn.gap_s, turn.kept_tokens, turn.prompt_tokens, turn.reply_tokens] for turn in session.turns]})
            for session in profile.recorded
        ]  # fmt: skip
        lines.append('"recorded": [\n  ' + ",\n  ".join(sessions) + "\n ]")
    return "{\n " + ",\n ".join(lines) + "\n}\n"
