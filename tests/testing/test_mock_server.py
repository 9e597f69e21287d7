"""The mock server over real sockets, with our own client and with httpx: answers, times, faults, counters, the log."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import httpx
import pytest

from hostcache.client.backpressure import Backpressure
from hostcache.client.openai import Failure, OpenAIClient, Reply
from hostcache.clock import VirtualClock, WallClock
from hostcache.errors import ConfigError, ServerError
from hostcache.testing.mock_config import FaultKind
from hostcache.testing.mock_server import Fault, MockConfig, MockServer, add_arguments, config_from, serve_mock

T = TypeVar("T")
FAST = {"base_s": 0.0, "s_per_token": 0.0, "s_per_restored": 0.0, "itl_s": 0.0, "retry_after_s": 0.001}


def fast(*faults: tuple[FaultKind, int], **more: Any) -> MockConfig:
    return MockConfig(**{**FAST, **more}, faults=tuple(Fault(kind=kind, every=every) for kind, every in faults))


def play(config: MockConfig, script: Callable[[MockServer, OpenAIClient], Awaitable[T]]) -> T:
    """Runs `script` against a server; its books must balance in the end."""

    async def main() -> T:
        server = MockServer(config)
        patience = Backpressure(base_s=0.001, cap_s=0.001)
        async with server, OpenAIClient(server.url, clock=WallClock(), backpressure=patience) as client:
            result = await script(server, client)
            server.stats()
            return result

    return asyncio.run(asyncio.wait_for(main(), 60.0))


def ask(client: OpenAIClient, prompt: Any = range(40), *, max_tokens: int = 6) -> Coroutine[Any, Any, Reply | Failure]:
    return client.complete(prompt, model="mock", max_tokens=max_tokens, rng=Random(0))


async def served(client: OpenAIClient, prompt: Any = range(40), *, max_tokens: int = 6) -> Reply:
    reply = await ask(client, prompt, max_tokens=max_tokens)
    assert isinstance(reply, Reply), reply
    return reply


async def until(true: Callable[[], bool]) -> None:
    """Lets server and clients work until they have come that far."""
    async with asyncio.timeout(20.0):
        while not true():  # noqa: ASYNC110  # nothing to be told by: the other side is a socket
            await asyncio.sleep(0)


@asynccontextmanager
async def http(server: MockServer, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, headers=headers) as client:
        yield client


class HandClock:
    """Whoever waits, waits until `release`."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._gate = asyncio.Event()

    def now(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here may block")

    async def sleep_until(self, due_s: float) -> None:
        await self._gate.wait()
        self._now_s = max(self._now_s, due_s)

    def release(self) -> None:
        self._gate.set()


# -- answers ---------------------------------------------------------------------------------------------------------


def test_our_client_gets_a_whole_reply_and_its_account() -> None:
    async def script(server: MockServer, client: OpenAIClient) -> tuple[Reply, Reply]:
        assert await client.healthy()
        assert await client.model() == "mock"
        assert await client.max_context() == 131072
        return await served(client), await served(client)

    cold, warm = play(fast(), script)
    assert cold.text == warm.text
    assert cold.token_ids == warm.token_ids
    assert (len(cold.token_ids), cold.usage.completion_tokens, cold.finish_reason) == (6, 6, "length")
    assert cold.usage.recomputed == {"new": 32, "partial_page": 8}
    assert (warm.usage.hit_tokens, warm.usage.device_tokens, warm.usage.host_tokens) == (32, 32, 0)


def test_the_next_turn_hits_prompt_and_reply_and_the_host_restores_it_after_pressure() -> None:
    async def script(server: MockServer, client: OpenAIClient) -> None:
        reply = await served(client, range(40), max_tokens=26)
        following = [*range(40), *reply.token_ids, 7]
        for other in range(4):
            await served(client, range(1000 * other + 1000, 1000 * other + 1100))
        again = await served(client, following)
        assert again.usage.host_tokens == 64  # 40 + 26 tokens, the last never computed: four whole blocks
        assert (await served(client, following)).usage.device_tokens == 64
        stats = await client.stats()
        assert stats["host_cache"]["restores"] == 1
        assert stats["accounting"]["host_tokens"] == 64
        assert stats["engine"]["device_evictions"] > 0

    play(fast(device_blocks=8, host_blocks=64), script)


def test_text_ids_and_tokenize_are_the_same_prompt() -> None:
    async def script(server: MockServer, client: OpenAIClient) -> None:
        text = "one word is one token " * 10
        reply = await served(client, await client.tokenize(text))
        async with http(server) as raw:
            answer = (await raw.post("/v1/completions", json={"prompt": text, "max_tokens": 6})).json()
        assert answer["choices"][0]["text"] == reply.text
        assert answer["usage"]["prompt_tokens"] == 50
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}

    play(fast(), script)


