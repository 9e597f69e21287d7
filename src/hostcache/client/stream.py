"""A streamed answer while it arrives: server-sent events, their text, tokens and times. Opens no connection."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hostcache.client.backpressure import parse_retry_after
from hostcache.client.wire import Broken, Head

OK = 200
_LONGEST_EVENT = 16 * 1024 * 1024
_LONGEST_ERROR = 64 * 1024


class Events:
    """Cuts bytes into the data of server-sent events, as the HTML standard has them (section 9.2.6), but for lines
    that end in a lone carriage return, which no server sends. Comments and other fields are skipped."""

    __slots__ = ("_data", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of every event that `piece` completes. Raises Broken (`malformed-sse`) for a line without end."""
        lines = (self._rest + piece if self._rest else piece).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > _LONGEST_EVENT:
            raise Broken("malformed-sse", f"a line of the stream is longer than {_LONGEST_EVENT} bytes")
        events: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif self._data and line in (b"", b"\r"):
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events

    def rest(self) -> list[bytes]:
        """What the end of the stream completes: an event whose empty line never came."""
        return self.feed(b"\n\n")


class StreamedAnswer:
    """Hears one answer: a `wire.Listener`.

    A chunk counts as an arrival when it carries text or token ids. `reasoning` is what a model says before its answer
    (`reasoning_content`, `reasoning`): it is generated too, so it counts as an arrival, but it is no part of the text.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self.retry_after_s: float | None = None
        self.done = False
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.token_ids: list[int] = []
        self.logits: list[Mapping[str, Any]] = []
        self.finish_reason: str | None = None
        self.usage: Mapping[str, Any] | None = None
        self.timings: Mapping[str, Any] | None = None
        self.arrivals_s: list[float] = []
        self.last_s: float | None = None
        self._events = Events()
        self._some: bytes = b""
        self._heard_event = False

    def head(self, head: Head, now_s: float) -> None:
        self.status, self.last_s = head.status, now_s
        self.retry_after_s = parse_retry_after(head.headers.get("retry-after"))

    def body(self, data: bytes, now_s: float) -> bool:
        self.last_s = now_s
        if self.status != OK:
            if len(self._some) < _LONGEST_ERROR:
                self._some += data
            return False
        if not self._heard_event and len(self._some) < _LONGEST_ERROR:
            self._some += data
        return self._take(self._events.feed(data), now_s)

    def close(self) -> None:
        """The answer is over. Raises Broken for what makes it no whole answer."""
        if self.status != OK:
            raise Broken(f"http-{self.status}", error_text(self._some.decode("utf-8", "replace")))
        if not self.done and self.last_s is not None:
            self._take(self._events.rest(), self.last_s)
        if not self.done:
            if not self._heard_event:
                said = self._some.decode("utf-8", "replace")
                raise Broken("malformed-sse", f"the answer is no stream of events; it begins with {said[:80]!r}")
            raise Broken("cut-short", "the stream ended before [DONE]")
        if not self.arrivals_s:
            counted = self.usage.get("completion_tokens") if isinstance(self.usage, dict) else None
            raise Broken("no-token", "the stream carried no text and no token ids" + (
                f", although its usage says {_line(counted, 20)} tokens" if counted else ""))

    def _take(self, events: list[bytes], now_s: float) -> bool:
        for event in events:
            if event == b"[DONE]":
                self.done = True
                return True
            try:
                self._chunk(json.loads(event.decode()), now_s)
            except (ValueError, RecursionError) as error:
                raise Broken("malformed-sse", f"a chunk is not JSON: {_shown(event)}") from error
            except (TypeError, AttributeError, KeyError) as error:
                raise Broken("malformed-sse", f"a chunk has not the shape of one: {_shown(event)}") from error
            self._heard_event, self._some = True, b""
        return False

    def _chunk(self, chunk: Any, now_s: float) -> None:
        if chunk.get("error"):
            raise Broken("stream-error", error_text(chunk))
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta")
            thought = ""
            if delta is None:
                text = choice.get("text") or ""
            else:
                text = delta.get("content") or ""
                thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            ids = choice.get("token_ids")
            if text or ids or thought:
                self.arrivals_s.append(now_s)
                self.text.append(text + "")  # a text that is none fails here, not when the whole is joined
                if thought:
                    self.reasoning.append(thought + "")
                if ids:
                    self.token_ids.extend(map(_token, ids))
            logits = choice.get("hostcache_logits")
            if logits:
                self.logits.extend(dict(trace) for trace in logits)
            if choice.get("finish_reason"):
                self.finish_reason = str(choice["finish_reason"])
        self.usage = chunk.get("usage") or self.usage
        self.timings = chunk.get("timings") or self.timings


class WholeAnswer:
    """Hears an answer that is read when it is complete: a `wire.Listener`."""

    def __init__(self) -> None:
        self.status = 0
        self.content_type = ""
        self.content = bytearray()

    def head(self, head: Head, now_s: float) -> None:
        self.status = head.status
        self.content_type = head.headers.get("content-type", "")

    def body(self, data: bytes, now_s: float) -> bool:
        self.content += data
        return False

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")


def error_text(value: object) -> str:
    """What an error's body says, in one line."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return _line(value, 200)
    if isinstance(value, dict):
        error = value.get("error", value)
        return _line(error.get("message", error) if isinstance(error, dict) else error, 300)
    return _line(value, 200)


def _token(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no token id")
    return value


def _line(value: object, longest: int) -> str:
    return " ".join(str(value).split())[:longest]


def _shown(event: bytes) -> str:
    return repr(event[:80].decode("utf-8", "replace"))
