"""The HTTP surface of the engine: routes, keys, limits, streams, a log line a request; and the process that serves it.

A thin ASGI app of its own. Knows the engine as an EngineHandle only: nothing of models, pages or the tier.
Generation goes through the front door; what the client's departure, a key or a signal means is decided here.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import json
import logging
import re
import signal
import socket
import sys
import traceback
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO
from urllib.parse import parse_qs

from hostcache import __version__
from hostcache.clock import Clock, unix_time
from hostcache.engine import openai_schema as schema
from hostcache.engine.requests import EngineHandle, GenerationEvent, GenerationRequest, Usage
from hostcache.errors import ConfigError, HostCacheError, RequestRefused, ServerError
from hostcache.frontdoor import (
    GENERATION_PATHS,
    AdmissionQueue,
    FrontDoor,
    Message,
    Receive,
    Scope,
    Send,
    error_body,
)
from hostcache.settings import Settings

STATS_VERSION = 1
LEVELS = ("debug", "info", "warning", "error")
CLIENT_LEFT = 499
"""Status in the log (never sent) of a request whose client left first."""
_JSON = "application/json"
_EXCHANGE = "hostcache.exchange"
_REQUEST_ID = re.compile(r"[^A-Za-z0-9._-]")
_LONGEST_REQUEST_ID = 64


class JsonLog:
    """Structured logs: one JSON object a line, with `time` (unix seconds), `level` and `event` first."""

    def __init__(self, stream: TextIO, level: str = "info") -> None:
        self._stream = stream
        self._least = LEVELS.index(level)

    def __call__(self, event: str, *, level: str = "info", **fields: Any) -> None:
        if LEVELS.index(level) < self._least:
            return
        line = {"time": round(unix_time(), 3), "level": level, "event": event, **fields}
        # One write a line, so that lines of several threads do not mix.
        self._stream.write(json.dumps(line, default=str) + "\n")
        self._stream.flush()


@dataclass(slots=True, kw_only=True)
class _Exchange:
    """What one HTTP request grows into: the log line is made of it."""

    request_id: str
    engine_id: str
    """Unique whatever the client sends as x-request-id."""
    start_s: float
    salt: str = ""
    status: int = 0
    left: bool = False
    ttft_s: float | None = None
    usage: Usage | None = None
    finish_reason: str | None = None
    error: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class _ClientLeft(Exception):
    """The client disconnected: nobody is there to answer."""


class _Mailbox:
    """Carries one request's events from the engine's thread to the loop. Holds at most one event for each of
    max_tokens and the last one: the engine sends no more, however slowly the client reads."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._events: deque[GenerationEvent] = deque()
        self.left = False

    def post(self, event: GenerationEvent) -> None:
        """Called on the engine's thread."""
        self._events.append(event)
        # A closed loop has nobody left to tell, and the engine's thread must not die of that.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ready.set)

    def leave(self) -> None:
        """The client is gone: wake the reader."""
        self.left = True
        self._ready.set()

    async def take(self) -> list[GenerationEvent]:
        """Everything that came since the last call; waits for at least one. Raises _ClientLeft."""
        while True:
            if self.left:
                raise _ClientLeft
            taken = [self._events.popleft() for _ in range(len(self._events))]
            if taken:
                return taken
            self._ready.clear()
            if not self._events:  # came between the look and the clear
                await self._ready.wait()


Handler = Callable[["Application", Scope, Receive, Send], Awaitable[None]]


