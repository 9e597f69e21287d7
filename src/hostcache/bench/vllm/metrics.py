"""One scrape of vLLM's /metrics: numbers by name and labels, and differences of two. Absent is None, never 0."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from hostcache.errors import ServerError

_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Scrape:
    samples: Mapping[str, tuple[tuple[Mapping[str, str], float], ...]]

    def value(self, name: str, **labels: str) -> float | None:
        """The sum over whatever labels are not given; None where no such series is shown."""
        found = [number for given, number in self.samples.get(name, ())
                 if all(given.get(label) == value for label, value in labels.items())]
        return sum(found) if found else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        summed: dict[str, float] = {}
        for given, number in self.samples.get(name, ()):
            if label in given:
                summed[given[label]] = summed.get(given[label], 0.0) + number
        return summed

    def names(self, *prefixes: str) -> list[str]:
        return sorted(name for name in self.samples if name.startswith(prefixes))

    def flat(self, *prefixes: str) -> dict[str, float]:
        """For a record: every series under these prefixes, but buckets, without vLLM's own two labels."""
        return {name + "".join(f"{{{label}={value}}}" for label, value in sorted(labels.items())
                               if label not in ("engine", "model_name")): number
                for name in self.names(*prefixes) if not name.endswith(("_bucket", "_created"))
                for labels, number in self.samples[name]}


def parse(text: str) -> Scrape:
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for line in text.splitlines():
        found = _LINE.fullmatch(line)
        if found is not None:
            name, labels, value = found.groups()
            number = float(value)
            if isfinite(number):
                samples.setdefault(name, []).append((dict(_LABEL.findall(labels or "")), number))
    return Scrape({name: tuple(each) for name, each in samples.items()})


def moved(before: Scrape, after: Scrape, name: str, **labels: str) -> float | None:
    """What was added to a counter; one that `before` did not show yet began at 0. None where `after` lacks it."""
    now = after.value(name, **labels)
    if now is None:
        return None
    then = before.value(name, **labels) or 0.0
    if now < then:
        raise ServerError(f"counter {name} went down from {then:g} to {now:g}; the server restarted")
    return now - then


def moved_by_label(before: Scrape, after: Scrape, name: str, label: str) -> dict[str, float]:
    """The same per value of a label; values that did not move are left out."""
    then = before.by_label(name, label)
    return {value: number - then.get(value, 0.0) for value, number in after.by_label(name, label).items()
            if number != then.get(value, 0.0)}
