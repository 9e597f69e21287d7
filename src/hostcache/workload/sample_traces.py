"""Small synthetic traces, and trace files: for tests and examples where no public trace is at hand. Measures nothing.

`synthetic_requests` is a toy of the agent trace: sessions that share a head, grow turn by turn, pause, and now and then
begin anew behind the head. Its figures stand for no real traffic.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hostcache.errors import ConfigError
from hostcache.workload.agents import stream
from hostcache.workload.blocks import common_blocks
from hostcache.workload.trace_formats import delta, mooncake
from hostcache.workload.traces import DELTA, MOONCAKE, TraceFormat, TraceRequest

HEAD_BLOCKS = 4
ANEW_SHARE = 0.1
UNMEASURED_SHARE = 0.15


def synthetic_requests(seed: int, *, sessions: int, turns: int, format: TraceFormat = DELTA,
                       first_id: int = 0) -> tuple[TraceRequest, ...]:
    """`sessions` × `turns` requests by time, as reading their file in that format gives them.

    `first_id`: ids are counted up from here, so that 64-bit ones can be had.
    """
    if sessions < 1 or turns < 1:
        raise ConfigError(f"{sessions} sessions of {turns} turns are no trace; at least 1 of each is needed")
    ids = _Counter(first_id + HEAD_BLOCKS)
    head = list(range(first_id, first_id + HEAD_BLOCKS))
    made = [request for index in range(sessions) for request in _session(seed, index, turns, format, head, ids)]
    made.sort(key=lambda request: (request.arrival_s, request.session))
    if format is MOONCAKE:
        made = [replace(request, session=None, think_s=0.0, api_s=None, kept_blocks=0) for request in made]
    return tuple(replace(request, number=number) for number, request in enumerate(made, 1))


def write_trace(path: Path, requests: Iterable[TraceRequest], *, format: TraceFormat) -> None:
    """The requests as a file of that format, gzipped when its name ends in .gz; the same requests give the same bytes.

    Times are rounded to ms. The Mooncake format has no sessions, pauses and answer times: they are lost.
    """
    rows = {MOONCAKE.name: mooncake.lines, DELTA.name: delta.lines}[format.name](requests)
    with path.open("wb") as raw:
        if path.suffix != ".gz":
            raw.writelines(rows)
            return
        with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file:
            file.writelines(rows)


@dataclass(slots=True)
class _Counter:
    next_id: int

    def take(self, count: int) -> list[int]:
        first = self.next_id
        self.next_id += count
        return list(range(first, first + count))


def _session(seed: int, index: int, turns: int, format: TraceFormat, head: list[int],
             ids: _Counter) -> Iterator[TraceRequest]:
    rng = stream(seed, "trace", index)
    size = format.block_tokens
    at_ms, think_ms = rng.randrange(60_000), 0
    tokens = size * len(head) + rng.randrange(1, 8 * size)
    full = list(head)  # the ids of the prompt's full blocks; a partly filled one is nobody else's prefix
    before = np.empty(0, dtype=np.uint64)
    for turn in range(turns):
        if turn and rng.random() < ANEW_SHARE:
            tokens, full = size * len(head) + rng.randrange(1, 8 * size), list(head)
        full += ids.take(tokens // size - len(full))
        blocks = np.array(full + ids.take(format.blocks_of(tokens) - len(full)), dtype=np.uint64)
        output = rng.randrange(1, 500)
        api_ms = 200 + 20 * output
        measured = rng.random() >= UNMEASURED_SHARE
        yield TraceRequest(
            number=0, session=f"session_{index:03d}", arrival_s=at_ms / 1000, think_s=think_ms / 1000,
            api_s=api_ms / 1000 if measured else None, input_tokens=tokens, output_tokens=output, blocks=blocks,
            kept_blocks=common_blocks(before, blocks),
        )
        before = blocks
        think_ms = rng.randrange(1000, 90_000)
        at_ms += api_ms + think_ms
        if not measured:
            think_ms += api_ms  # what a reader can know: the distance of two arrivals
        tokens += output + rng.randrange(1, 4 * size)