class Application:
    """The ASGI app. `drain` ends the taking of generation requests; what runs goes on."""

    def __init__(self, engine: EngineHandle, *, settings: Settings, clock: Clock, log: JsonLog | None,
                 new_id: Callable[[], str], body_timeout_s: float) -> None:
        self._engine = engine
        self._settings = settings
        self._clock = clock
        self._log = log
        self._new_id = new_id
        self._body_timeout_s = body_timeout_s
        self.queue = AdmissionQueue(slots=settings.slots, waiting=settings.waiting,
                                    wait_s=settings.front_door_wait_s, clock=clock)
        self._door = FrontDoor(self._dispatch, queue=self.queue, clock=clock)
        self._names = frozenset({engine.model_id, settings.model})
        self._created = int(unix_time())
        revision = str(engine.stats().get("engine", {}).get("model_revision", ""))
        identity = json.dumps([__version__, engine.model_id, revision])
        self._fingerprint = "hostcache-" + hashlib.sha256(identity.encode()).hexdigest()[:12]
        keys = settings.api_keys
        self._keys: Mapping[bytes, str] = {key.encode(): _salt(key) if len(keys) > 1 else "" for key in keys}
        """API key → the salt of its cache."""
        self._draining = False
        self._live: set[str] = set()
        """Engine ids of the requests that the engine has now."""

    def drain(self, retry_after_s: float) -> None:
        """Answer 429 to every generation request that is not running yet."""
        self._draining = True
        self._door.close(retry_after_s)

    def abort_running(self) -> None:
        """End what still runs: each gets what it has and an error that says so."""
        for engine_id in self._live:
            self._engine.abort(engine_id)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise ServerError(f"only HTTP is served here, not {scope['type']}")
        given = _REQUEST_ID.sub("-", _header(scope, b"x-request-id"))[:_LONGEST_REQUEST_ID]
        unique = self._new_id()
        exchange = _Exchange(request_id=given or unique, engine_id=f"{given}.{unique}" if given else unique,
                             start_s=self._clock.now())
        scope[_EXCHANGE] = exchange

        async def noted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()),
                                                  (b"x-request-id", exchange.request_id.encode())]}
            await send(message)

        try:
            try:
                self._authorize(scope, exchange)
                await self._door(scope, receive, noted_send)
            except RequestRefused as error:
                exchange.error = str(error)
                if exchange.status:
                    raise
                await _refused(noted_send, error)
            except _ClientLeft:
                exchange.left = True
            except Exception as error:
                exchange.error = f"{type(error).__name__}: {error}"
                exchange.extra["traceback"] = traceback.format_exc()
                if exchange.status:
                    raise
                await _respond(noted_send, 500, error_body(
                    f"the server failed on this request ({type(error).__name__}); its log has the details under "
                    f"{exchange.request_id}", kind="server_error", code="internal_error"))
        finally:
            self._write_line(scope, exchange)

    def _authorize(self, scope: Scope, exchange: _Exchange) -> None:
        """Raises RequestRefused (401). Everything but /health wants the key where one is set."""
        if not self._keys or scope["path"] == "/health":
            return
        scheme, _, sent = _header(scope, b"authorization").partition(" ")
        matched = None
        for key, salt in self._keys.items():  # every key, so that the time tells nothing
            if hmac.compare_digest(key, sent.strip().encode()):
                matched = salt
        if matched is None or scheme.lower() != "bearer":
            raise RequestRefused("the API key is missing or wrong; send the header 'Authorization: Bearer KEY'",
                                 status=401, code="invalid_api_key")
        exchange.salt = matched

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].rstrip("/") or "/"
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        route = ROUTES.get(path)
        if route is None and path.startswith("/v1/models/"):
            route = ("GET", Application._model)
        if route is None:
            raise RequestRefused(f"there is nothing at {path[:200]}; this server has {', '.join(ROUTES)}", status=404,
                                 code="unknown_path")
        if method != route[0]:
            raise RequestRefused(f"{path[:200]} takes {route[0]}, not {method}", status=405, code="method_not_allowed")
        await route[1](self, scope, receive, send)

    # -- generation --------------------------------------------------------------------------------------------------

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: _Exchange = scope[_EXCHANGE]
        body = schema.read_json(await self._body(scope, receive))
        chat = scope["path"].rstrip("/") == "/v1/chat/completions"
        call = schema.parse_chat(body) if chat else schema.parse_completion(body)
        self._check_model(call.model)
        prompt = self._prompt(call)
        budget = schema.answer_budget(call, prompt_tokens=len(prompt), max_context=self._engine.max_context)
        request = GenerationRequest(
            request_id=exchange.engine_id, prompt=prompt, sampling=call.sampling(budget), salt=exchange.salt,
            limits=call.limits, hints=call.hints, trace_logits=call.trace_logits)
        envelope = schema.Envelope(
            kind=call.kind, response_id=exchange.request_id, created=int(unix_time()), model=self._engine.model_id,
            fingerprint=self._fingerprint)
        mailbox = _Mailbox()
        self._engine.submit(request, mailbox.post)
        self._live.add(request.request_id)
        watcher = asyncio.create_task(self._watch(receive, request.request_id, mailbox))
        try:
            answer = self._stream if call.stream else self._whole
            await answer(call, envelope, prompt, mailbox, exchange, send)
        finally:
            watcher.cancel()
            self._live.discard(request.request_id)
            if exchange.finish_reason is None:  # the client left, or we failed: the engine must not go on for nobody
                self._engine.abort(request.request_id)

    async def _watch(self, receive: Receive, request_id: str, mailbox: _Mailbox) -> None:
        """Ends the request at once when its client disconnects, also while a slow send is under way."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._engine.abort(request_id)
        mailbox.leave()

    async def _whole(self, call: schema.Call, envelope: schema.Envelope, prompt: Sequence[int], mailbox: _Mailbox,
                     exchange: _Exchange, send: Send) -> None:
        events: list[GenerationEvent] = []
        while not events or events[-1].finish_reason is None:
            events += self._note(await mailbox.take(), exchange)
        last = events[-1]
        _raise_if_failed(last)
        await _respond(send, 200, schema.to_json(schema.full_answer(
            call, envelope, text="".join(event.text for event in events),
            token_ids=[token for event in events for token in event.token_ids],
            logits=[trace for event in events for trace in event.logits],
            finish_reason=last.finish_reason or "stop", usage=last.usage, prompt=prompt)))

    async def _stream(self, call: schema.Call, envelope: schema.Envelope, prompt: Sequence[int], mailbox: _Mailbox,
                      exchange: _Exchange, send: Send) -> None:
        events = self._note(await mailbox.take(), exchange)
        _raise_if_failed(events[0])  # nothing is sent yet, so a status can still say it
        await send({"type": "http.response.start", "status": 200, "headers": [
            (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no")]})
        opens: Sequence[int] | None = prompt
        while True:
            pieces = []
            for event in events:
                if event.finish_reason in ("error", "abort"):
                    exchange.error = event.error or _STOPPED
                    pieces.append(b"data: " + error_body(exchange.error, kind="server_error", code="aborted") + b"\n\n")
                    continue
                pieces.append(schema.sse(schema.chunk(
                    call, envelope, text=event.text, token_ids=event.token_ids, logits=event.logits,
                    finish_reason=event.finish_reason, opens=opens, usage=event.usage)))
                opens = None
            last = events[-1]
            if last.finish_reason is not None:
                if call.include_usage and exchange.error is None:
                    pieces.append(schema.sse(schema.usage_chunk(envelope, last.usage)))
                await send({"type": "http.response.body", "body": b"".join(pieces) + schema.SSE_DONE})
                return
            await send({"type": "http.response.body", "body": b"".join(pieces), "more_body": True})
            events = self._note(await mailbox.take(), exchange)

    def _note(self, events: list[GenerationEvent], exchange: _Exchange) -> list[GenerationEvent]:
        if exchange.ttft_s is None:
            exchange.ttft_s = self._clock.now() - exchange.start_s
        exchange.usage = events[-1].usage
        exchange.finish_reason = events[-1].finish_reason
        return events

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            raise RequestRefused(f"the model {name[:200]!r} does not exist here; this server has "
                                 f"{self._engine.model_id!r}", status=404, code="model_not_found", param="model")

    def _prompt(self, call: schema.Call) -> tuple[int, ...]:
        if call.token_ids is not None:
            schema.check_token_ids(call.token_ids, self._engine.tokenizer.vocab_size)
            return call.token_ids
        if call.messages is not None:
            return tuple(self._chat_tokens(call.messages))
        return tuple(self._engine.tokenizer.encode(call.text or ""))

    def _chat_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        try:
            return self._engine.tokenizer.chat(messages)
        except Exception as error:
            # A chat template is the model's own program: whatever it throws is its word on these messages.
            raise schema.refuse(f"the model's chat template refused these messages: {error}", "messages") from error

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body. Raises RequestRefused: 408 when it does not come (a slot is held meanwhile), 413 as soon as
        it is known to be too long. Raises _ClientLeft."""
        try:
            async with asyncio.timeout(self._body_timeout_s):
                return await self._read(scope, receive)
        except TimeoutError as error:
            raise RequestRefused(f"the body did not arrive within {self._body_timeout_s:g} s; send the request again",
                                 status=408, code="body_too_slow") from error

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        limit = self._settings.max_body_bytes
        announced = _header(scope, b"content-length")
        length = int(announced) if announced.isdecimal() else 0
        body = bytearray()
        while length <= limit and len(body) <= limit:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _ClientLeft
            body += message.get("body", b"")
            if not message.get("more_body", False) and len(body) <= limit:
                return bytes(body)
        size = f"{length} bytes" if length > limit else f"more than {limit} bytes"
        raise RequestRefused(f"the body has {size}; this server reads at most {limit} (max_body_bytes)", status=413,
                             code="body_too_large")

    # -- everything else ---------------------------------------------------------------------------------------------

    async def _models(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _respond(send, 200, schema.to_json({"object": "list", "data": [self._card()]}))

    async def _model(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._check_model(scope["path"].removeprefix("/v1/models/"))
        await _respond(send, 200, schema.to_json(self._card()))

    def _card(self) -> dict[str, Any]:
        return {"id": self._engine.model_id, "object": "model", "created": self._created, "owned_by": "hostcache",
                "max_model_len": self._engine.max_context}

    async def _tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = schema.read_json(await self._body(scope, receive))
        wanted = schema.parse_tokenize(body)
        model = body.get("model")
        self._check_model(None if model is None else str(model))
        tokens = self._engine.tokenizer.encode(wanted) if isinstance(wanted, str) else self._chat_tokens(wanted)
        await _respond(send, 200, schema.to_json(
            {"tokens": tokens, "count": len(tokens), "max_model_len": self._engine.max_context}))

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        wrong = self._engine.healthy()
        if wrong is None and self._draining:
            wrong = "draining: the server is stopping"
        status = "ok" if wrong is None else wrong
        await _respond(send, 200 if wrong is None else 503, schema.to_json({"status": status}))

    async def _stats(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = {"version": STATS_VERSION, **self._engine.stats(), "front_door": self._door_stats()}
        await _respond(send, 200, schema.to_json(record))

    def _door_stats(self) -> dict[str, Any]:
        now = self.queue.stats()
        return {"slots": now.slots, "running": now.running, "waiting": now.waiting, "waiting_limit": now.waiting_limit,
                "arrived": now.arrived, "served": now.served, "refused": now.refused,
                "left_waiting": now.left_waiting, "draining": now.closed}

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        text = self._engine.metrics_text()
        text += "" if not text or text.endswith("\n") else "\n"
        await _respond(send, 200, (text + _door_metrics(self._door_stats())).encode(),
                       content_type="text/plain; version=0.0.4; charset=utf-8")

    async def _reset(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        raw = query.get("weights_unchanged", ["false"])[-1].lower()
        if raw not in ("true", "false", "1", "0"):
            raise schema.refuse(f"weights_unchanged is {raw[:40]!r}; give true or false", "weights_unchanged")
        self._engine.reset(weights_unchanged=raw in ("true", "1"))
        await _respond(send, 200, b"{}")

    def _write_line(self, scope: Scope, exchange: _Exchange) -> None:
        if self._log is None:
            return
        status = exchange.status or CLIENT_LEFT
        generation = scope["path"].rstrip("/") in GENERATION_PATHS
        level = "error" if status >= 500 and scope["path"] != "/health" else "info" if generation else "debug"
        line: dict[str, Any] = {"request_id": exchange.request_id, "method": scope["method"],
                                "path": scope["path"][:200], "status": status,
                                "duration_s": round(self._clock.now() - exchange.start_s, 6)}
        if generation:
            line["ttft_s"] = None if exchange.ttft_s is None else round(exchange.ttft_s, 6)
            line["finish_reason"] = exchange.finish_reason
            line["client_left"] = exchange.left
            if exchange.usage is not None:
                usage, report = exchange.usage, exchange.usage.report
                line |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens,
                         "device_tokens": usage.device_tokens, "host_tokens": usage.host_tokens,
                         "recomputed": report.get("recomputed"), "first_miss": report.get("first_miss")}
        if exchange.error is not None:
            line["error"] = exchange.error
        self._log("request", level=level, **line, **exchange.extra)


ROUTES: Mapping[str, tuple[str, Handler]] = {
    "/v1/completions": ("POST", Application._generate),
    "/v1/chat/completions": ("POST", Application._generate),
    "/v1/models": ("GET", Application._models),
    "/tokenize": ("POST", Application._tokenize),
    "/health": ("GET", Application._health),
    "/v1/stats": ("GET", Application._stats),
    "/metrics": ("GET", Application._metrics),
    "/reset_prefix_cache": ("POST", Application._reset),
}
_STOPPED = "the server stopped before the answer was complete; try again"


def build_app(engine: EngineHandle, *, settings: Settings, clock: Clock, log: JsonLog | None = None,
              new_id: Callable[[], str] = lambda: uuid.uuid4().hex, body_timeout_s: float = 30.0) -> Application:
    """The whole HTTP surface over a running engine. `new_id` must never give the same text twice."""
    return Application(engine, settings=settings, clock=clock, log=log, new_id=new_id, body_timeout_s=body_timeout_s)


def _raise_if_failed(event: GenerationEvent) -> None:
    if event.finish_reason == "error":
        raise HostCacheError(event.error or "the engine gave no reason")
    if event.finish_reason == "abort":
        raise RequestRefused(_STOPPED, status=429, code="server_stopping")


def _salt(key: str) -> str:
    return hashlib.sha256(b"hostcache salt of an API key\0" + key.encode()).hexdigest()


def _header(scope: Scope, name: bytes) -> str:
    for key, value in scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text.strip()
    return ""


async def _respond(send: Send, status: int, body: bytes, *, content_type: str = _JSON,
                   headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [
        (b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode()), *headers]})
    await send({"type": "http.response.body", "body": body})


async def _refused(send: Send, error: RequestRefused) -> None:
    headers = {401: [(b"www-authenticate", b"Bearer")], 408: [(b"connection", b"close")],
               429: [(b"retry-after", b"1")]}.get(error.status, [])
    kind = "rate_limit_error" if error.status == 429 else "invalid_request_error"
    await _respond(send, error.status, error_body(str(error), kind=kind, code=error.code, param=error.param),
                   headers=headers)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"].removeprefix("lifespan.")
        await send({"type": f"lifespan.{kind}.complete"})
        if kind == "shutdown":
            return


def _door_metrics(stats: Mapping[str, Any]) -> str:
    rows = (
        ("slots", "gauge", "Generation requests that may be inside at once.", stats["slots"]),
        ("running", "gauge", "Generation requests inside now.", stats["running"]),
        ("waiting", "gauge", "Generation requests waiting for a slot; those inside the engine's own queue not counted.",
         stats["waiting"]),
        ("served_total", "counter", "Generation requests let in whose handling is over, whatever they got; those "
         "refused at the door not counted.", stats["served"]),
        ("refused_total", "counter", "Generation requests answered 429 at the door; clients that left not counted.",
         stats["refused"]),
        ("left_waiting_total", "counter", "Generation requests whose client left while waiting at the door.",
         stats["left_waiting"]),
    )
    return "".join(f"# HELP hostcache_front_door_{name} {text}\n# TYPE hostcache_front_door_{name} {kind}\n"
                   f"hostcache_front_door_{name} {value}\n" for name, kind, text, value in rows)


# -- the process -----------------------------------------------------------------------------------------------------


def refuse_open_door(settings: Settings) -> None:
    """Raises ConfigError for an address that others can reach without any key."""
    if not settings.listens_on_loopback and not settings.api_keys:
        raise ConfigError(f"host is {settings.host!r}, which other machines can reach, and no API key is set; set "
                          "HOSTCACHE_API_KEY, or listen on 127.0.0.1")


def bind(settings: Settings) -> socket.socket:
    """The listening address, taken before a model is loaded. Raises ServerError when it cannot be had."""
    where = f"{settings.host}:{settings.port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ServerError(f"host {settings.host!r} cannot be resolved ({error}); give an address of this machine, for "
                          "example 127.0.0.1") from error
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ServerError(f"{where} is in use by another process; stop it, or give another --port (0 takes a free "
                              "one)") from error
        raise ServerError(f"cannot listen on {where}: {error.strerror}; give another --host or --port") from error
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Forward(logging.Handler):
    """What uvicorn has to say, as lines of our own log."""

    def __init__(self, log: JsonLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log("uvicorn", level="error" if record.levelno >= logging.ERROR else "warning",
                  message=self.format(record))


def run(engine: EngineHandle, sock: socket.socket, *, settings: Settings, clock: Clock, log: JsonLog,
        on_ready: Callable[[str], None]) -> bool:
    """Serve until SIGTERM or SIGINT, drain, close the engine. True: SIGINT asked for it. Main thread only.

    A second signal ends the drain. `on_ready` gets the URL once requests are answered. Raises ServerError.
    """
    import uvicorn

    if sys.platform == "win32":
        new_loop = asyncio.new_event_loop
    else:
        import uvloop

        new_loop = uvloop.new_event_loop

    app = build_app(engine, settings=settings, clock=clock, log=log)
    interrupted = False

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # signals drain first, see on_signal

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            try:
                await super().startup(sockets)
            except OSError as error:
                raise ServerError(f"cannot listen on {url_of(sock)}: {error.strerror}; give another --port") from error
            on_ready(url_of(sock))

    config = uvicorn.Config(app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False,
                            server_header=False, proxy_headers=False, timeout_graceful_shutdown=2)
    server = Server(config)

    async def drain() -> None:
        deadline_s = clock.now() + settings.drain_s
        app.drain(max(1.0, settings.drain_s))
        while not app.queue.idle and clock.now() < deadline_s and not server.should_exit:
            await clock.sleep_until(min(deadline_s, clock.now() + 0.02))
        app.abort_running()
        server.should_exit = True
        log("drained", running=app.queue.stats().running)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        drains: list[asyncio.Task[None]] = []

        def on_signal(number: signal.Signals) -> None:
            nonlocal interrupted
            interrupted |= number == signal.SIGINT
            if drains:
                server.should_exit = server.force_exit = True
                return
            log("draining", signal=number.name, drain_s=settings.drain_s)
            drains.append(loop.create_task(drain()))

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        try:
            await server.serve(sockets=[sock])
        finally:
            for task in drains:
                await task

    uvicorn_log = logging.getLogger("uvicorn")
    forward = _Forward(log)
    uvicorn_log.addHandler(forward)
    uvicorn_log.propagate = False
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(serve())
    finally:
        uvicorn_log.removeHandler(forward)
        sock.close()
        whole = engine.close(2.0)
    log("stopped", whole=whole)
    return interrupted
