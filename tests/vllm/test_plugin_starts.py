"""The plugin where it starts otherwise, or has to stop: each test has an engine of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.vllm import drill
from tests.vllm.drill import Mistaken
from tests.vllm.engine import POOL, PROMPTS, SETTINGS, Engine, cold_answers, prompt

from hostcache.copiers import Hold
from hostcache.tier import Direction

pytestmark = pytest.mark.vllm

Start = Callable[..., Engine]
DRILL = {"connector": "DrillConnector", "module": "tests.vllm.drill"}


@pytest.fixture(scope="module")
def cold(tiny_llama: Path) -> list[list[int]]:
    return cold_answers(tiny_llama)


@pytest.fixture
def start(tiny_llama: Path, cold: list[list[int]]) -> Iterator[Start]:
    """One engine; it is at rest and closed after the test."""
    made: list[Engine] = []
    drill.PLAN.clear()

    def make(model: Path = tiny_llama, blocks: int = POOL, extra: dict[str, Any] | None = None,
             **options: Any) -> Engine:
        made.append(Engine(model, blocks=blocks, extra={**SETTINGS, **(extra or {})}, **options))
        return made[-1]

    yield make
    for engine in made:
        try:
            if engine.side is not None:
                engine.at_rest(mistaken=(engine.side.off_reason or "").startswith("a bug"))
        finally:
            engine.close()


def test_a_stuck_load_is_reported_in_time_and_its_blocks_return_when_it_ends(
    start: Start, cold: list[list[int]]
) -> None:
    engine = start(extra={"host_cache_restore_budget_ms": 300}, **DRILL)
    engine.press()
    hold = Hold()
    drill.PLAN[:] = [(Direction.RESTORE, hold)]
    assert engine.answers(PROMPTS[:1]) == cold[:1]
    assert engine.side.counters.late_blocks == 12
    assert engine.answers(PROMPTS) == cold
    hold.release()
    engine.ask(PROMPTS[:1])


def test_a_dead_copy_thread_turns_the_tier_off_and_every_request_is_answered(
    start: Start, cold: list[list[int]]
) -> None:
    engine = start(**DRILL)
    engine.press()
    drill.PLAN[:] = [(Direction.RESTORE, SystemExit())]
    assert engine.answers(PROMPTS) == cold
    assert "a copy worker died" in (engine.side.off_reason or "")


def test_a_mistake_when_a_load_is_promised_ends_the_tier_and_no_request(start: Start, cold: list[list[int]]) -> None:
    """vLLM waits for such a load without a limit: it must hear that it failed."""
    engine = start()
    engine.press()
    engine.side.accounting = mistake = Mistaken(engine.side.accounting, "open")
    assert engine.answers(PROMPTS) == cold
    assert mistake.sprung
    assert engine.side is None
    assert engine.wall.why_off == "a bug: RuntimeError: nobody thought of this; please report it"
    assert engine.answers(PROMPTS) == cold
    engine.at_rest(mistaken=True)
    assert engine.metric("vllm:kv_cache_usage_perc") == 0
    assert engine.shown("hostcache_live_pins") == engine.shown("hostcache_quota_bytes") == 0


def test_a_mistake_while_a_load_runs_ends_the_tier_and_no_request(start: Start, cold: list[list[int]]) -> None:
    """In the worker, which alone can tell vLLM that a load is over."""
    engine = start(**DRILL)
    engine.press()
    hold = Hold()
    drill.PLAN[:] = [(Direction.RESTORE, hold)]
    engine.worker.side.copier = mistake = Mistaken(engine.worker.side.copier, "poll")
    assert engine.answers(PROMPTS) == cold
    assert mistake.sprung
    assert engine.side.off_reason == "a bug: RuntimeError: nobody thought of this; please report it"
    hold.release()
    assert engine.answers(PROMPTS) == cold
    engine.at_rest(mistaken=True)


def test_two_hundred_prompts_through_a_pool_of_forty_blocks_leave_nothing_behind(start: Start) -> None:
    engine = start(blocks=40)
    asked = [prompt(1000 + seed, 100 + seed) for seed in range(200)]
    assert len(engine.ask(asked, 4)) == 200
    assert engine.side.counters.evicted_pages > 1000
    engine.at_rest()
    assert engine.metric("vllm:kv_cache_usage_perc") == 0
    assert engine.shown("hostcache_live_pins") == engine.shown("hostcache_live_reservations") == 0


def test_memory_refused_at_the_start_leaves_an_engine_without_the_tier(start: Start, cold: list[list[int]]) -> None:
    engine = start(extra={"host_cache_bytes": "90TiB"})
    assert engine.answers(PROMPTS) == cold
    assert engine.side is None
    assert engine.connector._why_not.startswith("host_cache_bytes is 90")


def test_a_rank_that_gets_no_memory_later_than_the_scheduler_looked_turns_the_tier_off(
    start: Start, cold: list[list[int]]
) -> None:
    engine = start(connector="NoMemoryConnector", module="tests.vllm.drill")
    assert engine.answers(PROMPTS) == cold
    assert engine.side.off_reason == "the machine has none left"


@pytest.mark.parametrize("mode", ["on-evict", "on-retain"])
def test_the_other_modes_restore_the_same(start: Start, cold: list[list[int]], mode: str) -> None:
    engine = start(extra={"host_cache_mode": mode})
    engine.press()
    assert engine.answers(PROMPTS) == cold
    assert engine.side.tier.stats().counters.restores > 0
    counters = engine.side.counters
    assert counters.saved_pages == counters.evicted_pages
    assert (counters.saved_at_once_pages > 0) or mode == "on-retain"


def test_without_pressure_no_byte_moves_and_nothing_is_pinned(start: Start, cold: list[list[int]]) -> None:
    engine = start(blocks=1000)
    assert engine.answers(PROMPTS) == cold
    assert engine.answers(PROMPTS) == cold
    counters = engine.side.tier.stats().counters
    assert (counters.stores_issued, counters.store_bytes, counters.pins_taken, counters.restores) == (0, 0, 0, 0)


def test_a_model_with_two_cache_groups_runs_without_the_tier(start: Start, tiny_gemma2: Path) -> None:
    engine = start(tiny_gemma2, blocks=100)
    assert engine.side is None
    assert "2 KV cache groups" in engine.connector._why_not
    assert len(engine.answers(PROMPTS[:4])) == 4


def test_without_prefix_caching_vllm_runs_without_the_tier(start: Start, cold: list[list[int]]) -> None:
    engine = start(enable_prefix_caching=False)
    assert engine.side is None
    assert "prefix caching is off" in engine.connector._why_not
    assert engine.answers(PROMPTS[:4]) == cold[:4]


def test_a_reset_that_says_nothing_of_the_weights_leaves_the_copies(start: Start, cold: list[list[int]]) -> None:
    engine = start(extra={"host_cache_keep_on_reset": True})
    engine.press()
    assert engine.llm.reset_prefix_cache()
    (out,) = engine.ask(PROMPTS[:1])
    assert (out.num_cached_tokens, list(out.outputs[0].token_ids)) == (384, cold[0])
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    (out,) = engine.ask(PROMPTS[:1])
    assert (out.num_cached_tokens, list(out.outputs[0].token_ids)) == (0, cold[0])


def test_who_listens_to_vllms_events_knows_what_the_tier_holds(start: Start) -> None:
    from vllm.config import KVEventsConfig

    engine = start(extra={"host_cache_bytes": "8MiB"},
                   kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"))
    held: set[Any] = set()

    class Listener:
        def publish(self, batch: Any) -> None:
            for event in batch.events:
                if getattr(event, "medium", None) == "CPU":
                    change = held.update if type(event).__name__ == "BlockStored" else held.difference_update
                    change(event.block_hashes)

        def shutdown(self) -> None: ...

    engine.core.scheduler.kv_event_publisher = Listener()
    engine.press()
    engine.idle()
    stats = engine.side.tier.stats()
    assert stats.counters.host_evictions > 0
    assert len(held) == stats.resident_pages > 100
    assert engine.llm.reset_prefix_cache()
    engine.ask([PROMPTS[0][:40]])
    engine.idle()
    assert len(held) == engine.side.tier.stats().resident_pages == 0
