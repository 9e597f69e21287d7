"""The engine on its thread, with the real copier: calls from other threads, broken steps, draining, departures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.engine.fake_model import LAYERS, FakeModel, FakeTokenizer, greedy_answer, sample, tokens

from hostcache.clock import WallClock
from hostcache.copiers import Fault, Slabs, ThreadCopier
from hostcache.engine.engine import Engine, EngineConfig
from hostcache.engine.requests import GenerationEvent, GenerationRequest, SamplingParams
from hostcache.engine.running import RunningEngine
from hostcache.errors import RequestRefused
from hostcache.tier import Identity, TierConfig


@dataclass
class Client:
    """Collects the events of one request and lets a test wait for its end."""

    prompt: list[int]
    events: list[GenerationEvent] = field(default_factory=list)
    first: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    threads: set[str] = field(default_factory=set)

    def take(self, event: GenerationEvent) -> None:
        self.events.append(event)
        self.threads.add(threading.current_thread().name)
        self.first.set()
        if event.finish_reason is not None:
            self.over.set()

    def wait(self) -> list[int]:
        assert self.over.wait(60), "no end came"
        return [token for event in self.events for token in event.token_ids]


@dataclass
class Server:
    engine: Engine
    running: RunningEngine
    model: FakeModel
    log: list[tuple[str, dict[str, Any]]]
    asked: int = 0

    def ask(self, prompt: list[int], max_tokens: int = 4, request_id: str | None = None) -> Client:
        self.asked += 1
        client = Client(prompt)
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self.running.submit(GenerationRequest(request_id=request_id or f"r{self.asked}", prompt=tuple(prompt),
                                              sampling=params), client.take)
        return client


def start(fault: Fault | None = None, pool_pages: int = 32) -> Server:
    pool = torch.zeros((pool_pages, LAYERS, 2, 1, 4, 1), dtype=torch.int64)
    page_bytes, clock, model = pool[0].nbytes, WallClock(), FakeModel()
    tier = TierConfig(host_cache_bytes=400 * page_bytes, page_bytes=page_bytes, page_tokens=4)
    slabs = Slabs(tier.frames * page_bytes, page_bytes)
    copier = ThreadCopier(pool.data_ptr(), pool_pages, page_bytes, slabs, clock=clock, owner=pool, fault=fault)
    log: list[tuple[str, dict[str, Any]]] = []

    def write(event: str, *, level: str = "info", **fields: Any) -> None:
        log.append((event, fields))

    def release(timeout_s: float) -> bool:
        if not copier.close(timeout_s):
            return False
        slabs.close()
        return True

    config = EngineConfig(page_tokens=4, slots=4, bank_entries=8, prefill_batch_tokens=16, max_context=4 * pool_pages,
                          identity=Identity(model="fake", revision="1", dtype="i", layout="l", page_tokens=4))
    engine = Engine(config, model=model, tokenizer=FakeTokenizer(), pool=pool, sample=sample, clock=clock, log=write,
                    tier=tier, copier=copier)
    running = RunningEngine(engine, model_id="fake", clock=clock, log=write, rss_bytes=lambda: 1, release=release)
    return Server(engine, running, model, log)


@pytest.fixture
def server() -> Iterator[Server]:
    started = start()
    yield started
    started.running.close(10)


def test_many_conversations_over_a_small_pool_come_back_right_and_the_books_are_there(server: Server) -> None:
    for _ in range(2):
        for number in range(12):
            assert server.ask(tokens(number, 40)).wait() == greedy_answer(tokens(number, 40), 4)
    body = server.running.stats()
    assert body["accounting"]["requests"] == 24
    assert body["accounting"]["host_tokens"] > 0
    assert body["host_cache"]["restores"] > 0
    assert body["engine"]["rss_bytes"] == 1
    assert "hostcache_restores_total" in server.running.metrics_text()
    assert server.running.healthy() is None
    assert (server.running.slots, server.running.max_context, server.running.model_id) == (4, 128, "fake")


def test_who_has_the_last_event_finds_the_request_in_the_record(server: Server) -> None:
    for number in range(1, 20):
        server.ask(tokens(number, 9)).wait()
        assert server.running.stats()["engine"]["requests_finished"] == number


def test_calls_from_many_threads_are_served_and_events_come_on_the_engines_thread(server: Server) -> None:
    clients: list[Client] = []

    def one(number: int) -> None:
        clients.append(server.ask(tokens(number % 5, 30), 6, request_id=f"t{number}"))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        assert client.wait() == greedy_answer(client.prompt, 6)
    assert {name for client in clients for name in client.threads} == {"hostcache-engine"}


def test_a_departed_client_frees_its_slot_and_its_pages(server: Server) -> None:
    client = server.ask(tokens(1, 20), 100, request_id="gone")
    assert client.first.wait(30)
    server.running.abort("gone")
    server.running.abort("never was")
    client.wait()
    assert client.events[-1].finish_reason in ("abort", "length")
    server.ask(tokens(2, 5)).wait()
    stats = server.running.stats()["engine"]
    assert (stats["active_requests"], stats["waiting_requests"]) == (0, 0)


def test_a_reset_takes_effect_before_the_next_request(server: Server) -> None:
    prompt = tokens(1, 30)
    server.ask(prompt).wait()
    server.running.reset(weights_unchanged=False)
    again = server.ask(prompt)
    again.wait()
    assert again.events[-1].usage.cached_tokens == 0
    server.running.reset(weights_unchanged=True)
    third = server.ask(prompt)
    third.wait()
    assert third.events[-1].usage.host_tokens + third.events[-1].usage.device_tokens == 28


def test_a_step_that_raises_ends_what_runs_with_an_error_and_the_server_says_so(server: Server) -> None:
    server.ask(tokens(1, 5)).wait()
    server.model.fail_next = "the model\nfell over"
    broken = server.ask(tokens(2, 5))
    broken.wait()
    assert broken.events[-1].finish_reason == "error"
    assert broken.events[-1].error == ("the engine stopped: RuntimeError: the model fell over; restart the server")
    assert server.running.healthy() == broken.events[-1].error
    later = server.ask(tokens(3, 5))
    later.wait()
    assert later.events[-1].finish_reason == "error"
    assert [event for event, _ in server.log] == ["engine_broken"]


def test_closing_lets_what_runs_finish_and_refuses_what_is_new() -> None:
    server = start()
    clients = [server.ask(tokens(number, 20), 30) for number in range(6)]
    assert server.running.close(30)
    for client in clients:
        assert client.wait() == greedy_answer(client.prompt, 30)
    with pytest.raises(RequestRefused, match="stopping") as refusal:
        server.ask([1])
    assert refusal.value.status == 429
    assert server.running.healthy() is not None


def test_closing_in_no_time_aborts_what_runs() -> None:
    server = start(pool_pages=200)
    client = server.ask(tokens(1, 300), 400)
    assert client.first.wait(30)
    whole = server.running.close(0)
    client.wait()
    assert client.events[-1].finish_reason in ("abort", "length")
    assert whole == (client.events[-1].finish_reason == "length")


def test_a_copier_that_always_fails_costs_hits_and_nothing_else() -> None:
    def fault(job: object) -> None:
        raise OSError("no such bus")

    server = start(fault)
    for _ in range(2):
        for number in range(8):
            assert server.ask(tokens(number, 40)).wait() == greedy_answer(tokens(number, 40), 4)
    stats = server.running.stats()
    assert stats["accounting"]["host_tokens"] == 0
    assert stats["host_cache"]["stores_failed"] > 0
    assert server.running.close(10)
