"""The sender against scripted answers on a virtual clock: what is timed, what is retried, what is a failure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from random import Random
from typing import Any

import httpx
import pytest

from hostcache.client.backpressure import Backpressure
from hostcache.client.openai import Failure, OpenAIClient, Reply
from hostcache.clock import VirtualClock
from hostcache.errors import ServerError

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_cache_hit_tokens": 2,
         "hostcache": {"device": 1, "host": 1, "recomputed": {"new": 1}, "first_miss": {"reason": "new"}}}


class Script(httpx.AsyncBaseTransport):
    """Answers in order; remembers what was asked."""

    def __init__(self, *answers: Callable[[httpx.Request], httpx.Response]) -> None:
        self.answers = list(answers)
        self.bodies: list[Any] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(json.loads(await request.aread() or b"null"))
        return self.answers.pop(0)(request)


class Chunks(httpx.AsyncByteStream):
    """Server-sent chunks; each first lets `seconds` pass."""

    def __init__(self, clock: VirtualClock, pieces: Sequence[tuple[float, str]]) -> None:
        self.clock, self.pieces = clock, pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for seconds, data in self.pieces:
            self.clock.advance(seconds)
            yield f"data: {data}\n\n".encode()


def chunk(text: str = "", ids: Sequence[int] = (), **more: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "text": text, "token_ids": list(ids), **more}]})


def usage(value: object = USAGE) -> str:
    return json.dumps({"choices": [], "usage": value})


def streamed(clock: VirtualClock, *pieces: tuple[float, str]) -> Callable[[httpx.Request], httpx.Response]:
    return lambda _: httpx.Response(200, stream=Chunks(clock, pieces))


def refused(status: int, retry_after: str | None = None) -> Callable[[httpx.Request], httpx.Response]:
    return lambda _: httpx.Response(status, headers={"Retry-After": retry_after} if retry_after else {}, json={})


def ask(clock: VirtualClock, script: Script, *, budget: int = 20, trace: bool = False) -> Reply | Failure:
    async def go() -> Reply | Failure:
        async with OpenAIClient("http://server", clock=clock, transport=script,
                                backpressure=Backpressure(budget=budget)) as client:
            return await client.complete([1, 2, 3], model="m", max_tokens=2, rng=Random(7), trace_logits=trace)

    return asyncio.run(go())


def good(clock: VirtualClock) -> Callable[[httpx.Request], httpx.Response]:
    return streamed(clock, (0.5, chunk()), (0.5, chunk("a", [8])), (2.0, chunk("b", [9], finish_reason="length")),
                    (0.25, usage()), (0.0, "[DONE]"))


def test_a_reply_carries_its_tokens_its_times_and_the_servers_account() -> None:
    clock = VirtualClock(100.0)
    script = Script(good(clock))
    reply = ask(clock, script)
    assert isinstance(reply, Reply)
    assert (reply.text, reply.token_ids, reply.finish_reason) == ("ab", (8, 9), "length")
    assert reply.ttft_s == pytest.approx(1.0)  # the empty chunk is no token
    assert reply.duration_s == pytest.approx(3.25)
    assert (reply.usage.hit_tokens, reply.usage.device_tokens, reply.usage.host_tokens) == (2, 1, 1)
    assert reply.usage.recomputed == {"new": 1}
    assert script.bodies[0] == {
        "model": "m", "prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0, "stream": True, "ignore_eos": True,
        "return_token_ids": True, "stream_options": {"include_usage": True}}


def test_refusals_are_waited_out_and_the_wait_is_in_the_time() -> None:
    clock = VirtualClock()
    reply = ask(clock, Script(refused(429, "3"), refused(503), good(clock)))
    assert isinstance(reply, Reply)
    assert [note.status for note in reply.retries] == [429, 503]
    first, second = (note.wait_s for note in reply.retries)
    assert 3.0 <= first <= 3.75
    assert 0.75 <= second <= 1.25
    assert reply.ttft_s == pytest.approx(first + second + 1.0)
    assert reply.duration_s == pytest.approx(first + second + 3.25)


def test_a_turn_that_spends_its_retries_is_a_failure_with_the_count() -> None:
    clock = VirtualClock()
    failure = ask(clock, Script(*[refused(429)] * 3), budget=2)
    assert isinstance(failure, Failure)
    assert failure.error == "refused with 429 after 2 retries"
    assert failure.duration_s == pytest.approx(sum(note.wait_s for note in failure.retries))


def test_an_error_that_is_no_refusal_is_not_retried() -> None:
    script = Script(lambda _: httpx.Response(400, json={"error": {"message": "prompt too long"}}), refused(429))
    failure = ask(VirtualClock(), script)
    assert isinstance(failure, Failure)
    assert failure.error == "HTTP 400: prompt too long"
    assert len(script.answers) == 1


@pytest.mark.parametrize(("pieces", "said"), [
    ([chunk("a", [1]), usage()], "before [DONE]"),
    ([chunk("a", [1]), "[DONE]"], "no usage"),
    ([usage(), "[DONE]"], "no token"),
    ([chunk("a", [1]), "{oops", "[DONE]"], "not JSON"),
    ([json.dumps({"error": {"message": "engine stopped"}})], "engine stopped"),
])
def test_half_an_answer_is_a_failure(pieces: list[str], said: str) -> None:
    clock = VirtualClock()
    failure = ask(clock, Script(streamed(clock, *((0.1, piece) for piece in pieces))))
    assert isinstance(failure, Failure)
    assert said in failure.error


def test_a_server_without_the_extension_leaves_the_sources_absent_not_zero() -> None:
    clock = VirtualClock()
    plain = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}
    reply = ask(clock, Script(streamed(clock, (0.1, chunk("a")), (0.1, usage(plain)), (0.0, "[DONE]"))))
    assert isinstance(reply, Reply)
    assert reply.usage.hit_tokens == 2
    assert reply.usage.device_tokens is None
    assert reply.usage.recomputed is None
    assert reply.token_ids == ()


def test_traced_logits_come_with_every_token() -> None:
    clock = VirtualClock()
    script = Script(streamed(
        clock, (0.1, chunk("a", [1], hostcache_logits=[{"digest": "d1", "margin": 0.5}])),
        (0.1, chunk("b", [2], hostcache_logits=[{"digest": "d2", "margin": 0.25}])), (0.0, usage()), (0.0, "[DONE]")))
    reply = ask(clock, script, trace=True)
    assert isinstance(reply, Reply)
    assert (reply.digests, reply.margins) == (("d1", "d2"), (0.5, 0.25))
    assert script.bodies[0]["hostcache"] == {"trace_logits": True}


@pytest.mark.parametrize(("answer", "said"), [
    (lambda _: httpx.Response(401, json={"error": {"message": "no key"}}), "401: no key"),
    (lambda _: httpx.Response(200, text="<html>"), "/v1/stats"),
    (lambda _: httpx.Response(200, json={"version": 2}), "version 2"),
])
def test_a_scrape_that_is_not_what_was_expected_is_an_error(
        answer: Callable[[httpx.Request], httpx.Response], said: str) -> None:
    async def go() -> None:
        async with OpenAIClient("http://server", clock=VirtualClock(), transport=Script(answer)) as client:
            await client.stats()

    with pytest.raises(ServerError, match=said):
        asyncio.run(go())