def test_a_chat_streams_deltas_and_its_next_turn_is_an_exact_descendant() -> None:
    async def script(server: MockServer, client: OpenAIClient) -> None:
        messages = [{"role": "user", "content": "tell me " * 16}]
        async with http(server) as raw:
            body = {"messages": messages, "max_tokens": 20, "stream": True, "stream_options": {"include_usage": True}}
            lines = (await raw.post("/v1/chat/completions", json=body)).text.splitlines()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert lines[-2] == "data: [DONE]"
            assert events[0]["choices"][0]["delta"]["role"] == "assistant"
            reply = "".join(event["choices"][0]["delta"]["content"] for event in events[:-1])
            following = [*messages, {"role": "assistant", "content": reply.strip()}, {"role": "user", "content": "go"}]
            answer = (await raw.post("/v1/chat/completions", json={"messages": following, "max_tokens": 4})).json()
        assert [event["choices"][0]["finish_reason"] for event in events[-3:-1]] == [None, "length"]
        assert events[-1]["usage"]["completion_tokens"] == 20
        assert answer["choices"][0]["message"]["role"] == "assistant"
        # 35 tokens of the first prompt and 20 of its reply, the last never computed.
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 48

    play(fast(), script)


def test_a_salt_keeps_prompts_apart() -> None:
    async def script(server: MockServer, client: OpenAIClient) -> list[int]:
        async with http(server) as raw:
            answers = [(await raw.post("/v1/completions", json={
                "prompt": list(range(40)), **({"cache_salt": salt} if salt else {})})).json()
                for salt in ("", "a", "b", "a", "")]
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
        return [answer["usage"]["prompt_cache_hit_tokens"] for answer in answers]

    assert play(fast(), script) == [0, 0, 0, 32, 32]


def test_what_replies_report_is_what_the_server_counts_however_many_come_at_once() -> None:
    async def script(server: MockServer, client: OpenAIClient) -> None:
        prompts = [range(100 * (index % 7), 100 * (index % 7) + 30 + index) for index in range(60)]
        replies = await asyncio.gather(*(served(client, prompt) for prompt in prompts))
        books = (await client.stats())["accounting"]
        assert books["requests"] == 60
        assert books["prompt_tokens"] == sum(map(len, prompts))
        assert books["device_tokens"] == sum(reply.usage.device_tokens or 0 for reply in replies)
        assert books["host_tokens"] == sum(reply.usage.host_tokens or 0 for reply in replies) > 0
        assert books["recomputed_tokens"] == sum(sum((reply.usage.recomputed or {}).values()) for reply in replies)

    play(fast(slots=4, device_blocks=9, host_blocks=40), script)


@pytest.mark.parametrize("streamed", [True, False])
def test_prompt_ids_are_left_out_where_told(streamed: bool) -> None:
    async def script(server: MockServer, client: OpenAIClient) -> str:
        async with http(server) as raw:
            body = {"prompt": [1, 2, 3], "max_tokens": 2, "return_token_ids": True, "stream": streamed}
            return (await raw.post("/v1/completions", json=body)).text

    told, all_of_it = (play(fast(no_prompt_ids=left_out), script) for left_out in (True, False))
    assert ("prompt_token_ids" in told, "prompt_token_ids" in all_of_it) == (False, True)
    assert told.count('"token_ids"') == all_of_it.count('"token_ids"') > 0


