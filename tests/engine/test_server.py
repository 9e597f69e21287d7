"""The HTTP surface over a scripted engine: a real uvicorn on loopback, the official client, clients that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from tests.engine.fake_engine import FakeEngine

from hostcache.clock import WallClock
from hostcache.engine.requests import GenerationRequest
from hostcache.engine.server import Application, JsonLog, bind, build_app, refuse_open_door
from hostcache.errors import ConfigError, ServerError
from hostcache.settings import Settings

TIMEOUT_S = 30.0


class Served:
    """A real server on a free port, in a thread; the log in memory."""

    def __init__(self, engine: FakeEngine, *, body_timeout_s: float = TIMEOUT_S, **settings: Any) -> None:
        self.engine = engine
        self.log = io.StringIO()
        self.settings = Settings(model="alias", concurrency=engine.slots, port=0, **settings)
        self.app: Application = build_app(engine, settings=self.settings, clock=WallClock(),
                                          log=JsonLog(self.log, "debug"), body_timeout_s=body_timeout_s)
        self.http = httpx.Client(timeout=TIMEOUT_S, trust_env=False, verify=False)
        self.sock = bind(self.settings)
        self.port: int = self.sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Served:
        started = threading.Event()

        class Server(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                started.set()

        self._server = Server(uvicorn.Config(self.app, http="httptools", ws="none", lifespan="off", log_config=None,
                                             access_log=False, timeout_graceful_shutdown=5))
        self._thread = threading.Thread(target=self._server.run, args=([self.sock],))
        self._thread.start()
        assert started.wait(TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.engine.gate.set()
        self._server.should_exit = True
        self._thread.join(TIMEOUT_S)
        self.sock.close()
        assert not self._thread.is_alive()
        assert self.engine.close(TIMEOUT_S)
        self.app.queue.check()
        assert self.app.queue.idle
        self.engine.check()

    @contextmanager
    def openai(self, key: str = "unused") -> Iterator[openai.OpenAI]:
        with openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=TIMEOUT_S) as client:
            yield client

    def call(self, method: str, path: str, body: bytes | dict[str, Any] | None = None,
             headers: dict[str, str] | None = None) -> httpx.Response:
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        return self.http.request(method, self.url + path, content=content, headers=headers)

    def post(self, path: str, body: bytes | dict[str, Any], **headers: str) -> httpx.Response:
        return self.call("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.getvalue().splitlines()]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One server for the tests that leave nothing behind."""
    with Served(FakeEngine()) as served:
        yield served


def last_seen(served: Served) -> GenerationRequest:
    return served.engine.seen[-1]


CHAT = [{"role": "user", "content": "hi"}]


# -- the official client ---------------------------------------------------------------------------------------------


