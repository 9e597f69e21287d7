"""Sends completions to an OpenAI-compatible server and times them as its user would. Knows no workload and no table.

TTFT is the first chunk that carries a token minus the first attempt; the duration ends with the last byte of the
answer. Both include every refusal that was waited out.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import TracebackType
from typing import Any, Self

from hostcache.client.backpressure import RETRYABLE, Backpressure, parse_retry_after
from hostcache.clock import Clock
from hostcache.errors import MissingDependency, ServerError
from hostcache.records import RetryNote

try:
    import httpx
except ImportError as error:
    raise MissingDependency("httpx is not installed; run: pip install 'hostcache[bench]'") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyUsage:
    """The server's own account of one request. None where it did not say."""

    prompt_tokens: int
    completion_tokens: int
    hit_tokens: int | None
    device_tokens: int | None
    host_tokens: int | None
    recomputed: dict[str, int] | None
    first_miss: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A finished answer. Times in seconds from the first attempt."""

    text: str
    token_ids: tuple[int, ...]
    digests: tuple[str, ...]
    margins: tuple[float, ...]
    finish_reason: str | None
    usage: ReplyUsage
    ttft_s: float
    duration_s: float
    retries: tuple[RetryNote, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A turn that was not served: one line of why."""

    error: str
    duration_s: float
    retries: tuple[RetryNote, ...]


class _Refused(Exception):
    def __init__(self, status: int, retry_after_s: float | None) -> None:
        super().__init__(f"refused with {status}")
        self.status = status
        self.retry_after_s = retry_after_s


class _Failed(Exception):
    pass


