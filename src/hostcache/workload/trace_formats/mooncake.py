"""Mooncake (FAST'25 traces, kvcache-ai/Mooncake): one request a row, its own session. Knows no file.

`timestamp` in ms, 512-token blocks, the last one filled by what is left: ceil(input / 512). No think or answer times.
Other tools write the same rows with other blocks; their size is not in the file and must be told to `open_trace`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from hostcache.errors import ConfigError
from hostcache.workload.trace_formats.rows import (
    MAX_MS,
    MAX_TOKENS,
    TraceFormat,
    TraceRequest,
    block_ids,
    check_count,
    check_fields,
    json_line,
    json_row,
    later,
    ms,
    sealed,
    whole,
)

MOONCAKE = TraceFormat(name="mooncake", block_tokens=512, rounding="ceil")
FIELDS = frozenset({"timestamp", "input_length", "output_length", "hash_ids"})


class Reader:
    def __init__(self, format: TraceFormat) -> None:
        self._format = format
        self._last_ms = 0

    def __call__(self, number: int, line: bytes) -> TraceRequest:
        row = json_row(line)
        check_fields(row, FIELDS)
        later("timestamp", whole(row, "timestamp", 0, MAX_MS), self._last_ms)
        self._last_ms = row["timestamp"]
        input_tokens = whole(row, "input_length", 1, MAX_TOKENS)
        ids = block_ids(row)
        check_count(self._format, input_tokens, len(ids))
        return TraceRequest(
            number=number, session=None, arrival_s=self._last_ms / 1000, think_s=0.0, api_s=None,
            input_tokens=input_tokens, output_tokens=whole(row, "output_length", 0, MAX_TOKENS),
            blocks=sealed(np.array(ids, dtype=np.uint64)))


def lines(requests: Iterable[TraceRequest]) -> Iterator[bytes]:
    """Times are rounded to ms; sessions, pauses and answer times are lost. Raises ConfigError without an arrival."""
    for request in requests:
        yield json_line({"timestamp": arrival_ms(request), "input_length": request.input_tokens,
                         "output_length": request.output_tokens, "hash_ids": request.blocks.tolist()})


def arrival_ms(request: TraceRequest) -> int:
    if request.arrival_s is None:
        raise ConfigError(f"request {request.number} has no arrival; a trace's rows go by time")
    return ms(request.arrival_s)