def test_the_same_requests_get_the_same_answers_from_the_same_seed() -> None:
    async def script(server: MockServer, client: OpenAIClient) -> tuple[list[str], dict[str, Any]]:
        texts = [(await served(client, range(index % 5, 50))).text for index in range(12)]
        return texts, (await client.stats())["accounting"]

    one, again, other = (play(fast(seed=seed, device_blocks=5, host_blocks=9), script) for seed in (0, 0, 1))
    assert one == again
    assert one[1] == other[1]
    assert not set(one[0]) & set(other[0])


@pytest.mark.parametrize(("more", "pieces"), [
    ({}, [1] * 6), ({"tokens_per_chunk": 4}, [4, 2]), ({"chunks": 3}, [2, 2, 2]), ({"chunks": 100}, [1] * 6)])
def test_a_stream_is_cut_into_chunks_as_told(more: dict[str, int], pieces: list[int]) -> None:
    async def script(server: MockServer, client: OpenAIClient) -> list[int]:
        async with http(server) as raw:
            body = {"prompt": "a b", "max_tokens": 6, "stream": True, "return_token_ids": True}
            lines = (await raw.post("/v1/completions", json=body)).text.splitlines()
        events = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        assert "prompt_token_ids" in events[0]
        return [len(event["token_ids"]) for event in events]

    assert play(fast(**more), script) == pieces


@pytest.mark.parametrize(("body", "status", "says"), [
    ({"prompt": ""}, 400, "the prompt is empty"),
    ({"prompt": [1, "a"]}, 400, "token ids"),
    ({"prompt": [-1]}, 400, "negative"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens is 0"),
    ({"prompt": "a", "max_tokens": 500}, 400, "context is 100 tokens"),
    ({"prompt": "a", "model": "other"}, 404, "'other' does not exist"),
    ({"prompt": "a", "ignore_eos": True}, 400, "Unrecognized request argument supplied: ignore_eos"),
    ([], 400, "JSON object"),
])
def test_what_cannot_be_served_is_refused_with_its_reason(body: Any, status: int, says: str) -> None:
    async def script(server: MockServer, client: OpenAIClient) -> None:
        async with http(server) as raw:
            answer = await raw.post("/v1/completions", json=body)
            assert (answer.status_code, says in answer.json()["error"]["message"]) == (status, True)
            assert (await raw.post("/v1/completions", json={"prompt": "a"})).status_code == 200

    play(fast(openai_fields_only=True, max_context_tokens=100), script)


def test_unknown_paths_and_what_is_not_http_are_answered_and_the_server_goes_on() -> None:
    async def script(server: MockServer, client: OpenAIClient) -> None:
        async with http(server) as raw:
            assert (await raw.get("/nothing")).status_code == 404
            assert (await raw.get("/v1/completions")).status_code == 405
            assert (await raw.post("/tokenize", json={"prompt": "a"})).status_code == 404
        host, port = server.url.removeprefix("http://").split(":")
        for sent, status in ((b"hello\r\n\r\n", b" 400 "), (b"GET / HTTP/1.1\r\nX: " + b"x" * 200_000, b" 431 "),
                             (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b" 411 "),
                             (b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", b" 413 ")):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            assert status in await reader.readline()
            writer.close()
            await writer.wait_closed()
        assert await client.healthy()

    play(fast(no_tokenize=True), script)


# -- times -----------------------------------------------------------------------------------------------------------


def log_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_times_follow_the_model_exactly(tmp_path: Path) -> None:
    """On a virtual clock, read from the log: computed, restored, and the gaps between chunks."""

    async def main() -> None:
        config = MockConfig(base_s=0.5, s_per_token=0.01, s_per_restored=0.001, itl_s=0.25, device_blocks=2,
                            host_blocks=9, request_log=tmp_path / "log.jsonl")
        clock = VirtualClock(100.0)
        async with (MockServer(config, clock=clock, unix_now=lambda: 1_790_000_000.0) as server,
                    OpenAIClient(server.url, clock=clock) as client):
            for start in (0, 1000, 0):
                await ask(client, range(start, start + 40), max_tokens=5)

    asyncio.run(main())
    lines = log_of(tmp_path / "log.jsonl")
    first_s = [0.9, 0.9, 0.5 + 8 * 0.01 + 32 * 0.001]
    assert [line["ttft_s"] for line in lines] == pytest.approx(first_s)
    assert [line["latency_s"] for line in lines] == pytest.approx([each + 4 * 0.25 for each in first_s])
    assert [line["ts"] for line in lines] == pytest.approx([1_790_000_000.0, 1_790_000_001.9, 1_790_000_003.8])


class AskedClock(VirtualClock):
    """Counts how often it was asked."""

    asked = 0

    def now(self) -> float:
        self.asked += 1
        return super().now()


def test_a_request_arrives_with_its_first_byte_and_takes_as_long_as_it_is_sent(tmp_path: Path) -> None:
    """Read from the log: one that is sent in halves, one behind it on the same connection, and two in one piece."""
    body = b'{"prompt":[1,2,3],"max_tokens":2}'
    request = b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)

    async def main() -> None:
        clock = AskedClock(100.0)
        config = fast(request_log=tmp_path / "log.jsonl")
        async with MockServer(config, clock=clock, unix_now=lambda: 1_790_000_000.0) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))

            async def send(piece: bytes) -> None:
                asked = clock.asked
                writer.write(piece)
                await until(lambda: clock.asked > asked)

            async def answered() -> None:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))

            await send(request[:-10])
            clock.advance(5.0)
            writer.write(request[-10:])
            await answered()
            clock.advance(1.0)
            writer.write(request)
            await answered()
            clock.advance(1.0)
            writer.write(2 * request)
            await answered()
            await answered()
            writer.close()

    asyncio.run(asyncio.wait_for(main(), 20.0))
    lines = log_of(tmp_path / "log.jsonl")
    assert [line["ts"] - 1_790_000_000.0 for line in lines] == pytest.approx([0.0, 6.0, 7.0, 7.0])
    assert [line["latency_s"] for line in lines] == pytest.approx([5.0, 0.0, 0.0, 0.0])


