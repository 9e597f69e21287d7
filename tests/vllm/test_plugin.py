"""The plugin in a real vLLM with real bytes: what comes back is what was there, whatever goes wrong, and nothing stays.

The models have random weights of a size at which every token depends on the whole prefix (see models.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.vllm import drill
from tests.vllm.engine import BLOCK, POOL, PROMPTS, SETTINGS, Engine, cold_answers, prompt

from hostcache.copiers import Delay, Fail, Hold
from hostcache.tier import Direction, Reason

pytestmark = pytest.mark.vllm

@pytest.fixture(scope="module")
def cold(tiny_llama: Path) -> list[list[int]]:
    return cold_answers(tiny_llama)


@pytest.fixture(scope="module")
def started(tiny_llama: Path, cold: list[list[int]]) -> Iterator[Engine]:
    engine = Engine(tiny_llama, blocks=POOL, extra=SETTINGS, connector="DrillConnector", module="tests.vllm.drill",
                    policy="fail")
    yield engine
    engine.close()


@pytest.fixture
def engine(started: Engine) -> Iterator[Engine]:
    """With nothing cached, and nothing held afterwards."""
    drill.PLAN.clear()
    started.idle()
    assert started.llm.reset_prefix_cache()
    assert started.side.tier.stats().resident_pages == 0
    yield started
    drill.PLAN.clear()
    started.at_rest()


def test_evicted_prefixes_come_back_with_the_output_of_a_cold_run(engine: Engine, cold: list[list[int]]) -> None:
    engine.press()
    before = engine.side.tier.stats().counters.restores
    for tokens, answer in zip(PROMPTS, cold, strict=True):
        (out,) = engine.ask([tokens])
        assert list(out.outputs[0].token_ids) == answer
        assert out.num_cached_tokens == (len(tokens) - 1) // BLOCK * BLOCK
    assert engine.side.tier.stats().counters.restores == before + 20


def test_zeros_in_place_of_what_was_saved_would_change_every_answer(engine: Engine, cold: list[list[int]]) -> None:
    """The negative control: these outputs do depend on the bytes that are restored."""
    engine.press()
    slabs = engine.worker.side.copier._slabs
    for frame in range(slabs.frames):
        ctypes.memset(slabs.address(frame), 0, slabs.page_bytes)
    assert sum(engine.answers([tokens])[0] == answer for tokens, answer in zip(PROMPTS[:10], cold, strict=False)) == 0


def test_many_at_once_are_restored_and_the_tokens_balance(engine: Engine, cold: list[list[int]]) -> None:
    names = ("vllm:external_prefix_cache_hits", "vllm:prefix_cache_hits")
    before = [engine.metric(name) for name in names]
    host = engine.metric("vllm:prompt_tokens_cached_by_source", source="host")
    book = engine.side.accounting.stats()
    engine.press()
    outs = engine.ask(PROMPTS)
    assert [list(out.outputs[0].token_ids) for out in outs] == cold
    now = engine.side.accounting.stats()
    served, device = now.host_tokens - book.host_tokens, now.device_tokens - book.device_tokens
    assert served + device == sum(out.num_cached_tokens for out in outs)
    assert [engine.metric(name) - b for name, b in zip(names, before, strict=True)] == [served, device]
    assert engine.metric("vllm:prompt_tokens_cached_by_source", source="host") - host == served
    assert now.prompt_tokens - book.prompt_tokens == 2 * sum(map(len, PROMPTS))
    engine.idle()
    assert engine.shown("hostcache_cached_tokens_total", source="host") == now.host_tokens
    assert engine.shown("hostcache_restore_bytes_total") == engine.side.tier.stats().counters.restore_bytes
    assert engine.shown("hostcache_live_pins") == 0


@pytest.mark.parametrize("after_pages", [0, 5, 1000])
def test_a_load_that_fails_is_computed_and_counted(engine: Engine, cold: list[list[int]], after_pages: int) -> None:
    engine.press()
    before, book = engine.side.tier.stats().counters, engine.side.accounting.stats()
    drill.PLAN.append((Direction.RESTORE, Fail(after_pages=after_pages)))
    (out,) = engine.ask(PROMPTS[:1])
    assert (list(out.outputs[0].token_ids), out.outputs[0].finish_reason) == (cold[0], "length")
    now = engine.side.tier.stats().counters
    assert (now.restore_failures - before.restore_failures, now.restores - before.restores) == (1, 0)
    failed = engine.side.accounting.stats().recomputed[Reason.FAILED] - book.recomputed.get(Reason.FAILED, 0)
    assert failed == (len(PROMPTS[0]) - 1) // BLOCK * BLOCK


def test_after_a_failed_load_our_figure_is_what_was_restored_and_vllms_is_what_was_offered(engine: Engine) -> None:
    engine.press()
    offered = engine.metric("vllm:external_prefix_cache_hits")
    by_source = engine.metric("vllm:prompt_tokens_cached_by_source", source="host")
    book = engine.side.accounting.stats()
    drill.PLAN.append((Direction.RESTORE, Fail(after_pages=5)))
    outs = [engine.ask([tokens])[0] for tokens in PROMPTS[:2]]  # the first load fails, the second one does not
    now = engine.side.accounting.stats()
    pages = [(len(tokens) - 1) // BLOCK * BLOCK for tokens in PROMPTS[:2]]
    restored = now.host_tokens - book.host_tokens
    assert restored == pages[1]
    assert engine.metric("vllm:external_prefix_cache_hits") - offered == sum(pages)
    assert engine.metric("vllm:prompt_tokens_cached_by_source", source="host") - by_source >= restored
    recomputed = sum(now.recomputed.values()) - sum(book.recomputed.values())
    device = now.device_tokens - book.device_tokens
    assert restored + device + recomputed == sum(len(tokens) for tokens in PROMPTS[:2])
    assert outs[1].num_cached_tokens == pages[1]


def test_a_load_that_raises_is_computed(engine: Engine, cold: list[list[int]]) -> None:
    engine.press()
    drill.PLAN.append((Direction.RESTORE, OSError("the memory is gone")))
    assert engine.answers(PROMPTS[:1]) == cold[:1]


def test_a_save_that_fails_costs_pages_and_no_answer(engine: Engine, cold: list[list[int]]) -> None:
    lost = engine.side.counters.lost_pages
    drill.PLAN.extend([(Direction.STORE, Fail())] * 3)
    engine.press()
    assert engine.answers(PROMPTS) == cold
    assert engine.side.tier.stats().counters.stores_failed >= 3
    assert engine.side.counters.lost_pages >= lost


@pytest.mark.parametrize("stuck", [Delay(seconds=0.3), Hold()], ids=["slow", "stuck"])
def test_an_abort_during_a_load_gives_everything_back(engine: Engine, stuck: Delay | Hold) -> None:
    from vllm import SamplingParams

    engine.press()
    drill.PLAN.append((Direction.RESTORE, stuck))
    inner = engine.llm.llm_engine
    inner.add_request("leaves", {"prompt_token_ids": PROMPTS[0]}, SamplingParams(max_tokens=4))
    engine.step_until(lambda: bool(engine.side.tier.stats().live_reservations), "the load is promised")
    inner.abort_request(["leaves"])
    if isinstance(stuck, Hold):
        for _ in range(3):
            inner.step()
        assert engine.side.tier.stats().live_reservations == 1, "the copy may still write: its frames stay pinned"
        stuck.release()
    engine.at_rest()
    assert engine.metric("vllm:kv_cache_usage_perc") == 0


def test_requests_preempted_again_and_again_answer_as_if_they_were_alone(engine: Engine, tiny_llama: Path) -> None:
    asked = [prompt(100 + seed, 150) for seed in range(12)]
    alone = [engine.answers([tokens], 120)[0] for tokens in asked]
    assert engine.llm.reset_prefix_cache()
    before = engine.metric("vllm:num_preemptions")
    assert engine.answers(asked, 120) == alone
    assert engine.metric("vllm:num_preemptions") > before
    stats = engine.side.accounting.stats()
    assert stats.recovery_host_tokens + stats.recovery_device_tokens > 0


def test_a_prompt_prefilled_in_many_chunks_is_restored_to_its_last_full_block(engine: Engine) -> None:
    long = prompt(77, 1100)
    engine.ask([long])
    engine.press()
    (out,) = engine.ask([long])
    assert out.num_cached_tokens == 1088


def test_agents_over_a_small_pool_lose_less_than_a_hundredth_of_what_is_evicted(engine: Engine) -> None:
    """Ten agents, three turns, all at once: most blocks are freed and handed out between two looks at the queue."""
    before = (engine.side.counters.evicted_pages, engine.side.counters.saved_pages)
    talks = [prompt(500 + agent, 100 + 55 * agent) for agent in range(10)]
    for turn in range(3):
        answers = engine.answers(talks, 40)
        talks = [[*t, *a, *prompt(turn, 60)] for t, a in zip(talks, answers, strict=True)]
    engine.idle()
    evicted = engine.side.counters.evicted_pages - before[0]
    saved = engine.side.counters.saved_pages - before[1]
    assert evicted > 200
    assert saved >= 0.99 * evicted


def test_a_prompt_that_wants_its_logprobs_is_computed(engine: Engine) -> None:
    engine.press()
    (out,) = engine.ask(PROMPTS[:1], prompt_logprobs=1)
    assert not out.num_cached_tokens


def test_another_salt_shares_nothing(engine: Engine, cold: list[list[int]]) -> None:
    from vllm import SamplingParams

    engine.press()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    salted: Any = {"prompt_token_ids": PROMPTS[0], "cache_salt": "mine"}
    (out,) = engine.llm.generate([salted], params, use_tqdm=False)
    assert (out.num_cached_tokens, list(out.outputs[0].token_ids)) == (0, cold[0])
