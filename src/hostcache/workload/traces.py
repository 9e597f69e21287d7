"""Public traces as requests: what was asked when, and which blocks of its prompt were like others'.

Reads two line formats, gzipped or not, told apart by their content; knows no pages, keys, servers or clocks. A file is
read as a stream: besides the current row it holds each session's last blocks (delta format only), and what
`trace_facts` or `sessions_of` was asked to keep. A row that cannot be is refused by its number; nothing follows it.

Mooncake (FAST'25 traces, kvcache-ai/Mooncake): one request a row, its own session; `timestamp` in ms, 512-token blocks,
the last one filled by what is left: ceil(input / 512). No think or answer times.

Delta (`agentic240.delta.jsonl.gz`, made from callanjfox/kv-cache-tester): sessions of a coding agent, rows of all
sessions sorted by time; 64-token blocks, floor(input / 64); `keep` blocks shared with the session's request before,
then `runs` of consecutive ids. What that file holds, found by reading it:

* Every row has an absolute `timestamp`. Sessions start 29 to 3,586 s in (drawn uniformly over an hour, not observed);
  inside a session the distances are the recorded ones, in whole seconds, up to 74,138 s, so the file spans 21.5 h.
* `think_ms` is the pause after the last answer *whose time was measured*, in whole seconds: in all 3,305 rows that
  follow a measured answer it is `timestamp` − the earlier `timestamp` − its `api_ms` within 1 s. Ten of these start up
  to 1 s before the answer's end, by rounding.
* 528 rows have `api_ms` 0: not measured (`api_s` is None). In 455 of the 514 rows that follow one, `think_ms` runs on
  from an earlier answer, so that summing it counts pauses again and again (238.6 h for 211.9 h); in the other 59 it is
  0. There `think_s` is the distance of the two timestamps instead: the pause and the unmeasured answer together.
* 242 sessions of 240 agents: two sub-agents of one parent (`trace_0291/agent_001`, `…/agent_002`), each a session with
  its own context. The first runs (3,335 to 3,355 s) in a pause of the parent, the second (3,367 to 3,421 s) beside the
  parent's next request (3,396 s, answered in 49 s). They share no block with it, but 174 with each other; no other two
  sessions share a block.
* 8 requests keep nothing of their predecessor: a context begun anew. Two have no output.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from hostcache.errors import ConfigError
from hostcache.workload.blocks import mixed

Rounding = Literal["ceil", "floor"]

MAX_TOKENS = 2**27
"""Longest prompt or answer taken for real: ten times the longest context that anybody offers."""

MAX_LINE_BYTES = 64 * 2**20

MAX_MS = 2**53
"""Beyond, milliseconds are no exact float."""


class TraceRefused(ConfigError):
    """A trace, or one row of it by number, that cannot be what it says it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """What a format's rows mean. `rounding`: whether a rest shorter than a block has an id of its own (ceil)."""

    name: str
    block_tokens: int
    rounding: Rounding

    def blocks_of(self, input_tokens: int) -> int:
        """How many blocks a prompt of that length has."""
        rest = self.block_tokens - 1 if self.rounding == "ceil" else 0
        return (input_tokens + rest) // self.block_tokens


MOONCAKE = TraceFormat(name="mooncake", block_tokens=512, rounding="ceil")
DELTA = TraceFormat(name="delta", block_tokens=64, rounding="floor")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceRequest:
    """One row. Equal to itself alone: compare fields, and blocks as arrays."""

    number: int
    """Row in the file, from 1."""
    session: str | None
    """None: a request that is its own session."""
    arrival_s: float | None
    """From the trace's start, as recorded. None in a format that tells only a session's order and pauses."""
    think_s: float
    """Pause after the session's previous answer; 0 for a session's first request and where nothing is known."""
    api_s: float | None
    """What the recorded server took for the whole answer. None: not measured."""
    input_tokens: int
    output_tokens: int
    blocks: npt.NDArray[np.uint64]
    """Ids chained by prefix: the same id means the same prompt up to that block's end. Read-only."""
    kept_blocks: int = 0
    """So many of them, from the first, are the session's previous request's, says the file (0 where it does not)."""

    @property
    def parent(self) -> str | None:
        """The session a sub-agent belongs to."""
        return parent_of(self.session)