@dataclass(slots=True)
class _Stream:
    """What one streamed answer has said so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logits: list[Mapping[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    first_token_s: float | None = None

    def take(self, chunk: Mapping[str, Any], now_s: float) -> None:
        if chunk.get("error"):
            raise _Failed(f"the stream ended with an error: {_error_text(chunk)}")
        for choice in chunk.get("choices") or ():
            text, ids = choice.get("text") or "", choice.get("token_ids") or ()
            if self.first_token_s is None and (text or ids):
                self.first_token_s = now_s
            self.text.append(text)
            self.token_ids.extend(ids)
            self.logits.extend(choice.get("hostcache_logits") or ())
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if chunk.get("usage"):
            self.usage = chunk["usage"]


class OpenAIClient:
    """One server. Use as an async context manager; calls may run concurrently."""

    def __init__(self, base_url: str, *, clock: Clock, api_key: str | None = None,
                 backpressure: Backpressure | None = None, read_timeout_s: float = 900.0,
                 transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.base_url = base_url
        self._clock = clock
        self._backpressure = backpressure or Backpressure()
        # No proxies from the environment: the server under test is reached directly or not at all.
        self._http = httpx.AsyncClient(
            base_url=base_url, trust_env=False, transport=transport,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(10.0, read=read_timeout_s, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self._http.aclose()

    async def healthy(self) -> bool:
        """Whether /health answers 200 now."""
        try:
            answer = await self._http.get("/health", timeout=5.0)
        except httpx.HTTPError:
            return False
        return answer.status_code == httpx.codes.OK

    async def stats(self) -> dict[str, Any]:
        """One scrape of /v1/stats. Raises ServerError."""
        stats = await self._json("GET", "/v1/stats")
        if stats.get("version") != 1:
            raise ServerError(f"{self.base_url}/v1/stats has version {stats.get('version')!r}; version 1 is known")
        return stats

    async def tokenize(self, text: str) -> list[int]:
        answer = await self._json("POST", "/tokenize", body={"prompt": text})
        tokens = answer.get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise ServerError(f"{self.base_url}/tokenize gave no list of token ids")
        return tokens

    async def max_context(self) -> int:
        """Longest prompt + answer in tokens."""
        return int((await self._json("POST", "/tokenize", body={"prompt": "x"}))["max_model_len"])

    async def model(self) -> str:
        return str((await self._json("GET", "/v1/models"))["data"][0]["id"])

    async def _json(self, method: str, path: str, *, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            answer = await self._http.request(method, path, json=body, timeout=60.0)
            value = answer.json()
        except (httpx.HTTPError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ServerError(f"{method} {self.base_url}{path}: {_reason(error)}") from error
        if answer.status_code != httpx.codes.OK or not isinstance(value, dict):
            raise ServerError(f"{method} {self.base_url}{path} answered {answer.status_code}: {_error_text(value)}")
        return value

    async def complete(self, prompt: Sequence[int], *, model: str, max_tokens: int, rng: Random,
                       trace_logits: bool = False, extension: Mapping[str, Any] | None = None) -> Reply | Failure:
        """Greedy, streamed, exactly `max_tokens` tokens; refusals are waited out. Never raises for a bad answer.

        `rng` jitters the waits. `extension` is the request's `hostcache` object.
        """
        options = {**(extension or {}), **({"trace_logits": True} if trace_logits else {})}
        body: dict[str, Any] = {
            "model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True, "return_token_ids": True,
            **({"hostcache": options} if options else {}),
        }
        started_s = self._clock.now()
        retries: list[RetryNote] = []
        while True:
            try:
                stream = await self._attempt(body)
                return self._reply(stream, started_s, tuple(retries))
            except _Refused as refused:
                wait_s = self._backpressure.wait_s(len(retries), refused.retry_after_s, rng)
                if wait_s is None:
                    return Failure(
                        error=f"refused with {refused.status} after {len(retries)} retries",
                        duration_s=self._clock.now() - started_s, retries=tuple(retries),
                    )
                retries.append(RetryNote(status=refused.status, retry_after_s=refused.retry_after_s, wait_s=wait_s))
                await self._clock.sleep_until(self._clock.now() + wait_s)
            except (_Failed, httpx.HTTPError) as error:
                return Failure(error=_reason(error), duration_s=self._clock.now() - started_s, retries=tuple(retries))

    async def _attempt(self, body: Mapping[str, Any]) -> _Stream:
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code in RETRYABLE:
                await answer.aread()
                raise _Refused(answer.status_code, parse_retry_after(answer.headers.get("retry-after")))
            if answer.status_code != httpx.codes.OK:
                text = (await answer.aread()).decode("utf-8", "replace")
                raise _Failed(f"HTTP {answer.status_code}: {_error_text(text)}")
            stream, done = _Stream(), False
            async for data in _server_sent(answer):
                if data == "[DONE]":
                    done = True
                    continue
                try:
                    chunk = json.loads(data)
                except json.JSONDecodeError as error:
                    raise _Failed(f"a chunk of the stream is not JSON: {data[:80]!r}") from error
                stream.take(chunk, self._clock.now())
            if not done:
                raise _Failed("the stream ended before [DONE]")
            return stream

    def _reply(self, stream: _Stream, started_s: float, retries: tuple[RetryNote, ...]) -> Reply:
        if stream.usage is None:
            raise _Failed("the stream carried no usage although include_usage was asked")
        if stream.first_token_s is None:
            raise _Failed("the stream carried no token")
        return Reply(
            text="".join(stream.text), token_ids=tuple(stream.token_ids),
            digests=tuple(str(trace["digest"]) for trace in stream.logits),
            margins=tuple(float(trace["margin"]) for trace in stream.logits),
            finish_reason=stream.finish_reason, usage=_usage(stream.usage),
            ttft_s=stream.first_token_s - started_s, duration_s=self._clock.now() - started_s, retries=retries,
        )


def _usage(usage: Mapping[str, Any]) -> ReplyUsage:
    report = usage.get("hostcache") or {}
    details = usage.get("prompt_tokens_details") or {}
    hit = usage.get("prompt_cache_hit_tokens", details.get("cached_tokens"))
    recomputed = report.get("recomputed")
    return ReplyUsage(
        prompt_tokens=int(usage["prompt_tokens"]), completion_tokens=int(usage["completion_tokens"]),
        hit_tokens=None if hit is None else int(hit),
        device_tokens=report.get("device"), host_tokens=report.get("host"),
        recomputed=None if recomputed is None else {str(reason): int(n) for reason, n in recomputed.items()},
        first_miss=report.get("first_miss"),
    )


async def _server_sent(answer: httpx.Response) -> AsyncIterator[str]:
    async for line in answer.aiter_lines():
        if line.startswith("data:"):
            yield line[5:].strip()


def _error_text(value: object) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return str(value)[:200]
    if isinstance(value, dict):
        error = value.get("error", value)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
    return str(value)[:200]


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
