"""What a request of a trace is, and the checks that every format's rows pass. Opens no file."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

Rounding = Literal["ceil", "floor"]
Blocks = npt.NDArray[np.uint64]
Row = dict[str, Any]

MAX_TOKENS = 2**27
"""Longest prompt or answer taken for real: ten times the longest context that anybody offers."""

MAX_MS = 2**53
"""Beyond, milliseconds are no exact float."""


class Impossible(Exception):
    """What is wrong with the current row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """What a format's rows mean. `rounding`: whether a rest shorter than a block has an id of its own (ceil)."""

    name: str
    block_tokens: int
    """0: its rows name no blocks, so that what is shared cannot be known."""
    rounding: Rounding

    def blocks_of(self, input_tokens: int) -> int:
        """How many blocks a prompt of that length has."""
        if not self.block_tokens:
            return 0
        rest = self.block_tokens - 1 if self.rounding == "ceil" else 0
        return (input_tokens + rest) // self.block_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceRequest:
    """One row. Equal to itself alone: compare fields, and blocks as arrays."""

    number: int
    """Row in the file, from 1 (a CSV's heading is row 1); of sessions in files of their own, the place by time."""
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
    blocks: Blocks
    """Ids chained by prefix: the same id means the same prompt up to that block's end. Read-only."""
    kept_blocks: int = 0
    """So many of them, from the first, are the session's previous request's, says the file (0 where it does not)."""

    @property
    def parent(self) -> str | None:
        """The session a sub-agent belongs to."""
        return parent_of(self.session)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceColumns:
    """A trace's rows as arrays of (requests,), without sessions, pauses and answer times."""

    arrival_s: npt.NDArray[np.float64]
    """nan where none is known"""
    input_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    """(requests + 1,) where each one's blocks begin and the last one's end"""
    blocks: Blocks
    """(references,)"""


def parent_of(session: str | None) -> str | None:
    """`a/b` is a sub-agent of `a`; other sessions have no parent."""
    return session.rpartition("/")[0] or None if session is not None else None


# Checks -------------------------------------------------------------------------------------------------------------


def json_row(line: bytes) -> Row:
    try:
        row = _JSON.decode(line.decode())
    except (ValueError, RecursionError) as why:
        raise Impossible(f"not JSON ({str(why).splitlines()[0][:80]}); each line is one JSON object") from None
    if type(row) is not dict:
        raise Impossible(f"{short(row)} is no JSON object")
    return row


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def once_each(pairs: list[tuple[str, Any]]) -> Row:
    """An object of JSON, as `object_pairs_hook`. Raises ValueError for a key that is there twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{short(next(name for name in names if names.count(name) > 1))} is there twice")
    return row


_JSON = json.JSONDecoder(parse_constant=_no_number, object_pairs_hook=once_each)


def json_line(row: Row) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def check_fields(row: Row, fields: frozenset[str]) -> None:
    """Exactly these: a row with more means more than would be read."""
    if row.keys() == fields:
        return
    missing, more = sorted(fields - row.keys()), sorted(row.keys() - fields)
    raise Impossible(f"{missing[0]} is missing" if missing else f"{short(more[0])} is no field of this format")


def whole(row: Row, field: str, low: int, high: int) -> int:
    value = row[field]
    if type(value) is not int or not low <= value <= high:  # a bool is an int to isinstance
        raise Impossible(f"{field} is {short(value)}; an integer in {low} … {high} is needed")
    return value


def seconds(row: Row, field: str) -> float:
    """A time in seconds, which formats write as a fraction or whole."""
    value = row[field]
    if type(value) not in (int, float) or not 0 <= value <= MAX_MS / 1000:
        raise Impossible(f"{field} is {short(value)}; seconds from 0 on are needed")
    return float(value)


def later(field: str, value: float, last: float) -> float:
    if value < last:
        raise Impossible(f"{field} {value} is before the previous row's {last}; rows go by time")
    return value


def block_ids(row: Row) -> list[int]:
    """`hash_ids`: 64-bit integers, whole."""
    ids = row["hash_ids"]
    if type(ids) is not list:
        raise Impossible(f"hash_ids is {short(ids)}; a list of block ids is needed")
    for kind in set(map(type, ids)) - {int}:
        raise Impossible(f"hash_ids holds {short(next(i for i in ids if type(i) is kind))}; ids are integers")
    if ids and (min(ids) < 0 or max(ids) >= 2**64):
        raise Impossible(f"block id {min(ids) if min(ids) < 0 else max(ids)} is outside 0 … 2^64-1")
    return ids


def check_count(format: TraceFormat, input_tokens: int, blocks: int, *, told: bool = False) -> None:
    """`told`: the file itself says the size of its blocks, so no other can be meant."""
    if blocks != format.blocks_of(input_tokens):
        raise Impossible(f"{blocks} blocks for {input_tokens} tokens; {format.rounding}({input_tokens} / "
                         f"{format.block_tokens}) = {format.blocks_of(input_tokens)} are needed"
                         + ("" if told else "; where all its blocks are of another size, --read-blocks says so"))


def sealed(blocks: Blocks) -> Blocks:
    """The same, read-only, once no id is there twice."""
    if len(set(blocks.tolist())) < len(blocks):
        ids, counts = np.unique(blocks, return_counts=True)
        raise Impossible(f"block {ids[counts > 1][0]} is there twice; an id stands for one prefix, so for one place")
    blocks.flags.writeable = False
    return blocks


def short(value: object) -> str:
    """The offending value on one line, cut."""
    if type(value) is float and not math.isfinite(value):
        return str(value)
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):  # ValueError: an integer of too many digits for text
        return "a number of thousands of digits" if isinstance(value, int) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."


def ms(time_s: float | None) -> int:
    return round((time_s or 0.0) * 1000)
