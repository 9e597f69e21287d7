"""Request logs as requests without content: when, how many tokens, and digests of what a prompt begins with.

Reads four forms, gzipped or not, told apart by their first lines (docs/profiles.md describes each): the JSON lines of
an OpenAI proxy, vLLM's own log, LiteLLM's StandardLoggingPayload as JSON lines, a CSV. Text in a log is digested piece
by piece and forgotten: no `LoggedRequest` holds any. A log is dirty: lines that give no request are counted by reason,
and a log with too many of them is refused. Knows no sessions; finding them is mining's.
"""

from __future__ import annotations

import calendar
import csv
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, islice
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from hostcache.errors import ConfigError

Form = Literal["proxy", "vllm", "litellm", "csv"]

BAD_SHARE = 0.01
"""A log of which more requests than this cannot be read is refused: what is left would not be the workload."""

ID_CHUNK = 16
"""Token ids a digest, where a log holds token ids: vLLM's own block size by default."""

MAX_LINE_BYTES = 256 * 2**20
MAX_TOKENS = 2**27
_NONE = np.empty(0, dtype=np.uint64)
_NOWHERE = np.empty(0, dtype=np.uint32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoggedRequest:
    """One answered request (`status` below 400) or one that failed. Equal to itself alone."""

    line: int
    """In the log, from 1."""
    started_s: float
    """Seconds since the epoch, or since whatever the log counts from."""
    ended_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    """Of the prompt, as the server said; None where it did not."""
    session: str | None = None
    """What the log calls the conversation; may be a request's own id (mining looks whether it ever comes again)."""
    prefix: npt.NDArray[np.uint64] = field(default_factory=lambda: _NONE)
    """Digests chained over the prompt's pieces: the same one means the same prompt up to that piece's end."""
    prefix_ends: npt.NDArray[np.uint32] = field(default_factory=lambda: _NOWHERE)
    """Where each piece ends, in tokens: exact for blocks of tokens, by share of the characters for messages."""
    model: str = ""
    status: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLog:
    """A whole log, by start. `skipped`: lines that gave no request, by reason; `first`: the first such line of each.
    `failed`: requests that were answered with an error, by status; they are in neither."""

    path: Path
    form: Form
    requests: tuple[LoggedRequest, ...]
    skipped: dict[str, int]
    first: dict[str, int]
    failed: dict[int, int]


class _Skip(Exception):
    """Why the current line gives no request."""


def read_log(path: Path | str, *, form: Form | None = None, bad_share: float = BAD_SHARE) -> RequestLog:
    """Raises ConfigError for a file that is no log, holds no request, or is unreadable by more than `bad_share`."""
    path = Path(path)
    skipped: Counter[str] = Counter()
    failed: Counter[int] = Counter()
    first: dict[str, int] = {}
    requests: list[LoggedRequest] = []
    with _opened(path) as file:
        lines = _lines(path, file)
        head = list(islice(lines, _HEAD))
        form = form or _form_of(path, [line for _, line in head])
        for number, read in _FORMS[form](chain(head, lines)):
            if isinstance(read, str):
                skipped[read] += 1
                first.setdefault(read, number)
            elif read.status >= 400:
                failed[read.status] += 1
            else:
                requests.append(read)
    bad = sum(skipped.values())
    lines_read = bad + len(requests) + sum(failed.values())
    said = "; ".join(f"{count} × {why} (first: line {first[why]})" for why, count in skipped.most_common(3))
    if bad > bad_share * lines_read:
        raise ConfigError(f"{path.name}: {bad} of {lines_read} requests cannot be read: {said}; more than "
                          f"{bad_share:.0%} is too many to call the rest the workload")
    if not requests:
        raise ConfigError(f"{path.name} holds no answered request in the form {form}; give another file or form")
    requests.sort(key=lambda request: (request.started_s, request.line))
    return RequestLog(path=path, form=form, requests=tuple(requests), skipped=dict(skipped), first=first,
                      failed=dict(failed))


# Digests ------------------------------------------------------------------------------------------------------------


def chained(pieces: Iterable[bytes]) -> npt.NDArray[np.uint64]:
    """One digest a piece, each over everything up to that piece's end."""
    made, before = [], b""
    for piece in pieces:
        before = blake2b(before + piece, digest_size=8).digest()
        made.append(int.from_bytes(before, "little"))
    return np.array(made, dtype=np.uint64)


def token_prefix(ids: Sequence[int]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
    """Digests and ends of every whole `ID_CHUNK` token ids."""
    whole = len(ids) - len(ids) % ID_CHUNK
    data = np.asarray(ids[:whole], dtype=np.int64)
    digests = chained(data[at : at + ID_CHUNK].tobytes() for at in range(0, whole, ID_CHUNK))
    return digests, np.arange(ID_CHUNK, whole + 1, ID_CHUNK, dtype=np.uint32)


def message_prefix(
    messages: Iterable[object], prompt_tokens: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
    """Digests of a chat's messages in order; an end is the prompt's tokens by the share of characters so far."""
    texts = [json.dumps(message, sort_keys=True, ensure_ascii=False).encode() for message in messages]
    return chained(texts), _ends([len(text) for text in texts], prompt_tokens)


_TEXT_PIECE = 64
"""Characters; about `ID_CHUNK` tokens. Where two conversations differ only behind the last whole piece, they look as
one to mining, so it is short."""


def text_prefix(text: str, prompt_tokens: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
    """Digests of every whole 64 characters of a prompt that is one text."""
    pieces = [text[at : at + _TEXT_PIECE].encode() for at in range(0, len(text) - _TEXT_PIECE + 1, _TEXT_PIECE)]
    ends = np.arange(1, len(pieces) + 1, dtype=np.float64) * _TEXT_PIECE * prompt_tokens / max(1, len(text))
    return chained(pieces), ends.astype(np.uint32)


def _ends(sizes: Sequence[int], tokens: int) -> npt.NDArray[np.uint32]:
    reached = np.cumsum(np.asarray(sizes, dtype=np.float64))
    return (reached * tokens / (reached[-1] if len(reached) else 1)).round().astype(np.uint32)


# Forms --------------------------------------------------------------------------------------------------------------

_Lines = Iterable[tuple[int, str]]
_Read = Iterator[tuple[int, "LoggedRequest | str"]]
_HEAD = 400
"""Lines looked at to tell the form: vLLM says much before its first request."""


def _proxy(lines: _Lines) -> _Read:
    yield from _json_lines(lines, _proxy_row)


def _litellm(lines: _Lines) -> _Read:
    yield from _json_lines(lines, _litellm_row)


def _json_lines(lines: _Lines, read: Callable[[int, Mapping[str, Any]], LoggedRequest]) -> _Read:
    for number, line in lines:
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise _Skip("no JSON object")
            yield number, read(number, row)
        except _Skip as why:
            yield number, str(why)
        except (ValueError, RecursionError):
            yield number, "not JSON"


def _proxy_row(number: int, row: Mapping[str, Any]) -> LoggedRequest:
    asked = _object(row, "request")
    started_s = _time(row.get("ts"), "ts")
    status = _count(row.get("status", 200), "status")
    ended_s = started_s + _seconds(row.get("latency_s", 0 if status >= 400 else None), "latency_s")
    model = asked.get("model")
    session = next((str(each) for each in (row.get("session"), asked.get("session_id")) if each), None)
    model = model if isinstance(model, str) else ""
    if status >= 400:
        return LoggedRequest(line=number, started_s=started_s, ended_s=ended_s, prompt_tokens=0, completion_tokens=0,
                             session=session, model=model, status=status)
    prompt, completion, cached = _usage(row.get("usage"))
    prefix, ends = _proxy_prefix(row, asked, prompt)
    return LoggedRequest(
        line=number, started_s=started_s, ended_s=ended_s, prompt_tokens=prompt, completion_tokens=completion,
        cached_tokens=cached, session=session, prefix=prefix, prefix_ends=ends, model=model, status=status)  # fmt: skip


def _proxy_prefix(row: Mapping[str, Any], asked: Mapping[str, Any],
                  prompt: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
    given = row.get("prefix")
    if given is None:
        return _content_prefix(asked.get("messages", asked.get("prompt")), prompt)
    if not isinstance(given, list):
        raise _Skip("prefix is no list of digests")
    # Digests may be of any kind; chaining ours over theirs costs nothing and holds where theirs are not chained.
    digests = chained(str(each).encode() for each in given)
    block = row.get("prefix_tokens")
    if block is None:
        return digests, _ends([1] * len(given), prompt)
    ends = np.arange(1, len(given) + 1, dtype=np.uint64) * _count(block, "prefix_tokens")
    return digests, np.minimum(ends, prompt).astype(np.uint32)


def _content_prefix(content: object, prompt: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
    if isinstance(content, str):
        return text_prefix(content, prompt)
    if isinstance(content, list) and content:
        if all(type(each) is int for each in content):
            return token_prefix(content)
        return message_prefix(content, prompt)
    return _NONE, _NOWHERE


def _litellm_row(number: int, row: Mapping[str, Any]) -> LoggedRequest:
    """Fields: docs.litellm.ai/docs/proxy/logging_spec. `trace_id` is the client's `litellm_session_id` where it gave
    one, else a random id of the request."""
    inner = row.get("standard_logging_object")
    row = inner if isinstance(inner, dict) else row
    started_s, ended_s = _time(row.get("startTime"), "startTime"), _time(row.get("endTime"), "endTime")
    metadata = row.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    ids = (metadata.get("session_id"), metadata.get("trace_id"), row.get("trace_id"))
    session = next((str(each) for each in ids if each), None)
    model = row.get("model")
    model = model if isinstance(model, str) else ""
    if row.get("status", "success") != "success":
        information = row.get("error_information")
        code = information.get("error_code") if isinstance(information, dict) else None
        status = int(str(code)) if re.fullmatch(r"[45]\d\d", str(code)) else 500
        return LoggedRequest(line=number, started_s=started_s, ended_s=max(started_s, ended_s), prompt_tokens=0,
                             completion_tokens=0, session=session, model=model, status=status)
    answer = row.get("response")
    usage = metadata.get("usage_object") or (answer.get("usage") if isinstance(answer, dict) else None)
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    prompt, completion, cached = _usage({
        "prompt_tokens": row.get("prompt_tokens"), "completion_tokens": row.get("completion_tokens"),
        "prompt_tokens_details": details})  # fmt: skip
    messages = row.get("messages")
    prefix, ends = _content_prefix(messages.get("messages") if isinstance(messages, dict) else messages, prompt)
    if len(prefix) == 1:  # "redacted-by-litellm": the same one message for all; it tells nothing
        prefix, ends = (_NONE, _NOWHERE) if "redacted-by-litellm" in json.dumps(messages)[:200] else (prefix, ends)
    if ended_s < started_s:
        raise _Skip("ends before it starts")
    return LoggedRequest(
        line=number, started_s=started_s, ended_s=ended_s, prompt_tokens=prompt, completion_tokens=completion,
        cached_tokens=cached, session=session, prefix=prefix, prefix_ends=ends, model=model)  # fmt: skip


def _csv(lines: _Lines) -> _Read:
    """`timestamp,prompt_tokens,completion_tokens,session`, with a head line; `latency_s` and `cached_tokens` may be
    there, the session may be empty or absent."""
    names: list[str] | None = None
    for number, line in lines:
        if not line.strip():
            continue
        cells = [cell.strip() for cell in next(csv.reader([line]))]
        if names is None:
            names = [cell.lower() for cell in cells]
            continue
        try:
            if len(cells) != len(names):
                raise _Skip(f"{len(cells)} cells under {len(names)} names")
            row = dict(zip(names, cells, strict=True))
            started_s = _time(row["timestamp"], "timestamp")
            yield number, LoggedRequest(
                line=number, started_s=started_s, ended_s=started_s + _seconds(row.get("latency_s") or 0, "latency_s"),
                prompt_tokens=_count(row["prompt_tokens"], "prompt_tokens", 1),
                completion_tokens=_count(row["completion_tokens"], "completion_tokens"),
                cached_tokens=_count(row["cached_tokens"], "cached_tokens") if row.get("cached_tokens") else None,
                session=row.get("session") or None)  # fmt: skip
        except _Skip as why:
            yield number, str(why)


_STAMP = re.compile(r"(?:(\d{4})-)?(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d+))?")
_PLACE = re.compile(r"[^\[\]\s]+:\d+\] ")
"""Where in vLLM's source a line comes from; the message is behind it. Prompts and answers are in messages, so a pattern
must begin where the message does and end where it ends: text may say anything in between."""
_ASKED = re.compile(r"(?:Received request|Request) (\S+?)(?: details)?: prompt: .*, prompt_token_ids: \[([\d, ]*)\], "
                    r"(?:prompt_embeds|lora_request)")
_RECEIVED = re.compile(r"Received request (\S+?): (?:prompt: |params: )")
_ANSWER_IDS = re.compile(r"Generated response (\S+)( \(streaming \w+\))? details: output_token_ids: \[([\d, ]*)\]$")
_ANSWER = re.compile(r"Generated response (\S+?)( \(streaming \w+\))?: output: (.*), (?:output_token_ids: "
                     r"(?:None|\[([\d, ]*)\]), )?finish_reason: (\S+)$")
_COUNTED = re.compile(r"<streaming_complete: (\d+) tokens>")


@dataclass(slots=True)
class _Heard:
    """A request of vLLM's log between its first line and its last."""

    line: int
    started_s: float
    ids: list[int] | None = None
    answered: int = 0
    """Tokens of the answer whose ids were logged."""


def _vllm(lines: _Lines) -> _Read:
    """vLLM 0.32 with --enable-log-requests --enable-log-outputs and VLLM_LOGGING_LEVEL=DEBUG, as
    entrypoints/serve/utils/request_logger.py writes it: above DEBUG it says no prompt, so no length. Older lines, which
    have the ids in `Received request`, are read too. It logs no answers of /v1/completions.

    Its stamps have no year and whole seconds; a year is counted on when months run backwards.
    """
    live: dict[str, _Heard] = {}
    year, month = 1972, 0  # a leap year: no day is missing
    for number, line in lines:
        if "equest " not in line and "Generated response " not in line:
            continue
        stamped, message = _message(line)
        asked, received = _ASKED.match(message), _RECEIVED.match(message)
        ids, answer = _ANSWER_IDS.match(message), _ANSWER.match(message)
        if not (asked or received or ids or answer):
            continue
        stamp = _STAMP.search(stamped)
        try:
            if stamp is None:
                raise _Skip("no time in the line")
            if stamp[1] is None:
                year += int(stamp[2]) < month - 6
                month = int(stamp[2])
            at_s = _moment_s(int(stamp[1] or year), *map(int, stamp.groups()[1:6])) + float(f"0.{stamp[7] or 0}")
        except _Skip as why:
            yield number, str(why)
            continue
        if asked or received:
            name = (asked or received)[1]  # type: ignore[index]
            heard = live.setdefault(name, _Heard(number, at_s))
            if asked:
                heard.ids = _ids(asked[2])
            continue
        name = (ids or answer)[1]  # type: ignore[index]
        if name not in live:
            yield number, "an answer to a request that is not in the log"
            continue
        if ids:
            live[name].answered += len(_ids(ids[3]))
            continue
        assert answer is not None
        if answer[4]:
            live[name].answered += len(_ids(answer[4]))
        if answer[2] == " (streaming delta)":
            continue
        heard = live.pop(name)
        counted = _COUNTED.search(answer[3])
        reply = int(counted[1]) if counted else heard.answered
        if heard.ids is None:
            yield number, "no prompt ids (start vLLM with VLLM_LOGGING_LEVEL=DEBUG and without --max-log-len)"
        elif not reply:
            yield number, "no tokens of the answer (start vLLM with --enable-log-deltas)"
        else:
            prefix, ends = token_prefix(heard.ids)
            yield number, LoggedRequest(
                line=heard.line, started_s=heard.started_s, ended_s=at_s, prompt_tokens=max(1, len(heard.ids)),
                completion_tokens=reply, prefix=prefix, prefix_ends=ends)  # fmt: skip
    for heard in live.values():
        yield heard.line, "no answer in the log (vLLM logs those of /v1/completions nowhere)"


def _message(line: str) -> tuple[str, str]:
    """(what has the time, the message) of a line of text or of vLLM's JSON form."""
    if line.startswith("{"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            return str(row.get("asctime", "")), str(row.get("message", ""))
    place = _PLACE.search(line)
    return (line[: place.start()], line[place.end() :].rstrip()) if place else ("", "")


def _ids(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each.strip()]


_FORMS: Mapping[Form, Callable[[_Lines], _Read]] = {"proxy": _proxy, "vllm": _vllm, "litellm": _litellm, "csv": _csv}
FORMS = tuple(_FORMS)

_CSV_FIELDS = {"timestamp", "prompt_tokens", "completion_tokens"}


def _form_of(path: Path, head: Sequence[str]) -> Form:
    for line in head:
        if _RECEIVED.match(_message(line)[1]):
            return "vllm"
        if line.lstrip().startswith("{"):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if "ts" in row and "request" in row:
                return "proxy"
            if "startTime" in row or "standard_logging_object" in row:
                return "litellm"
        elif {cell.strip().lower() for cell in line.split(",")} >= _CSV_FIELDS:
            return "csv"
    raise ConfigError(f"{path.name} is no request log that is known; known are proxy JSON lines (ts, latency_s, "
                      "request, usage), litellm JSON lines (startTime, endTime, prompt_tokens), vLLM's log with "
                      "--enable-log-requests, and csv (timestamp,prompt_tokens,completion_tokens,session)")


# Values -------------------------------------------------------------------------------------------------------------


def _object(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = row.get(name)
    if not isinstance(value, dict):
        raise _Skip(f"no {name}")
    return value


def _usage(usage: object) -> tuple[int, int, int | None]:
    if not isinstance(usage, dict):
        raise _Skip("no usage")
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else usage.get("cached_tokens")
    prompt = _count(usage.get("prompt_tokens"), "prompt_tokens", 1)
    return prompt, _count(usage.get("completion_tokens"), "completion_tokens"), \
        None if cached is None else min(prompt, _count(cached, "cached_tokens"))


def _count(value: object, name: str, least: int = 0) -> int:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not least <= value <= MAX_TOKENS:
        raise _Skip(f"no count in {name}")
    return value


def _seconds(value: object, name: str) -> float:
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise _Skip(f"no seconds in {name}") from None
    if not isfinite(seconds) or not 0 <= seconds < 1e7:
        raise _Skip(f"no seconds in {name}")
    return seconds


_ISO = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d+))?)? ?(Z|[+-]\d\d:?\d\d)?", re.ASCII)


def _moment_s(year: int, month: int, day: int, hour: int, minute: int, second: int) -> float:
    """Seconds since the epoch of a time in UTC; a leap second is the next minute's first."""
    if not (1 <= month <= 12 and 1 <= day <= calendar.monthrange(max(1, year), month)[1]
            and hour < 24 and minute < 60 and second <= 60):  # fmt: skip
        raise _Skip("no such day or time")
    return float(calendar.timegm((year, month, day, hour, minute, second)))


def _offset_s(zone: str | None) -> int:
    if zone in (None, "Z"):
        return 0
    digits = (zone or "")[1:].replace(":", "")
    return (1 if (zone or "")[0] == "+" else -1) * (int(digits[:2]) * 3600 + int(digits[2:]) * 60)


def _time(value: object, name: str) -> float:
    """Seconds, or an ISO 8601 time (without a zone: UTC)."""
    if isinstance(value, str):
        if moment := _ISO.fullmatch(value.strip()):
            return _moment_s(*(int(each or 0) for each in moment.groups()[:6])) + float(f"0.{moment[7] or 0}") \
                - _offset_s(moment[8])
        try:
            value = float(value)
        except ValueError:
            raise _Skip(f"no time in {name}") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise _Skip(f"no time in {name}")
    return float(value)


# Files --------------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        if not path.is_file():
            raise FileNotFoundError(0, "no file of that name")
        raw = path.open("rb")
    except OSError as why:
        raise ConfigError(f"{path} cannot be read: {why.strerror}; give the path of a request log") from None
    with raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        if not zipped:
            yield raw
            return
        with gzip.GzipFile(fileobj=raw) as unzipped:
            yield unzipped  # type: ignore[misc]  # typeshed: a GzipFile is no BinaryIO, though it reads lines like one


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, str]]:
    number = 0
    while True:
        number += 1
        try:
            line = file.readline(MAX_LINE_BYTES + 1)
        except (EOFError, OSError, zlib.error) as why:
            raise ConfigError(f"{path.name} line {number}: the file ends or breaks here ({why}); "
                              "fetch it again") from None
        if not line:
            return
        if len(line) > MAX_LINE_BYTES:
            raise ConfigError(f"{path.name} line {number} is longer than {MAX_LINE_BYTES} bytes; a log has one request "
                              "a line")
        yield number, line.decode("utf-8", errors="replace")