def test_the_first_token_never_comes_before_its_scripted_time() -> None:
    async def script(server: MockServer, client: OpenAIClient) -> list[Reply]:
        return [await served(client) for _ in range(3)]

    assert all(reply.ttft_s >= 0.02 for reply in play(fast(ttft_s=0.02), script))


def test_the_door_lets_in_as_many_as_there_are_slots_and_refuses_whom_it_cannot_seat() -> None:
    async def main() -> None:
        clock = HandClock()
        async with (MockServer(fast(slots=1, waiting=1), clock=clock) as server, http(server) as raw):

            def door(name: str) -> int:
                return int(server.stats()["front_door"][name])

            async def send() -> httpx.Response:
                return await raw.post("/v1/completions", json={"prompt": "a"})

            first = asyncio.create_task(send())
            await until(lambda: door("running") == 1)
            second = asyncio.create_task(send())
            await until(lambda: door("waiting") == 1)
            refused = await send()
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "0.001")
            clock.release()
            assert [(await task).status_code for task in (first, second)] == [200, 200]
            await until(lambda: door("running") == 0)
            assert [door(name) for name in ("arrived", "served", "refused", "waiting")] == [3, 2, 1, 0]

    asyncio.run(main())


def test_clients_that_leave_give_back_their_slot_and_their_place_in_line() -> None:
    async def main() -> None:
        clock = HandClock()
        async with MockServer(fast(slots=1), clock=clock) as server, http(server) as raw:

            def door(name: str) -> int:
                return int(server.stats()["front_door"][name])

            sent = []
            for waiting in range(3):
                sent.append(asyncio.create_task(raw.post("/v1/completions", json={"prompt": "a"})))
                await until(lambda: door("running") + door("waiting") == waiting + 1)  # noqa: B023
            sent[1].cancel()  # waits at the door
            await until(lambda: door("left_waiting") == 1)
            sent[0].cancel()  # is inside
            await until(lambda: door("served") == 1)
            assert (door("running"), door("waiting")) == (1, 0)
            clock.release()
            assert (await sent[2]).status_code == 200
            assert server.stats()["engine"]["requests_aborted"] == 1
            await asyncio.gather(*sent[:2], return_exceptions=True)

    asyncio.run(main())