def parent_of(session: str | None) -> str | None:
    """`a/b` is a sub-agent of `a`; other sessions have no parent."""
    return session.rpartition("/")[0] or None if session is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A trace on disk. Each iteration reads it anew; raises TraceRefused at the first row that cannot be."""

    path: Path
    format: TraceFormat

    def __iter__(self) -> Iterator[TraceRequest]:
        read = _FORMS[self.format.name].reader(self.format)
        with _opened(self.path) as file:
            for number, row in _rows(self.path, file):
                try:
                    request = read(number, row)
                except _Impossible as bad:
                    _refuse(self.path, number, str(bad))
                yield request


def open_trace(path: Path | str) -> Trace:
    """The trace at `path`, its format told from the first row's fields. Raises TraceRefused when it is none."""
    path = Path(path)
    with _opened(path) as file:
        for _, row in _rows(path, file):
            for form in _FORMS.values():
                if row.keys() == form.fields:
                    return Trace(path=path, format=form.format)
            fields = ", ".join(str(field) for field in row)[:200]
            raise TraceRefused(f"{path.name}: no known trace format has the fields {fields}; known are "
                               + "; ".join(f"{form.format.name} ({', '.join(sorted(form.fields))})"
                                           for form in _FORMS.values()))
    raise TraceRefused(f"{path.name} holds no request; give a trace with at least one row")


# What is in a trace -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    """One pass over a trace."""

    requests: int
    sessions: int
    references: int
    """Blocks, each request's counted."""
    distinct: int
    infinite_hit_rate: float | None
    """Of the references, in blocks: what a cache that never forgets would have held. None without references."""
    input_tokens: int
    output_tokens: int
    longest_input_tokens: int
    span_s: float
    """From the first arrival to the last; 0 where no arrivals are known."""


