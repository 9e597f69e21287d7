"""kv-cache-tester (callanjfox/kv-cache-tester): coding agents, one JSON file a session. Reads a folder, a tar or one.

Seconds, blocks of the file's `block_size` (64), floor(in / block). What the 710 files at 94f6046d that could be read
hold, found by reading them (49,334 requests):

* `t` counts from the session's first request; a file says nothing of when that was. So the sessions of a folder begin
  together, or each at a time drawn uniformly from `spread_s` seconds, from a seed and the file's name.
* `hash_id_scope`: `local` (all of them) numbers blocks by file, from 1; in the same file a sub-agent's ids are the
  parent's scope. `global` ids are kept; with `per_context`, or none, each agent of a file numbers its own. Local ids
  are renumbered without a gap, file after file by start, so that no two are one.
* `type` is `s`, `n` (streamed or not) or `subagent`: an agent with its own context, whose times count from its own
  start. It becomes the session `parent/agent_id`. 63 of them.
* `api_time`: missing in 4,312 requests, not measured. `think_time`: missing in 116. The pause is `think_time` where it
  is known and follows a measured answer, else the distance of the two requests less the answer's time, if known.

A file is parsed when its session begins and then held as the blocks each request adds to the one before: 8 bytes each.
A tar cannot be entered in the middle: all its sessions are held so at once. Unknown fields are passed over: the format
has gained some before.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from hostcache.workload.agents import stream
from hostcache.workload.blocks import common_blocks
from hostcache.workload.trace_formats.files import (
    BREAKS,
    MAX_LINE_BYTES,
    TraceRefused,
    is_folder,
    opened,
    reading,
    unmarked,
    unpacked,
)
from hostcache.workload.trace_formats.rows import (
    MAX_TOKENS,
    Blocks,
    Impossible,
    Row,
    TraceFormat,
    TraceRequest,
    block_ids,
    check_count,
    json_row,
    later,
    sealed,
    seconds,
    short,
    whole,
)

SESSIONS = TraceFormat(name="kv-cache-tester", block_tokens=64, rounding="floor")
FIELDS = frozenset({"id", "block_size", "requests"})
REQUEST_FIELDS = ("t", "in", "out", "hash_ids")
SCOPES = ("local", "global", "per_context")

_ENDS = (".json", ".json.gz", ".json.xz")


def is_session(row: Row) -> bool:
    return row.keys() >= FIELDS


@dataclass(frozen=True, slots=True)
class Source:
    """One session's file: its name, and what reads its bytes."""

    name: str
    read: Callable[[], bytes]

    @property
    def unpacked_name(self) -> str:
        return self.name.removesuffix(".gz").removesuffix(".xz")


def sources(path: Path) -> list[Source]:
    """The session files of a folder (by name), of a tar (held whole, as it lies there), or the one file.

    Raises TraceRefused where there are none.
    """
    if is_folder(path):
        with reading(path):
            found = [Source(each.name, _reader(each)) for each in path.iterdir() if each.name.endswith(_ENDS)]
        found.sort(key=lambda each: (each.unpacked_name, each.name))
    elif is_tar(path):
        found = list(_members(path))
    else:
        found = [Source(path.name, _reader(path))]
    if not found:
        raise TraceRefused(f"{path} holds no session files ({', '.join(_ENDS)}); give a trace file, or a folder or tar "
                           "of kv-cache-tester sessions")
    return found


def is_tar(path: Path) -> bool:
    with opened(path) as file:
        try:
            return file.peek(512)[257:262] == b"ustar"
        except BREAKS:
            return False


def _reader(path: Path) -> Callable[[], bytes]:
    def read() -> bytes:
        with opened(path) as file:
            return _whole_file(path.name, file)

    return read


def _members(path: Path) -> Iterator[Source]:
    with opened(path) as file:
        try:
            with tarfile.open(fileobj=cast(BinaryIO, file), mode="r|") as tar:
                for member in tar:
                    inside = tar.extractfile(member) if member.isfile() else None
                    if inside is not None and member.name.endswith(_ENDS):
                        with unpacked(io.BytesIO(inside.read(MAX_LINE_BYTES + 1))) as packed:
                            text = _whole_file(member.name, packed)
                        yield Source(Path(member.name).name, lambda text=text: text)  # type: ignore[misc]
        except (tarfile.TarError, *BREAKS) as why:
            raise TraceRefused(f"{path.name}: the file ends or breaks ({why}); fetch it again") from None


