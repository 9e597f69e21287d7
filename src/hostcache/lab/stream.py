"""A trace as one stream of block references: dense ids, request bounds, the tokens of each block. Caches nothing.

    reference     one block of one request's prompt, in the prompt's order
    id            dense, by order of first appearance: 0, 1, 2 … distinct - 1; `names` holds the trace's own 64-bit ids
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from hostcache.errors import ConfigError
from hostcache.lab.lru import Ids, Starts
from hostcache.workload.traces import Rounding, Trace, TraceRequest


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

    Raises TraceRefused, ConfigError for a trace without block ids.
    """
    blocks: list[npt.NDArray[np.uint64]] = []
    inputs: list[int] = []
    seal = Seal(trace.format.block_tokens)
    for request in islice(trace, limit):
        blocks.append(request.blocks)
        inputs.append(request.input_tokens)
        seal.add(request)
    if limit is not None and len(inputs) < limit:
        raise ConfigError(f"{trace.path.name} has {len(inputs)} requests, {limit} were asked for; give --requests "
                          f"{len(inputs)} or less")
    if not any(len(each) for each in blocks):
        raise ConfigError(f"{trace.path.name} names no blocks; what is shared cannot be known from it")
    starts = np.concatenate(([0], np.cumsum([len(each) for each in blocks]))).astype(np.int64)
    names, digest = np.concatenate(blocks), seal.hexdigest()
    if block_tokens is not None:
        return _stream(names, starts, np.diff(starts) * block_tokens, block_tokens, "ceil",
                       f"{digest} in full blocks of {block_tokens}")
    return _stream(names, starts, np.array(inputs, dtype=np.int64), trace.format.block_tokens, trace.format.rounding,
                   digest)


def _stream(names: npt.NDArray[Any], starts: Starts, input_tokens: npt.NDArray[np.int64], block_tokens: int,
            rounding: Rounding, digest: str) -> Stream:
    distinct, first, inverse = np.unique(names, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty(len(order), dtype=np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    lengths = np.diff(starts)
    place = np.arange(len(names)) - np.repeat(starts[:-1], lengths)
    tokens = np.minimum(block_tokens, np.repeat(input_tokens, lengths) - place * block_tokens).astype(np.int32)
    return Stream(ids=rank[inverse.reshape(-1)], starts=starts, names=distinct[order].astype(np.uint64), tokens=tokens,
                  input_tokens=input_tokens, block_tokens=block_tokens, rounding=rounding, digest=digest)


class Seal:
    """The canonical digest of a workload: of what is asked, not of how a file writes it down.

    sha256 over the format's block size and, for each request in order: arrival in microseconds (all ones: unknown),
    input and output tokens, number of blocks, and the blocks' ids by order of first appearance, all as little-endian
    64-bit words. So renaming ids, compressing the file or converting it to another format changes nothing.
    """

    def __init__(self, block_tokens: int) -> None:
        self._state = hashlib.sha256(b"hostcache-trace-1" + int(block_tokens).to_bytes(8, "little"))
        self._ranks: dict[int, int] = {}

    def add(self, request: TraceRequest) -> None:
        arrival = 2**64 - 1 if request.arrival_s is None else round(request.arrival_s * 1e6)
        ranks = self._ranks
        words = [arrival, request.input_tokens, request.output_tokens, len(request.blocks),
                 *(ranks.setdefault(each, len(ranks)) for each in request.blocks.tolist())]
        self._state.update(np.array(words, dtype="<u8").tobytes())

    def hexdigest(self) -> str:
        return self._state.hexdigest()


def digest_of(requests: Iterable[TraceRequest], *, block_tokens: int) -> str:
    """The canonical digest of these requests (see `Seal`)."""
    seal = Seal(block_tokens)
    for request in requests:
        seal.add(request)
    return seal.hexdigest()