def trace_facts(trace: Trace) -> TraceFacts:
    """Counts a trace in one pass: 16 bytes a distinct block, four times that while newcomers are merged.

    Raises TraceRefused also where an id follows another block than it did before: ids that are not chained by prefix
    name no pages.
    """
    ids = _Ids()
    sessions: set[str] = set()
    alone = requests = references = inputs = outputs = longest = 0
    first = last = None
    for request in trace:
        requests += 1
        if request.session is None:
            alone += 1
        else:
            sessions.add(request.session)
        references += len(request.blocks)
        inputs += request.input_tokens
        outputs += request.output_tokens
        longest = max(longest, request.input_tokens)
        if request.arrival_s is not None:
            first = request.arrival_s if first is None else first
            last = request.arrival_s
        ids.add(request.blocks, request.kept_blocks)
    ids.merge()
    if ids.torn is not None:
        _refuse_torn(trace, ids.torn)
    distinct = len(ids)
    return TraceFacts(
        requests=requests, sessions=alone + len(sessions), references=references, distinct=distinct,
        infinite_hit_rate=(references - distinct) / references if references else None, input_tokens=inputs,
        output_tokens=outputs, longest_input_tokens=longest,
        span_s=0.0 if first is None or last is None else last - first,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSession:
    """A session's requests in order. A closed-loop client sends the first at its arrival, each next one `think_s` after
    the answer before."""

    name: str
    parent: str | None
    requests: tuple[TraceRequest, ...]


def sessions_of(trace: Trace) -> tuple[TraceSession, ...]:
    """The whole trace by session, in the order of first requests. Holds 8 bytes a reference.

    A request without a session is one of its own, named by its row.
    """
    by_name: dict[str, list[TraceRequest]] = {}
    for request in trace:
        by_name.setdefault(f"row {request.number}" if request.session is None else request.session, []).append(request)
    return tuple(TraceSession(name=name, parent=requests[0].parent, requests=tuple(requests))
                 for name, requests in by_name.items())


class _Ids:
    """Distinct ids and what each one follows, as two sorted columns; newcomers wait until a merge pays."""

    WAITING = 2**16

    def __init__(self) -> None:
        self.torn: int | None = None
        """An id seen behind two different blocks, once there is one."""
        self._ids = np.empty(0, dtype=np.uint64)
        self._links = np.empty(0, dtype=np.uint64)
        self._new_ids: list[npt.NDArray[np.uint64]] = []
        self._new_links: list[npt.NDArray[np.uint64]] = []
        self._waiting = 0

    def __len__(self) -> int:
        """Exact after `merge`."""
        return len(self._ids)

    def add(self, blocks: npt.NDArray[np.uint64], known: int) -> None:
        """A request's blocks, of which the first `known` have been added before."""
        if known == len(blocks):
            return
        links = np.zeros(len(blocks) - known, dtype=np.uint64)
        links[1 if known == 0 else 0 :] = mixed(blocks[max(0, known - 1) : -1]) | np.uint64(1)  # 0: the first block
        self._new_ids.append(blocks[known:].copy())  # a view would hold the whole request
        self._new_links.append(links)
        self._waiting += len(links)
        if self._waiting >= max(self.WAITING, len(self._ids)):
            self.merge()

    def merge(self) -> None:
        ids = np.concatenate([self._ids, *self._new_ids])
        links = np.concatenate([self._links, *self._new_links])
        self._new_ids, self._new_links, self._waiting = [], [], 0
        order = ids.argsort(kind="stable")
        ids, links = ids[order], links[order]
        again = np.zeros(len(ids), dtype=np.bool_)
        again[1:] = ids[1:] == ids[:-1]
        torn = ids[1:][again[1:] & (links[1:] != links[:-1])]
        if len(torn) and self.torn is None:
            self.torn = int(torn[0])
        self._ids, self._links = ids[~again], links[~again]


def _refuse_torn(trace: Trace, wanted: int) -> NoReturn:
    """Reads again for the row where the id first follows something else."""
    known: tuple[int, int | None] | None = None
    for request in trace:
        for at in np.flatnonzero(request.blocks == np.uint64(wanted)).tolist():
            before = int(request.blocks[at - 1]) if at else None
            if known is None:
                known = request.number, before
            elif before != known[1]:
                words = ["is the first block" if block is None else f"follows block {block}"
                         for block in (before, known[1])]
                _refuse(trace.path, request.number, f"block {wanted} {words[0]} and in row {known[0]} {words[1]}; "
                        "ids must be chained by prefix")
    raise TraceRefused(f"{trace.path.name} changed while it was read; give it a file that stays as it is")


# Formats ------------------------------------------------------------------------------------------------------------


class _Impossible(Exception):
    """What is wrong with the current row."""


Row = dict[str, Any]


class _Mooncake:
    def __init__(self, format: TraceFormat) -> None:
        self._format = format
        self._last_ms = 0

    def __call__(self, number: int, row: Row) -> TraceRequest:
        _check_fields(row, MOONCAKE_FIELDS)
        self._last_ms = _timestamp(row, self._last_ms)
        input_tokens = _whole(row, "input_length", 1, MAX_TOKENS)
        ids = row["hash_ids"]
        if type(ids) is not list:
            raise _Impossible(f"hash_ids is {_short(ids)}; a list of block ids is needed")
        for kind in set(map(type, ids)) - {int}:
            raise _Impossible(f"hash_ids holds {_short(next(i for i in ids if type(i) is kind))}; ids are integers")
        _check_count(self._format, input_tokens, len(ids))
        if ids and (min(ids) < 0 or max(ids) >= 2**64):
            raise _Impossible(f"block id {min(ids) if min(ids) < 0 else max(ids)} is outside 0 … 2^64-1")
        return TraceRequest(
            number=number, session=None, arrival_s=self._last_ms / 1000, think_s=0.0, api_s=None,
            input_tokens=input_tokens, output_tokens=_whole(row, "output_length", 0, MAX_TOKENS),
            blocks=_sealed(np.array(ids, dtype=np.uint64)),
        )


@dataclass(slots=True)
class _Before:
    """A session's last request."""

    blocks: npt.NDArray[np.uint64]
    timestamp_ms: int
    api_ms: int


class _Delta:
    def __init__(self, format: TraceFormat) -> None:
        self._format = format
        self._last_ms = 0
        self._sessions: dict[str, _Before] = {}

    def __call__(self, number: int, row: Row) -> TraceRequest:
        _check_fields(row, DELTA_FIELDS)
        timestamp_ms = _timestamp(row, self._last_ms)
        input_tokens = _whole(row, "input_length", 1, MAX_TOKENS)
        api_ms = _whole(row, "api_ms", 0, MAX_MS)
        think_ms = _whole(row, "think_ms", 0, MAX_MS)
        session = row["session_id"]
        if type(session) is not str or not session:
            raise _Impossible(f"session_id is {_short(session)}; a name is needed")
        before = self._sessions.get(session)
        had = 0 if before is None else len(before.blocks)
        keep = _whole(row, "keep", 0, MAX_TOKENS)
        if keep > had:
            raise _Impossible(f"keep is {keep}, but the session's previous request has {had} blocks")
        if before is None and think_ms:
            raise _Impossible(f"think_ms is {think_ms} in a session's first request; there is no answer before it")
        runs = _runs(row["runs"])
        _check_count(self._format, input_tokens, keep + sum(length for _, length in runs))
        parts = [np.arange(length, dtype=np.uint64) + np.uint64(first) for first, length in runs]
        if before is not None:
            parts.insert(0, before.blocks[:keep])
            if before.api_ms == 0:
                think_ms = timestamp_ms - before.timestamp_ms
        blocks = _sealed(np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64))
        self._sessions[session] = _Before(blocks, timestamp_ms, api_ms)
        self._last_ms = timestamp_ms
        return TraceRequest(
            number=number, session=session, arrival_s=timestamp_ms / 1000, think_s=think_ms / 1000,
            api_s=api_ms / 1000 if api_ms else None, input_tokens=input_tokens,
            output_tokens=_whole(row, "output_length", 0, MAX_TOKENS), blocks=blocks, kept_blocks=keep,
        )


