"""Qwen-Bailian (alibaba-edu/qwen-bailian-usagetraces-anon): a cloud's chats, linked by parent. Knows no file.

`timestamp` in s, 16-token blocks, ceil(input / 16); every request has its own `chat_id`, a further turn names the chat
it goes on from as `parent_chat_id` (−1: none). From that repository's README.

* An id there is a salted hash of one block's *content*, so the same id may stand behind different prefixes, and twice
  in one prompt. (In two of its four files it does: counting such blocks as hits makes the infinite-cache rate 57.89 %
  and 54.18 % where a prefix cache can reach 57.79 % and 53.41 %, says discussion 1 of the data set
  maxbromberg/flux-traces at Hugging Face.) The reader therefore gives each block the id of its *prefix*, a 64-bit hash
  of all ids up to it:

      prefix of block k = f(Σ_{i ≤ k} f(id_i + i · 0x9E3779B97F4A7C15))      mod 2^64, f: `blocks.mixed`

  Two of n prefixes meet with a chance of n² / 2^65: below one in 10^5 at ten million.
* A session is a tree of chats, named by its root. A parent from before the trace's begin names a session too.
* No answer was timed: `think_s` is the distance from the parent's arrival, its pause and its answer together.

Holds about 200 bytes a request: which chat belongs to which session, and when it came.
"""

from __future__ import annotations

import numpy as np

from hostcache.workload.blocks import GOLDEN, mixed
from hostcache.workload.trace_formats.rows import (
    MAX_MS,
    MAX_TOKENS,
    Blocks,
    Impossible,
    TraceFormat,
    TraceRequest,
    block_ids,
    check_count,
    check_fields,
    json_row,
    later,
    sealed,
    seconds,
    short,
    whole,
)

BAILIAN = TraceFormat(name="bailian", block_tokens=16, rounding="ceil")
FIELDS = frozenset({"chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "type", "turn",
                    "hash_ids"})
NO_PARENT = -1


class Reader:
    def __init__(self, format: TraceFormat) -> None:
        self._format = format
        self._last_s = 0.0
        self._chats: dict[int, tuple[int, float]] = {}
        """chat → its session's root, its arrival"""

    def __call__(self, number: int, line: bytes) -> TraceRequest:
        row = json_row(line)
        check_fields(row, FIELDS)
        arrival_s = later("timestamp", seconds(row, "timestamp"), self._last_s)
        input_tokens = whole(row, "input_length", 1, MAX_TOKENS)
        chat, parent = whole(row, "chat_id", 0, MAX_MS), whole(row, "parent_chat_id", NO_PARENT, MAX_MS)
        if chat in self._chats:
            raise Impossible(f"chat_id {chat} was there before; each request has its own")
        if parent == chat:
            raise Impossible(f"parent_chat_id is {parent}, the chat's own; a chat goes on from an earlier one")
        whole(row, "turn", 0, MAX_TOKENS)
        if type(row["type"]) is not str:
            raise Impossible(f"type is {short(row['type'])}; a name is needed")
        ids = block_ids(row)
        check_count(self._format, input_tokens, len(ids))
        root, before_s = (chat, arrival_s) if parent == NO_PARENT else self._chats.get(parent, (parent, arrival_s))
        blocks = sealed(prefixes(np.array(ids, dtype=np.uint64)))
        self._chats[chat] = root, arrival_s
        self._last_s = arrival_s
        return TraceRequest(
            number=number, session=f"chat {root}", arrival_s=arrival_s, think_s=arrival_s - before_s, api_s=None,
            input_tokens=input_tokens, output_tokens=whole(row, "output_length", 0, MAX_TOKENS), blocks=blocks)


def prefixes(ids: Blocks) -> Blocks:
    """Ids of contents → ids of prefixes: equal where everything up to there is equal."""
    return mixed(np.cumsum(mixed(ids + np.arange(len(ids), dtype=np.uint64) * GOLDEN), dtype=np.uint64))
