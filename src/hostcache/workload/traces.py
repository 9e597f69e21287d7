"""Public traces as requests: what was asked when, and which blocks of its prompt were like others'.

Reads five formats, plain or packed with gzip or xz, told apart by their content (`trace_formats` has a module for each
and says what its fields mean); knows no pages, keys, servers or clocks.

    mooncake          JSONL, ms, 512 tokens a block, ceil, no sessions
    delta             JSONL, ms, 64, floor, sessions, pauses, answer times
    bailian           JSONL, s, 16, ceil, sessions by parent chat
    kv-cache-tester   one JSON file a session, s, 64, floor, pauses, answer times: a folder, a tar, or one file
    azure             CSV, arrivals and lengths only

A file is read as a stream: besides the current row it holds what its format needs (each session's last blocks, which
chat belongs where), and what `ranked` or `sessions_of` was asked to keep. A row that cannot be is refused by its
number; nothing follows it. CRLF counts as an end of line; a byte order mark is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import file_digest, sha256
from pathlib import Path
from typing import NoReturn, cast, get_args

import numpy as np
import numpy.typing as npt

from hostcache.errors import ConfigError
from hostcache.workload.trace_formats import azure, bailian, delta, mooncake, sessions
from hostcache.workload.trace_formats.azure import AZURE
from hostcache.workload.trace_formats.bailian import BAILIAN
from hostcache.workload.trace_formats.delta import DELTA
from hostcache.workload.trace_formats.files import TraceRefused, is_folder, lines, opened, refuse
from hostcache.workload.trace_formats.mooncake import MOONCAKE
from hostcache.workload.trace_formats.rows import (
    Impossible,
    Rounding,
    TraceFormat,
    TraceRequest,
    json_row,
    parent_of,
    short,
)
from hostcache.workload.trace_formats.sessions import SESSIONS
from hostcache.workload.trace_ids import KnownIds, Ranks

__all__ = [
    "AZURE",
    "BAILIAN",
    "DELTA",
    "MOONCAKE",
    "SESSIONS",
    "Ranked",
    "Rounding",
    "Trace",
    "TraceCount",
    "TraceFacts",
    "TraceFormat",
    "TraceRefused",
    "TraceRequest",
    "TraceSession",
    "block_form",
    "files_digest",
    "open_trace",
    "parent_of",
    "ranked",
    "refuse_torn",
    "sessions_of",
    "trace_facts",
]

_LFS = b"version https://git-lfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A trace on disk. Each iteration reads it anew; raises TraceRefused at the first row that cannot be."""

    path: Path
    format: TraceFormat
    spread_s: float = 0.0
    """Sessions whose start nobody recorded begin within so many seconds, drawn from `seed`; 0: together."""
    seed: int = 0

    def __iter__(self) -> Iterator[TraceRequest]:
        if self.format.name == SESSIONS.name:
            yield from sessions.read(self.path, self.format, spread_s=self.spread_s, seed=self.seed)
        else:
            for _, request in self.with_lines():
                yield request

    def with_lines(self) -> Iterator[tuple[bytes, TraceRequest]]:
        """Each request beside the line that holds it. Not for sessions in files of their own."""
        read = _READERS[self.format.name](self.format)
        with opened(self.path) as file:
            for number, line in lines(self.path, file):
                try:
                    request = read(number, line)
                except Impossible as bad:
                    refuse(self.path, number, str(bad))
                if request is not None:
                    yield line, request


Reader = Callable[[int, bytes], TraceRequest | None]

_READERS: Mapping[str, Callable[[TraceFormat], Reader]] = {
    MOONCAKE.name: mooncake.Reader, DELTA.name: delta.Reader, BAILIAN.name: bailian.Reader, AZURE.name: azure.Reader,
}
_BY_FIELDS = ((MOONCAKE, mooncake.FIELDS), (DELTA, delta.FIELDS), (BAILIAN, bailian.FIELDS))


def block_form(text: str, name: str) -> tuple[int, Rounding]:
    """`64:floor`, as option `name` gives it. Raises ConfigError."""
    size, _, rounding = text.partition(":")
    if not (size.isascii() and size.isdigit() and int(size)) or rounding not in get_args(Rounding):
        raise ConfigError(f"{name} is {text}; give tokens a block and ceil or floor: 64:floor")
    return int(size), cast(Rounding, rounding)