MOONCAKE_FIELDS = frozenset({"timestamp", "input_length", "output_length", "hash_ids"})
DELTA_FIELDS = frozenset({"timestamp", "input_length", "output_length", "session_id", "think_ms", "api_ms", "keep",
                          "runs"})


@dataclass(frozen=True, slots=True)
class _Form:
    """A format, the fields its rows have (exactly: a row with more means more than would be read), and how to make a
    reader for one pass."""

    format: TraceFormat
    fields: frozenset[str]
    reader: Callable[[TraceFormat], Callable[[int, Row], TraceRequest]]


_FORMS: Mapping[str, _Form] = {
    form.format.name: form
    for form in (_Form(MOONCAKE, MOONCAKE_FIELDS, _Mooncake), _Form(DELTA, DELTA_FIELDS, _Delta))
}


def _check_fields(row: Row, fields: frozenset[str]) -> None:
    if row.keys() == fields:
        return
    missing, more = sorted(fields - row.keys()), sorted(row.keys() - fields)
    raise _Impossible(f"{missing[0]} is missing" if missing else f"{_short(more[0])} is no field of this format")


def _whole(row: Row, field: str, low: int, high: int) -> int:
    value = row[field]
    if type(value) is not int or not low <= value <= high:  # a bool is an int to isinstance
        raise _Impossible(f"{field} is {_short(value)}; an integer in {low} … {high} is needed")
    return value


