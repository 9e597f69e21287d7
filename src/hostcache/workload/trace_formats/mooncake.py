"""Mooncake (FAST'25 traces, kvcache-ai/Mooncake): one request a row, its own session. Knows no file.

`timestamp` in ms, 512-token blocks, the last one filled by what is left: ceil(input / 512). No think or answer times.
Other tools write the same rows with other blocks; their size is not in the file and must be told to `open_trace`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hostcache.errors import ConfigError
from hostcache.workload.trace_formats.files import BREAKS, MAX_LINE_BYTES, opened
from hostcache.workload.trace_formats.rows import (
    MAX_MS,
    MAX_TOKENS,
    TraceColumns,
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


# Many rows at once --------------------------------------------------------------------------------------------------

_N = rb"(?:0|[1-9][0-9]{0,18}+)"
_ROWS = re.compile(rb'(?:\{"timestamp": ?+N, ?+"input_length": ?+N, ?+"output_length": ?+N, ?+"hash_ids": ?+'
                   rb"\[N(?:, ?+N)*+\]\}\n)*+".replace(b"N", _N))
"""Rows as Mooncake's own files have them, with or without the spaces; numbers that are 64 bits for certain."""
_ONLY_DIGITS = bytes(each if each in b"0123456789" else ord(" ") for each in range(256))
_CHUNK_BYTES = 2**23


def columns(path: Path, format: TraceFormat, limit: int | None = None) -> TraceColumns | None:
    """The rows, or the first `limit`, as `Reader` would give them. None: to be read by it, row by row.

    That is so where a row is written in another way or cannot be, or the file breaks: `Reader` decides and says why.
    Six times as fast as it. Holds 16 bytes a reference and some 100 MB. Raises TraceRefused for no file.
    """
    numbers: list[npt.NDArray[np.uint64]] = []
    counts: list[npt.NDArray[np.int64]] = []
    rest, rows = b"", 0
    with opened(path) as file:
        while limit is None or rows < limit:
            try:
                more = file.read(_CHUNK_BYTES)
            except BREAKS:
                return None
            text = rest + (more or (b"\n" if rest else b""))
            cut = text.rfind(b"\n") + 1
            text, rest = text[:cut], text[cut:]
            if len(rest) > MAX_LINE_BYTES or _ROWS.fullmatch(text) is None:
                return None
            if text:
                bytes_ = np.frombuffer(text, dtype=np.uint8)
                commas, ends = np.flatnonzero(bytes_ == ord(",")), np.flatnonzero(bytes_ == ord("\n"))
                if np.diff(ends, prepend=-1).max() > MAX_LINE_BYTES:
                    return None
                counts.append(np.diff(np.searchsorted(commas, ends), prepend=0) - 2)
                numbers.append(np.fromstring(text.translate(_ONLY_DIGITS), dtype=np.uint64, sep=" "))
                rows += len(ends)
            if not more:
                break
    return None if not rows else _checked(np.concatenate(numbers), np.concatenate(counts), format, limit)


def _checked(numbers: npt.NDArray[np.uint64], counts: npt.NDArray[np.int64], format: TraceFormat,
             limit: int | None) -> TraceColumns | None:
    """`counts`: blocks of each row; three more numbers are before them. None where `Reader` would refuse one."""
    counts = counts[:limit]
    starts = np.concatenate(([0], np.cumsum(counts)))
    heads = starts[:-1] + 3 * np.arange(len(counts))
    numbers = numbers[: starts[-1] + 3 * len(counts)]
    arrival_ms, inputs, outputs = (numbers[heads + place] for place in range(3))
    if arrival_ms.max() > MAX_MS or max(inputs.max(), outputs.max()) > MAX_TOKENS or inputs.min() < 1:
        return None
    input_tokens = inputs.astype(np.int64)
    rest = format.block_tokens - 1 if format.rounding == "ceil" else 0
    if (arrival_ms[1:] < arrival_ms[:-1]).any() or (counts != (input_tokens + rest) // format.block_tokens).any():
        return None
    of_ids = np.ones(len(numbers), dtype=np.bool_)
    for place in range(3):
        of_ids[heads + place] = False
    blocks = numbers[of_ids]
    # Ids in rising order are different ones; the others are looked at.
    falls = np.flatnonzero(blocks[1:] <= blocks[:-1]) + 1
    within = np.searchsorted(starts, falls, side="right") - 1
    for row in np.unique(within[starts[within] != falls]).tolist():
        ids = blocks[starts[row] : starts[row + 1]]
        if len(np.unique(ids)) < len(ids):
            return None
    return TraceColumns(arrival_s=arrival_ms.astype(np.int64) / 1000, input_tokens=input_tokens,
                        output_tokens=outputs.astype(np.int64), starts=starts, blocks=blocks)


def lines(requests: Iterable[TraceRequest]) -> Iterator[bytes]:
    """Times are rounded to ms; sessions, pauses and answer times are lost. Raises ConfigError without an arrival."""
    for request in requests:
        yield json_line({"timestamp": arrival_ms(request), "input_length": request.input_tokens,
                         "output_length": request.output_tokens, "hash_ids": request.blocks.tolist()})


def arrival_ms(request: TraceRequest) -> int:
    if request.arrival_s is None:
        raise ConfigError(f"request {request.number} has no arrival; a trace's rows go by time")
    return ms(request.arrival_s)
