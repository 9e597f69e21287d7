"""Reads what /metrics says: Prometheus' classic text and OpenMetrics text, told apart by their content type.

Strict on purpose, since the two differ just where a lenient reader goes wrong: in OpenMetrics `X_created` belongs to
the counter `X`, in the classic text it is a gauge of its own, and a text cut short looks like a server with fewer
counters. Names are matched whole, never by their beginning. Formats: Prometheus' "Exposition formats" (text 0.0.4) and
OpenMetrics 1.0.0. Knows no engine and no counter by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hostcache.errors import ServerError

CREATED = "created"
"""Kind of a sample that says when a series began (unix seconds) and counts nothing."""
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(,|\})')
_NUMBER = re.compile(r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[Ii]nf(?:inity)?|[Nn]a[Nn])")
_NO_LABELS = re.compile(r"\s*\}")
_KINDS = frozenset({"counter", "gauge", "histogram", "summary", "untyped", "unknown", "info", "stateset",
                    "gaugehistogram"})
_SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "counter": ("_total", "_created"), "histogram": ("_bucket", "_count", "_sum", "_created"),
    "summary": ("", "_count", "_sum", "_created"), "gaugehistogram": ("_bucket", "_gcount", "_gsum"),
    "info": ("_info",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One line with a number. `kind` is its family's type, or CREATED; `line` is the text it was read from."""

    name: str
    labels: Mapping[str, str]
    value: float
    kind: str
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposition:
    """`families`: declared name → type. A counter's name carries its `_total` in both formats, so that a lookup by the
    sample's name finds it also where it is declared and has no sample yet."""

    samples: tuple[Sample, ...]
    families: Mapping[str, str]


def parse(text: str, content_type: str) -> list[Sample]:
    """Every sample, in the order of the text. Raises ServerError naming the line."""
    return list(read_exposition(text, content_type).samples)


def read_exposition(text: str, content_type: str) -> Exposition:
    """Raises ServerError naming the line, for a text that is cut short or counts something twice."""
    strict = content_type.split(";", 1)[0].strip().lower() == "application/openmetrics-text"
    lines = text.split("\n")
    if strict:
        if lines[-2:] != ["# EOF", ""] and lines[-1:] != ["# EOF"]:
            raise ServerError("the metrics are OpenMetrics by their content type and do not end in '# EOF': they were "
                              "cut short, or they are classic text")
        lines = lines[:-1] if lines[-1] else lines[:-2]
    reader = _OpenMetrics() if strict else _Classic()
    for number, raw in enumerate(lines, start=1):
        try:
            reader.line(raw if strict else raw.strip())
        except ValueError as error:
            raise ServerError(f"the metrics cannot be read, line {number}: {error}: {raw[:120]!r}") from error
    return reader.exposition()


class _Classic:
    """Version 0.0.4: comments are free, a sample may stand without a type, timestamps are whole milliseconds."""

    def __init__(self) -> None:
        self._families: dict[str, str] = {}
        self._samples: list[Sample] = []
        self._seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()

    def line(self, line: str) -> None:
        if not line:
            return
        if line.startswith("#"):
            words = line.split(None, 3)
            if len(words) == 4 and words[1] == "TYPE":
                self._declare(words[2], words[3].strip().lower())
            return
        name, labels, rest = _series(line)
        numbers = rest.split()
        if len(numbers) not in (1, 2) or (len(numbers) == 2 and not re.fullmatch(r"-?[0-9]+", numbers[1])):
            raise ValueError("a value and at most a timestamp in milliseconds are expected")
        self._add(name, labels, _number(numbers[0]), self._kind(name), line)

    def _declare(self, name: str, kind: str) -> None:
        if kind not in _KINDS:
            raise ValueError(f"{kind!r} is no type")
        if name in self._families:
            raise ValueError(f"{name} is declared twice")
        self._families[name] = kind

    def _kind(self, name: str) -> str:
        kind = self._families.get(name)
        if kind is not None:
            return kind
        if name.endswith("_total") and self._families.get(name.removesuffix("_total")) == "counter":
            return "counter"  # declared as OpenMetrics does it, which some servers send under the classic type
        for suffix in ("_bucket", "_count", "_sum"):
            kind = self._families.get(name.removesuffix(suffix)) if name.endswith(suffix) else None
            if kind in ("histogram", "summary"):
                return kind
        return "untyped"

    def _add(self, name: str, labels: dict[str, str], value: float, kind: str, line: str) -> None:
        key = (name, tuple(sorted(labels.items())))
        if key in self._seen:
            raise ValueError(f"{name} stands here a second time with the same labels")
        self._seen.add(key)
        self._samples.append(Sample(name=name, labels=labels, value=value, kind=kind, line=line))

    def exposition(self) -> Exposition:
        families = {f"{name}_total" if kind == "counter" and not name.endswith("_total") else name: kind
                    for name, kind in self._families.items()}
        return Exposition(samples=tuple(self._renamed(sample) for sample in self._samples), families=families)

    def _renamed(self, sample: Sample) -> Sample:
        """A gauge X_created beside a counter, histogram or summary X is a time of creation, as the Python client
        writes it; without one it is what it says."""
        if not sample.name.endswith("_created") or sample.kind not in ("gauge", "untyped"):
            return sample
        base = sample.name.removesuffix("_created")
        beside = self._families.get(f"{base}_total") == "counter" or self._families.get(base) in (
            "counter", "histogram", "summary")
        return replace(sample, kind=CREATED) if beside else sample


