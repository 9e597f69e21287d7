"""A server that plays raw bytes over real sockets: what a test wants to have said, and how the connection ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

End = Literal["keep", "close", "reset", "silence"]


@dataclass(frozen=True, kw_only=True)
class Play:
    """Pieces that are written one after another (a callable runs instead), then how it ends."""

    pieces: Sequence[bytes | Callable[[], None]]
    end: End = "keep"


@dataclass(kw_only=True)
class Request:
    connection: int
    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Scripted:
    """`plays` in the order of requests; `routes` answer for a path whenever it is asked for."""

    plays: list[Play] = field(default_factory=list)
    routes: dict[str, Callable[[Request], Play]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    url: str = ""
    connections: int = 0
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with the first request."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        if task := asyncio.current_task():
            self.tasks.add(task)
        # Streams report a cancelled handler as an error, so its end is kept to itself.
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._answer(number, reader, writer):
                pass
        writer.close()

    async def _answer(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
        request = Request(connection=number, method=method, path=path, headers=headers,
                          body=json.loads(raw) if raw else None)
        self.requests.append(request)
        self.asked.set()
        route = self.routes.get(path)
        play = route(request) if route else self.plays.pop(0) if self.plays else answer(404, b"nothing here")
        for piece in play.pieces:
            if isinstance(piece, bytes):
                writer.write(piece)
                await writer.drain()
                for _ in range(6):  # both ends share this loop: let the client read before the next piece
                    await asyncio.sleep(0)
            else:
                piece()
        if play.end == "silence":
            await reader.read()  # until the client gives up
        if play.end == "reset":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        return play.end == "keep"


@asynccontextmanager
async def serving(*plays: Play, routes: dict[str, Callable[[Request], Play]] | None = None,
                  tls: ssl.SSLContext | None = None) -> AsyncIterator[Scripted]:
    script = Scripted(list(plays), routes or {})
    server = await asyncio.start_server(script._serve, "127.0.0.1", 0, ssl=tls)
    script.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield script
    finally:
        server.close()
        for task in script.tasks:
            task.cancel()
        await asyncio.gather(*script.tasks)


def head(status: int = 200, *headers: str) -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status} Whatever", *headers, "", "")).encode()


def answer(status: int, body: bytes, *headers: str) -> Play:
    return Play(pieces=(head(status, f"Content-Length: {len(body)}", *headers) + body,))


def answer_json(value: object, status: int = 200, *headers: str) -> Play:
    return answer(status, json.dumps(value).encode(), "Content-Type: application/json", *headers)


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: object) -> bytes:
    """A server-sent event; a str goes as it is."""
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()


def stream(*values: object | Callable[[], None], end: End = "keep", last: bytes = b"0\r\n\r\n") -> Play:
    """An event stream: each value in a chunk of its own, callables in between."""
    pieces: list[bytes | Callable[[], None]] = [
        head(200, "Content-Type: text/event-stream", "Transfer-Encoding: chunked")]
    pieces += [value if callable(value) else chunked(event(value)) for value in values]
    return Play(pieces=(*pieces, last) if last else pieces, end=end)


def word(text: str = "", ids: Sequence[int] = (), **more: Any) -> dict[str, Any]:
    """A chunk of a completion."""
    return {"choices": [{"index": 0, "text": text, **({"token_ids": list(ids)} if ids else {}), **more}]}


def said(text: str = "", **more: Any) -> dict[str, Any]:
    """A chunk of a chat."""
    return {"choices": [{"index": 0, "delta": {"content": text, **more}}]}


def usage(value: object) -> dict[str, Any]:
    return {"choices": [], "usage": value}
