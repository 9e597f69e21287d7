"""A workload as distributions instead of requests: what one mined of a request log, without its content.

A profile is a JSON file. Every distribution is a list of its quantiles, evenly spaced from the least to the greatest
value (one value: a constant); a draw interpolates between neighbours. Knows no servers and draws no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random

from hostcache.errors import ConfigError

VERSION = 1


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

    def __post_init__(self) -> None:
        for name in ("start_tokens", "growth_tokens", "reply_tokens", "gap_s", "turns"):
            values = getattr(self, name)
            least = 0 if name in ("gap_s", "growth_tokens") else 1
            if not values or list(values) != sorted(values) or not least <= values[0] <= values[-1] < float("inf"):
                raise ConfigError(f"profile {self.name}: {name} is {list(values)[:4]}…; give finite quantiles in "
                                  f"ascending order, the first at least {least}")
        for name, at_least in (("sessions", 1), ("shared_tokens", 0), ("compact_one_in", 0)):
            if getattr(self, name) < at_least:
                raise ConfigError(f"profile {self.name}: {name} is {getattr(self, name)}; give at least {at_least}")
        if not 0 < self.compact_share <= 1:
            raise ConfigError(f"profile {self.name}: compact_share is {self.compact_share}; give 0 < share <= 1")

    @property
    def longest_start_tokens(self) -> int:
        """Of a session's first prompt and its reply."""
        return int(self.start_tokens[-1] + self.reply_tokens[-1])


def draw(quantiles: Sequence[float], rng: Random) -> float:
    """One value of the distribution with these evenly spaced quantiles."""
    at = rng.random() * (len(quantiles) - 1)
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


def read_profile(path: Path) -> Profile:
    """Raises ConfigError with the file and the field that is wrong."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a profile: {error}") from error
    if not isinstance(data, dict) or data.get("version") != VERSION:
        raise ConfigError(f"{path} is not a profile of version {VERSION}; it needs \"version\": {VERSION}")
    known = {field.name: field for field in fields(Profile)}
    given = {name: value for name, value in data.items() if name != "version"}
    if unknown := sorted(given.keys() - known.keys()):
        raise ConfigError(f"{path}: {unknown[0]!r} is no field of a profile; they are {', '.join(known)}")
    values: dict[str, object] = {}
    for name, value in given.items():
        kind = str(known[name].type)
        if kind.startswith("tuple"):
            good = isinstance(value, list) and all(isinstance(each, int | float) for each in value)
            values[name] = tuple(map(float, value)) if good else value
        else:
            good = isinstance(value, str) if kind == "str" else isinstance(value, int if kind == "int" else int | float)
            values[name] = value
        if not good or isinstance(value, bool):
            wanted = "a list of numbers" if kind.startswith("tuple") else f"one of type {kind}"
            raise ConfigError(f"{path}: {name} is {value!r}; give {wanted}")
    try:
        return Profile(**values)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(f"{path} is not a profile: {error}") from error


def profile_json(profile: Profile) -> str:
    """The file's content."""
    return json.dumps({"version": VERSION, **{field.name: getattr(profile, field.name) for field in fields(profile)}},
                      indent=1, ensure_ascii=False) + "\n"
