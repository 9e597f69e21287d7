"""Azure's public LLM traces (2023 and 2024): when requests came and how long they were. Knows no file.

CSV of `TIMESTAMP,ContextTokens,GeneratedTokens`. Times of day are counted from the first row, in whole microseconds
(the files of 2023 have seven digits of a second and no time zone, those of 2024 six and `+00:00`). No block ids: what
was shared cannot be known, and whatever needs to know refuses such a trace.
"""

from __future__ import annotations

import re

import numpy as np

from hostcache.workload.trace_formats.rows import MAX_TOKENS, Impossible, TraceFormat, TraceRequest, short, whole

AZURE = TraceFormat(name="azure", block_tokens=0, rounding="floor")
HEADING = b"TIMESTAMP,ContextTokens,GeneratedTokens"

_TIME = re.compile(r"(?P<day>\d{4}-\d\d-\d\d)[ T](?P<time>\d\d:\d\d:\d\d(?:\.\d{1,9})?)(?P<zone>Z|[+-]\d\d:\d\d)?",
                   re.ASCII)
_NO_BLOCKS = np.empty(0, dtype=np.uint64)
_NO_BLOCKS.flags.writeable = False


def is_heading(line: bytes) -> bool:
    return line.strip() == HEADING


class Reader:
    def __init__(self, format: TraceFormat) -> None:
        self._first_us: int | None = None
        self._last_us = 0
        self._zoned = False

    def __call__(self, number: int, line: bytes) -> TraceRequest | None:
        """None for the heading."""
        if number == 1:
            return None
        values = line.decode(errors="replace").strip().split(",")
        if len(values) != 3:
            raise Impossible(f"{len(values)} values; {HEADING.decode()} are needed")
        at_us = self._time_us(values[0])
        tokens = {name: _number(text) for name, text in zip(("ContextTokens", "GeneratedTokens"), values[1:],
                                                            strict=True)}
        return TraceRequest(
            number=number, session=None, arrival_s=at_us / 1e6, think_s=0.0, api_s=None,
            input_tokens=whole(tokens, "ContextTokens", 1, MAX_TOKENS),
            output_tokens=whole(tokens, "GeneratedTokens", 0, MAX_TOKENS), blocks=_NO_BLOCKS)

    def _time_us(self, text: str) -> int:
        """Microseconds since the first row."""
        found = _TIME.fullmatch(text)
        try:
            if found is None:
                raise ValueError(text)
            at_us = int(np.datetime64(f"{found['day']}T{found['time']}", "us").astype(np.int64))
        except ValueError:
            raise Impossible(f"TIMESTAMP is {short(text)}; a time like 2023-11-16 18:17:03.9799600 is needed") from None
        zone = found["zone"]
        if zone and zone != "Z":
            at_us -= int(f"{zone[0]}1") * (int(zone[1:3]) * 60 + int(zone[4:])) * 60_000_000
        if self._first_us is None:
            self._first_us, self._last_us, self._zoned = at_us, at_us, bool(zone)
        if bool(zone) != self._zoned:
            raise Impossible(f"TIMESTAMP is {short(text)}; either all rows have a time zone or none")
        if at_us < self._last_us:
            raise Impossible(f"TIMESTAMP {text} is before the previous row's; rows go by time")
        self._last_us = at_us
        return at_us - self._first_us


def _number(text: str) -> object:
    """The integer, or the text that is none, to be refused as what it is."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else text