def _timestamp(row: Row, last_ms: int) -> int:
    timestamp_ms = _whole(row, "timestamp", 0, MAX_MS)
    if timestamp_ms < last_ms:
        raise _Impossible(f"timestamp {timestamp_ms} is before the previous row's {last_ms}; rows go by time")
    return timestamp_ms


def _check_count(format: TraceFormat, input_tokens: int, blocks: int) -> None:
    if blocks != format.blocks_of(input_tokens):
        raise _Impossible(f"{blocks} blocks for {input_tokens} tokens; {format.rounding}({input_tokens} / "
                          f"{format.block_tokens}) = {format.blocks_of(input_tokens)} are needed")


def _runs(value: object) -> list[tuple[int, int]]:
    """(first id, length) of each run; lengths are not bounded here."""
    if type(value) is not list:
        raise _Impossible(f"runs is {_short(value)}; a list of [first id, length] is needed")
    for run in value:
        if type(run) is not list or len(run) != 2 or {type(number) for number in run} != {int} or run[1] < 1:
            raise _Impossible(f"runs holds {_short(run)}; [first id, length of at least 1] is needed")
        if run[0] < 0 or run[0] + run[1] > 2**64:
            raise _Impossible(f"run {_short(run)} has ids outside 0 … 2^64-1")
    return [(first, length) for first, length in value]


def _sealed(blocks: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    if len(np.unique(blocks)) < len(blocks):
        ids, counts = np.unique(blocks, return_counts=True)
        raise _Impossible(f"block {ids[counts > 1][0]} is there twice; an id stands for one prefix, so for one place")
    blocks.flags.writeable = False
    return blocks


def _short(value: object) -> str:
    """The offending value on one line, cut."""
    try:
        text = json.dumps(value)
    except ValueError:  # an integer of too many digits for text
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


# Files --------------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The file's bytes, unzipped where they begin as gzip does."""
    try:
        if not path.is_file():
            raise FileNotFoundError(0, "no file of that name")
        raw = path.open("rb")
    except OSError as why:
        raise TraceRefused(f"{path} cannot be read: {why.strerror}; give the path of a trace file") from None
    with raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        if not zipped:
            yield raw
            return
        with gzip.GzipFile(fileobj=raw) as unzipped:
            yield unzipped  # type: ignore[misc]  # typeshed: a GzipFile is no BinaryIO, though it reads lines like one


def _rows(path: Path, file: BinaryIO) -> Iterator[tuple[int, Row]]:
    """Each line's JSON object with its number, from 1. Empty lines may end a file, nowhere else."""
    number, empty = 0, 0
    while True:
        number += 1
        try:
            line = file.readline(MAX_LINE_BYTES + 1)
        except (EOFError, OSError, zlib.error) as why:
            _refuse(path, number, f"the file ends or breaks here ({why}); fetch it again")
        if not line:
            return
        if len(line) > MAX_LINE_BYTES:
            _refuse(path, number, f"longer than {MAX_LINE_BYTES} bytes; a trace has one request a line")
        if not line.strip():
            empty = empty or number
            continue
        if empty:
            _refuse(path, empty, "empty; a trace has one request a line")
        try:
            row = json.loads(line.decode(), parse_constant=_no_number)
        except (ValueError, RecursionError) as why:
            _refuse(path, number, f"not JSON ({str(why).splitlines()[0][:80]}); each line is one JSON object")
        if type(row) is not dict:
            _refuse(path, number, f"{_short(row)} is no JSON object")
        yield number, row


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _refuse(path: Path, number: int, why: str) -> NoReturn:
    raise TraceRefused(f"{path.name} row {number}: {why}") from None