def files_digest(path: Path) -> str:
    """sha256 of a trace's bytes as they lie there; of a folder of sessions, of all their names and bytes.

    Raises OSError, TraceRefused.
    """
    if not is_folder(path):
        with path.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()
    whole = sha256()
    for source in sessions.sources(path):
        whole.update(f"{source.name} {sha256(source.read()).hexdigest()}\n".encode())
    return whole.hexdigest()


def open_trace(path: Path | str, *, blocks: tuple[int, Rounding] | None = None, spread_s: float = 0.0, seed: int = 0,
               need_blocks: bool = True) -> Trace:
    """The trace at `path`, its format told from the first row. Raises TraceRefused when it is none.

    `blocks`: tokens a block and rounding, where a file has other ones than its format. `need_blocks`: refuse a trace
    that names no blocks. `spread_s`, `seed`: see `Trace`.
    """
    path = Path(path)
    if not 0 <= spread_s < float("inf"):
        raise ConfigError(f"sessions are to begin within {spread_s} seconds; give 0 or more")
    format = _format(path)
    if need_blocks and not format.block_tokens:
        raise TraceRefused(f"{path.name} ({format.name}) names no blocks, so what its prompts share cannot be known; "
                           "give a trace with block ids")
    if blocks is not None:
        if format.name in (AZURE.name, SESSIONS.name):
            raise TraceRefused(f"{path.name} ({format.name}) cannot be read in blocks of {blocks[0]} tokens; the "
                               "format says what it has")
        if blocks[0] < 1:
            raise ConfigError(f"blocks of {blocks[0]} tokens make no sense; give 1 or more")
        format = replace(format, block_tokens=blocks[0], rounding=blocks[1])
    return Trace(path=path, format=format, spread_s=spread_s, seed=seed)


def _format(path: Path) -> TraceFormat:
    if is_folder(path) or sessions.is_tar(path):
        return sessions.format_of(sessions.sources(path)[0])
    with opened(path) as file:
        rows = lines(path, file)
        for number, line in rows:
            if azure.is_heading(line):
                if next(rows, None) is None:
                    break
                return AZURE
            if line.startswith(_LFS):
                raise TraceRefused(f"{path.name} is Git LFS's pointer to a file; fetch the file itself (git lfs pull)")
            if line.strip() == b"{":  # one session over many lines
                return sessions.format_of(sessions.sources(path)[0])
            try:
                row = json_row(line)
            except Impossible as bad:
                refuse(path, number, str(bad))
            for format, fields in _BY_FIELDS:
                if row.keys() == fields:
                    return format
            if sessions.is_session(row):
                return sessions.format_of(sessions.sources(path)[0])
            raise TraceRefused(
                f"{path.name}: no known trace format has the fields {', '.join(map(str, row))[:200]}; known are "
                + "; ".join(f"{format.name} ({', '.join(sorted(fields))})" for format, fields in _BY_FIELDS)
                + f"; {SESSIONS.name} ({', '.join(sorted(sessions.FIELDS))}, …); {AZURE.name} "
                f"({azure.HEADING.decode()})")
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
    infinite_hit_rate_tokens: float | None
    """Of the prompts' tokens."""
    infinite_hit_rate_requests: float | None
    """The mean of each request's rate in blocks, of those that have any."""
    input_tokens: int
    output_tokens: int
    longest_input_tokens: int
    span_s: float
    """From the first arrival to the last; 0 where no arrivals are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """Some requests of a trace, one after the other, and their blocks by order of first appearance in the trace."""

    requests: tuple[TraceRequest, ...]
    starts: npt.NDArray[np.int64]
    """(requests + 1,) where each one's blocks begin and the last one's end"""
    ranks: Ranks
    """(references,)"""
    known: int
    """Distinct blocks before these."""

    def hits(self) -> npt.NDArray[np.int64]:
        """(requests,) how many of each one's blocks were in a request before it: its first ones, ids being chained."""
        highest = np.maximum.accumulate(np.maximum(self.ranks, self.known - 1))
        again = np.diff(highest, prepend=self.known - 1) == 0
        return np.diff(np.concatenate(([0], np.cumsum(again)))[self.starts])