def test_the_official_client_chats(served: Served) -> None:
    with served.openai() as client:
        answer = client.chat.completions.create(model="fake-model", messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == served.engine.reply
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert str(answer.system_fingerprint).startswith("hostcache-")
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens == len(b"<user>hi\n<assistant>")
    assert usage.completion_tokens == len(served.engine.reply)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 5
    extra = usage.model_dump()
    assert (extra["prompt_cache_hit_tokens"], extra["prompt_cache_miss_tokens"]) == (5, 15)
    assert extra["hostcache"] == {"device": 3, "host": 2, "recomputed": {"new": 15},
                                  "first_miss": {"reason": "new", "position": 5}}


def test_the_official_client_streams_a_chat_with_usage(served: Served) -> None:
    with served.openai() as client:
        stream = client.chat.completions.create(model="alias", messages=[{"role": "user", "content": "hi"}],
                                                stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == served.engine.reply
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 20 + len(served.engine.reply)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_with_continuous_usage_says_the_usage_so_far_on_every_piece(served: Served, path: str) -> None:
    body = {**(TEXT if path == "/v1/completions" else TALK), "stream": True, "max_tokens": 7, "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = [line.removeprefix("data: ") for line in served.post(path, body).text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    usages = [json.loads(event)["usage"] for event in events]
    assert [usage["completion_tokens"] for usage in usages] == [1, 2, 3, 4, 5, 6, 7, 7]
    assert len({usage["prompt_tokens"] for usage in usages}) == 1
    assert usages[-1] == usages[-2]


def test_the_official_client_completes_text_and_token_ids_alike(served: Served) -> None:
    with served.openai() as client:
        text = client.completions.create(model="fake-model", prompt="abc", max_tokens=5)
        ids = client.completions.create(model="fake-model", prompt=[97, 98, 99], max_tokens=5,
                                        extra_body={"return_token_ids": True})
        batch_of_one = client.completions.create(model="fake-model", prompt=["abc"], max_tokens=5)
    assert text.choices[0].text == ids.choices[0].text == batch_of_one.choices[0].text == "hello"
    assert text.choices[0].finish_reason == "length"
    assert ids.choices[0].model_dump()["token_ids"] == list(b"hello")
    assert ids.choices[0].model_dump()["prompt_token_ids"] == [97, 98, 99]


def test_the_official_client_streams_token_ids_and_logit_traces(served: Served) -> None:
    with served.openai() as client:
        stream = client.completions.create(
            model="fake-model", prompt="abc", max_tokens=5, stream=True,
            extra_body={"return_token_ids": True, "hostcache": {"trace_logits": True}})
        choices = [chunk.choices[0].model_dump() for chunk in stream]
    assert [token for choice in choices for token in choice["token_ids"]] == list(b"hello")
    traces = [trace for choice in choices for trace in choice["hostcache_logits"]]
    assert traces == [{"digest": "00" * 32, "margin": 0.5}] * 5
    assert choices[0]["prompt_token_ids"] == [97, 98, 99]
    assert "prompt_token_ids" not in choices[1]


def test_the_official_client_lists_and_finds_the_model(served: Served) -> None:
    with served.openai() as client:
        assert [model.id for model in client.models.list()] == ["fake-model"]
        assert client.models.retrieve("fake-model").model_dump()["max_model_len"] == 512
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.models.retrieve("gpt-9")


def test_the_official_client_reads_our_refusals(served: Served) -> None:
    with served.openai() as client:
        with pytest.raises(openai.BadRequestError, match="tools") as caught:
            client.chat.completions.create(model="fake-model", messages=[{"role": "user", "content": "hi"}], tools=[
                {"type": "function", "function": {"name": "f"}}])
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "tools")
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="gpt-9", prompt="x")
        assert missing.value.code == "model_not_found"


def test_everything_a_request_may_say_reaches_the_engine(served: Served) -> None:
    answer = served.post("/v1/chat/completions", {
        "model": "fake-model", "messages": [{"role": "developer", "content": [{"type": "text", "text": "be "},
                                                                            {"type": "text", "text": "brief"}]}, *CHAT],
        "max_completion_tokens": 3, "temperature": 0, "top_p": 0.5, "stop": ["x", "yy"], "seed": 7, "ignore_eos": True,
        "user": "u", "metadata": {}, "store": False, "n": 1, "tools": [], "logprobs": False, "response_format":
        {"type": "text"}, "presence_penalty": 0.0, "logit_bias": None, "service_tier": "auto",
        "hostcache": {"store": False, "load": False, "store_answer": False, "max_store_tokens": 64,
                      "max_load_tokens": 0, "session_id": "s", "expected_return_s": 2.5, "session_closed": True}})
    assert answer.status_code == 200
    request = last_seen(served)
    assert bytes(request.prompt).startswith(b"<system>be brief\n<user>hi")
    sampling, limits, hints = request.sampling, request.limits, request.hints
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (3, 0.0, 0.5)
    assert (sampling.stop, sampling.seed, sampling.ignore_eos) == (("x", "yy"), 7, True)
    assert (limits.store, limits.load, limits.store_answer) == (False, False, False)
    assert (limits.max_store_tokens, limits.max_load_tokens) == (64, 0)
    assert (hints.session_id, hints.expected_return_s, hints.session_closed) == ("s", 2.5, True)


def test_max_tokens_defaults_to_16_for_completions_and_the_rest_of_the_context_for_chat(served: Served) -> None:
    served.post("/v1/completions", {"prompt": "x"})
    assert last_seen(served).sampling.max_tokens == 16
    served.post("/v1/completions", {"prompt": [1] * 500})
    assert last_seen(served).sampling.max_tokens == 12
    served.post("/v1/chat/completions", {"messages": CHAT})
    assert last_seen(served).sampling.max_tokens == 512 - 20


def test_a_wrong_hint_never_fails_a_request(served: Served) -> None:
    hints = {"session_id": "s" * 10_000, "expected_return_s": -1e300}
    assert served.post("/v1/completions", {"prompt": "x", "hostcache": hints}).status_code == 200
    hint = last_seen(served).hints
    assert hint.expected_return_s is None
    assert hint.session_id is not None
    assert len(hint.session_id) == 64


# -- refusals --------------------------------------------------------------------------------------------------------

TEXT: dict[str, Any] = {"model": "fake-model", "prompt": "x"}
TALK: dict[str, Any] = {"model": "fake-model", "messages": CHAT}

REFUSED: list[tuple[str, str, bytes | dict[str, Any], int, str, str]] = [
    # path, what it is about, body, status, code, a word of the message
    ("/v1/completions", "bad JSON", b'{"prompt": ', 400, "invalid_json", "JSON"),
    ("/v1/completions", "NaN is not JSON", b'{"prompt": "x", "temperature": NaN}', 400, "invalid_json", "NaN"),
    ("/v1/completions", "deep nesting", b"[" * 200_000, 400, "invalid_json", "nested"),
    ("/v1/completions", "a number of 5,000 digits", b'{"seed": ' + b"9" * 5000 + b"}", 400, "invalid_json", "digits"),
    ("/v1/completions", "no object", b"[1]", 400, "invalid_json", "object"),
    ("/v1/completions", "empty body", b"", 400, "invalid_json", "JSON"),
    ("/v1/completions", "invalid UTF-8", b'{"prompt": "\xff"}', 400, "invalid_utf8", "UTF-8"),
    ("/v1/completions", "half a surrogate pair", b'{"prompt": "a\\ud800"}', 400, "invalid_utf8", "surrogate"),
    ("/v1/completions", "unknown model", {"model": "gpt-9", "prompt": "x"}, 404, "model_not_found", "gpt-9"),
    ("/v1/completions", "model of no text", {"model": 3, "prompt": "x"}, 400, "invalid_value", "model"),
    ("/v1/completions", "no prompt", {"model": "fake-model"}, 400, "invalid_value", "prompt"),
    ("/v1/completions", "empty prompt", {**TEXT, "prompt": ""}, 400, "invalid_value", "empty"),
    ("/v1/completions", "empty ids", {**TEXT, "prompt": []}, 400, "invalid_value", "empty"),
    ("/v1/completions", "two prompts", {**TEXT, "prompt": ["a", "b"]}, 400, "unsupported_value", "2 prompts"),
    ("/v1/completions", "ids of texts", {**TEXT, "prompt": [1, "b"]}, 400, "invalid_value", "prompt[1]"),
    ("/v1/completions", "ids of truths", {**TEXT, "prompt": [True]}, 400, "invalid_value", "prompt[0]"),
    ("/v1/completions", "negative id", {**TEXT, "prompt": [1, -1]}, 400, "invalid_value", "prompt[1] is -1"),
    ("/v1/completions", "id beyond", {**TEXT, "prompt": [256]}, 400, "invalid_value", "0 to 255"),
    ("/v1/completions", "negative max_tokens", {**TEXT, "max_tokens": -1}, 400, "invalid_value", "-1"),
    ("/v1/completions", "max_tokens 0", {**TEXT, "max_tokens": 0}, 400, "invalid_value", "at least 1"),
    ("/v1/completions", "max_tokens 1.5", {**TEXT, "max_tokens": 1.5}, 400, "invalid_value", "1.5"),
    ("/v1/completions", "max_tokens true", {**TEXT, "max_tokens": True}, 400, "invalid_value", "true"),
    ("/v1/completions", "prompt over the context", {**TEXT, "prompt": "x" * 512}, 400, "context_length_exceeded",
     "context is 512 tokens; the prompt has 512"),
    ("/v1/completions", "answer over the context", {**TEXT, "prompt": "x" * 500, "max_tokens": 13}, 400,
     "context_length_exceeded", "together 513"),
    ("/v1/completions", "temperature", {**TEXT, "temperature": 2.5}, 400, "invalid_value", "between 0 and 2"),
    ("/v1/completions", "top_p", {**TEXT, "top_p": 0}, 400, "invalid_value", "top_p"),
    ("/v1/completions", "stream", {**TEXT, "stream": "yes"}, 400, "invalid_value", "stream"),
    ("/v1/completions", "stream_options alone", {**TEXT, "stream_options": {"include_usage": True}}, 400,
     "invalid_value", "stream: true"),
    ("/v1/completions", "a stream option", {**TEXT, "stream": True, "stream_options": {"x": 1}}, 400,
     "unsupported_parameter", "stream_options.x"),
    ("/v1/completions", "continuous usage alone",
     {**TEXT, "stream": True, "stream_options": {"continuous_usage_stats": True}}, 400, "invalid_value",
     "include_usage: true"),
    ("/v1/completions", "empty stop", {**TEXT, "stop": [""]}, 400, "invalid_value", "stop"),
    ("/v1/completions", "stop of numbers", {**TEXT, "stop": [1]}, 400, "invalid_value", "stop"),
    ("/v1/completions", "seed", {**TEXT, "seed": 2**64}, 400, "invalid_value", "seed"),
    ("/v1/completions", "unknown field", {**TEXT, "temprature": 1}, 400, "unknown_parameter", "temprature"),
    ("/v1/completions", "chat field", {**TEXT, "messages": CHAT}, 400, "unknown_parameter", "messages"),
    ("/v1/completions", "unknown key", {**TEXT, "hostcache": {"stor": True}}, 400, "unknown_parameter", "stor"),
    ("/v1/completions", "extension of no object", {**TEXT, "hostcache": 1}, 400, "invalid_value", "hostcache"),
    ("/v1/completions", "store cap", {**TEXT, "hostcache": {"max_store_tokens": -1}}, 400, "invalid_value", "-1"),
    ("/v1/completions", "store flag", {**TEXT, "hostcache": {"store": 1}}, 400, "invalid_value", "hostcache.store"),
    ("/v1/completions", "salt", {**TEXT, "cache_salt": "s"}, 400, "unsupported_parameter", "protects nobody"),
    *[("/v1/completions", name, {**TEXT, name: value}, 400, "unsupported_parameter", name) for name, value in [
        ("n", 2), ("best_of", 2), ("echo", True), ("suffix", "s"), ("logprobs", 1), ("logprobs", 0),
        ("logit_bias", {"5": 1}), ("presence_penalty", 0.1), ("frequency_penalty", -1), ("top_k", 5), ("min_p", 0.1)]],
    *[("/v1/chat/completions", name, {**TALK, name: value}, 400, "unsupported_parameter", name) for name, value in [
        ("n", 3), ("tools", [{"type": "function"}]), ("tool_choice", "required"), ("functions", [{}]),
        ("response_format", {"type": "json_object"}), ("logprobs", True), ("top_logprobs", 2),
        ("reasoning_effort", "high"), ("modalities", ["audio"]), ("audio", {}), ("prediction", {})]],
    ("/v1/chat/completions", "no messages", {"model": "fake-model"}, 400, "invalid_value", "messages"),
    ("/v1/chat/completions", "empty messages", {**TALK, "messages": []}, 400, "invalid_value", "at least one"),
    ("/v1/chat/completions", "a role", {**TALK, "messages": [{"role": "king", "content": "x"}]}, 400, "invalid_value",
     "king"),
    ("/v1/chat/completions", "no content", {**TALK, "messages": [{"role": "user"}]}, 400, "invalid_value", "content"),
    ("/v1/chat/completions", "an image", {**TALK, "messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, "unsupported_value", "image_url"),
    ("/v1/chat/completions", "tool calls", {**TALK, "messages": [{"role": "assistant", "content": "", "tool_calls": [
        {"id": "1"}]}]}, 400, "unsupported_parameter", "tool_calls"),
    ("/v1/chat/completions", "two caps", {**TALK, "max_tokens": 1, "max_completion_tokens": 2}, 400, "invalid_value",
     "one of them"),
    ("/v1/chat/completions", "the template's word", {**TALK, "messages": [{"role": "assistant", "content": "x"}]}, 400,
     "invalid_value", "must not be the assistant"),
    ("/v1/nothing", "unknown path", {}, 404, "unknown_path", "/v1/nothing"),
    ("/health", "wrong method", {}, 405, "method_not_allowed", "GET"),
    ("/tokenize", "nothing to tokenize", {}, 400, "invalid_value", "prompt"),
    ("/tokenize", "unknown field", {"prompt": "x", "y": 1}, 400, "unknown_parameter", "y"),
    ("/reset_prefix_cache?weights_unchanged=maybe", "no truth", b"", 400, "invalid_value", "maybe"),
]


@pytest.mark.parametrize(("path", "about", "body", "status", "code", "word"), REFUSED,
                         ids=[f"{row[0].split('/')[-1]}-{row[1]}" for row in REFUSED])
def test_a_wrong_request_is_refused_in_openai_shape(served: Served, path: str, about: str, status: int, code: str,
                                                    word: str, body: bytes | dict[str, Any]) -> None:
    before = len(served.engine.seen)
    answer = served.post(path, body)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["code"] == code
    assert word in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 700
    assert len(served.engine.seen) == before


def test_a_body_over_the_limit_is_refused_announced_or_not() -> None:
    with Served(FakeEngine(), max_body_bytes=1000) as served:
        fits = json.dumps(TEXT).encode()
        assert served.post("/v1/completions", fits + b" " * (1000 - len(fits))).status_code == 200
        for content in (fits + b" " * 2000, iter([fits, b" " * 600, b" " * 600])):
            answer = served.http.post(served.url + "/v1/completions", content=content)
            assert answer.status_code == 413
            assert "at most 1000" in answer.json()["error"]["message"]


def test_what_can_never_fit_gets_the_engines_own_numbers() -> None:
    with Served(FakeEngine(refuse_at=8)) as served:
        answer = served.post("/v1/completions", {"prompt": "x" * 9})
        assert answer.status_code == 400
        assert answer.json()["error"] == {"message": "the prompt of 9 tokens can never fit a pool of 7",
                                          "type": "invalid_request_error", "param": None, "code": "too_big"}


# -- keys and salts --------------------------------------------------------------------------------------------------


def test_without_the_right_key_everything_but_health_is_401_and_takes_no_slot() -> None:
    with Served(FakeEngine(), api_key="right") as served:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic right"},
                        {"authorization": "Bearer \xff"}):
            raw = {name: value.encode("latin-1") for name, value in headers.items()}
            answer = served.http.post(served.url + "/v1/completions", json=TEXT,
                                      headers=raw)  # type: ignore[arg-type]
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert served.call("GET", "/v1/stats", headers=dict(headers) if headers.get("authorization", "").isascii()
                               else None).status_code == 401
        assert served.call("GET", "/health").status_code == 200
        assert served.app.queue.stats().arrived == 0
        with served.openai("right") as client:
            client.completions.create(model="fake-model", prompt="x")
        assert last_seen(served).salt == ""


def test_each_of_several_keys_has_a_salt_of_its_own_that_is_not_the_key() -> None:
    with Served(FakeEngine(), api_key="alpha,beta") as served:
        for key in ("alpha", "beta", "alpha"):
            with served.openai(key) as client:
                client.completions.create(model="fake-model", prompt="x")
        first, second, third = (request.salt for request in served.engine.seen)
        assert first == third != second
        assert "alpha" not in first
        assert len(first) == 64


# -- departures, failures, load --------------------------------------------------------------------------------------


def raw_request(served: Served, body: dict[str, Any]) -> socket.socket:
    """A request sent over a socket that the test can cut."""
    sock = socket.create_connection(("127.0.0.1", served.port), timeout=TIMEOUT_S)
    content = json.dumps(body).encode()
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
    return sock


def test_a_client_cut_in_mid_stream_aborts_its_request() -> None:
    with Served(FakeEngine(stall_at=3)) as served:
        with raw_request(served, {**TEXT, "stream": True}) as sock:
            seen = b""
            while b'"text":"l"' not in seen:
                seen += sock.recv(65536)
        assert served.engine.aborted.get(timeout=TIMEOUT_S) == served.engine.seen[0].request_id


def test_a_client_that_leaves_before_its_answer_aborts_its_request() -> None:
    with Served(FakeEngine(stall_at=0)) as served:
        with raw_request(served, TEXT):
            request = served.engine.arrivals.get(timeout=TIMEOUT_S)
        assert served.engine.aborted.get(timeout=TIMEOUT_S) == request.request_id
    line = next(line for line in served.lines() if line["event"] == "request")
    assert (line["status"], line["client_left"]) == (499, True)


def test_a_client_that_never_sends_its_body_does_not_keep_a_slot() -> None:
    with Served(FakeEngine(), body_timeout_s=0.05) as served:
        with socket.create_connection(("127.0.0.1", served.port), timeout=TIMEOUT_S) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            answer = b""
            while part := sock.recv(65536):  # until the server closes
                answer += part
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"body_too_slow"' in answer


def test_two_requests_of_one_name_do_not_meet() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    with Served(engine) as served:
        answers: list[httpx.Response] = []
        threads = [threading.Thread(target=lambda: answers.append(
            served.post("/v1/completions", TEXT, x_request_id="same name/!?+")))
            for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in threads:
            engine.arrivals.get(timeout=TIMEOUT_S)
        engine.gate.set()
        for thread in threads:
            thread.join()
        assert [answer.status_code for answer in answers] == [200, 200]
        assert {answer.headers["x-request-id"] for answer in answers} == {"same-name----"}
        assert {answer.json()["id"] for answer in answers} == {"cmpl-same-name----"}
        assert len({request.request_id for request in engine.seen}) == 2


def test_an_engine_failure_is_a_500_in_openai_shape_and_an_error_event_in_a_stream() -> None:
    with Served(FakeEngine(fail_at=3)) as served:
        answer = served.post("/v1/completions", TEXT)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "Traceback" not in answer.text
        with served.openai() as client, pytest.raises(openai.APIError, match="scripted failure"):
            list(client.completions.create(model="fake-model", prompt="x", stream=True))
    errors = [line for line in served.lines() if line["event"] == "request"]
    assert "scripted failure" in errors[0]["error"]
    assert errors[0]["level"] == "error"


def test_200_requests_against_16_slots_are_each_served_or_sent_away_with_retry_after() -> None:
    engine = FakeEngine(slots=16)

    async def flood(url: str) -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits, trust_env=False) as client:
            calls = [asyncio.create_task(client.post(url + "/v1/completions", json={**TEXT, "stream": i % 2 == 0}))
                     for i in range(200)]
            for done, call in enumerate(asyncio.as_completed(calls), start=1):
                await call
                if done == 120:  # everybody who cannot be inside (16) or wait (64) was sent away
                    engine.gate.set()
            return [call.result() for call in calls]

    with Served(engine) as served:
        engine.gate.clear()
        answers = asyncio.run(flood(served.url))
        counts = served.call("GET", "/v1/stats").json()["front_door"]
    statuses = [answer.status_code for answer in answers]
    assert (statuses.count(200), statuses.count(429)) == (16 + 64, 120)
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status_code == 429)
    assert engine.peak <= 16
    assert (counts["arrived"], counts["running"], counts["waiting"]) == (200, 0, 0)
    assert (counts["served"], counts["refused"]) == (statuses.count(200), statuses.count(429))


def test_a_full_house_answers_429_while_stats_and_health_still_answer() -> None:
    engine = FakeEngine(slots=1)
    engine.gate.clear()
    with Served(engine, front_door_waiting=0) as served, raw_request(served, TEXT) as sock:
        engine.arrivals.get(timeout=TIMEOUT_S)
        answer = served.post("/v1/chat/completions", TALK)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert answer.headers["x-request-id"]
        assert served.call("GET", "/v1/stats").json()["front_door"]["running"] == 1
        assert served.call("GET", "/health").status_code == 200
        engine.gate.set()
        assert sock.recv(100).startswith(b"HTTP/1.1 200")


def test_draining_finishes_what_runs_and_refuses_what_comes() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    with Served(engine) as served, raw_request(served, TEXT) as sock:
        engine.arrivals.get(timeout=TIMEOUT_S)
        served._server.servers[0].get_loop().call_soon_threadsafe(served.app.drain, 7.0)
        while served.call("GET", "/health").status_code == 200:
            pass
        answer = served.post("/v1/completions", TEXT)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
        assert answer.json()["error"]["code"] == "server_stopping"
        engine.gate.set()
        assert sock.recv(100).startswith(b"HTTP/1.1 200")


# -- the small routes ------------------------------------------------------------------------------------------------


def test_tokenize_counts_text_and_conversations(served: Served) -> None:
    assert served.post("/tokenize", {"model": "fake-model", "prompt": "hé"}).json() == {
        "tokens": [104, 195, 169], "count": 3, "max_model_len": 512}
    assert served.post("/tokenize", {"messages": CHAT}).json()["count"] == 20
    assert served.post("/tokenize", {"model": "gpt-9", "prompt": "x"}).status_code == 404


def test_stats_carry_the_engines_record_and_the_front_door(served: Served) -> None:
    record = served.call("GET", "/v1/stats").json()
    assert record["version"] == 1
    assert set(record) == {"version", "engine", "accounting", "host_cache", "host_cache_config", "front_door"}
    assert record["host_cache"] is None
    assert {"slots", "running", "waiting", "refused", "served"} <= set(record["front_door"])


def test_metrics_are_prometheus_text_with_help_and_total_only_on_counters(served: Served) -> None:
    answer = served.call("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    kinds = dict(line.split()[2:4] for line in answer.text.splitlines() if line.startswith("# TYPE"))
    assert "hostcache_front_door_refused_total" in kinds
    for name, kind in kinds.items():
        assert name.endswith("_total") == (kind == "counter")
    assert all(line.count("\n") == 0 and line for line in answer.text.splitlines())


def test_reset_says_whether_the_weights_are_unchanged(served: Served) -> None:
    for query in ("", "?weights_unchanged=true", "?weights_unchanged=false"):
        assert served.post("/reset_prefix_cache" + query, b"").status_code == 200
    assert served.engine.resets == [False, True, False]


def test_an_unhealthy_engine_says_what_is_wrong() -> None:
    with Served(FakeEngine(wrong="the engine's thread died: boom")) as served:
        answer = served.call("GET", "/health")
        assert answer.status_code == 503
        assert answer.json() == {"status": "the engine's thread died: boom"}


def test_one_log_line_a_request_tells_tokens_by_source_and_the_first_miss() -> None:
    with Served(FakeEngine()) as served:
        served.post("/v1/completions", {**TEXT, "prompt": "twelve bytes"}, x_request_id="mine")
        served.call("GET", "/health")
    generation, health = (line for line in served.lines() if line["event"] == "request")
    assert generation["level"] == "info"
    assert health["level"] == "debug"
    assert generation["request_id"] == "mine"
    assert (generation["device_tokens"], generation["host_tokens"], generation["recomputed"]) == (3, 2, {"new": 7})
    assert generation["first_miss"] == {"reason": "new", "position": 5}
    assert 0 <= generation["ttft_s"] <= generation["duration_s"]
    assert (generation["status"], generation["finish_reason"], generation["client_left"]) == (200, "length", False)


def test_keep_alive_survives_a_refusal(served: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        for body, status in ((b"{", 400), (json.dumps(TEXT).encode(), 200), (b"", 400)):
            connection.request("POST", "/v1/completions", body)
            answer = connection.getresponse()
            assert answer.status == status
            answer.read()


# -- the process -----------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from hostcache.clock import WallClock
from hostcache.engine.server import JsonLog, bind, run
from hostcache.settings import Settings
from tests.engine.fake_engine import FakeEngine

settings = Settings(port=0, drain_s=float(sys.argv[2]))
ready = lambda url: print("ready", url, file=sys.stderr, flush=True)
interrupted = run(FakeEngine(stall_at=int(sys.argv[1])), bind(settings), settings=settings, clock=WallClock(),
                  log=JsonLog(sys.stderr), on_ready=ready)
sys.exit(130 if interrupted else 0)
"""


@contextmanager
def process(root: Path, stall_at: int, drain_s: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    child = subprocess.Popen([sys.executable, "-c", SCRIPT, str(stall_at), str(drain_s)], cwd=root, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert child.stderr is not None
        line = child.stderr.readline()
        assert line.startswith("ready http://127.0.0.1:"), line + child.stderr.read()
        yield child, line.split()[1]
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize(("stop", "code"), [(subprocess.Popen.terminate, 0),
                                            (lambda child: child.send_signal(2), 130)], ids=["SIGTERM", "SIGINT"])
def test_a_signal_drains_an_idle_server_and_ends_it(root: Path, stop: Callable[[Any], None], code: int) -> None:
    with process(root, -1, 30.0) as (child, url):
        assert httpx.get(url + "/health").status_code == 200
        stop(child)
        out, err = child.communicate(timeout=TIMEOUT_S)
    assert (child.returncode, out) == (code, "")
    events = [json.loads(line)["event"] for line in err.splitlines()]
    assert events == ["draining", "drained", "stopped"]


def test_sigterm_ends_what_outlives_the_drain_and_exits_0(root: Path) -> None:
    with process(root, 2, 0.1) as (child, url), httpx.Client(timeout=TIMEOUT_S) as client:
        with client.stream("POST", url + "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data:")
            child.terminate()
            rest = [line for line in lines if line]
        assert "stopped before the answer was complete" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        out, _ = child.communicate(timeout=TIMEOUT_S)
    assert (child.returncode, out) == (0, "")


def test_a_port_in_use_is_refused_with_the_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"127.0.0.1:{port} is in use") as caught:
            bind(Settings(port=port))
    assert "--port" in str(caught.value)


def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ServerError, match=r"192\.0\.2\.1"):
        bind(Settings(host="192.0.2.1", port=0))
    with pytest.raises(ServerError, match="cannot be resolved"):
        bind(Settings(host="no such host", port=0))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "127.example.com"])
def test_beyond_loopback_a_key_is_needed(host: str) -> None:
    with pytest.raises(ConfigError, match="HOSTCACHE_API_KEY"):
        refuse_open_door(Settings(host=host))
    refuse_open_door(Settings(host=host, api_key="k"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_loopback_needs_no_key(host: str) -> None:
    refuse_open_door(Settings(host=host))
