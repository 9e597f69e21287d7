"""Sends requests to an OpenAI-compatible server and times them as its user would. Knows no workload and no table.

One request is an `Ask`, and what became of it a `Heard`, whatever the server did: `OpenAIClient.ask` raises for nothing
that comes from there. The first word of a reason is stable: `refused-429` and `refused-503` (until the retries were
spent), `http-NNN`, `unreachable`, `reset` (the connection broke, or ended before an answer), `cut-short` (the answer
ended early), `stalled` (silence), `closed` (by this client), `malformed-sse`, `malformed-http`, `stream-error` (the
server's word inside a stream), `no-token`, and `usage-missing`, which alone leaves the outcome `ok`.
"""

from __future__ import annotations

import contextlib
import json
import math
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from types import TracebackType
from typing import Any, Literal, Self

from hostcache.client.backpressure import RETRYABLE, Backpressure
from hostcache.client.stream import OK, StreamedAnswer, WholeAnswer, error_text
from hostcache.client.usage import ReplyUsage, read_usage
from hostcache.client.wire import Broken, Connections
from hostcache.clock import Clock
from hostcache.errors import ServerError
from hostcache.records import Outcome, RetryNote

__all__ = ["Ask", "Capabilities", "Endpoint", "Failure", "Heard", "OpenAIClient", "Reply", "ReplyUsage"]

