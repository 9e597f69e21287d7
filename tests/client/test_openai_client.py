"""The client against a server that plays raw bytes over real sockets: what it sends, times, retries, never raises."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Any, TypeVar

import pytest
from tests.client.scripted import (
    Play,
    Request,
    Scripted,
    answer,
    answer_json,
    chunked,
    head,
    said,
    serving,
    stream,
    usage,
    word,
)

from hostcache.client.backpressure import Backpressure
from hostcache.client.openai import Ask, Capabilities, Endpoint, Failure, Heard, OpenAIClient, Reply
from hostcache.clock import Clock, VirtualClock, WallClock
from hostcache.errors import ServerError

T = TypeVar("T")
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_cache_hit_tokens": 2,
         "hostcache": {"device": 1, "host": 1, "recomputed": {"new": 1}, "first_miss": {"reason": "new"}}}
GOOD = stream(word(), word("a", [8]), word("b", [9], finish_reason="length"), usage(USAGE), "[DONE]")
IDS = Ask(endpoint="completions", prompt=(1, 2, 3), max_tokens=2, want_ids=True)


def refused(status: int, *headers: str) -> Play:
    return answer(status, b"{}", *headers)


def talk(*plays: Play, then: Callable[[OpenAIClient, Scripted], Awaitable[T]], clock: Clock | None = None,
         budget: int = 20, routes: dict[str, Callable[[Request], Play]] | None = None) -> T:
    async def go() -> T:
        async with serving(*plays, routes=routes) as server, OpenAIClient(
                server.url, clock=clock or VirtualClock(), backpressure=Backpressure(budget=budget), api_key="k",
                read_timeout_s=0.1) as client:
            return await then(client, server)

    return asyncio.run(go())


def ask(*plays: Play, ask: Ask = IDS, clock: Clock | None = None, budget: int = 20) -> tuple[Heard, list[Request]]:
    async def then(client: OpenAIClient, server: Scripted) -> tuple[Heard, list[Request]]:
        return await client.ask(ask, model="m", rng=Random(7)), server.requests

    return talk(*plays, then=then, clock=clock, budget=budget)


def test_one_request_says_what_was_asked_and_hears_everything() -> None:
    heard, (request,) = ask(GOOD)
    assert (request.method, request.path) == ("POST", "/v1/completions")
    assert request.headers["authorization"] == "Bearer k"
    assert request.body == {
        "model": "m", "prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0, "stream": True, "ignore_eos": True,
        "return_token_ids": True, "stream_options": {"include_usage": True}}
    assert (heard.outcome, heard.reason, heard.text, heard.token_ids) == ("ok", None, "ab", (8, 9))
    assert heard.finish_reason == "length"
    assert heard.usage is not None
    assert (heard.usage.hit_tokens, heard.usage.device_tokens, heard.usage.host_tokens) == (2, 1, 1)
    assert heard.usage.recomputed == {"new": 1}
    assert heard.retries == ()


@pytest.mark.parametrize(("wanted", "path", "sent"), [
    (Ask(endpoint="completions", prompt="once", max_tokens=4, ignore_eos=False, extra={"cache_salt": "s"}),
     "/v1/completions", {"prompt": "once", "cache_salt": "s"}),
    (Ask(endpoint="chat", prompt=({"role": "user", "content": "hi"},), max_tokens=4, extra={"temperature": 0.5}),
     "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "ignore_eos": True}),
])
def test_texts_and_chats_go_where_they_belong_and_extra_wins(wanted: Ask, path: str, sent: Mapping[str, Any]) -> None:
    heard, (request,) = ask(stream(said("hello"), usage(USAGE), "[DONE]"), ask=wanted)
    assert heard.text == "hello"
    assert request.path == path
    assert request.body == {"model": "m", "max_tokens": 4, "temperature": 0, "stream": True,
                            "stream_options": {"include_usage": True}, **sent}


def test_times_are_those_of_the_bytes_and_every_arrival_is_kept() -> None:
    clock = VirtualClock(100.0)

    def later(seconds: float) -> Callable[[], None]:
        return lambda: clock.advance(seconds)

    heard, _ = ask(stream(later(0.5), word(), later(0.5), word("a", [8]), later(2.0), word("b", [9]), later(0.25),
                          usage(USAGE), later(0.25), "[DONE]", later(9.0)), clock=clock)
    assert (heard.sent_s, heard.answered_attempt_s) == (100.0, 100.0)
    assert heard.first_token_s == pytest.approx(101.0)  # the empty chunk is no token
    assert heard.chunk_s == pytest.approx((0.0, 2.0))
    assert heard.ended_s == pytest.approx(103.5)  # nobody waits for what follows [DONE]


def test_refusals_are_waited_out_and_the_attempts_are_told_apart() -> None:
    heard, requests = ask(refused(429, "Retry-After: 3"), refused(503), GOOD)
    assert heard.outcome == "ok"
    assert [(note.status, note.retry_after_s) for note in heard.retries] == [(429, 3.0), (503, None)]
    first, second = (note.wait_s for note in heard.retries)
    assert 3.0 <= first <= 3.75
    assert 0.75 <= second <= 1.25
    assert heard.sent_s == 0.0
    assert heard.answered_attempt_s == pytest.approx(first + second)
    assert heard.first_token_s == pytest.approx(first + second)
    assert len({request.connection for request in requests}) == 1


def test_a_refusal_is_one_even_if_the_connection_breaks_before_its_body_is_whole() -> None:
    heard, _ = ask(Play(pieces=(head(429, "Content-Length: 10", "Retry-After: 1"),), end="reset"), GOOD)
    assert heard.outcome == "ok"
    assert [note.retry_after_s for note in heard.retries] == [1.0]


def test_a_turn_that_spends_its_retries_is_refused_with_the_count() -> None:
    heard, _ = ask(*[refused(429)] * 3, budget=2)
    assert (heard.outcome, heard.reason) == ("refused", "refused-429: given up after 2 retries")
    assert (heard.answered_attempt_s, heard.first_token_s, heard.usage) == (None, None, None)
    assert heard.ended_s == pytest.approx(sum(note.wait_s for note in heard.retries))


TOKEN = word("a", [1])


@pytest.mark.parametrize(("play", "reason", "text"), [
    (answer_json({"error": {"message": "boom"}}, 500), "http-500: boom", ""),
    (answer(502, b"<html>bad gateway</html>"), "http-502: <html>bad gateway</html>", ""),
    (answer_json({"error": {"message": "prompt too long"}}, 400), "http-400: prompt too long", ""),
    (Play(pieces=(), end="close"), "reset: the server closed the connection before it answered", ""),
    (Play(pieces=(), end="reset"), "reset: ", ""),
    (stream(TOKEN, end="reset", last=b""), "reset: ", "a"),
    (stream(TOKEN, end="close", last=b""), "cut-short: ", "a"),
    (stream(TOKEN, usage(USAGE)), "cut-short: the stream ended before [DONE]", "a"),
    (stream(TOKEN, end="silence", last=b""), "stalled: no byte for 0.1 s", "a"),
    (Play(pieces=(), end="silence"), "stalled: no byte for 0.1 s", ""),
    (stream(TOKEN, "{oops", "[DONE]"), "malformed-sse: a chunk is not JSON: '{oops'", "a"),
    (stream(TOKEN, "[1, 2]", "[DONE]"), "malformed-sse: a chunk has not the shape of one: '[1, 2]'", "a"),
    (answer(200, b"\xff\xfe no events"), "malformed-sse: the answer is no stream of events", ""),
    (Play(pieces=(head(200, "Transfer-Encoding: chunked") + chunked(b"data: \xff\n\n"),)), "malformed-sse: ", ""),
    (stream(TOKEN, {"error": {"message": "engine stopped"}}), "stream-error: engine stopped", "a"),
    (stream(usage(USAGE), "[DONE]"), "no-token: the stream carried no text and no token ids, although its usage says 2 "
     "tokens", ""),
    (Play(pieces=(b"SSH-2.0\r\n\r\n",)), "malformed-http: ", ""),
    (Play(pieces=(head(200, "Transfer-Encoding: chunked") + b"zz\r\n",)), "malformed-http: ", ""),
    (answer(301, b"", "Location: /elsewhere"), "http-301: ", ""),
])
def test_whatever_a_server_does_is_heard_with_a_reason_and_nothing_is_raised(play: Play, reason: str,
                                                                           text: str) -> None:
    heard, _ = ask(play, clock=WallClock())
    assert heard.outcome == "error"
    assert heard.reason is not None
    assert heard.reason.startswith(reason)
    assert "\n" not in heard.reason
    assert heard.text == text
    assert (heard.first_token_s is not None) == bool(text)
    assert heard.ended_s >= heard.sent_s


def test_the_next_request_is_answered_whatever_became_of_the_last() -> None:
    async def then(client: OpenAIClient, server: Scripted) -> list[str]:
        return [(await client.ask(IDS, model="m", rng=Random(0))).outcome for _ in range(4)]

    garbled = stream(TOKEN, "{oops", end="silence", last=b"")
    outcomes = talk(Play(pieces=(), end="reset"), GOOD, garbled, GOOD, then=then)
    assert outcomes == ["error", "ok", "error", "ok"]


@pytest.mark.parametrize("told", [None, {"prompt_tokens": "many", "completion_tokens": 1}, [3]])
def test_usage_that_is_missing_or_unreadable_leaves_the_answer_and_says_so(told: object) -> None:
    heard, _ = ask(stream(TOKEN, *([] if told is None else [usage(told)]), "[DONE]"))
    assert (heard.outcome, heard.text, heard.usage) == ("ok", "a", None)
    assert heard.reason is not None
    assert heard.reason.startswith("usage-missing: ")


def test_a_server_that_never_ends_the_answer_after_done_holds_nobody() -> None:
    heard, _ = ask(stream(TOKEN, usage(USAGE), "[DONE]", end="silence", last=b""), clock=WallClock())
    assert heard.outcome == "ok"


def test_a_server_that_is_gone_is_unreachable() -> None:
    async def go() -> Heard:
        async with serving() as server:
            url = server.url
        async with OpenAIClient(url, clock=VirtualClock()) as client:
            return await client.ask(IDS, model="m", rng=Random(0))

    heard = asyncio.run(go())
    assert heard.outcome == "error"
    assert str(heard.reason).startswith("unreachable: ")


def test_a_request_that_is_on_its_way_when_the_client_closes_says_so() -> None:
    async def go() -> Heard:
        async with serving(Play(pieces=(), end="silence")) as server:
            async with OpenAIClient(server.url, clock=VirtualClock()) as client:
                asked = asyncio.create_task(client.ask(IDS, model="m", rng=Random(0)))
                await server.asked.wait()
            return await asked

    heard = asyncio.run(go())
    assert (heard.outcome, heard.reason) == ("error", "closed: this client was closed")


def test_many_requests_share_kept_connections() -> None:
    async def then(client: OpenAIClient, server: Scripted) -> int:
        for _ in range(3):
            heard = await asyncio.gather(*(client.ask(IDS, model="m", rng=Random(0)) for _ in range(4)))
            assert all(each.token_ids == (8, 9) for each in heard)
        return server.connections

    at_once = Play(pieces=[b"".join(piece for piece in GOOD.pieces if isinstance(piece, bytes))])
    assert talk(*[at_once] * 12, then=then, clock=WallClock()) == 4


# -- complete, for those who want an answer or a failure -------------------------------------------------------------


def complete(*plays: Play, trace: bool = False, budget: int = 20) -> tuple[Reply | Failure, list[Request]]:
    async def then(client: OpenAIClient, server: Scripted) -> tuple[Reply | Failure, list[Request]]:
        return (await client.complete([1, 2, 3], model="m", max_tokens=2, rng=Random(7), trace_logits=trace),
                server.requests)

    return talk(*plays, then=then, budget=budget)


def test_a_reply_counts_from_the_first_attempt() -> None:
    reply, _ = complete(refused(429, "Retry-After: 3"), GOOD)
    assert isinstance(reply, Reply)
    assert (reply.text, reply.token_ids, reply.finish_reason) == ("ab", (8, 9), "length")
    assert reply.ttft_s == reply.duration_s == pytest.approx(reply.retries[0].wait_s)


def test_traced_logits_come_with_every_token() -> None:
    reply, (request,) = complete(stream(
        word("a", [1], hostcache_logits=[{"digest": "d1", "margin": 0.5}]),
        word("b", [2], hostcache_logits=[{"digest": "d2", "margin": None}]), usage(USAGE), "[DONE]"), trace=True)
    assert isinstance(reply, Reply)
    assert (reply.digests, reply.margins) == (("d1", "d2"), (0.5, float("inf")))
    assert request.body["hostcache"] == {"trace_logits": True}


@pytest.mark.parametrize(("play", "error"), [
    (stream(TOKEN, "[DONE]"), "usage-missing"), (stream(TOKEN, usage(USAGE)), "cut-short"),
    (answer_json({"error": {"message": "no"}}, 400), "http-400: no")])
def test_half_an_answer_is_a_failure(play: Play, error: str) -> None:
    failure, _ = complete(play)
    assert isinstance(failure, Failure)
    assert failure.error.startswith(error)


# -- what the server is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("play", "said"), [
    (answer_json({"error": {"message": "no key"}}, 401), "401: no key"), (answer(200, b"<html>"), "no JSON"),
    (answer_json({"version": 2}), "version 2"), (answer_json([1]), "answered 200"),
    (Play(pieces=(), end="reset"), "reset"),
])
def test_a_scrape_that_is_not_what_was_expected_is_an_error(play: Play, said: str) -> None:
    async def then(client: OpenAIClient, server: Scripted) -> None:
        await client.stats()

    with pytest.raises(ServerError, match=said):
        talk(play, then=then)


def test_a_text_comes_with_its_status_and_type() -> None:
    async def then(client: OpenAIClient, server: Scripted) -> tuple[int, str, str]:
        assert await client.healthy() is False
        return await client.get_text("/metrics")

    assert talk(answer(503, b""), answer(404, "né".encode(), "Content-Type: text/plain"), then=then) == (
        404, "text/plain", "né")


class Server:
    """A server with likes and dislikes; what it takes for granted is what the probe must find out."""

    def __init__(self, *, refuses: tuple[str, ...] = (), chat: bool = True, completions: bool = True,
                 tokenize: str | None = "prompt", ids: bool = True, cached: str = "always",
                 card: Mapping[str, Any] | None = None) -> None:
        self.refuses, self.ids, self.cached = refuses, ids, cached
        self.seen: set[str] = set()
        self.routes: dict[str, Callable[[Request], Play]] = {
            "/v1/models": lambda _: answer_json({"data": [{"id": "m", **(card or {"max_model_len": 4096})}]})}
        if completions:
            self.routes["/v1/completions"] = self.generate
        if chat:
            self.routes["/v1/chat/completions"] = self.generate
        if tokenize:
            self.routes["/tokenize"] = lambda request: answer_json(
                {"tokens": list(range(len(request.body.get(tokenize, ""))))})

    def generate(self, request: Request) -> Play:
        if wrong := [name for name in self.refuses if name in request.body]:
            return answer_json({"error": {"message": f"unknown field {wrong[0]}"}}, 400)
        if not self.ids and isinstance(request.body.get("prompt"), list):
            return answer_json({"detail": "prompt must be a string"}, 422)
        hit = 64 if str(request.body) in self.seen else 0
        self.seen.add(str(request.body))
        told = {"prompt_tokens": 80, "completion_tokens": 1}
        if self.cached == "always" or (self.cached == "not-0" and hit):
            told |= {"prompt_cache_hit_tokens": hit}
        ids = [5] if request.body.get("return_token_ids") and self.ids else []
        chunk = said("x") if "messages" in request.body else word("x", ids)
        return stream(chunk, usage(told), "[DONE]")


def probed(server: Server) -> tuple[Capabilities, Heard, Request]:
    """What was found, and a request after it with what it was sent as."""

    async def then(client: OpenAIClient, script: Scripted) -> tuple[Capabilities, Heard, Request]:
        found = await client.capabilities()
        endpoint: Endpoint = "completions" if found.completions else "chat"
        wanted = Ask(endpoint=endpoint, max_tokens=1, want_ids=True,
                     prompt="new" if found.completions else ({"role": "user", "content": "new"},))
        heard = await client.ask(wanted, model="m", rng=Random(0))
        asked = len(script.requests)
        assert await client.capabilities() is found
        assert len(script.requests) == asked
        return found, heard, script.requests[-1]

    return talk(then=then, routes=server.routes)


def test_a_server_that_takes_everything_is_found_to() -> None:
    found, heard, request = probed(Server())
    assert found == Capabilities(token_ids=True, ignore_eos=True, tokenize=True, chat=True, completions=True,
                                 max_context=4096, usage_cached=True)
    assert request.body["ignore_eos"] is request.body["return_token_ids"] is True
    assert heard.usage is not None
    assert heard.usage.hit_tokens == 0


@pytest.mark.parametrize("refuses", [("return_token_ids",), ("ignore_eos",), ("ignore_eos", "return_token_ids")])
def test_fields_that_a_server_refuses_are_left_out_from_then_on(refuses: tuple[str, ...]) -> None:
    found, heard, request = probed(Server(refuses=refuses))
    assert found.ignore_eos == ("ignore_eos" not in refuses)
    assert found.token_ids == ("return_token_ids" not in refuses)
    assert not any(name in request.body for name in refuses)
    assert heard.outcome == "ok"


def test_a_server_of_texts_alone_is_asked_in_text() -> None:
    found, _, _ = probed(Server(ids=False, chat=False, cached="never"))
    assert (found.token_ids, found.chat, found.completions, found.usage_cached) == (False, False, True, False)


def test_a_server_of_chats_alone_is_found_to_chat() -> None:
    found, _, _ = probed(Server(completions=False, tokenize=None, card={"meta": {"n_ctx_train": 2048}}))
    assert found == Capabilities(token_ids=False, ignore_eos=True, tokenize=False, chat=True, completions=False,
                                 max_context=2048, usage_cached=True)


def test_llama_cpps_form_of_tokenize_is_found() -> None:
    assert probed(Server(tokenize="content"))[0].tokenize is True


def test_a_server_that_leaves_out_a_count_of_nothing_is_known_to_and_its_silence_is_0() -> None:
    found, heard, _ = probed(Server(cached="not-0"))
    assert found.usage_cached is True
    assert heard.usage is not None
    assert heard.usage.hit_tokens == 0


def test_a_server_that_says_nothing_of_its_cache_stays_silent_about_it() -> None:
    found, heard, _ = probed(Server(cached="never"))
    assert found.usage_cached is False
    assert heard.usage is not None
    assert heard.usage.hit_tokens is None


@pytest.mark.parametrize(("server", "said"), [
    (Server(chat=False, completions=False), "neither completions nor chat"), (Server(card={"id": None}), "m")])
def test_a_server_that_generates_nothing_is_an_error(server: Server, said: str) -> None:
    if said == "m":
        server.routes["/v1/completions"] = lambda _: answer_json({"error": {"message": "on fire"}}, 500)
        said = "could not be probed: /v1/completions: http-500: on fire"
    with pytest.raises(ServerError, match=said):
        probed(server)
