"""Engine and tier together: evicted conversations come back; copies fail, are late or lost, every request succeeds."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.fake_model import Rig, ScriptedCopier, greedy_answer, make_rig, tokens

from hostcache.engine.device import Verify
from hostcache.engine.requests import CacheHints, CacheLimits
from hostcache.tier import Mode
from hostcache.tier.copying import CopyJob, Direction

PROMPT = 40
"""Ten pages of 4, of which nine can be served: the last token is always computed."""


def copier_of(rig: Rig) -> ScriptedCopier:
    assert rig.copier is not None
    return rig.copier


def counters(rig: Rig) -> Any:
    record = rig.engine.record()
    assert record.tier is not None
    return record.tier.counters


def fill_and_evict(rig: Rig, prompt: list[int] | None = None, **more: Any) -> list[int]:
    """One conversation, then others until it has left the device."""
    prompt = prompt or tokens(1, PROMPT)
    rig.serve(prompt, 4, **more)
    evict(rig, prompt)
    return prompt


def evict(rig: Rig, prompt: list[int]) -> None:
    chain = rig.engine.prepare_chain(prompt, "")
    number = 1000
    while rig.engine.device.pages.find(chain.keys[0]) is not None:
        number += 1
        rig.serve(tokens(number, PROMPT), 4)


def restores_are(copier: ScriptedCopier, fate: str) -> None:
    copier.script = lambda job: fate if job.direction is Direction.RESTORE else "copy"


def stores_are(copier: ScriptedCopier, fate: str) -> None:
    copier.script = lambda job: fate if job.direction is Direction.STORE else "copy"


# ---- eviction and return


@pytest.mark.parametrize("mode", [Mode.ON_PRESSURE, Mode.ON_RETAIN, Mode.ON_EVICT])
def test_an_evicted_conversation_is_restored_to_its_last_whole_page(mode: Mode) -> None:
    rig = make_rig(pool_pages=32, mode=mode)
    prompt = fill_and_evict(rig)
    event = rig.serve(prompt, 4)
    assert (event.usage.device_tokens, event.usage.host_tokens) == (0, 36)
    assert event.usage.report["recomputed"] == {"partial_page": 4}
    rig.assert_at_rest()


@pytest.mark.parametrize("batch", [1, 3, 4, 7, 16, 64])
def test_a_prompt_in_any_number_of_chunks_is_restored_to_its_last_whole_page(batch: int) -> None:
    rig = make_rig(pool_pages=32, prefill_batch_tokens=batch)
    prompt = fill_and_evict(rig, tokens(1, 43))
    assert rig.serve(prompt, 1).usage.host_tokens == 40


def test_a_restore_into_neighbouring_pages_is_one_submission() -> None:
    rig = make_rig(pool_pages=64)
    prompt = fill_and_evict(rig, tokens(1, 101))
    assert rig.serve(prompt, 1).usage.host_tokens == 100
    assert rig.engine.record().transfers.restore_submissions <= 2


def test_forty_eight_small_sessions_over_twenty_four_entries_are_all_restored() -> None:
    sessions = [tokens(number, 9) for number in range(48)]
    rig = make_rig(pool_pages=48 * 3 * 5, bank_entries=24, slots=6)
    for session in sessions:
        rig.serve(session, 2)
    assert rig.engine.device.pages.free > 0.7 * rig.engine.device.pages.count, "pages are not what is short"
    for session in sessions:
        usage = rig.serve(session, 2).usage
        assert usage.device_tokens + usage.host_tokens == 8
    record = rig.engine.record()
    assert record.accounting.host_tokens >= 24 * 8
    assert counters(rig).evict_drops_uncached == 0
    rig.assert_at_rest()


def test_the_last_sampled_token_is_neither_stored_nor_hit() -> None:
    """O3: three tokens and one sampled: nothing whole was written. Six and two: one page of four."""
    rig = make_rig(pool_pages=64, mode=Mode.ON_RETAIN)
    first, second = tokens(1, 3), tokens(2, 6)
    first_answer = greedy_answer(first, 1)
    second_answer = greedy_answer(second, 2)
    rig.serve(first, 1)
    assert counters(rig).store_pages == 0
    rig.serve(second, 2)
    assert counters(rig).store_pages == 1
    rig.engine.reset(weights_unchanged=True)
    rig.run()
    assert rig.engine.device.pages.free == 64
    assert rig.serve([*first, *first_answer, 5, 6], 1).usage.cached_tokens == 0
    assert rig.serve([*second, *second_answer, 5, 6], 1).usage.host_tokens == 4
    rig.assert_at_rest()


def test_what_is_on_the_device_is_used_first_and_the_host_supplies_the_rest() -> None:
    rig = make_rig(pool_pages=40)
    shared = tokens(1, 20)
    long = [*shared, *tokens(2, 40)]
    fill_and_evict(rig, long)
    rig.serve(shared, 1)
    usage = rig.serve(long, 2).usage
    assert (usage.device_tokens, usage.host_tokens) == (16, 40) or usage.cached_tokens == 56
    rig.assert_at_rest()


def test_an_idle_engine_under_pressure_drains_what_was_planned_without_traffic() -> None:
    rig = make_rig(pool_pages=32)
    stores_are(copier_of(rig), "hold")
    for number in (1, 2, 3):
        name = rig.ask(tokens(number, PROMPT), 4)
        while not rig.finished(name):
            rig.step()
    assert copier_of(rig).held
    for _ in range(20):
        copier_of(rig).release()
        if not rig.step():
            break
    assert not copier_of(rig).held
    assert counters(rig).stores_completed == counters(rig).stores_issued > 0


def test_a_host_smaller_than_the_device_still_adds_hits() -> None:
    """O1 at engine level: ten one-block conversations over a device of eight pages and a host of four."""
    rig = make_rig(pool_pages=8, page_tokens=16, frames=4, bank_entries=24, slots=1)
    for _ in range(3):
        for number in range(10):
            rig.serve(tokens(number, 17), 1)
    record = rig.engine.record().accounting
    assert record.device_tokens == 0
    assert 14 * 16 <= record.host_tokens <= 20 * 16  # what a tier that keeps a clean copy after a restore may have


# ---- limits


def test_a_request_that_must_not_be_stored_is_not_and_says_opted_out_when_it_returns() -> None:
    rig = make_rig(pool_pages=32)
    prompt = fill_and_evict(rig, limits=CacheLimits(store=False))
    report = rig.serve(prompt, 1).usage.report
    assert report["host"] == 0
    assert report["recomputed"]["opted_out"] == 36
    assert report["first_miss"] == {"reason": "opted_out", "position": 0}


def test_a_request_that_must_not_load_computes_and_says_so() -> None:
    rig = make_rig(pool_pages=32)
    prompt = fill_and_evict(rig)
    report = rig.serve(prompt, 1, limits=CacheLimits(load=False)).usage.report
    assert (report["host"], report["recomputed"]["opted_out"]) == (0, 36)


def test_load_and_store_caps_are_honoured_and_visible() -> None:
    rig = make_rig(pool_pages=32)
    prompt = fill_and_evict(rig)
    report = rig.serve(prompt, 1, limits=CacheLimits(max_load_tokens=19)).usage.report
    assert (report["host"], report["recomputed"]["opted_out"]) == (16, 20)
    capped = fill_and_evict(rig, tokens(2, PROMPT), limits=CacheLimits(max_store_tokens=13))
    report = rig.serve(capped, 1).usage.report
    assert (report["host"], report["recomputed"]["opted_out"]) == (12, 24)


def test_prompt_only_keeps_the_answer_off_the_host() -> None:
    rig = make_rig(pool_pages=32)
    prompt = tokens(1, 20)
    whole = [*prompt, *greedy_answer(prompt, 12)]
    rig.serve(prompt, 12, limits=CacheLimits(store_answer=False))
    evict(rig, prompt)
    assert rig.serve([*whole, 1, 2], 1).usage.host_tokens == 20


def test_hints_change_no_answer_and_fail_nothing() -> None:
    rig = make_rig(pool_pages=24)
    hints = [CacheHints(session_closed=True), CacheHints(expected_return_s=-5.0, session_id="x" * 1000),
             CacheHints(expected_return_s=1e300)]
    for number in range(9):
        rig.serve(tokens(number % 4, PROMPT), 4, hints=hints[number % 3])
    rig.assert_at_rest()


# ---- faults


def test_a_restore_that_fails_half_way_is_computed_and_counted_and_nothing_of_it_is_seen() -> None:
    rig = make_rig(pool_pages=32)
    prompt = fill_and_evict(rig)
    restores_are(copier_of(rig), "fail")
    report = rig.serve(prompt, 4).usage.report
    assert (report["host"], report["recomputed"]["failed"]) == (0, 36)
    assert counters(rig).restore_failures == 1
    rig.assert_at_rest()
    copier_of(rig).script = lambda job: "copy"
    evict(rig, prompt)
    assert rig.serve(prompt, 4).usage.host_tokens == 36, "what was stored is still good"


def test_a_restore_over_its_budget_is_computed_and_its_pages_stay_in_quarantine_until_the_copy_ends() -> None:
    rig = make_rig(pool_pages=32)
    prompt = fill_and_evict(rig)
    restores_are(copier_of(rig), "hold")
    asked_s = rig.clock.now()
    name = rig.ask(prompt, 4)
    other = rig.ask(tokens(77, 6), 4)
    rig.run()
    assert rig.clock.now() - asked_s <= 0.5
    assert rig.answer(name) == greedy_answer(prompt, 4)
    assert rig.answer(other) == greedy_answer(tokens(77, 6), 4)
    report = rig.last(name).usage.report
    assert (report["host"], report["recomputed"]["late"]) == (0, 36)
    record = rig.engine.record()
    assert record.engine.quarantined_pages == 9
    assert counters(rig).restore_timeouts == 1
    copier_of(rig).release()
    rig.run()
    assert rig.engine.record().engine.quarantined_pages == 0
    rig.assert_at_rest()
    rig.drain_pages()


def test_a_late_restore_that_had_not_started_costs_no_page() -> None:
    rig = make_rig(pool_pages=32)
    prompt = fill_and_evict(rig)
    restores_are(copier_of(rig), "queue")
    report = rig.serve(prompt, 4).usage.report
    assert report["recomputed"]["late"] == 36
    assert rig.engine.record().engine.quarantined_pages == 0
    rig.assert_at_rest()


def test_while_one_request_is_restored_others_run() -> None:
    rig = make_rig(pool_pages=48)
    prompt = fill_and_evict(rig)
    restores_are(copier_of(rig), "hold")
    name, other = rig.ask(prompt, 4), rig.ask(tokens(77, 6), 4)
    while not rig.finished(other):
        rig.step()
    assert not rig.events[name]
    assert rig.engine.record().engine.restoring_requests == 1
    copier_of(rig).release()
    rig.run()
    assert rig.last(name).usage.host_tokens == 36


def test_a_store_that_fails_leaves_the_pages_unwritten_and_says_so() -> None:
    rig = make_rig(pool_pages=32)
    stores_are(copier_of(rig), "fail")
    prompt = fill_and_evict(rig)
    copier_of(rig).script = lambda job: "copy"
    report = rig.serve(prompt, 1).usage.report
    assert report["host"] == 0
    assert sum(tokens for reason, tokens in report["recomputed"].items() if reason != "partial_page") == 36
    rig.assert_at_rest()


def test_a_store_that_is_lost_holds_an_eviction_for_its_budget_and_no_longer() -> None:
    """O5 at engine level: the frames stay with the copy that never ended, everything else goes on."""
    rig = make_rig(pool_pages=32, copy_budget_s=0.05)
    copier = copier_of(rig)
    first: list[CopyJob] = []

    def lose_the_first(job: CopyJob) -> str:
        if job.direction is Direction.STORE and not first:
            first.append(job)
            return "lose"
        return "copy"

    copier.script = lose_the_first
    prompt = fill_and_evict(rig)
    assert first
    assert rig.serve(prompt, 1).usage.host_tokens == 36, "it was stored afresh"
    record = rig.engine.record()
    assert record.tier is not None
    assert record.tier.quarantined_frames == first[0].pages
    rig.assert_at_rest()


def test_an_eviction_never_waits_beyond_its_budget() -> None:
    rig = make_rig(pool_pages=24, copy_budget_s=0.2)
    stores_are(copier_of(rig), "hold")
    for number in (1, 2, 3):
        asked_s = rig.clock.now()
        name = rig.ask(tokens(number, PROMPT), 4)
        while not rig.finished(name):
            rig.step(0.001)
        assert rig.clock.now() - asked_s <= 0.2 + 0.02
    assert rig.engine.tier.stats().counters.evict_waits > 0
    copier_of(rig).release()
    rig.run()
    rig.assert_at_rest()


@pytest.mark.parametrize("fate", ["copy", "hold", "queue", "fail"])
@pytest.mark.parametrize("at_step", range(6))
def test_a_client_that_leaves_at_any_point_of_a_restore_leaves_no_pin_and_no_page(fate: str, at_step: int) -> None:
    rig = make_rig(pool_pages=32)
    prompt = fill_and_evict(rig)
    restores_are(copier_of(rig), fate)
    name = rig.ask(prompt, 4)
    for _ in range(at_step):
        rig.step()
    rig.engine.abort(name)
    rig.engine.check()
    rig.step()
    assert rig.last(name).finish_reason in ("abort", "length")
    copier_of(rig).release()
    rig.run()
    rig.assert_at_rest()
    record = rig.engine.record()
    assert record.tier is not None
    assert (record.tier.pinned_pages, record.tier.live_reservations, record.engine.quarantined_pages) == (0, 0, 0)
    rig.drain_pages()


def test_the_account_of_an_aborted_request_balances() -> None:
    rig = make_rig(pool_pages=32)
    prompt = fill_and_evict(rig)
    restores_are(copier_of(rig), "hold")
    name = rig.ask(prompt, 4)
    waiting = rig.ask(tokens(1, PROMPT), 4)
    rig.step()
    rig.engine.abort(name)
    rig.engine.abort(waiting)
    rig.step()
    assert rig.last(name).usage.report["recomputed"]["aborted"] == 36
    assert rig.engine.record().accounting.aborted_before_admission == 1
    copier_of(rig).release()
    rig.run()
    rig.assert_at_rest()


def test_a_request_that_only_a_copy_without_end_keeps_from_its_pages_is_answered_with_an_error() -> None:
    rig = make_rig(pool_pages=16)
    prompt = tokens(1, PROMPT)
    rig.serve(prompt, 4)
    rig.engine.reset(weights_unchanged=True)
    rig.run()
    restores_are(copier_of(rig), "lose")
    name = rig.ask(prompt, 4)
    small = rig.ask(tokens(2, 9), 2)
    for _ in range(400):
        rig.step(0.1)
    last = rig.last(name)
    assert last.finish_reason == "error"
    assert last.error is not None
    assert "9 device pages are held by restores that never ended" in last.error
    assert rig.answer(small) == greedy_answer(tokens(2, 9), 2), "what fits goes on"
    record = rig.engine.record()
    assert (record.engine.quarantined_pages, record.engine.requests_failed) == (9, 1)
    assert "request_stuck" in [event for event, _ in rig.log]
    rig.engine.check()


def test_copiers_that_fail_are_asked_again_later_and_trusted_after_a_success() -> None:
    rig = make_rig(pool_pages=32)
    copier = copier_of(rig)
    stores_are(copier, "fail")
    for number in range(3):
        rig.serve(tokens(number, PROMPT), 2)
    failed = len(copier.jobs)
    for _ in range(50):
        rig.step(0.001)
    assert len(copier.jobs) == failed, "no hot loop of failing copies"
    copier.script = lambda job: "copy"
    for _ in range(50):
        rig.step(2.0)
    assert counters(rig).stores_completed > 0


# ---- one prefix, one copy


def test_ten_sharers_of_a_prefix_on_the_host_cause_one_copy() -> None:
    rig = make_rig(pool_pages=100, slots=10)
    shared = tokens(1, 80)
    rig.serve(shared, 1)
    rig.engine.reset(weights_unchanged=True)
    rig.run()
    restores_are(copier_of(rig), "hold")
    names = [rig.ask([*shared, *tokens(100 + n, 5)], 4) for n in range(10)]
    for _ in range(3):
        rig.step()
    restore_jobs = [job for job in copier_of(rig).jobs if job.direction is Direction.RESTORE]
    assert len(restore_jobs) == 1
    copier_of(rig).release()
    rig.run()
    assert len([job for job in copier_of(rig).jobs if job.direction is Direction.RESTORE]) == 1
    assert [rig.last(name).usage.cached_tokens for name in names] == [80] * 10
    assert rig.engine.record().transfers.prefill_holds == 9
    rig.assert_at_rest()


def test_sharers_wait_for_one_load_at_most_when_loads_never_end() -> None:
    rig = make_rig(pool_pages=200, slots=10)
    shared = tokens(1, 80)
    rig.serve(shared, 1)
    rig.engine.reset(weights_unchanged=True)
    rig.run()
    restores_are(copier_of(rig), "lose")
    asked_s = rig.clock.now()
    names = [rig.ask([*shared, *tokens(100 + n, 5)], 4) for n in range(10)]
    rig.run(seconds=0.01)
    assert all(rig.finished(name) for name in names)
    assert rig.clock.now() - asked_s <= 2 * 0.5 + 1.0, "one load each at most, not one after another"
    rig.assert_at_rest()


def test_a_prefix_on_the_device_never_waits_for_the_tier() -> None:
    rig = make_rig(pool_pages=100, slots=10)
    device, host = tokens(1, 41), tokens(2, 41)
    rig.serve(host, 1)
    rig.engine.reset(weights_unchanged=True)
    rig.run()
    rig.serve(device, 1)
    restores_are(copier_of(rig), "hold")
    slow, fast = rig.ask(host, 1), rig.ask(device, 1)
    rig.step()
    assert rig.finished(fast)
    assert not rig.finished(slow)
    rig.run()


def test_a_prompt_with_nothing_stored_is_answered_in_the_same_step() -> None:
    rig = make_rig(pool_pages=100)
    name = rig.ask(tokens(9, 12), 1)
    rig.step()
    assert rig.finished(name)


def test_a_restore_dearer_than_computing_is_not_made() -> None:
    rig = make_rig(pool_pages=32)
    prompt = fill_and_evict(rig)
    rig.engine.rates.saw_prefill(10_000, 1.0)
    rig.engine.rates.saw_restore(100, 1.0)
    report = rig.serve(prompt, 1).usage.report
    assert (report["host"], report["recomputed"]["dearer"]) == (0, 36)
    assert counters(rig).restores == 0


# ---- bytes


@pytest.mark.parametrize("verify", list(Verify))
def test_restored_pages_that_are_not_what_was_stored_are_never_used_where_they_are_verified(verify: Verify) -> None:
    rig = make_rig(pool_pages=32, verify=verify)
    prompt = fill_and_evict(rig)
    if verify is Verify.ALWAYS:
        copier_of(rig).frames += 1
    report = rig.serve(prompt, 4).usage.report
    transfers = rig.engine.record().transfers
    if verify is Verify.ALWAYS:
        assert (report["host"], report["recomputed"]["failed"]) == (0, 36)
        assert (transfers.verify_failures, transfers.pages_verified) == (9, 9)
    else:
        assert report["host"] == 36
        assert transfers.verify_failures == 0
        assert (transfers.pages_verified > 0) <= (verify is Verify.SAMPLED)


def test_the_fingerprints_would_notice_a_wrong_byte() -> None:
    """The instrument itself: with nothing verified, a damaged page stops the model."""
    rig = make_rig(pool_pages=32)
    prompt = fill_and_evict(rig)
    copier_of(rig).frames += 1
    with pytest.raises(AssertionError, match="foreign or stale"):
        rig.serve(prompt, 4)


def test_a_compacted_conversation_shares_only_what_it_kept() -> None:
    rig = make_rig(pool_pages=40)
    prompt = fill_and_evict(rig, tokens(1, 60))
    kept = [*prompt[:43], *tokens(5, 10)]
    usage = rig.serve(kept, 4).usage
    assert usage.cached_tokens == 40
    rig.assert_at_rest()


def test_a_hundred_turnovers_of_the_tier_leave_nothing_behind() -> None:
    rig = make_rig(pool_pages=24, frames=12, bank_entries=3)
    rig.check_every_step = False
    for number in range(220):
        rig.serve(tokens(number % 7, 30), 2)
        if number % 20 == 0:
            rig.assert_at_rest()
    assert counters(rig).store_pages > 20 * 12
    rig.assert_at_rest()
    rig.drain_pages()
