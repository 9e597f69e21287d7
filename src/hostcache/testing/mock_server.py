"""An OpenAI-compatible server without a model: two cache tiers, times and faults as told. Offline, one process.

For trying a client or a harness where the truth is known: /v1/completions, /v1/chat/completions (streamed or whole),
/v1/models, /tokenize, /health, /metrics, /v1/stats (style hostcache), /version (style vllm),
POST /reset_prefix_cache, and POST /mock/restart, after which counters, their `_created` and the caches are a new
server's. A reply is a function of prompt and seed; a prompt of text is a word a token, token ids are taken as they are;
`cache_salt` in a body keeps its blocks apart. A prompt's whole blocks are cached when it is admitted, its reply's when
the answer ends. What the counters say always adds up: device + host + computed = prompt tokens.

The request log, where asked for, is one JSON object a line, written when a request is over, as a proxy in front of a
server could write it:

    ts           unix seconds of the arrival of the request's first byte
    latency_s    until its end; `ttft_s` until the first token, null where none came
    status       of the answer; 499 where the client left or the connection was reset first
    session      header X-Session-ID, else `session_id`, else `user` of the body, else null
    request      model, endpoint (completions | chat), prompt_tokens, max_tokens, stream, user; with `log_content` the
                 `messages` or `prompt` too
    usage        prompt_tokens, completion_tokens (those sent), cached_tokens; null where nothing was served
    prefix       digests of the prompt's beginnings, one every `prefix_tokens` tokens: a prompt that goes on from an
                 earlier one begins with its digests
    prefix_tokens  tokens between two digests: block_tokens × log_every_blocks

Knows nothing of clients, workloads or records. What a request says and an answer looks like is `mock_answers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TextIO

from hostcache import __version__
from hostcache.clock import Clock, WallClock, unix_time
from hostcache.errors import ConfigError, RequestRefused, ServerError
from hostcache.testing import mock_answers as answers
from hostcache.testing import mock_metrics as metrics
from hostcache.testing.mock_answers import Call, error_json, json_response
from hostcache.testing.mock_cache import MockCache
from hostcache.testing.mock_config import Fault, MockConfig, add_arguments, config_from
from hostcache.testing.mock_door import Door
from hostcache.testing.mock_http import (
    HEAD_LIMIT_BYTES,
    LAST_CHUNK,
    HttpRequest,
    Inbound,
    head,
    http_chunk,
    read_request,
    reset_connection,
    whole,
)
from hostcache.testing.mock_metrics import Ledger, Moment
from hostcache.testing.mock_text import WORD_IDS, drifted, reply_words

__all__ = ["Fault", "MockConfig", "MockServer", "add_arguments", "config_from", "serve_mock"]

MAX_BODY_BYTES = 64 << 20
_SSE = "text/event-stream; charset=utf-8"
_MID_STREAM = frozenset({"malformed", "stall", "reset", "cut-short", "stream-error"})


class _BrokenOff(Exception):
    """An answer ended early, as it was told to; its connection can go on."""


class _HungUp(_BrokenOff):
    """And its connection with it."""


class MockServer:
    """Serves while it is entered as an async context manager. `port` 0 takes a free one; see `url`.

    On a VirtualClock no request waits: what would take time moves the clock.
    """

    def __init__(self, config: MockConfig | None = None, *, clock: Clock | None = None, host: str = "127.0.0.1",
                 port: int = 0, unix_now: Callable[[], float] = unix_time) -> None:
        self.config = config or MockConfig()
        self._clock = clock or WallClock()
        self._host, self._port = host, port
        self._origin_unix_s = unix_now() - self._clock.now()
        self._door = Door(self.config.slots, self.config.waiting)
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._log: TextIO | None = None
        self._number = 0
        self._cache = self._new_cache()
        self._ledger = Ledger(created_unix_s=self._unix_s(), started_s=self._clock.now())

    # -- its life ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._open_log()
        try:
            self._server = await loop.create_server(
                lambda: asyncio.StreamReaderProtocol(Inbound(limit=HEAD_LIMIT_BYTES, loop=loop, now=self._clock.now),
                                                     self._connection, loop=loop),
                self._host, self._port, backlog=1024)
        except OSError as error:
            self._close_log()
            why = "in use by another process" if error.errno == errno.EADDRINUSE else f"no address to have ({error})"
            raise ServerError(f"{self._host}:{self._port} is {why}; give another --port (0 takes a free one)"
                              ) from error
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()
        self._close_log()

    @property
    def url(self) -> str:
        assert self._server is not None, "enter the server first"
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def stats(self) -> dict[str, Any]:
        """As /v1/stats has it, whatever the style. Raises InvariantBroken when the books do not balance."""
        now = self._moment()
        now.check()
        return metrics.stats_json(now)

    def reset_prefix_cache(self) -> None:
        self._cache.reset(keep_host=self.config.reset_keeps_host)

    def restart(self) -> None:
        """Counters at zero and created later than before, empty caches, faults counted anew. What is inside goes on;
        its tokens are counted in the life that admitted it."""
        self._number = 0
        self._cache = self._new_cache()
        self._ledger = Ledger(created_unix_s=max(self._unix_s(), self._ledger.created_unix_s + 0.001),
                              started_s=self._clock.now(), arrived=self._door.running + self._door.waiting)

    def _new_cache(self) -> MockCache:
        return MockCache(block_tokens=self.config.block_tokens, device_blocks=self.config.device_blocks,
                         host_blocks=self.config.host_blocks)

    def _unix_s(self) -> float:
        return self._origin_unix_s + self._clock.now()

    def _moment(self) -> Moment:
        return Moment(config=self.config, ledger=self._ledger, cache=self._cache, running=self._door.running,
                      waiting=self._door.waiting, now_s=self._clock.now())

    def _open_log(self) -> None:
        if self.config.request_log is None:
            return
        try:
            self._log = self.config.request_log.open("x", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"request_log {self.config.request_log}: {error.strerror}; give a new file in a folder "
                              "that can be written") from error

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()

    # -- connections and routes --------------------------------------------------------------------------------------

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert isinstance(reader, Inbound)
        assert task is not None
        self._connections.add(task)
        try:
            while (request := await read_request(reader, max_body_bytes=MAX_BODY_BYTES)) is not None:
                reader.on_left = task.cancel
                try:
                    await self._answer(request, writer)
                    await writer.drain()
                finally:
                    reader.on_left = None
                if not request.keep_alive:
                    return
        except RequestRefused as error:
            writer.write(_refusal(error))
        except (ConnectionError, _HungUp):
            pass
        except asyncio.CancelledError:
            # The client left, or the server ends: either way this task is over here, and nobody reads what is unsent.
            writer.transport.abort()
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, request: HttpRequest, writer: asyncio.StreamWriter) -> None:
        try:
            if request.path not in ("/v1/completions", "/v1/chat/completions"):
                writer.write(self._plain(request))
                return
            if request.method != "POST":
                raise RequestRefused(f"{request.path} takes POST, not {request.method}", status=405)
            call = answers.parse_call(request, self.config, number=self._number + 1,
                                      origin_unix_s=self._origin_unix_s)
        except RequestRefused as error:
            writer.write(_refusal(error))
            return
        self._number += 1
        try:
            await self._generate(call, writer)
        except _HungUp:
            raise
        except _BrokenOff:
            pass

    def _plain(self, request: HttpRequest) -> bytes:
        """Everything that generates nothing."""
        config, ours = self.config, self.config.style == "hostcache"
        match request.method, request.path:
            case "GET", "/health":
                return whole(200, b'{"status":"ok"}' if ours else b"")
            case "GET", "/v1/models":
                return json_response(200, {"object": "list", "data": [{
                    "id": config.model, "object": "model", "created": int(self._ledger.created_unix_s),
                    "owned_by": config.style, "max_model_len": config.max_context_tokens}]})
            case "GET", "/version" if not ours:
                return json_response(200, {"version": f"0.0.0+hostcache.mock.{__version__}"})
            case "POST", "/tokenize" if not config.no_tokenize:
                body = answers.read_json(request.body)
                ids = answers.token_ids(body, chat=body.get("messages") is not None)
                return json_response(200, {"tokens": ids, "count": len(ids),
                                           "max_model_len": config.max_context_tokens})
            case "GET", "/metrics":
                if "application/openmetrics-text" in request.headers.get("accept", ""):
                    text, kind = metrics.openmetrics_text(self._moment()), metrics.OPENMETRICS
                else:
                    text, kind = metrics.classic_text(self._moment()), metrics.CLASSIC
                return whole(200, text.encode(), content_type=kind)
            case "GET", "/v1/stats" if ours:
                return json_response(200, metrics.stats_json(self._moment()))
            case "POST", "/reset_prefix_cache":
                self.reset_prefix_cache()
                return whole(200, b"{}" if ours else b"")
            case "POST", "/mock/restart":
                self.restart()
                return whole(200, b"{}")
        raise RequestRefused(f"there is nothing at {request.method} {request.path[:200]}", status=404,
                             code="unknown_path")

    # -- generation --------------------------------------------------------------------------------------------------

    async def _generate(self, call: Call, writer: asyncio.StreamWriter) -> None:
        self._ledger.arrived += 1
        try:
            if call.fault == "refuse" or self._door.full:
                self._ledger.refused += 1
                call.status = self.config.refuse_status if call.fault == "refuse" else 429
                writer.write(self._busy(call.status))
                return
            async with self._inside() as waited:
                await self._serve(call, writer, admitted_s=self._clock.now() if waited else call.arrived_s)
        finally:
            if self._log is not None:
                line = answers.log_line(call, self.config, arrived_unix_s=self._origin_unix_s + call.arrived_s,
                                        now_s=self._clock.now())
                self._log.write(answers.to_json(line).decode() + "\n")
                self._log.flush()

    @asynccontextmanager
    async def _inside(self) -> AsyncIterator[bool]:
        """Holds a slot. Yields whether it had to be waited for."""
        waited = not self._door.open
        try:
            await self._door.enter()
        except asyncio.CancelledError:
            self._ledger.left_waiting += 1
            raise
        try:
            yield waited
        finally:
            self._door.leave()
            self._ledger.handled += 1

    async def _serve(self, call: Call, writer: asyncio.StreamWriter, *, admitted_s: float) -> None:
        config, cache, ledger = self.config, self._cache, self._ledger
        if call.fault == "http-500":
            ledger.failed += 1
            call.status = 500
            writer.write(json_response(500, error_json("the mock server failed, as it was told to",
                                                       kind="server_error", code="internal_error")))
            return
        call.report = report = cache.admit(call.chain.digests, len(call.prompt))
        if call.fault != "no-token":
            call.reply = reply_words(call.prompt, call.max_tokens, seed=config.seed)
        if call.fault == "drift" or (config.corrupt_restores and report.host_tokens):
            call.reply = drifted(call.reply)
        due_s = admitted_s + config.first_token_s(computed_tokens=sum(report.recomputed.values()),
                                                  restored_tokens=report.host_tokens)
        due_s += config.slow_s if call.fault == "slow" else 0.0
        try:
            await (self._stream if call.streamed else self._whole)(call, ledger, due_s, writer)
        except _BrokenOff:
            ledger.failed += 1
            raise
        except (asyncio.CancelledError, ConnectionError):
            ledger.left += 1
            raise
        finally:
            ledger.generated_tokens += call.sent_tokens
            ledger.decoded_tokens += max(0, call.sent_tokens - 1)
        ledger.finished += 1
        # The last token is never computed on: nobody asked for the one after it.
        call.chain.extend([WORD_IDS[word] for word in call.reply[:-1]])
        cache.retain(call.chain.digests)

    def _settle(self, call: Call, ledger: Ledger) -> None:
        assert call.report is not None
        call.first_token_s = self._clock.now()
        ledger.settle(call.report, restore_s=call.report.host_tokens * self.config.s_per_restored)

    async def _whole(self, call: Call, ledger: Ledger, due_s: float, writer: asyncio.StreamWriter) -> None:
        await self._clock.sleep_until(due_s)
        self._settle(call, ledger)
        if call.fault in ("stall", "reset"):
            await self._break_off(call, writer)
        gaps = max(0, -(-len(call.reply) // answers.chunk_tokens(call, self.config)) - 1)
        await self._clock.sleep_until(due_s + gaps * self.config.itl_s)
        call.sent_tokens, call.status, call.ended_s = len(call.reply), 200, self._clock.now()
        writer.write(json_response(200, answers.whole_answer(call, self.config)))

    async def _stream(self, call: Call, ledger: Ledger, due_s: float, writer: asyncio.StreamWriter) -> None:
        events = answers.stream_events(call, self.config)
        step, tail = answers.chunk_tokens(call, self.config), answers.stream_tail(call, self.config)
        breaks_at = max(1, len(events) // 2) if call.fault in _MID_STREAM else None
        if breaks_at == len(events):
            events.append(tail)  # on its own, so that there is something to break
        else:
            events[-1] += tail
        opening = head(200, _SSE, length=None, extra={"cache-control": "no-cache"})
        last = len(events) - 1
        for index, event in enumerate(events):
            await self._clock.sleep_until(due_s + index * self.config.itl_s)
            if index == 0:
                self._settle(call, ledger)
                call.status = 200
            if index == breaks_at:
                if call.fault != "malformed":
                    await self._break_off(call, writer)
                opening += http_chunk(b'data: {"id":"cmpl-broken","choices":[{"ind\n\n')
            if index == last:
                call.ended_s = self._clock.now()
            writer.write(opening + http_chunk(event) + (LAST_CHUNK if index == last else b""))
            opening = b""
            call.sent_tokens = min(len(call.reply), (index + 1) * step)
            await writer.drain()

    async def _break_off(self, call: Call, writer: asyncio.StreamWriter) -> None:
        """The rest of an answer does not come. Raises _BrokenOff."""
        match call.fault:
            case "reset":
                reset_connection(writer)
                raise _HungUp
            case "stall":
                await asyncio.get_running_loop().create_future()  # until the client leaves, or the server ends
            case "stream-error":
                error = answers.to_json(error_json("the mock engine failed, as it was told to", kind="server_error",
                                                   code="aborted"))
                writer.write(http_chunk(b"data: " + error + b"\n\ndata: [DONE]\n\n") + LAST_CHUNK)
            case _:
                writer.write(LAST_CHUNK)
        raise _BrokenOff

    def _busy(self, status: int) -> bytes:
        after_s = self.config.retry_after_s
        return json_response(
            status, error_json("the mock server is full; try again later", kind="rate_limit_error", code="server_busy"),
            extra={} if after_s is None else {"retry-after": f"{after_s:g}"})


async def serve_mock(config: MockConfig, host: str = "127.0.0.1", port: int = 0, *, clock: Clock | None = None,
                     on_ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve until this coroutine is cancelled; it returns then. `on_ready` gets the URL once requests are answered.

    Raises ServerError for an address that cannot be had, ConfigError for a log that cannot be written.
    """
    async with MockServer(config, clock=clock, host=host, port=port) as server:
        on_ready(server.url)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.get_running_loop().create_future()


def _refusal(error: RequestRefused) -> bytes:
    return json_response(error.status, error_json(str(error), kind="invalid_request_error", code=error.code,
                                                  param=error.param))