def test_a_server_that_ends_does_not_wait_for_what_runs() -> None:
    async def main() -> None:
        async with MockServer(fast(("stall", 1))) as server, http(server) as raw:
            sent = asyncio.create_task(raw.post("/v1/completions", json={"prompt": "a b", "stream": True}))
            await until(lambda: server.stats()["accounting"]["requests"] == 1)
        with pytest.raises(httpx.HTTPError):
            await sent

    asyncio.run(asyncio.wait_for(main(), 20.0))


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "says"), [
    ("http-500", "http-500"),
    ("no-usage", "usage-missing"),
    ("malformed", "malformed-sse"),
    ("cut-short", "cut-short"),
    ("stream-error", "stream-error"),
    ("no-token", "no-token"),
    ("stall", "stalled"),
    ("reset", "reset"),
])
def test_a_fault_hits_every_second_request_and_no_other(fault: FaultKind, says: str) -> None:
    """The reasons' first words are the client's (client/openai.py)."""

    async def script(server: MockServer, client: OpenAIClient) -> list[Reply | Failure]:
        # Impatient where it waits for nothing only, so that a busy machine cannot fail the others.
        timeout_s = 0.05 if fault == "stall" else 20.0
        async with OpenAIClient(server.url, clock=WallClock(), read_timeout_s=timeout_s) as other:
            answers = [await ask((client, other)[index % 2], range(index, index + 40)) for index in range(4)]
        await until(lambda: server.stats()["front_door"]["running"] == 0)
        return answers

    answers = play(fast((fault, 2)), script)
    assert [answer.error.partition(":")[0] if isinstance(answer, Failure) else "" for answer in answers] == [
        "", says, "", says]


def test_a_reset_comes_in_the_middle_of_the_stream_as_a_reset() -> None:
    async def script(server: MockServer, client: OpenAIClient) -> bytes:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"prompt":"a b","max_tokens":8,"stream":true}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        heard = await reader.readuntil(b"data: ")
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        return heard

    assert b"200 OK" in play(fast(("reset", 1), itl_s=0.02), script)


def test_refusals_are_waited_out_and_noted() -> None:
    async def script(server: MockServer, client: OpenAIClient) -> list[Reply]:
        return [await served(client) for _ in range(2)]

    replies = play(fast(("refuse", 2), refuse_status=503), script)
    assert [[note.status for note in reply.retries] for reply in replies] == [[], [503]]
    assert replies[1].retries[0].retry_after_s == 0.001


def test_a_slow_first_byte_comes_so_much_later(tmp_path: Path) -> None:
    async def main() -> None:
        config = MockConfig(ttft_s=0.5, slow_s=3.0, faults=(Fault(kind="slow", every=2),),
                            request_log=tmp_path / "log.jsonl")
        clock = VirtualClock()
        async with MockServer(config, clock=clock) as server, OpenAIClient(server.url, clock=clock) as client:
            for _ in range(2):
                await ask(client)

    asyncio.run(main())
    assert [line["ttft_s"] for line in log_of(tmp_path / "log.jsonl")] == pytest.approx([0.5, 3.5])


@pytest.mark.parametrize("kind", ["reset", "stall"])
def test_an_answer_in_one_piece_can_break_off_too(kind: FaultKind) -> None:
    async def script(server: MockServer, client: OpenAIClient) -> None:
        async with http(server) as raw:
            with pytest.raises((httpx.ReadError, httpx.ReadTimeout)):
                await raw.post("/v1/completions", json={"prompt": "a"}, timeout=httpx.Timeout(10.0, read=0.2))
        await until(lambda: server.stats()["front_door"]["running"] == 0)

    play(fast((kind, 1)), script)


def test_replies_can_drift_at_random_or_whenever_something_was_restored() -> None:
    async def script(server: MockServer, client: OpenAIClient) -> list[str]:
        texts = [(await served(client)).text for _ in range(2)]
        await served(client, range(1000, 1100))
        return [*texts, (await served(client)).text]

    cold, hit, restored = play(fast(device_blocks=6, host_blocks=50, corrupt_restores=True), script)
    assert cold == hit != restored
    cold, hit, restored = play(fast(("drift", 2), device_blocks=6, host_blocks=50), script)
    assert cold != hit


