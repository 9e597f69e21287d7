"""Delta (`agentic240.delta.jsonl.gz`, made from callanjfox/kv-cache-tester): sessions of a coding agent. Knows no file.

Rows of all sessions sorted by time; 64-token blocks, floor(input / 64); `keep` blocks shared with the session's request
before, then `runs` of consecutive ids. Holds each session's last blocks. What that file holds, found by reading it:

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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hostcache.errors import ConfigError
from hostcache.workload.blocks import common_blocks
from hostcache.workload.trace_formats.mooncake import arrival_ms
from hostcache.workload.trace_formats.rows import (
    MAX_MS,
    MAX_TOKENS,
    Blocks,
    Impossible,
    TraceFormat,
    TraceRequest,
    check_count,
    check_fields,
    json_line,
    json_row,
    later,
    ms,
    sealed,
    short,
    whole,
)

DELTA = TraceFormat(name="delta", block_tokens=64, rounding="floor")
FIELDS = frozenset({"timestamp", "input_length", "output_length", "session_id", "think_ms", "api_ms", "keep", "runs"})


@dataclass(slots=True)
class _Before:
    """A session's last request."""

    blocks: Blocks
    timestamp_ms: int
    api_ms: int


class Reader:
    def __init__(self, format: TraceFormat) -> None:
        self._format = format
        self._last_ms = 0
        self._sessions: dict[str, _Before] = {}

    def __call__(self, number: int, line: bytes) -> TraceRequest:
        row = json_row(line)
        check_fields(row, FIELDS)
        timestamp_ms = whole(row, "timestamp", 0, MAX_MS)
        later("timestamp", timestamp_ms, self._last_ms)
        input_tokens = whole(row, "input_length", 1, MAX_TOKENS)
        api_ms = whole(row, "api_ms", 0, MAX_MS)
        think_ms = whole(row, "think_ms", 0, MAX_MS)
        session = row["session_id"]
        if type(session) is not str or not session:
            raise Impossible(f"session_id is {short(session)}; a name is needed")
        before = self._sessions.get(session)
        had = 0 if before is None else len(before.blocks)
        keep = whole(row, "keep", 0, MAX_TOKENS)
        if keep > had:
            raise Impossible(f"keep is {keep}, but the session's previous request has {had} blocks")
        if before is None and think_ms:
            raise Impossible(f"think_ms is {think_ms} in a session's first request; there is no answer before it")
        runs = _runs_of(row["runs"])
        check_count(self._format, input_tokens, keep + sum(length for _, length in runs))
        parts = [np.arange(length, dtype=np.uint64) + np.uint64(first) for first, length in runs]
        if before is not None:
            parts.insert(0, before.blocks[:keep])
            if before.api_ms == 0:
                think_ms = timestamp_ms - before.timestamp_ms
        blocks = sealed(np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64))
        self._sessions[session] = _Before(blocks, timestamp_ms, api_ms)
        self._last_ms = timestamp_ms
        return TraceRequest(
            number=number, session=session, arrival_s=timestamp_ms / 1000, think_s=think_ms / 1000,
            api_s=api_ms / 1000 if api_ms else None, input_tokens=input_tokens,
            output_tokens=whole(row, "output_length", 0, MAX_TOKENS), blocks=blocks, kept_blocks=keep)


def _runs_of(value: object) -> list[tuple[int, int]]:
    """(first id, length) of each run; lengths are not bounded here."""
    if type(value) is not list:
        raise Impossible(f"runs is {short(value)}; a list of [first id, length] is needed")
    for run in value:
        if type(run) is not list or len(run) != 2 or {type(number) for number in run} != {int} or run[1] < 1:
            raise Impossible(f"runs holds {short(run)}; [first id, length of at least 1] is needed")
        if run[0] < 0 or run[0] + run[1] > 2**64:
            raise Impossible(f"run {short(run)} has ids outside 0 … 2^64-1")
    return [(first, length) for first, length in value]


def lines(requests: Iterable[TraceRequest], *, alone: bool = False) -> Iterator[bytes]:
    """Times are rounded to ms. `alone`: a request without a session becomes one, named by its row.

    Raises ConfigError without an arrival, or without a session where that is not `alone`.
    """
    last: dict[str, Blocks] = {}
    for request in requests:
        session = request.session
        if session is None:
            if not alone:
                raise ConfigError(f"request {request.number} has no session; the delta format needs one")
            session = f"row {request.number}"
        before = last.get(session)
        keep = 0 if before is None else common_blocks(before, request.blocks)
        if request.session is not None:
            last[session] = request.blocks
        yield json_line({
            "timestamp": arrival_ms(request), "input_length": request.input_tokens,
            "output_length": request.output_tokens, "session_id": session,
            "think_ms": 0 if before is None else ms(request.think_s), "api_ms": ms(request.api_s), "keep": keep,
            "runs": _runs(request.blocks[keep:])})


def _runs(ids: Blocks) -> list[list[int]]:
    """[first, length] of each run of consecutive ids."""
    if not len(ids):
        return []
    starts = np.concatenate(([0], np.flatnonzero(ids[1:] != ids[:-1] + np.uint64(1)) + 1, [len(ids)]))
    return [[int(ids[first]), int(end - first)] for first, end in pairwise(starts)]
