"""As much HTTP/1.1 as the mock server speaks, on asyncio streams. Knows no route and no meaning of a body.

Requests carry a Content-Length or no body. Answers are whole, or a stream of chunks; connections are kept alive. The
client's departure while its request is handled is told at once (`Inbound.on_left`).
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from hostcache.errors import RequestRefused

HEAD_LIMIT_BYTES = 64 << 10
LAST_CHUNK = b"0\r\n\r\n"


class Inbound(asyncio.StreamReader):
    """A reader that says at once when the other end is gone, not only to who reads, and notes when a request came."""

    on_left: Callable[[], object] | None = None

    def __init__(self, *, limit: int, loop: asyncio.AbstractEventLoop, now: Callable[[], float]) -> None:
        super().__init__(limit=limit, loop=loop)
        self._now = now
        self._began_s: float | None = None

    def feed_data(self, data: Any) -> None:
        if self._began_s is None:
            self._began_s = self._now()
        super().feed_data(data)

    def began_s(self) -> float:
        """When the first byte came since this was asked before; now, where that byte came with an earlier request."""
        began_s, self._began_s = self._began_s, None
        return self._now() if began_s is None else began_s

    def feed_eof(self) -> None:
        super().feed_eof()
        self._left()

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self._left()

    def _left(self) -> None:
        if self.on_left is not None:
            self.on_left()


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """`headers`: lower-case names. `query`: what follows the question mark. `arrived_s`: of its first byte."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes
    arrived_s: float

    @property
    def keep_alive(self) -> bool:
        return self.headers.get("connection", "").lower() != "close"


async def read_request(reader: Inbound, *, max_body_bytes: int) -> HttpRequest | None:
    """The next request, None at the connection's end. Raises RequestRefused for one that is not understood: nothing
    more can be read from this connection then."""
    try:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError as error:
        raise RequestRefused("the request's head is too long", status=431) from error
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise RequestRefused(f"the request line {lines[0][:80]!r} is not HTTP/1.1")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:-2])}
    if "transfer-encoding" in headers:
        raise RequestRefused("send a body with Content-Length; chunked requests are not read here", status=411)
    length = headers.get("content-length", "0")
    if not length.isdecimal():
        raise RequestRefused(f"Content-Length is {length[:40]!r}; give the body's bytes")
    if int(length) > max_body_bytes:
        raise RequestRefused(f"the body has {length} bytes; at most {max_body_bytes} are read here", status=413)
    try:
        body = await reader.readexactly(int(length))
    except asyncio.IncompleteReadError:
        return None
    path, _, query = words[1].partition("?")
    return HttpRequest(method=words[0], path=path.rstrip("/") or "/", query=query, headers=headers, body=body,
                       arrived_s=reader.began_s())


def head(status: int, content_type: str, *, length: int | None, extra: Mapping[str, str] | None = None) -> bytes:
    """Status line and headers. `length` None: chunks follow."""
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"content-type: {content_type}",
             "transfer-encoding: chunked" if length is None else f"content-length: {length}",
             *(f"{name}: {value}" for name, value in (extra or {}).items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def whole(status: int, body: bytes, *, content_type: str = "application/json",
          extra: Mapping[str, str] | None = None) -> bytes:
    return head(status, content_type, length=len(body), extra=extra) + body


def http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def reset_connection(writer: asyncio.StreamWriter) -> None:
    """End the connection with RST instead of FIN: what is not sent yet is lost."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