@pytest.mark.parametrize(("usage", "cached"), [("plain", None), ("none", None), ("full", 0)])
def test_usage_can_lack_the_cached_tokens_or_be_left_out(usage: Any, cached: int | None) -> None:
    async def script(server: MockServer, client: OpenAIClient) -> dict[str, Any]:
        async with http(server) as raw:
            answer: dict[str, Any] = (await raw.post("/v1/completions", json={"prompt": "a"})).json()
            return answer

    answer = play(fast(usage=usage, style="vllm"), script)
    assert ("usage" in answer) == (usage != "none")
    assert answer.get("usage", {}).get("prompt_tokens_details", {}).get("cached_tokens") == cached
    assert "hostcache" not in answer.get("usage", {})


# -- counters --------------------------------------------------------------------------------------------------------


def test_metrics_come_in_the_format_that_was_asked_for() -> None:
    async def script(server: MockServer, client: OpenAIClient) -> None:
        await served(client)
        async with http(server) as raw:
            classic = await raw.get("/metrics", headers={"Accept": "text/plain"})
            openmetrics = await raw.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
            assert classic.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
            assert openmetrics.text.endswith("# EOF\n")
            assert 'vllm:prompt_tokens_total{engine="0",model_name="mock"} 40.0' in classic.text
            assert (await raw.get("/version")).json()["version"].startswith("0.0.0+hostcache.mock")
            assert (await raw.get("/v1/models")).json()["data"][0]["owned_by"] == "vllm"
            assert (await raw.get("/v1/stats")).status_code == 404

    play(fast(style="vllm"), script)


def test_a_restart_begins_a_new_life() -> None:
    async def script(server: MockServer, client: OpenAIClient) -> None:
        async def created_s() -> float:
            async with http(server) as raw:
                lines = (await raw.get("/metrics")).text.splitlines()
            return float(next(line.split()[1] for line in lines if line.startswith("hostcache_requests_created ")))

        await served(client)
        before_s = await created_s()
        async with http(server) as raw:
            assert (await raw.post("/mock/restart")).status_code == 200
        assert await created_s() > before_s
        assert (await client.stats())["accounting"]["requests"] == 0
        assert (await served(client)).usage.hit_tokens == 0

    play(fast(), script)


def test_a_request_that_runs_through_a_restart_is_not_counted_in_the_new_life() -> None:
    async def main() -> None:
        clock = HandClock()
        async with MockServer(fast(), clock=clock) as server, http(server) as raw:
            sent = asyncio.create_task(raw.post("/v1/completions", json={"prompt": "a"}))
            await until(lambda: server.stats()["front_door"]["running"] == 1)
            server.restart()
            clock.release()
            assert (await sent).status_code == 200
            await until(lambda: server.stats()["front_door"]["running"] == 0)
            assert server.stats()["accounting"]["requests"] == 0
            assert server.stats()["front_door"]["served"] == 1

    asyncio.run(main())


@pytest.mark.parametrize(("keeps", "hit"), [(False, 0), (True, 32)])
def test_a_reset_empties_the_cache_or_says_so_only(keeps: bool, hit: int) -> None:
    async def script(server: MockServer, client: OpenAIClient) -> None:
        await served(client)
        await served(client, range(1000, 1100))
        async with http(server) as raw:
            assert (await raw.post("/reset_prefix_cache")).status_code == 200
        assert (await served(client)).usage.hit_tokens == hit
        assert (await client.stats())["accounting"]["requests"] == 3

    play(fast(device_blocks=6, host_blocks=50, reset_keeps_host=keeps), script)


# -- the log and the command -----------------------------------------------------------------------------------------


