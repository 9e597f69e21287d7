"""Admission, deferral, growth, preemption: everything finishes, nothing locks up, the outputs do not know of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.fake_model import Rig, greedy_answer, make_rig, tokens

from hostcache.tier import Mode


def assert_answered(rig: Rig, asked: dict[str, tuple[list[int], int]]) -> None:
    for name, (prompt, count) in asked.items():
        assert rig.finished(name), f"{name} is still waiting"
        assert rig.answer(name) == greedy_answer(prompt, count)


@pytest.mark.parametrize("mode", list(Mode))
def test_contexts_that_together_exceed_the_pool_all_finish_and_the_deferred_are_counted(mode: Mode) -> None:
    rig = make_rig(pool_pages=24, slots=8, mode=mode)
    asked = {}
    for number in range(8):
        prompt = tokens(number, 30 + 3 * number)
        asked[rig.ask(prompt, 12)] = (prompt, 12)
    rig.run()
    assert_answered(rig, asked)
    assert rig.engine.record().engine.deferred_admissions > 0
    rig.assert_at_rest()
    rig.drain_pages()


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.ON_PRESSURE, Mode.ON_EVICT])
def test_answers_that_outgrow_the_pool_preempt_the_youngest_and_end_unchanged(mode: Mode) -> None:
    rig = make_rig(pool_pages=20, slots=4, mode=mode)
    asked = {}
    for number in range(4):
        prompt = tokens(number, 10)
        asked[rig.ask(prompt, 50)] = (prompt, 50)
    rig.run()
    assert_answered(rig, asked)
    record = rig.engine.record()
    assert record.engine.preemptions > 0
    accounting = record.accounting
    assert accounting.requests == 4, "each is counted once, however often it came back"
    assert accounting.prompt_tokens == 40
    recovered = (accounting.recovery_device_tokens, accounting.recovery_host_tokens,
                 accounting.recovery_recomputed_tokens)
    assert sum(recovered) > 0
    rig.assert_at_rest()
    rig.drain_pages()


def test_a_preempted_request_resumes_from_the_host_where_its_pages_are() -> None:
    rig = make_rig(pool_pages=20, slots=4)
    names = [rig.ask(tokens(number, 10), 50) for number in range(4)]
    rig.run()
    assert all(rig.finished(name) for name in names)
    assert rig.engine.record().accounting.recovery_host_tokens > 0


def test_a_sampled_answer_is_the_same_with_and_without_preemption() -> None:
    def answers(pool_pages: int) -> tuple[list[list[int]], int]:
        rig = make_rig(pool_pages=pool_pages, slots=4, max_context=80)
        names = [rig.ask(tokens(number, 10), 50, temperature=1.0, seed=number) for number in range(4)]
        rig.run()
        return [rig.answer(name) for name in names], rig.engine.record().engine.preemptions

    calm, none = answers(200)
    crowded, some = answers(20)
    assert calm == crowded
    assert (none, some > 0) == (0, True)


def test_first_come_first_served_even_when_a_smaller_one_would_fit() -> None:
    rig = make_rig(pool_pages=20, slots=4)
    names = [rig.ask(tokens(1, 50), 12)]
    rig.step()
    names += [rig.ask(tokens(2, 60), 4), rig.ask(tokens(3, 5), 4)]
    admitted: list[str] = []
    while not all(rig.finished(name) for name in names):
        rig.step()
        admitted += [live.request.request_id for live in rig.engine.scheduler.active
                     if live.request.request_id not in admitted]
    assert admitted == names
    rig.assert_at_rest()


def test_more_requests_than_slots_wait_their_turn() -> None:
    rig = make_rig(pool_pages=64, slots=2)
    names = [rig.ask(tokens(number, 8), 3) for number in range(7)]
    most = 0
    while not all(rig.finished(name) for name in names):
        rig.step()
        most = max(most, rig.engine.record().engine.active_requests)
    assert most == 2
    rig.assert_at_rest()


def test_ten_sharers_of_a_cold_prefix_compute_it_once() -> None:
    rig = make_rig(pool_pages=100, slots=10)
    shared = tokens(1, 80)
    asked = {}
    for number in range(10):
        prompt = [*shared, *tokens(100 + number, 5)]
        asked[rig.ask(prompt, 4)] = (prompt, 4)
    rig.run()
    assert_answered(rig, asked)
    record = rig.engine.record()
    assert record.engine.prefill_tokens == 80 + 10 * 5
    assert record.accounting.device_tokens == 9 * 80
    assert record.transfers.prefill_holds == 0, "nobody waited for the tier"
    rig.assert_at_rest()


def test_two_prompts_that_together_fill_the_pool_both_finish_from_the_host() -> None:
    """O4: 511 pages of 16; 4,096 + 4,080 tokens, both on the host, device cleared, submitted in one step."""
    rig = make_rig(pool_pages=511, page_tokens=16, frames=1024, slots=4, prefill_batch_tokens=512, max_context=8000)
    rig.check_every_step = False
    p, q = tokens(1, 4096), tokens(2, 4080)
    for prompt in (p, q):
        rig.ask(prompt, 1)
        rig.run()
    rig.engine.reset(weights_unchanged=True)
    rig.run()
    assert rig.engine.device.pages.free == 511
    rig.check_every_step = True
    names = [rig.ask(p, 8), rig.ask(q, 8)]
    steps = 0
    while not all(rig.finished(name) for name in names):
        steps += 1
        assert steps <= 200
        rig.step()
        active = rig.engine.scheduler.active
        assert len(active) <= 1 or any(len(live.pages) * 16 > live.written for live in active)
    assert rig.last(names[0]).usage.host_tokens >= 4080
    assert rig.last(names[1]).usage.host_tokens >= 4064
    assert [len(rig.answer(name)) for name in names] == [8, 8]
    rig.assert_at_rest()
    record = rig.engine.record()
    assert record.tier is not None
    assert record.tier.pinned_pages == 0
    rig.drain_pages()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=8),
       st.integers(20, 40), st.integers(1, 4), st.sampled_from([3, 8, 40]))
def test_any_mix_of_requests_whose_largest_fits_the_pool_completes(
        requests: list[tuple[int, int, int]], pool_pages: int, slots: int, batch: int) -> None:
    rig = make_rig(pool_pages=pool_pages, slots=slots, prefill_batch_tokens=batch, bank_entries=3, frames=60)
    asked = {}
    for seed, length, answer in requests:
        prompt = tokens(seed, length)
        asked[rig.ask(prompt, answer)] = (prompt, answer)
        rig.step()
    rig.run()
    assert_answered(rig, asked)
    rig.assert_at_rest()
    rig.drain_pages()