class _OpenMetrics(_Classic):
    """Version 1.0.0: families in one piece each, every sample in its family, exemplars, no blank lines."""

    def __init__(self) -> None:
        super().__init__()
        self._open = ""
        self._closed: set[str] = set()
        self._types: dict[str, str] = {}
        self._has_sample = False

    def line(self, line: str) -> None:
        if not line:
            raise ValueError("OpenMetrics has no empty lines")
        if line.startswith("#"):
            words = line.split(" ", 3)
            if words[:2] == ["#", "EOF"]:
                raise ValueError("the text goes on after '# EOF'")
            if len(words) < 3 or words[0] != "#" or words[1] not in ("TYPE", "HELP", "UNIT"):
                raise ValueError("OpenMetrics has no free comments")
            self._turn_to(words[2])
            if words[1] == "TYPE":
                if self._has_sample:
                    raise ValueError("the type stands after its samples")
                kind = words[3] if len(words) == 4 else ""
                self._declare(f"{words[2]}_total" if kind == "counter" else words[2], kind)
                self._types[words[2]] = kind
            return
        name, labels, rest = _series(line)
        body = rest.split(" # ", 1)  # an exemplar says which request it was, and counts nothing
        numbers = body[0].split()
        if len(numbers) not in (1, 2):
            raise ValueError("a value and at most a timestamp in seconds are expected")
        if len(numbers) == 2:
            _number(numbers[1])
        value = _number(numbers[0])
        name = self._with_colons(name)
        family, kind = self._family(name)
        self._turn_to(family)
        self._has_sample = True
        if kind == "counter" and not value >= 0:
            raise ValueError("a counter is a number of at least 0")
        created = name.endswith("_created") and kind in ("counter", "histogram", "summary")
        self._add(name, labels, value, CREATED if created else kind, line)

    def _family(self, name: str) -> tuple[str, str]:
        for suffix in ("_total", "_created", "_bucket", "_count", "_sum", "_gcount", "_gsum", "_info"):
            base = name.removesuffix(suffix)
            if base != name and suffix in _SUFFIXES.get(self._types.get(base, ""), ()):
                return base, self._types[base]
        kind = self._types.get(name, "unknown")
        if "" not in _SUFFIXES.get(kind, ("",)):
            raise ValueError(f"{name} has the type {kind} and lacks a suffix of it")
        return name, kind

    def _with_colons(self, name: str) -> str:
        """The Python client (0.22 to 0.26 at least) declares `vllm:a` and writes its samples as `vllm_a…`, unless it
        was asked for another escaping. The name that was declared is meant."""
        escaped = self._open.replace(":", "_")
        suffix = name.removeprefix(escaped)
        meant = escaped != self._open and name.startswith(escaped) and suffix in _SUFFIXES.get(
            self._types.get(self._open, ""), ("",))
        return f"{self._open}{suffix}" if meant else name

    def _turn_to(self, family: str) -> None:
        if family == self._open:
            return
        if family in self._closed:
            raise ValueError(f"the family {family} goes on after another one began")
        self._closed.add(self._open)
        self._open, self._has_sample = family, False


def _series(line: str) -> tuple[str, dict[str, str], str]:
    """Name, labels, and what follows them."""
    found = _NAME.match(line)
    if found is None:
        raise ValueError("no metric name")
    at = found.end()
    labels: dict[str, str] = {}
    spaces = len(line) - len(line[at:].lstrip(" \t")) - at
    if line[at + spaces:at + spaces + 1] != "{":
        if not spaces:
            raise ValueError("no metric name, or no space behind it")
        return found[0], labels, line[at:]
    at += spaces + 1
    empty = _NO_LABELS.match(line, at)
    if empty is not None:
        return found[0], labels, line[empty.end():]
    while True:
        label = _LABEL.match(line, at)
        if label is None:
            raise ValueError("a label is not NAME=\"VALUE\"")
        if label[1] in labels:
            raise ValueError(f"the label {label[1]} stands twice")
        labels[label[1]] = _unescaped(label[2])
        at = label.end()
        if label[3] == "}":
            return found[0], labels, line[at:]
        empty = _NO_LABELS.match(line, at)  # the classic text allows a last comma
        if empty is not None:
            return found[0], labels, line[empty.end():]


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    return re.sub(r"\\(.)", lambda found: {"n": "\n"}.get(found[1], found[1]), text)


def _number(text: str) -> float:
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is no number")
    return math.nan if text.lower() == "nan" else float(text)