def test_the_log_tells_a_conversation_by_its_beginnings_and_keeps_no_content(tmp_path: Path) -> None:
    async def script(server: MockServer, client: OpenAIClient) -> None:
        async with http(server) as raw:
            for count in (100, 200):
                body = {"prompt": list(range(count)), "max_tokens": 4, "user": "ann"}
                await raw.post("/v1/completions", json=body, headers={"X-Session-ID": "s1"})
            await raw.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "secret"}],
                                                         "session_id": "s2"})
            assert (await raw.post("/v1/completions", json={"prompt": "a"})).status_code == 429

    path = tmp_path / "log.jsonl"
    play(fast(("refuse", 4), request_log=path), script)
    first, second, chat, refused = log_of(path)
    assert first["request"] == {"model": "mock", "endpoint": "completions", "prompt_tokens": 100, "max_tokens": 4,
                                "stream": False, "user": "ann"}
    assert first["usage"] == {"prompt_tokens": 100, "completion_tokens": 4, "cached_tokens": 0}
    assert second["usage"]["cached_tokens"] == 96
    assert (first["prefix_tokens"], len(first["prefix"]), len(second["prefix"])) == (64, 1, 3)
    assert second["prefix"][:1] == first["prefix"]
    assert [line["session"] for line in (first, second, chat, refused)] == ["s1", "s1", "s2", None]
    assert (refused["status"], refused["usage"], refused["ttft_s"]) == (429, None, None)
    assert "secret" not in path.read_text(encoding="utf-8")


def test_the_log_notes_the_time_of_those_that_broke_off_and_content_where_asked(tmp_path: Path) -> None:
    async def script(server: MockServer, client: OpenAIClient) -> None:
        assert isinstance(await ask(client, [1, 2, 3]), Failure)

    path = tmp_path / "log.jsonl"
    play(fast(("reset", 1), request_log=path, log_content=True), script)
    (line,) = log_of(path)
    assert (line["request"]["prompt"], line["usage"]["completion_tokens"]) == ([1, 2, 3], 3)
    assert line["prefix"] == []


def test_an_earlier_log_is_never_overwritten(tmp_path: Path) -> None:
    async def script(server: MockServer, client: OpenAIClient) -> None:
        await served(client)

    config = fast(request_log=tmp_path / "log.jsonl")
    play(config, script)
    with pytest.raises(ConfigError, match="give a new file"):
        play(config, script)
    assert len(log_of(tmp_path / "log.jsonl")) == 1


def test_a_taken_address_is_told_in_one_line() -> None:
    async def script(server: MockServer, client: OpenAIClient) -> None:
        with pytest.raises(ServerError, match="in use by another process"):
            await serve_mock(MockConfig(), port=int(server.url.rsplit(":", 1)[1]))

    play(fast(), script)


def test_the_command_s_coroutine_serves_until_it_is_cancelled() -> None:
    async def main() -> None:
        told = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(serve_mock(fast(), on_ready=told.set_result))
        async with OpenAIClient(await told, clock=WallClock()) as client:
            assert await client.healthy()
        task.cancel()
        await task

    asyncio.run(asyncio.wait_for(main(), 20.0))


def test_every_field_is_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert config_from(parser.parse_args([])) == MockConfig()
    args = parser.parse_args([
        "--style", "vllm", "--host-blocks", "32", "--ttft-s", "0.05", "--chunks", "4", "--corrupt-restores",
        "--request-log", "log.jsonl", "--fault", "stall:10", "--fault", "reset:7", "--port", "8001"])
    assert config_from(args) == MockConfig(
        style="vllm", host_blocks=32, ttft_s=0.05, chunks=4, corrupt_restores=True, request_log=Path("log.jsonl"),
        faults=(Fault(kind="stall", every=10), Fault(kind="reset", every=7)))


@pytest.mark.parametrize(("fields", "says"), [
    ({"slots": 0}, "slots is 0"), ({"itl_s": -1.0}, "itl_s is -1.0"), ({"ttft_s": float("nan")}, "ttft_s is nan"),
    ({"style": "other"}, "hostcache, vllm"), ({"refuse_status": 404}, "429 or 503"),
])
def test_a_setting_that_makes_no_sense_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        MockConfig(**fields)


@pytest.mark.parametrize("text", ["stall", "stall:", "stall:0", "what:3", ":3", "stall:-1"])
def test_a_fault_that_is_not_understood_is_refused(text: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(ConfigError, match="fault"):
        config_from(parser.parse_args(["--fault", text]))