def _whole_file(name: str, file: io.BufferedReader) -> bytes:
    try:
        text = file.read(MAX_LINE_BYTES + 1)
    except BREAKS as why:
        raise TraceRefused(f"{name}: the file ends or breaks ({why}); fetch it again") from None
    if len(text) > MAX_LINE_BYTES:
        raise TraceRefused(f"{name}: longer than {MAX_LINE_BYTES} bytes; a file holds one session")
    return unmarked(text)


def format_of(first: Source) -> TraceFormat:
    """The blocks of the first session, and of all others."""
    return TraceFormat(name=SESSIONS.name, block_tokens=_parsed(first, None)[0], rounding="floor")


def read(path: Path, format: TraceFormat, *, spread_s: float, seed: int) -> Iterator[TraceRequest]:
    """All requests by time. Raises TraceRefused with the file's name and the request's place in it."""
    waiting = [(round(stream(seed, "session start", each.unpacked_name).random() * spread_s, 3), each)
               for each in sources(path)]
    waiting.sort(key=lambda each: (each[0], each[1].unpacked_name, each[1].name), reverse=True)
    running: list[tuple[float, int, int, _Session]] = []
    ids, names, began, number = _Names(), set[str](), 0, 0
    while waiting or running:
        while waiting and (not running or waiting[-1][0] <= running[0][0]):
            start_s, source = waiting.pop()
            session = _session(source, format, start_s, ids)
            if session.name in names:
                raise TraceRefused(f"{source.name}: session {short(session.name)} was there before; each file holds "
                                   "its own")
            names.add(session.name)
            began += 1
            if session.left:
                heappush(running, (session.left[-1].arrival_s, began, 0, session))
        if not running:
            continue
        _, order, step, session = heappop(running)
        number += 1
        yield session.next(number)
        if session.left:
            heappush(running, (session.left[-1].arrival_s, order, step + 1, session))
    if not number:
        raise TraceRefused(f"{path.name} holds no request; give a trace with at least one row")


# One file -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Request:
    """A request as its file tells it, with the blocks that it adds to its agent's request before."""

    arrival_s: float
    agent: str
    think_s: float
    api_s: float | None
    input_tokens: int
    output_tokens: int
    keep: int
    added: Blocks


@dataclass(slots=True)
class _Session:
    name: str
    left: list[_Request]
    """Last one first."""
    blocks: dict[str, Blocks]
    """Each agent's last prompt."""

    def next(self, number: int) -> TraceRequest:
        request = self.left.pop()
        kept = self.blocks[request.agent][: request.keep] if request.keep else request.added[:0]
        blocks = np.concatenate((kept, request.added))
        blocks.flags.writeable = False
        self.blocks[request.agent] = blocks
        return TraceRequest(
            number=number, session=request.agent, arrival_s=request.arrival_s, think_s=request.think_s,
            api_s=request.api_s, input_tokens=request.input_tokens, output_tokens=request.output_tokens, blocks=blocks,
            kept_blocks=request.keep)


class _Names:
    """Hands out the next ids that nobody has, without a gap."""

    def __init__(self) -> None:
        self._next = 0

    def rename(self, requests: Sequence[_Request]) -> None:
        """Each id of these requests, and the same id the same."""
        if not requests:
            return
        known, inverse = np.unique(np.concatenate([each.added for each in requests]), return_inverse=True)
        fresh = inverse.reshape(-1).astype(np.uint64) + np.uint64(self._next)
        self._next += len(known)
        end = 0
        for each in requests:
            each.added, end = fresh[end : end + len(each.added)], end + len(each.added)


def _session(source: Source, format: TraceFormat, start_s: float, ids: _Names) -> _Session:
    _, scope, name, entries = _parsed(source, format)
    walk = _Walk(source, format)
    walk.agent(name, entries, start_s)
    for agent, inside, begins_s in walk.inside:
        walk.agent(agent, inside, begins_s)
    if scope == "local":
        ids.rename(walk.found)
    elif scope == "per_context":
        for agent in dict.fromkeys(each.agent for each in walk.found):
            ids.rename([each for each in walk.found if each.agent == agent])
    walk.found.sort(key=lambda each: each.arrival_s)  # stable: an agent's own order stays
    return _Session(name, walk.found[::-1], {})