Endpoint = Literal["completions", "chat"]
PLAIN_TEXT = "text/plain;version=0.0.4, */*;q=0.1"
"""Names no OpenMetrics: the Python client would prefer them whatever their weight, and write other names in them."""
_PATHS: Mapping[str, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_EXTENSIONS = ("return_token_ids", "ignore_eos")
"""Fields that are not OpenAI's, so that a server may refuse a request because of them."""
_NOT_THIS = frozenset({"http-400", "http-404", "http-405", "http-422", "http-501"})
"""Answers that say: this server has no such endpoint, or does not take such a request."""
_PROBE = " ".join(f"page {number}" for number in range(40))
"""Longer than a page of 64 tokens, so that a second time is a hit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. Greedy and streamed always. `prompt`: a text, token ids, or the messages of a chat.

    `extra` goes into the body as it is and wins over what stands there. `ignore_eos` and `want_ids` are left out for a
    server that `capabilities()` found to refuse them.
    """

    endpoint: Endpoint
    prompt: str | tuple[int, ...] | tuple[Mapping[str, str], ...]
    max_tokens: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    ignore_eos: bool = True
    want_ids: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What became of an Ask. Times are on the client's clock, taken as bytes arrive.

    `sent_s`: the first attempt, taken after the body was written out. `answered_attempt_s`: the attempt whose answer
    was not a refusal; None where there was none. `ended_s`: the last byte, or when a silence was given up. `chunk_s`:
    each arrival of text or tokens in seconds after `first_token_s`, so the first is 0. `reasoning`: see
    stream.StreamedAnswer. `digests` and `margins`: this project's traced logits, where asked for.
    """

    outcome: Outcome
    reason: str | None
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    usage: ReplyUsage | None
    sent_s: float
    answered_attempt_s: float | None
    first_token_s: float | None
    ended_s: float
    chunk_s: tuple[float, ...]
    retries: tuple[RetryNote, ...]
    reasoning: str = ""
    digests: tuple[str, ...] = ()
    margins: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a server can do, as it showed when asked.

    `token_ids`: takes ids as a prompt and returns ids. `ignore_eos`: takes the field (that it obeys cannot be told from
    one answer). `tokenize`: has /tokenize. `usage_cached`: says how much of a prompt came from a cache.
    """

    token_ids: bool
    ignore_eos: bool
    tokenize: bool
    chat: bool
    completions: bool
    max_context: int | None
    usage_cached: bool


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


class OpenAIClient:
    """One server. Use as an async context manager; calls may run concurrently."""

    def __init__(self, base_url: str, *, clock: Clock, api_key: str | None = None,
                 backpressure: Backpressure | None = None, read_timeout_s: float = 900.0,
                 tls: ssl.SSLContext | None = None) -> None:
        """`read_timeout_s`: the longest silence of a server that is waited out. Raises ConfigError for a bad address.

        No proxies from the environment: the server under test is reached directly or not at all.
        """
        self.base_url = base_url
        self.clock = clock
        self._backpressure = backpressure or Backpressure()
        self._read_timeout_s = read_timeout_s
        self._wires = Connections(base_url, clock=clock, tls=tls,
                                  headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"})
        self._leave_out: dict[str, frozenset[str]] = {}
        """Endpoint → fields that its server refuses."""
        self._absent_hit_is_zero = False
        self._capabilities: Capabilities | None = None
        self._tokenize_form = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self._wires.close()

    # -- what the server is ------------------------------------------------------------------------------------------

    async def healthy(self) -> bool:
        """Whether /health answers 200 now."""
        answer = WholeAnswer()
        try:
            await self._wires.exchange("GET", "/health", answer, timeout_s=5.0)
        except Broken:
            return False
        return answer.status == OK

    async def get_text(self, path: str, *, accept: str = PLAIN_TEXT) -> tuple[int, str, str]:
        """Status, content type and text. Raises ServerError only where there is no answer."""
        answer = await self._whole("GET", path, None, accept)
        return answer.status, answer.content_type, answer.text

    async def get_json(self, path: str) -> Any:
        """The JSON value at `path`; None where the server has nothing there. Raises ServerError for no answer."""
        answer = await self._whole("GET", path, None, "application/json")
        if answer.status != OK:
            return None
        try:
            return json.loads(answer.text)
        except (ValueError, RecursionError):
            return None

    async def stats(self) -> dict[str, Any]:
        """One scrape of /v1/stats. Raises ServerError."""
        stats = await self._json("GET", "/v1/stats")
        if stats.get("version") != 1:
            raise ServerError(f"{self.base_url}/v1/stats has version {stats.get('version')!r}; version 1 is known")
        return stats

    async def tokenize(self, text: str) -> list[int]:
        """Token ids without a start token, so that pieces can be put together. Raises ServerError."""
        return [int(token) for token in (await self._tokenized(text))["tokens"]]

    async def max_context(self) -> int:
        """Longest prompt + answer in tokens. Raises ServerError where the server does not say."""
        longest = await self._max_context()
        if longest is None:
            raise ServerError(f"{self.base_url} says nowhere how long a context may be")
        return longest

    async def model(self) -> str:
        return str((await self._card())["id"])

    async def capabilities(self) -> Capabilities:
        """What this server can do, found out once with a few short requests.

        A field that it refuses is left out of every later Ask. Raises ServerError when it answers nothing at all.
        """
        if self._capabilities is None:
            self._capabilities = await self._probe()
        return self._capabilities

    # -- requests ----------------------------------------------------------------------------------------------------

    async def ask(self, ask: Ask, *, model: str, rng: Random, body: bytes | None = None) -> Heard:
        """Sends it; refusals are waited out. `rng` jitters the waits. Raises nothing for what a server does.

        `body`: what `encoded` gave for this Ask, where it was made ahead of time (a long prompt takes milliseconds).
        """
        body = body or self.encoded(ask, model)
        path = _PATHS[ask.endpoint]
        sent_s = attempt_s = self.clock.now()
        retries: list[RetryNote] = []
        while True:
            answer = StreamedAnswer()
            broken: Broken | None = None
            try:
                await self._wires.exchange("POST", path, answer, timeout_s=self._read_timeout_s, body=body)
                if answer.status not in RETRYABLE:
                    answer.close()
            except Broken as error:
                broken = error
            if answer.status is None or answer.status not in RETRYABLE:
                return self._heard(answer, broken, sent_s, attempt_s, tuple(retries))
            # A refusal is one however its body ended: servers that did not read the request reset the connection.
            wait_s = self._backpressure.wait_s(len(retries), answer.retry_after_s, rng)
            if wait_s is None:
                refused = Broken(f"refused-{answer.status}", f"given up after {len(retries)} retries")
                return self._heard(answer, refused, sent_s, attempt_s, tuple(retries))
            retries.append(RetryNote(status=answer.status, retry_after_s=answer.retry_after_s, wait_s=wait_s))
            await self.clock.sleep_until(self.clock.now() + wait_s)
            attempt_s = self.clock.now()

    async def complete(self, prompt: Sequence[int], *, model: str, max_tokens: int, rng: Random,
                       trace_logits: bool = False, extension: Mapping[str, Any] | None = None) -> Reply | Failure:
        """Exactly `max_tokens` tokens of a completion; an answer without usage is a Failure here.

        `extension` is the request's `hostcache` object.
        """
        options = {**(extension or {}), **({"trace_logits": True} if trace_logits else {})}
        heard = await self.ask(
            Ask(endpoint="completions", prompt=tuple(prompt), max_tokens=max_tokens, want_ids=True,
                extra={"hostcache": options} if options else {}), model=model, rng=rng)
        duration_s = heard.ended_s - heard.sent_s
        if heard.outcome != "ok" or heard.usage is None or heard.first_token_s is None:
            return Failure(error=heard.reason or "", duration_s=duration_s, retries=heard.retries)
        return Reply(
            text=heard.text, token_ids=heard.token_ids, digests=heard.digests, margins=heard.margins,
            finish_reason=heard.finish_reason, usage=heard.usage, ttft_s=heard.first_token_s - heard.sent_s,
            duration_s=duration_s, retries=heard.retries)

    def encoded(self, ask: Ask, model: str) -> bytes:
        """The request's body."""
        body: dict[str, Any] = {
            "model": model, "prompt" if ask.endpoint == "completions" else "messages": ask.prompt,
            "max_tokens": ask.max_tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        if ask.ignore_eos:
            body["ignore_eos"] = True
        if ask.want_ids:
            body["return_token_ids"] = True
        for name in self._leave_out.get(ask.endpoint, ()):
            body.pop(name, None)
        return json.dumps({**body, **ask.extra}, separators=(",", ":")).encode()

    def _heard(self, answer: StreamedAnswer, broken: Broken | None, sent_s: float, attempt_s: float,
               retries: tuple[RetryNote, ...]) -> Heard:
        outcome: Outcome = "ok"
        reason = None
        if broken is not None:
            outcome = "refused" if broken.kind.startswith("refused-") else "error"
            reason = str(broken)
        usage = None
        try:
            usage = read_usage(answer.usage, answer.timings)
            missing = "the stream carried none although include_usage was asked"
        except (ValueError, TypeError, AttributeError) as error:
            missing = str(error)
        if usage is None and reason is None:
            reason = f"usage-missing: {missing}"
        if usage is not None and usage.hit_tokens is None and self._absent_hit_is_zero:
            usage = replace(usage, hit_tokens=0)
        first_s = answer.arrivals_s[0] if answer.arrivals_s else None
        answered = answer.status is not None and answer.status not in RETRYABLE
        # A silence ends when it is given up, not with the last byte before it.
        whole = broken is None or broken.kind == "no-token"
        ended_s = answer.last_s if whole and answer.last_s is not None else self.clock.now()
        return Heard(
            outcome=outcome, reason=reason, text="".join(answer.text), reasoning="".join(answer.reasoning),
            token_ids=tuple(answer.token_ids), finish_reason=answer.finish_reason, usage=usage, sent_s=sent_s,
            answered_attempt_s=attempt_s if answered else None, first_token_s=first_s, ended_s=ended_s,
            chunk_s=() if first_s is None else tuple(at_s - first_s for at_s in answer.arrivals_s), retries=retries,
            digests=tuple(str(trace.get("digest", "")) for trace in answer.logits),
            margins=tuple(_margin(trace.get("margin")) for trace in answer.logits))

    # -- probing -----------------------------------------------------------------------------------------------------

    async def _probe(self) -> Capabilities:
        model = await self.model()
        ids: tuple[int, ...] | None = None
        with contextlib.suppress(ServerError):
            ids = tuple(await self.tokenize(_PROBE))
        prompts: tuple[Any, ...] = (_PROBE,) if ids is None else (ids, _PROBE)
        completion = await self._first_taken("completions", prompts, model)
        chat = await self._first_taken("chat", (({"role": "user", "content": _PROBE},),), model)
        if completion is None and chat is None:
            raise ServerError(f"{self.base_url} takes neither completions nor chat for the model {model!r}")
        taken, heard = completion or chat or _nothing()
        if heard.usage is not None and heard.usage.hit_tokens is None:
            # Some servers leave a count of 0 out (SGLang does): ask again, when there is something to count.
            heard = await self.ask(taken, model=model, rng=Random(0))
            self._absent_hit_is_zero = heard.usage is not None and bool(heard.usage.hit_tokens)
        return Capabilities(
            token_ids=completion is not None and completion[0].prompt == ids and bool(completion[1].token_ids),
            ignore_eos="ignore_eos" not in self._leave_out.get(taken.endpoint, ()), tokenize=ids is not None,
            chat=chat is not None, completions=completion is not None, max_context=await self._max_context(),
            usage_cached=heard.usage is not None and heard.usage.hit_tokens is not None)

    async def _first_taken(self, endpoint: Endpoint, prompts: Sequence[Any], model: str) -> tuple[Ask, Heard] | None:
        """The first form of a request that the server takes; None where it takes none.

        Raises ServerError for an answer that says nothing about the form: it could be another one next time.
        """
        for prompt in prompts:
            for refused in (frozenset[str](), frozenset(_EXTENSIONS[:1]), frozenset(_EXTENSIONS[1:]),
                            frozenset(_EXTENSIONS)):
                self._leave_out[endpoint] = refused
                ask = Ask(endpoint=endpoint, prompt=prompt, max_tokens=2, want_ids=True)
                heard = await self.ask(ask, model=model, rng=Random(0))
                kind = (heard.reason or "").partition(":")[0]
                if heard.outcome == "ok" or kind == "no-token":
                    return ask, heard
                if kind not in _NOT_THIS and not (endpoint == "chat" and kind == "http-500"):
                    raise ServerError(f"{self.base_url} could not be probed: {_PATHS[endpoint]}: {heard.reason}")
                if kind not in ("http-400", "http-422"):
                    return None
        return None

    async def _card(self) -> dict[str, Any]:
        models = await self._json("GET", "/v1/models")
        try:
            card = models["data"][0]
            card["id"]
        except (KeyError, IndexError, TypeError) as error:
            raise ServerError(f"{self.base_url}/v1/models names no model") from error
        return dict(card)

    async def _max_context(self) -> int | None:
        card = await self._card()
        meta = card.get("meta")
        said = card.get("max_model_len") or (meta.get("n_ctx") or meta.get("n_ctx_train")
                                             if isinstance(meta, dict) else None)
        if said is None:
            try:
                said = (await self._tokenized("x")).get("max_model_len")
            except ServerError:
                return None
        return said if isinstance(said, int) and said > 0 else None

    async def _tokenized(self, text: str) -> dict[str, Any]:
        """The answer of /tokenize in whichever form this server takes: vLLM's and SGLang's, without their options,
        llama.cpp's. Raises ServerError."""
        forms: tuple[dict[str, Any], ...] = ({"prompt": text, "add_special_tokens": False}, {"prompt": text},
                                             {"content": text})
        failure = ServerError(f"{self.base_url}/tokenize gave no list of token ids")
        for form in range(self._tokenize_form, len(forms)):
            try:
                answer = await self._json("POST", "/tokenize", body=forms[form])
            except ServerError as error:
                failure = error
                continue
            tokens = answer.get("tokens")
            # llama.cpp answers an unknown form with no tokens.
            if isinstance(tokens, list) and all(type(token) is int for token in tokens) and (tokens or not text):
                self._tokenize_form = form
                return answer
        raise failure

    async def _json(self, method: str, path: str, *, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        answer = await self._whole(method, path, body, "application/json")
        try:
            value = json.loads(answer.text)
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{method} {self.base_url}{path} answered {answer.status} and no JSON: "
                              f"{error_text(answer.text)}") from error
        if answer.status != OK or not isinstance(value, dict):
            raise ServerError(f"{method} {self.base_url}{path} answered {answer.status}: {error_text(value)}")
        return value

    async def _whole(self, method: str, path: str, body: Mapping[str, Any] | None, accept: str) -> WholeAnswer:
        answer = WholeAnswer()
        try:
            await self._wires.exchange(method, path, answer, timeout_s=60.0, accept=accept,
                                       body=None if body is None else json.dumps(body).encode())
        except Broken as error:
            raise ServerError(f"{method} {self.base_url}{path}: {error}") from error
        return answer


def _margin(value: object) -> float:
    """Infinite where the server had no second token to compare with (it says null)."""
    return float(value) if isinstance(value, int | float) else math.inf


def _nothing() -> tuple[Ask, Heard]:
    raise AssertionError("one endpoint was taken")