def ranked(requests: Iterable[TraceRequest], *, trace: Trace | None = None, together: int = 2**16) -> Iterator[Ranked]:
    """The same requests, so many blocks at a time; holds what `KnownIds` does.

    `trace`: where they come from. Raises TraceRefused where an id follows another block there than it did before: such
    ids name no pages. None: they are taken as they are.
    """
    ids = KnownIds()
    for some in _together(requests, together):
        starts = np.cumsum([0, *(len(each.blocks) for each in some)])
        known = len(ids)
        ranks = ids.add(np.concatenate([each.blocks for each in some]), starts)
        if trace is not None and ids.torn is not None:
            refuse_torn(trace, ids.torn)
        yield Ranked(requests=some, starts=starts, ranks=ranks, known=known)


def _together(requests: Iterable[TraceRequest], blocks: int) -> Iterator[tuple[TraceRequest, ...]]:
    some: list[TraceRequest] = []
    left = blocks
    try:
        for request in requests:
            some.append(request)
            left -= 16 + len(request.blocks)
            if left <= 0:
                yield tuple(some)
                some, left = [], blocks
    except TraceRefused:
        if some:  # what is wrong with them comes first
            yield tuple(some)
        raise
    if some:
        yield tuple(some)


class TraceCount:
    """What a trace holds. Holds the name of every session."""

    def __init__(self, trace: Trace) -> None:
        self._block_tokens = trace.format.block_tokens
        self._sessions: set[str] = set()
        self._alone = self.requests = self.references = self._inputs = self._outputs = self._longest = 0
        self._hits = self._hit_tokens = self._with_blocks = self._distinct = 0
        self._shares = 0.0
        self._first_s: float | None = None
        self._last_s: float | None = None

    def add(self, some: Ranked) -> None:
        for request, hits in zip(some.requests, some.hits().tolist(), strict=True):
            self.requests += 1
            if request.session is None:
                self._alone += 1
            else:
                self._sessions.add(request.session)
            self._inputs += request.input_tokens
            self._outputs += request.output_tokens
            self._longest = max(self._longest, request.input_tokens)
            if request.arrival_s is not None:
                self._first_s = request.arrival_s if self._first_s is None else self._first_s
                self._last_s = request.arrival_s
            if len(request.blocks):
                self._hits += hits
                self._hit_tokens += min(request.input_tokens, hits * self._block_tokens)
                self._with_blocks += 1
                self._shares += hits / len(request.blocks)
        self.references += len(some.ranks)
        self._distinct = max(self._distinct, int(some.ranks.max(initial=-1)) + 1)

    def facts(self) -> TraceFacts:
        any_blocks = self.references > 0
        return TraceFacts(
            requests=self.requests, sessions=self._alone + len(self._sessions), references=self.references,
            distinct=self._distinct, infinite_hit_rate=self._hits / self.references if any_blocks else None,
            infinite_hit_rate_tokens=self._hit_tokens / self._inputs if any_blocks else None,
            infinite_hit_rate_requests=self._shares / self._with_blocks if any_blocks else None,
            input_tokens=self._inputs, output_tokens=self._outputs, longest_input_tokens=self._longest,
            span_s=0.0 if self._first_s is None or self._last_s is None else round(self._last_s - self._first_s, 6))


def trace_facts(trace: Trace) -> TraceFacts:
    """Counts a trace in one pass. Raises TraceRefused as `ranked` does."""
    count = TraceCount(trace)
    for some in ranked(trace, trace=trace):
        count.add(some)
    return count.facts()


def refuse_torn(trace: Trace, wanted: int) -> NoReturn:
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
                whose = f" of session {short(request.session)}" if trace.format.name == SESSIONS.name else ""
                refuse(trace.path, request.number, f"block {wanted}{whose} {words[0]} and in row {known[0]} {words[1]};"
                       " ids must be chained by prefix")
    raise TraceRefused(f"{trace.path.name} changed while it was read; give it a file that stays as it is")


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
