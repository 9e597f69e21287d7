"""A trace as one stream of block references: dense ids, request bounds, the tokens of each block. Caches nothing.

    reference     one block of one request's prompt, in the prompt's order
    id            dense, by order of first appearance: 0, 1, 2 … distinct - 1; `names` holds the trace's own 64-bit ids
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from hostcache.errors import ConfigError
from hostcache.lab.lru import Ids, Starts
from hostcache.workload.trace_formats import mooncake
from hostcache.workload.trace_formats.rows import TraceColumns
from hostcache.workload.traces import MOONCAKE, Ranked, Rounding, Trace, TraceRequest, ranked, refuse_torn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stream:
    """`ids` (references,), `starts` (requests + 1,), `names` (distinct,), `input_tokens` (requests,).

    `tokens` (references,): of each block, less than `block_tokens` for a last one that is not full.
    """

    ids: Ids
    starts: Starts
    names: npt.NDArray[np.uint64]
    tokens: npt.NDArray[np.int32]
    input_tokens: npt.NDArray[np.int64]
    block_tokens: int
    rounding: Rounding
    digest: str

    @property
    def requests(self) -> int:
        return len(self.starts) - 1

    @property
    def references(self) -> int:
        return len(self.ids)

    @property
    def distinct(self) -> int:
        return len(self.names)

    @property
    def request_of(self) -> npt.NDArray[np.int64]:
        """(references,) the request each one belongs to."""
        return np.repeat(np.arange(self.requests), np.diff(self.starts))

    def through(self, texts: npt.NDArray[np.int64], *, why: str) -> Stream:
        """What an engine with prefix caching sees when block i of `names` is sent as text `texts[i]`.

        It keys a block by its text and everything before it, so two blocks are one to it when their texts are the same
        from the prompt's start.
        """
        known: dict[tuple[int, int], int] = {}
        keys: list[int] = []
        sent = texts[self.ids].tolist()
        for first, end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            key = -1
            for text in sent[first:end]:
                key = known.setdefault((key, text), len(known))
                keys.append(key)
        return _stream(np.array(keys, dtype=np.int64), self.starts, self.input_tokens, self.block_tokens, self.rounding,
                       f"{self.digest} {why}")

    def repeated(self) -> Stream:
        """The same requests twice over."""
        starts = np.concatenate((self.starts, self.starts[1:] + self.references))
        return _stream(np.tile(self.names[self.ids], 2), starts,
                       np.tile(self.input_tokens, 2), self.block_tokens, self.rounding, f"{self.digest} twice")

    def cut(self, names: npt.NDArray[Any], starts: Starts, block_tokens: int) -> Stream:
        """The same requests in other blocks, whole ones only."""
        return _stream(names, starts, self.input_tokens, block_tokens, "floor", f"{self.digest} in {block_tokens}")


def stream_of(trace: Trace, *, limit: int | None = None, block_tokens: int | None = None) -> Stream:
    """The trace's first `limit` requests, or all. `block_tokens`: take its blocks for full ones of that size instead.

    Holds some 60 bytes a reference while it reads, 16 afterwards. Raises TraceRefused, also where an id follows another
    block than it did before; ConfigError for a trace without block ids.
    """
    columns = mooncake.columns(trace.path, trace.format, limit) if trace.format.name == MOONCAKE.name else None
    if columns is None:
        columns = _columns(islice(trace, None if limit is None else min(limit, sys.maxsize)))
    requests = len(columns.input_tokens)
    if limit is not None and requests < limit:
        raise ConfigError(f"{trace.path.name} has {requests} requests, {limit} were asked for; give --requests "
                          f"{requests} or less")
    if not len(columns.blocks):
        raise ConfigError(f"{trace.path.name} names no blocks; what is shared cannot be known from it")
    starts, format = columns.starts, trace.format
    stream = _stream(columns.blocks, starts, columns.input_tokens, format.block_tokens, format.rounding, "")
    if (torn := _torn(stream)) is not None:
        refuse_torn(trace, torn)
    stream = replace(stream, digest=_digest(columns, stream.ids, format.block_tokens))
    if block_tokens is None:
        return stream
    return _stream(columns.blocks, starts, np.diff(starts) * block_tokens, block_tokens, "ceil",
                   f"{stream.digest} in full blocks of {block_tokens}")


def _columns(requests: Iterable[TraceRequest]) -> TraceColumns:
    rows: list[tuple[float, int, int]] = []
    blocks: list[npt.NDArray[np.uint64]] = [np.empty(0, dtype=np.uint64)]
    for request in requests:
        rows.append((np.nan if request.arrival_s is None else request.arrival_s, request.input_tokens,
                     request.output_tokens))
        blocks.append(request.blocks)
    columns = np.array(rows, dtype=np.float64).reshape(-1, 3)
    return TraceColumns(arrival_s=columns[:, 0].copy(), input_tokens=columns[:, 1].astype(np.int64),
                        output_tokens=columns[:, 2].astype(np.int64), blocks=np.concatenate(blocks),
                        starts=np.cumsum([len(each) for each in blocks]))


def _stream(names: npt.NDArray[Any], starts: Starts, input_tokens: npt.NDArray[np.int64], block_tokens: int,
            rounding: Rounding, digest: str) -> Stream:
    place = _first_places(names)
    new = place == np.arange(len(names))
    ids = (np.cumsum(new, dtype=np.int32) - np.int32(1))[place]
    lengths = np.diff(starts)
    tokens = np.minimum(block_tokens, np.repeat(input_tokens + starts[:-1] * block_tokens, lengths)
                        - np.arange(len(names)) * block_tokens).astype(np.int32)
    return Stream(ids=ids, starts=starts, names=names[new].astype(np.uint64), tokens=tokens, input_tokens=input_tokens,
                  block_tokens=block_tokens, rounding=rounding, digest=digest)


def _torn(stream: Stream) -> int | None:
    """A block that follows two different ones, or one and none."""
    ids = stream.ids
    behind = np.concatenate((np.full(1, -1, dtype=np.int32), ids))[:-1]
    behind[stream.starts[:-1][np.diff(stream.starts) > 0]] = -1
    known = np.empty(stream.distinct, dtype=np.int32)
    known[ids[::-1]] = behind[::-1]  # of equal places numpy keeps the last one written, so each id's first
    torn = np.flatnonzero(known[ids] != behind)
    return int(stream.names[ids[torn[0]]]) if len(torn) else None


def _first_places(names: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """For each one the place where its like stands first."""
    places: npt.NDArray[np.int64]
    if len(names) and names.max() < 4 * len(names):  # counted, not hashed: a table is no larger than the stream
        table = np.empty(int(names.max()) + 1, dtype=np.int64)
        table[names[::-1]] = np.arange(len(names) - 1, -1, -1)  # of equal places numpy keeps the last one written
        places = table[names]
    else:
        _, first, inverse = np.unique(names, return_index=True, return_inverse=True)
        places = first[inverse.reshape(-1)]
    return places


UNKNOWN = 2**64 - 1
"""An arrival that no trace tells, in a digest."""


def _digest(columns: TraceColumns, ids: Ids, block_tokens: int) -> str:
    """What `Seal` says of the same requests. `ids`: the blocks by order of first appearance."""
    state, starts = _state(block_tokens), columns.starts
    for first in range(0, len(starts) - 1, 2**14):
        rows = slice(first, min(first + 2**14, len(starts) - 1))
        some = TraceColumns(
            arrival_s=columns.arrival_s[rows], input_tokens=columns.input_tokens[rows],
            output_tokens=columns.output_tokens[rows], starts=starts[rows.start : rows.stop + 1] - starts[rows.start],
            blocks=columns.blocks[:0])
        state.update(_words(some, ids[starts[rows.start] : starts[rows.stop]]))
    return state.hexdigest()


def _state(block_tokens: int) -> hashlib._Hash:
    return hashlib.sha256(b"hostcache-trace-1" + int(block_tokens).to_bytes(8, "little"))


def _words(columns: TraceColumns, ids: npt.NDArray[Any]) -> bytes:
    """What a digest is taken of. `ids`: instead of the columns' own."""
    known = np.isfinite(columns.arrival_s)
    arrivals = np.full(len(known), UNKNOWN, dtype=np.uint64)
    arrivals[known] = np.rint(columns.arrival_s[known] * 1e6).astype(np.uint64)
    lengths = np.diff(columns.starts)
    place = columns.starts[:-1] + 4 * np.arange(len(lengths))
    words = np.zeros(len(ids) + 4 * len(lengths), dtype="<u8")
    of_ids = np.ones(len(words), dtype=np.bool_)
    for at, column in enumerate((arrivals, columns.input_tokens, columns.output_tokens, lengths)):
        words[place + at] = column
        of_ids[place + at] = False
    words[of_ids] = ids
    return words.tobytes()


class Seal:
    """The canonical digest of a workload: of what is asked, not of how a file writes it down.

    sha256 over the format's block size and, for each request in order: arrival in microseconds (all ones: unknown),
    input and output tokens, number of blocks, and the blocks' ids by order of first appearance, all as little-endian
    64-bit words. So renaming ids, compressing the file or converting it to another format changes nothing.
    """

    def __init__(self, block_tokens: int) -> None:
        self._state = _state(block_tokens)

    def add(self, some: Ranked) -> None:
        self._state.update(_words(_columns(some.requests), some.ranks))

    def hexdigest(self) -> str:
        return self._state.hexdigest()


def digest_of(requests: Iterable[TraceRequest], *, block_tokens: int) -> str:
    """The canonical digest of these requests (see `Seal`)."""
    seal = Seal(block_tokens)
    for some in ranked(requests):
        seal.add(some)
    return seal.hexdigest()
