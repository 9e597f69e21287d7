"""Settings become an engine, or one line that says why not and the way out."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hostcache.clock import WallClock
from hostcache.engine.build import build_engine, rss_reader
from hostcache.engine.requests import EngineHandle, GenerationEvent, GenerationRequest, SamplingParams
from hostcache.errors import ConfigError, MemoryRefused
from hostcache.settings import settle


def build(**flags: str) -> tuple[EngineHandle, list[str]]:
    notes: list[str] = []

    def log(event: str, *, level: str = "info", **fields: Any) -> None:
        notes.append(event)

    settled = settle({"model": "random:tiny", **flags}, environ={})
    return build_engine(settled.settings, WallClock(), log), notes


def ask(engine: EngineHandle, prompt: list[int], count: int) -> list[GenerationEvent]:
    events: list[GenerationEvent] = []
    over = threading.Event()

    def take(event: GenerationEvent) -> None:
        events.append(event)
        if event.finish_reason is not None:
            over.set()

    engine.submit(GenerationRequest(
        request_id=str(len(prompt)), prompt=tuple(prompt), trace_logits=True,
        sampling=SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)), take)
    assert over.wait(60)
    return events


def test_a_restored_conversation_is_the_device_hit_bit_for_bit_on_a_real_model() -> None:
    engine, notes = build(pool_tokens="512", page_tokens="16", host_cache_bytes="8MiB", host_cache_verify="always")
    try:
        vocab = engine.tokenizer.vocab_size
        prompt = [(7 * i) % vocab for i in range(150)]
        ask(engine, prompt, 6)
        device = ask(engine, prompt, 6)
        for other in range(1, 5):
            ask(engine, [(11 * i + other) % vocab for i in range(150)], 6)
        restored = ask(engine, prompt, 6)
        assert device[-1].usage.device_tokens == restored[-1].usage.host_tokens == 144
        assert [event.logits for event in restored] == [event.logits for event in device]
        assert [event.token_ids for event in restored] == [event.token_ids for event in device]
        stats = engine.stats()
        assert stats["host_cache"]["restores"] == 1
        assert stats["host_cache"]["verify_failures"] == 0
        assert stats["host_cache_config"]["host_cache_mode"] == "on-pressure"
        assert stats["host_cache"]["quota_bytes"] <= 8 * 1024**2
    finally:
        assert engine.close(10)
    assert notes == ["engine"]


def test_with_zero_bytes_nothing_of_the_tier_runs() -> None:
    engine, _ = build(pool_tokens="512", host_cache_bytes="0")
    before = {thread.name for thread in threading.enumerate()}
    assert not any(name.startswith("hostcache-copy") for name in before)
    assert engine.stats()["host_cache"] is None
    assert engine.stats()["host_cache_config"] is None
    assert engine.max_context <= 512
    assert engine.close(10)


def test_a_quota_smaller_than_a_page_is_said_and_served_without() -> None:
    engine, notes = build(pool_tokens="512", host_cache_bytes="10")
    assert notes[0].startswith("host cache: off")
    assert engine.stats()["host_cache"] is None
    assert engine.close(10)


def test_the_pool_is_sized_from_the_memory_that_is_there_and_never_over_64k_tokens() -> None:
    engine, _ = build(host_cache_bytes="0")
    stats = engine.stats()["engine"]
    assert 0 < stats["pool_pages"] * stats["page_tokens"] <= 65536
    assert engine.close(10)


def test_a_quota_that_cannot_be_met_is_refused_with_the_numbers() -> None:
    with pytest.raises(MemoryRefused, match="host_cache_bytes is"):
        build(pool_tokens="512", host_cache_bytes="4000TiB")


def test_a_pool_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(MemoryRefused, match="pool_tokens"):
        build(pool_tokens=str(10**13), host_cache_bytes="0")


def test_a_context_longer_than_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_context is 99999999"):
        build(pool_tokens="512", max_context="99999999")


def test_resident_memory_is_read_from_the_system() -> None:
    assert rss_reader()() > 10_000_000