def _parsed(source: Source, format: TraceFormat | None) -> tuple[int, str, str, list[Any]]:
    """Block size, scope, name and entries."""
    try:
        row = json_row(source.read())
        if missing := sorted(FIELDS - row.keys()):
            raise Impossible(f"{missing[0]} is missing; a file holds one kv-cache-tester session")
        size, name = whole(row, "block_size", 1, MAX_TOKENS), row["id"]
        scope = row.get("hash_id_scope", "per_context")
        if scope not in SCOPES:
            raise Impossible(f"hash_id_scope is {short(scope)}; {', '.join(SCOPES)} are known")
        if type(name) is not str or not name or "/" in name:
            raise Impossible(f"id is {short(name)}; a name without a slash is needed")
        if type(row["requests"]) is not list:
            raise Impossible(f"requests is {short(row['requests'])}; a list is needed")
        if format is not None and size != format.block_tokens:
            raise Impossible(f"block_size is {size}, in the first session {format.block_tokens}; one trace has one")
    except Impossible as bad:
        raise TraceRefused(f"{source.name}: {bad}") from None
    return size, scope, name, row["requests"]


class _Walk:
    """Goes through a file's entries; requests are counted as they stand there, sub-agents after their parent."""

    def __init__(self, source: Source, format: TraceFormat) -> None:
        self._source = source
        self._format = format
        self._number = 0
        self._agents: set[str] = set()
        self.found: list[_Request] = []
        self.inside: list[tuple[str, list[Any], float]] = []
        """name, entries, start of each sub-agent met"""

    def agent(self, name: str, entries: list[Any], start_s: float) -> None:
        last_t, api_s, blocks = 0.0, None, None
        for row in entries:
            self._number += 1
            try:
                if type(row) is not dict:
                    raise Impossible(f"{short(row)} is no JSON object")
                if row.get("type") == "subagent":
                    self._sub_agent(name, row, start_s)
                    continue
                request, read_blocks, t = self._request(name, row, start_s, last_t, api_s, blocks)
            except Impossible as bad:
                raise TraceRefused(f"{self._source.name} row {self._number}: {bad}", row=self._number) from None
            self.found.append(request)
            last_t, api_s, blocks = t, request.api_s, read_blocks

    def _sub_agent(self, parent: str, row: Row, start_s: float) -> None:
        for field in ("t", "agent_id", "requests"):
            if field not in row:
                raise Impossible(f"{field} is missing in a sub-agent")
        agent, entries = row["agent_id"], row["requests"]
        if type(agent) is not str or not agent or "/" in agent or type(entries) is not list:
            raise Impossible(f"agent_id is {short(agent)}, requests {short(entries)}; a name and a list are needed")
        if "/" in parent:
            raise Impossible(f"sub-agent {short(agent)} stands in a sub-agent; one level is known")
        if agent in self._agents:
            raise Impossible(f"agent_id {short(agent)} was there before; each sub-agent has its own")
        self._agents.add(agent)
        self.inside.append((f"{parent}/{agent}", entries, start_s + seconds(row, "t")))

    def _request(self, agent: str, row: Row, start_s: float, last_t: float, api_before_s: float | None,
                 before: Blocks | None) -> tuple[_Request, Blocks, float]:
        for field in REQUEST_FIELDS:
            if field not in row:
                raise Impossible(f"{field} is missing")
        t = later("t", seconds(row, "t"), last_t)
        input_tokens, output_tokens = whole(row, "in", 1, MAX_TOKENS), whole(row, "out", 0, MAX_TOKENS)
        ids = block_ids(row)
        check_count(self._format, input_tokens, len(ids), told=True)
        blocks = sealed(np.array(ids, dtype=np.uint64))
        api_s = (seconds(row, "api_time") or None) if row.get("api_time") is not None else None
        think_s = 0.0
        if before is not None:
            if row.get("think_time") is not None and api_before_s is not None:
                think_s = seconds(row, "think_time")
            else:
                think_s = max(0.0, t - last_t - (api_before_s or 0.0))
        keep = 0 if before is None else common_blocks(before, blocks)
        return _Request(round(start_s + t, 6), agent, think_s, api_s, input_tokens, output_tokens, keep,
                        blocks[keep:].copy()), blocks, t
