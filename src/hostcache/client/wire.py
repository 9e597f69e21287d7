"""HTTP/1.1 to one server, as a load generator needs it: kept connections, every byte stamped as it arrives.

Knows no JSON and no OpenAI. Written over asyncio's own transports because the general client in its place cost more
than the thing it was to measure: httpx 0.28 took 1.2 ms of processor time for a streamed answer of 4 chunks and 3.4 ms
for one of 128, this takes 0.19 and 1.1 ms (CPython 3.11, AMD EPYC, `complete` against a server on the same
machine), and stamps a byte when the loop reads it, not when a task wakes up.

What it does not do: proxies, redirects, compression, HTTP/2, sending a request again. A connection that was idle for
more than IDLE_S is not used again, since servers close idle ones (uvicorn after 5 s) and a request that meets the
close would look like a reset of the server's. The address that a name stood for at the first connection is kept.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from hostcache.clock import Clock
from hostcache.errors import ConfigError

CONNECT_S = 10.0
IDLE_S = 2.0
DRAIN_S = 1.0
"""How long the end of an answer may take after its listener has heard enough, before the connection is given up."""
_LONGEST_HEAD = 64 * 1024
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: .*)?")
_HEX = re.compile(rb"[0-9A-Fa-f]{1,15}")


class Broken(Exception):
    """No whole answer came. `kind` is the stable first word of the reason, the message is `kind: detail`."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Status and headers; header names in lower case."""

    status: int
    headers: Mapping[str, str]


class Listener(Protocol):
    """Hears an answer while it arrives. Both may raise Broken, which ends the exchange."""

    def head(self, head: Head, now_s: float) -> None: ...

    def body(self, data: bytes, now_s: float) -> bool:
        """True: heard enough. The exchange is over for its caller, whatever else the server still sends."""
        ...


class _State:
    IDLE, HEAD, SIZE, CHUNK, CHUNK_END, TRAILER, LENGTH, UNTIL_CLOSE = range(8)


class Wire(asyncio.Protocol):
    """One connection: at most one exchange at a time. `Connections` makes them."""

    def __init__(self, pool: Connections, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._pool = pool
        self._loop = loop
        self._now = clock.now
        self._transport: asyncio.Transport | None = None
        self._state = _State.IDLE
        self._pending = b""
        self._left = 0
        self._keep = False
        self._silent = True
        self._listener: Listener | None = None
        self._over: asyncio.Future[None] | None = None
        self._timeout_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._heard_s = 0.0
        self.idle_since_s = 0.0
        self.gone: asyncio.Future[None] = loop.create_future()

    # -- used by the pool --------------------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        return self._state == _State.IDLE and self._transport is not None and not self._transport.is_closing()

    def begin(self, request: bytes, listener: Listener, timeout_s: float) -> asyncio.Future[None]:
        """Sends and returns what ends when the answer has: with nothing, or with Broken."""
        assert self._transport is not None
        self._state = _State.HEAD
        self._silent = True
        self._listener = listener
        self._over = self._loop.create_future()
        self._timeout_s = timeout_s
        self._heard_s = self._loop.time()
        self._timer = self._loop.call_later(timeout_s, self._look)
        self._transport.write(request)
        return self._over

    def abort(self) -> None:
        self._listener = None
        self._stop_timer()
        if self._transport is not None:
            self._transport.abort()

    # -- called by asyncio -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now_s = self._now()
        self._heard_s = self._loop.time()
        if self._pending:
            data, self._pending = self._pending + data, b""
        try:
            self._parse(data, now_s)
        except Broken as broken:
            self.fail(broken)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._state == _State.UNTIL_CLOSE and exc is None:
            self._end()
        elif exc is not None:
            self.fail(Broken("reset", f"the connection broke ({str(exc) or type(exc).__name__})"))
        elif self._silent:
            self.fail(Broken("reset", "the server closed the connection before it answered"))
        else:
            self.fail(Broken("cut-short", "the server closed the connection in the middle of its answer"))
        self._transport = None
        self._pool.lost(self)
        if not self.gone.done():
            self.gone.set_result(None)

    # -- the answer --------------------------------------------------------------------------------------------------

    def _parse(self, data: bytes, now_s: float) -> None:
        at, end = 0, len(data)
        while at < end:
            state = self._state
            if state in (_State.CHUNK, _State.LENGTH):
                piece = data[at:at + self._left]
                at += len(piece)
                self._left -= len(piece)
                if not self._left:
                    self._state = _State.CHUNK_END if state == _State.CHUNK else _State.IDLE
                self._hear(piece, now_s)
                if self._state == _State.IDLE:
                    self._end()
            elif state in (_State.CHUNK_END, _State.SIZE, _State.TRAILER):
                cut = data.find(b"\n", at)
                if cut < 0:
                    self._keep_for_later(data[at:])
                    return
                self._framing_line(state, data[at:cut].rstrip(b"\r"))
                at = cut + 1
            elif state == _State.HEAD:
                self._silent = False
                cut = data.find(b"\r\n\r\n", at)
                if cut < 0:
                    self._keep_for_later(data[at:])
                    return
                self._begin_body(_head(data[at:cut]), now_s)
                at = cut + 4
            elif state == _State.UNTIL_CLOSE:
                self._hear(data[at:], now_s)
                return
            else:  # bytes that nobody asked for: this connection is out of step
                self.abort()
                return

    def _keep_for_later(self, rest: bytes) -> None:
        if len(rest) > _LONGEST_HEAD:
            raise Broken("malformed-http", f"a header or chunk line is longer than {_LONGEST_HEAD} bytes")
        self._pending = rest

    def _framing_line(self, state: int, line: bytes) -> None:
        if state == _State.CHUNK_END:
            if line:
                raise Broken("malformed-http", f"a chunk is longer than its size says: {line[:40]!r}")
            self._state = _State.SIZE
        elif state == _State.SIZE:
            size = line.split(b";", 1)[0].strip()
            if not _HEX.fullmatch(size):
                raise Broken("malformed-http", f"a chunk size is {line[:40]!r}")
            self._left = int(size, 16)
            self._state = _State.CHUNK if self._left else _State.TRAILER
        elif not line:
            self._end()

    def _begin_body(self, parsed: tuple[int, Head], now_s: float) -> None:
        minor, head = parsed
        if head.status < 200:
            if head.status == 101:
                raise Broken("malformed-http", "the server switched protocols, which was not asked for")
            return  # an interim answer: the real one follows
        headers = head.headers
        asked = {word.strip().lower() for word in headers.get("connection", "").split(",")}
        self._keep = "close" not in asked if minor else "keep-alive" in asked
        coding = headers.get("content-encoding", "identity").strip().lower()
        if coding != "identity":
            raise Broken("malformed-http", f"the answer is encoded as {coding[:40]!r}, which was not asked for")
        transfer = headers.get("transfer-encoding", "").strip().lower()
        length = headers.get("content-length", "").strip()
        if head.status in (204, 304):
            self._state = _State.IDLE
        elif transfer:
            if transfer != "chunked":
                raise Broken("malformed-http", f"the answer's transfer encoding is {transfer[:40]!r}")
            self._state = _State.SIZE
        elif length:
            if not length.isascii() or not length.isdecimal():
                raise Broken("malformed-http", f"the answer's content-length is {length[:40]!r}")
            self._left = int(length[:18])
            self._state = _State.LENGTH if self._left else _State.IDLE
        else:
            self._keep = False
            self._state = _State.UNTIL_CLOSE
        if self._listener is not None:
            self._listener.head(head, now_s)
        if self._state == _State.IDLE:
            self._end()

    def _hear(self, piece: bytes, now_s: float) -> None:
        if self._listener is not None and self._listener.body(piece, now_s):
            self._listener = None
            self._stop_timer()
            self._timer = self._loop.call_later(DRAIN_S, self.abort)
            self._settle(None)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """The message is complete."""
        self._state = _State.IDLE
        self._listener = None
        self._stop_timer()
        self._settle(None)
        if self._keep and self._transport is not None and not self._transport.is_closing():
            self.idle_since_s = self._loop.time()
            self._pool.free(self)
        elif self._transport is not None:
            self._transport.close()

    def fail(self, broken: Broken) -> None:
        """Ends the exchange, if there is one, with `broken`, and the connection."""
        self.abort()
        self._settle(broken)

    def _settle(self, broken: Broken | None) -> None:
        over, self._over = self._over, None
        if over is None or over.done():
            return
        if broken is None:
            over.set_result(None)
        else:
            over.set_exception(broken)

    def _look(self) -> None:
        silence_s = self._loop.time() - self._heard_s
        # A timer may fire a clock tick early; a tick more would be a second timer for nothing.
        if silence_s >= self._timeout_s - 1e-3:
            self.fail(Broken("stalled", f"no byte for {self._timeout_s:g} s"))
        else:
            self._timer = self._loop.call_later(self._timeout_s - silence_s, self._look)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _head(block: bytes) -> tuple[int, Head]:
    """Minor version and head."""
    first, *lines = block.split(b"\r\n")
    status = _STATUS.fullmatch(first)
    if status is None:
        raise Broken("malformed-http", f"the answer begins with {first[:60]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon:
            raise Broken("malformed-http", f"a header line is {line[:60]!r}")
        key, text = name.strip().lower().decode("latin-1"), value.strip().decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers and headers[key] != text else text
    return int(status[1]), Head(status=int(status[2]), headers=headers)


class Connections:
    """Connections to one server, as many as there are exchanges at the same time."""

    def __init__(self, base_url: str, *, clock: Clock, headers: Mapping[str, str] | None = None,
                 tls: ssl.SSLContext | None = None, idle_s: float = IDLE_S) -> None:
        """`base_url` as people write it, with or without a last `/v1`. `tls` None: the system's certificates.

        Raises ConfigError for what is no http or https address.
        """
        self._clock = clock
        self._idle_s = idle_s
        try:
            url = urlsplit(base_url)
            host, port = url.hostname, url.port
        except ValueError as error:
            raise ConfigError(f"{base_url!r} is no address of a server ({error}); give http://HOST:PORT") from error
        if url.scheme not in ("http", "https") or not host or url.query or url.fragment or url.username:
            raise ConfigError(f"{base_url!r} is no address of a server; give http://HOST:PORT or https://HOST")
        secure = url.scheme == "https"
        self._host = host
        self._port = port or (443 if secure else 80)
        self._tls = (tls or ssl.create_default_context()) if secure else None
        self._prefix = url.path.rstrip("/").removesuffix("/v1")
        self._address: str | None = None
        self._fixed = "".join(f"{name}: {_plain(value)}\r\n" for name, value in {
            "Host": url.netloc, "User-Agent": "hostcache", "Accept-Encoding": "identity", **(headers or {})}.items())
        self._free: list[Wire] = []
        self._all: set[Wire] = set()

    async def exchange(self, method: str, path: str, listener: Listener, *, timeout_s: float,
                       body: bytes | None = None, accept: str = "*/*") -> None:
        """Sends one request; `listener` hears the answer. `timeout_s`: the longest silence that is waited out.

        Raises Broken: `unreachable`, `reset`, `cut-short`, `stalled`, `malformed-http`, `closed`, or the listener's.
        """
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._fixed}Accept: {accept}\r\n"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        wire = self._take() or await self._connect()
        over = wire.begin(head.encode("latin-1") + b"\r\n" + (body or b""), listener, timeout_s)
        try:
            await over
        except asyncio.CancelledError:
            wire.abort()
            raise

    async def close(self) -> None:
        """Every connection ends at once; what is on its way ends with Broken (`closed`)."""
        wires = tuple(self._all)
        for wire in wires:
            wire.fail(Broken("closed", "this client was closed"))
        for wire in wires:
            await wire.gone

    def free(self, wire: Wire) -> None:
        self._free.append(wire)

    def lost(self, wire: Wire) -> None:
        self._all.discard(wire)
        if wire in self._free:
            self._free.remove(wire)

    def _take(self) -> Wire | None:
        """The one used last, so that the others grow old and go."""
        while self._free:
            wire = self._free.pop()
            if wire.usable and asyncio.get_running_loop().time() - wire.idle_since_s <= self._idle_s:
                return wire
            wire.abort()
        return None

    async def _connect(self) -> Wire:
        try:
            async with asyncio.timeout(CONNECT_S):
                if self._address is not None:
                    try:
                        return await self._dial(self._address)
                    except OSError:
                        if self._address == self._host:
                            raise
                        self._address = None  # it moved: ask for the name again
                return await self._dial(self._host)
        except TimeoutError as error:
            raise Broken("unreachable",
                         f"{self._host}:{self._port} took no connection within {CONNECT_S:g} s") from error
        except (OSError, UnicodeError) as error:
            raise Broken("unreachable", f"{self._host}:{self._port}: {_one_line(error)}") from error

    async def _dial(self, host: str) -> Wire:
        loop = asyncio.get_running_loop()
        transport, wire = await loop.create_connection(
            lambda: Wire(self, loop, self._clock), host, self._port, ssl=self._tls,
            server_hostname=self._host if self._tls is not None else None)
        self._all.add(wire)
        if self._address is None:
            self._address = str(transport.get_extra_info("peername", (host,))[0])
        return wire


def _plain(value: str) -> str:
    if not value.isprintable() or not value.isascii():
        raise ConfigError(f"{value!r} cannot stand in an HTTP header; use printable ASCII")
    return value


def _one_line(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())
