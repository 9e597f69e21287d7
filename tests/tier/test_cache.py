"""HostCache call by call: what each answers, and what it must not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hostcache.errors import ConfigError
from hostcache.testing.rig import Rig, done
from hostcache.tier import (
    Clean,
    Drop,
    Extent,
    History,
    HostCache,
    Identity,
    Match,
    Mode,
    Pressure,
    Reason,
    Refused,
    Reservation,
    StoreJob,
    TierConfig,
    TierStats,
    Wait,
    extents,
    key_chain,
)

PAGE = 4


def rig(device: int = 40, host: int = 40, *, mode: Mode = Mode.ON_PRESSURE, eager: bool = False, pace_s: float = 0.0,
        job: int = 256, **options: Any) -> Rig:
    config = TierConfig(host_cache_bytes=host, page_bytes=1, page_tokens=PAGE, mode=mode, store_pace_s=pace_s,
                        max_job_pages=job, quarantine_limit=1.0)
    return Rig(config, device, eager=eager, **options)


def prompt(name: int, pages: int, rest: int = 1) -> list[int]:
    return [name * 10_000 + i for i in range(pages * PAGE + rest)]


def last(r: Rig) -> int:
    """The id of the youngest snapshot."""
    return next(reversed(r.bank))


def plan(r: Rig, *victims: int, now_s: float = 0.0) -> list[StoreJob]:
    jobs = r.cache.plan_writeback(Pressure(now_s=now_s, victims=victims))
    r.submit(jobs)
    return jobs


def store(r: Rig, tokens: Sequence[int], **options: Any) -> None:
    """Visited, written back, gone from the device."""
    r.visit(tokens, **options)
    snapshot_id = last(r)
    while plan(r, snapshot_id):
        r.pump()
    r.evict(snapshot_id)


def on_host(r: Rig, tokens: Sequence[int]) -> int:
    chain = r.chain(tokens)
    return r.cache.lookup(chain, 0, len(chain)).pages


def reserve(r: Rig, tokens: Sequence[int]) -> Reservation:
    chain = r.chain(tokens)
    answer = r.cache.reserve(r.cache.lookup(chain, 0, len(chain)))
    assert isinstance(answer, Reservation)
    return answer


def state(r: Rig) -> TierStats:
    """Everything but the counters."""
    stats = r.cache.stats()
    return replace(stats, counters=type(stats.counters)())


# ---- write-back: when


def test_on_pressure_nothing_is_written_until_a_victim_is_named() -> None:
    r = rig()
    r.visit(prompt(1, 4))
    assert plan(r) == []
    assert r.cache.stats().dirty_pages == 4
    (job,) = plan(r, last(r))
    assert job.keys == r.chain(prompt(1, 4)).keys
    assert len(job.frames) == 4
    assert plan(r, last(r)) == [], "what is being written is not planned twice"
    r.pump()
    assert (r.cache.stats().resident_pages, r.cache.stats().dirty_pages) == (4, 0)
    assert plan(r, last(r)) == [], "what is written is not written again"


def test_on_retain_everything_is_written_at_once() -> None:
    r = rig(mode=Mode.ON_RETAIN)
    r.visit(prompt(1, 4))
    assert len(r.jobs) == 1
    r.pump()
    assert r.cache.stats().resident_pages == 4
    assert r.evict(last(r)) == Clean()
    assert r.cache.stats().counters.evict_waits == 0


def test_on_evict_only_the_last_moment_writes_with_a_bounded_wait() -> None:
    r = rig(mode=Mode.ON_EVICT)
    r.visit(prompt(1, 4))
    assert plan(r, last(r)) == []
    answer = r.cache.before_evict(last(r), stays=0, now_s=0.0)
    assert isinstance(answer, Wait)
    assert (answer.job_ids, answer.budget_s) == (tuple(job.job_id for job in answer.jobs), 1.0)
    r.submit(answer.jobs)
    r.pump()
    assert r.cache.before_evict(last(r), stays=0, now_s=0.0) == Clean()
    counters = r.cache.stats().counters
    assert (counters.evict_waits, counters.device_evictions, counters.evict_drops_uncached) == (1, 1, 0)


@pytest.mark.parametrize("off", [{"mode": Mode.OFF}, {"host": 0}])
def test_off_every_call_answers_neutrally_and_nothing_is_kept(off: dict[str, Any]) -> None:
    r = rig(**off)
    for name in range(4):
        visit = r.visit(prompt(name % 2, 4))
        assert (visit.host, r.jobs) == (0, {})
    chain = r.chain(prompt(0, 4))
    assert plan(r, *r.bank) == []
    assert r.cache.lookup(chain, 0, 4) == Match(chain=chain, start=0, pages=0)
    assert r.cache.reserve(Match(chain=chain, start=0, pages=4)) == Refused(reason=Reason.TIER_OFF)
    assert r.evict(last(r)) == Clean()
    r.cache.settle(done(1))
    r.cache.expire(1, running=True)
    r.cache.forget(r.identity)
    r.cache.forget()
    r.check()
    stats = r.cache.stats()
    assert (stats.frames, stats.snapshots, stats.live_stores, stats.live_reservations) == (0, 0, 0, 0)
    assert stats.off_reason == "host_cache_bytes is 0 or the mode is off"


def test_jobs_are_cut_to_size_and_few_at_a_time_heads_first() -> None:
    r = rig(device=60, host=60, job=3)
    r.visit(prompt(1, 20))
    jobs = plan(r, last(r))
    assert [len(job.keys) for job in jobs] == [3, 3, 3, 3]
    assert sum((job.keys for job in jobs), ()) == r.chain(prompt(1, 20)).keys[:12]
    assert plan(r, last(r)) == []
    r.complete(jobs[0].job_id)
    (job,) = plan(r, last(r))
    assert job.keys == r.chain(prompt(1, 20)).keys[12:15]
    r.check()


def test_the_pace_holds_stores_apart_but_not_the_last_moment() -> None:
    r = rig(job=2, pace_s=1.0)
    r.visit(prompt(1, 8))
    assert [len(plan(r, last(r), now_s=now_s)) for now_s in (10.0, 10.5, 10.9, 11.0, 11.0, 12.5)] == [1, 0, 0, 1, 0, 1]
    answer = r.cache.before_evict(last(r), stays=0, now_s=12.5)
    assert isinstance(answer, Wait)
    assert len(answer.jobs) == 1


def test_victims_are_written_in_the_order_of_their_eviction() -> None:
    r = rig()
    ids = []
    for name in (1, 2, 3):
        r.visit(prompt(name, 2))
        ids.append(last(r))
    jobs = plan(r, ids[2], ids[0], 999)
    assert [job.keys for job in jobs] == [r.chain(prompt(name, 2)).keys for name in (3, 1)]


def test_a_client_may_cap_what_is_written_or_opt_out() -> None:
    r = rig()
    for name, cap, kept in ((1, 3, 3), (2, 0, 0), (3, None, 5), (4, 99, 5)):
        store(r, prompt(name, 5), store_pages=cap)
        assert on_host(r, prompt(name, 5)) == kept, name
    r.check()


def test_a_snapshot_larger_than_the_host_is_skipped_once_and_takes_no_frame() -> None:
    r = rig(host=4)
    r.visit(prompt(1, 5))
    for _ in range(3):
        assert plan(r, last(r)) == []
    assert r.cache.stats().counters.stores_skipped == 1
    answer = r.evict(last(r))
    assert answer == Drop(reason=Reason.NOT_WRITTEN, pages=5)
    assert r.cache.stats().counters.peak_frames == 0


# ---- write-back: how it ends


def test_a_failed_store_leaves_nothing_behind_and_may_be_tried_again() -> None:
    r = rig()
    r.visit(prompt(1, 4))
    before = state(r)
    (job,) = plan(r, last(r))
    r.complete(job.job_id, "broken")
    assert state(r) == before
    assert r.cache.stats().counters.stores_failed == 1
    r.check()
    assert len(plan(r, last(r))) == 1
    r.pump()
    assert r.cache.stats().resident_pages == 4


def test_completions_that_are_unknown_late_or_double_change_nothing() -> None:
    r = rig()
    r.visit(prompt(1, 4))
    (job,) = plan(r, last(r))
    r.complete(job.job_id)
    before = state(r)
    for error in (None, "broken"):
        r.cache.settle(done(job.job_id, error))
        r.cache.settle(done(12345, error))
    r.cache.expire(job.job_id, running=True)
    assert state(r) == before
    assert r.cache.stats().counters.late_completions == 4
    assert r.cache.stats().counters.stores_completed == 1
    r.check()


@pytest.mark.parametrize("running", [False, True])
def test_an_expired_store_is_void_and_its_late_bytes_are_never_matched(running: bool) -> None:
    r = rig()
    r.visit(prompt(1, 4))
    (job,) = plan(r, last(r))
    r.cache.expire(job.job_id, running=running)
    stats = r.cache.stats()
    assert (stats.free_frames, stats.quarantined_frames) == ((36, 4) if running else (40, 0))
    r.check()
    r.cache.settle(done(job.job_id))
    stats = r.cache.stats()
    assert (stats.free_frames, stats.quarantined_frames, stats.resident_pages) == (40, 0, 0)
    assert on_host(r, prompt(1, 4)) == 0
    r.check()


def test_a_snapshot_dropped_before_its_copy_ended_is_restorable_when_the_copy_ends() -> None:
    r = rig()
    r.visit(prompt(1, 4))
    plan(r, last(r))
    r.drop(last(r))
    match = r.cache.lookup(r.chain(prompt(1, 4)), 0, 4)
    assert (match.pages, match.pending) == (0, True)
    r.pump()
    assert on_host(r, prompt(1, 4)) == 4
    r.check()


def test_before_evict_waits_once_then_drops_late_with_the_pages_that_are_lost() -> None:
    r = rig()
    r.visit(prompt(1, 4))
    answer = r.cache.before_evict(last(r), stays=1, now_s=0.0)
    assert isinstance(answer, Wait)
    assert r.cache.before_evict(last(r), stays=1, now_s=1.0, expired=True) == Drop(reason=Reason.LATE, pages=3)
    counters = r.cache.stats().counters
    assert (counters.device_evictions, counters.evict_drops_uncached, counters.evict_drop_pages) == (1, 1, 3)


def test_an_eviction_writes_the_heads_that_stay_too_because_no_tail_may_be_without_them() -> None:
    r = rig()
    r.visit(prompt(1, 4))
    r.visit([*prompt(1, 4)[:12], *prompt(2, 2)])
    first = next(iter(r.bank))
    answer = r.cache.before_evict(first, stays=3, now_s=0.0)
    assert isinstance(answer, Wait)
    assert [len(job.keys) for job in answer.jobs] == [4]


def test_every_store_that_is_begun_is_handed_out() -> None:
    r = rig()
    r.visit(prompt(1, 4))
    answer = r.cache.before_evict(last(r), stays=4, now_s=0.0)
    assert answer == Clean()
    assert r.cache.stats().live_stores == 0


def test_a_superseded_snapshot_needs_no_goodbye_and_an_unknown_one_is_clean() -> None:
    r = rig()
    r.visit(prompt(1, 2))
    first = last(r)
    r.visit(prompt(1, 4))
    assert first not in r.bank
    assert r.cache.before_evict(first, stays=0, now_s=0.0) == Clean()
    r.cache.evicted(first)
    assert r.cache.stats().counters.device_evictions == 0


# ---- restore


def test_lookup_changes_nothing_however_often_it_is_asked() -> None:
    r = rig()
    store(r, prompt(1, 4))
    before = state(r)
    chain = r.chain(prompt(1, 4))
    assert {r.cache.lookup(chain, 0, 4).pages for _ in range(50)} == {4}
    assert state(r) == before
    assert r.cache.stats().counters.host_hits >= 50


def test_lookup_finds_the_run_from_start_and_no_page_at_or_over_the_limit() -> None:
    r = rig()
    store(r, prompt(1, 4))
    chain = r.chain(prompt(1, 6))
    asked = ((0, 6), (0, 3), (2, 6), (4, 6), (3, 2), (0, 99))
    assert [r.cache.lookup(chain, start, limit).pages for start, limit in asked] == [4, 3, 2, 0, 0, 4]


def test_a_reservation_pins_what_it_names_until_it_ends_exactly_once() -> None:
    r = rig()
    store(r, prompt(1, 4))
    reservation = reserve(r, prompt(1, 4))
    assert reservation.keys == r.chain(prompt(1, 4)).keys
    assert (r.cache.stats().pinned_pages, r.cache.stats().live_reservations) == (4, 1)
    r.cache.commit(reservation)
    assert (r.cache.stats().pinned_pages, r.cache.stats().live_reservations) == (0, 0)
    before = state(r)
    with pytest.raises(ValueError, match="exactly once"):
        r.cache.commit(reservation)
    for copying in (False, True):
        with pytest.raises(ValueError, match="exactly once"):
            r.cache.abandon(reservation, Reason.LATE, copying=copying)
    assert state(r) == before
    assert on_host(r, prompt(1, 4)) == 4, "a restore does not consume the host copy"


def test_two_reservations_of_one_page_are_two_pins() -> None:
    r = rig()
    store(r, prompt(1, 2))
    one, other = reserve(r, prompt(1, 2)), reserve(r, prompt(1, 2))
    assert one.frames.tolist() == other.frames.tolist()
    r.cache.commit(one)
    assert r.cache.stats().pinned_pages == 2
    r.check()
    r.cache.abandon(other, Reason.ABORTED, copying=False)
    assert r.cache.stats().pinned_pages == 0
    r.check()


def test_an_abandoned_copy_keeps_its_pages_in_place_until_it_is_over() -> None:
    r = rig(host=4)
    store(r, prompt(1, 4))
    reservation = reserve(r, prompt(1, 4))
    r.cache.abandon(reservation, Reason.LATE, copying=True)
    assert r.cache.stats().pinned_pages == 4
    r.visit(prompt(2, 4))
    assert plan(r, last(r)) == [], "no frame under a running copy is given away"
    r.check()
    r.cache.settle(done(reservation.job_id))
    assert (r.cache.stats().pinned_pages, r.cache.stats().live_reservations) == (0, 0)
    r.cache.settle(done(reservation.job_id))
    assert r.cache.stats().pinned_pages == 0
    r.check()


@pytest.mark.parametrize(
    ("reason", "timeouts", "failures"),
    [(Reason.LATE, 1, 0), (Reason.FAILED, 0, 1), (Reason.NO_ROOM, 0, 1), (Reason.ABORTED, 0, 0)],
)
def test_an_abandoned_reservation_is_counted_by_its_reason(reason: Reason, timeouts: int, failures: int) -> None:
    r = rig()
    store(r, prompt(1, 4))
    r.cache.abandon(reserve(r, prompt(1, 4)), reason, copying=False)
    counters = r.cache.stats().counters
    assert (counters.restore_timeouts, counters.restore_failures, counters.restores) == (timeouts, failures, 0)


def test_a_refused_reservation_moves_nothing() -> None:
    r = rig(host=4)
    store(r, prompt(1, 4))
    match = r.cache.lookup(r.chain(prompt(1, 4)), 0, 4)
    r.cache.forget()
    before = state(r)
    assert r.cache.reserve(match) == Refused(reason=Reason.EVICTED)
    assert state(r) == before


def test_a_match_that_lost_its_tail_is_reserved_shorter() -> None:
    r = rig(host=40, job=4)
    store(r, prompt(1, 40))
    match = r.cache.lookup(r.chain(prompt(1, 40)), 0, 40)
    store(r, prompt(2, 4))
    assert on_host(r, prompt(2, 4)) == 4
    answer = r.cache.reserve(match)
    assert isinstance(answer, Reservation)
    assert answer.pages == 36
    assert answer.keys == match.chain.keys[:36]
    r.check()


# ---- refused calls


def test_calls_that_break_the_contract_are_refused_and_move_nothing() -> None:
    r = rig()
    r.visit(prompt(1, 2))
    before = state(r)
    with pytest.raises(ValueError, match="already retained"):
        r.cache.retain(last(r), r.chain(prompt(1, 2)), pages=2)
    r.cache.touch(r.chain(prompt(7, 2)), 2)
    r.cache.device_removed(r.chain(prompt(7, 2)).keys)
    assert state(r) == before
    r.check()


def test_a_snapshot_of_pages_the_device_never_reported_is_remembered_as_far_as_they_are_known() -> None:
    r = rig()
    r.visit(prompt(1, 2))
    r.cache.retain(99, r.chain(prompt(7, 2)), pages=2)
    r.cache.retain(100, r.chain(prompt(1, 9)), pages=9)
    (job,) = plan(r, 99, 100)
    assert job.keys == r.chain(prompt(1, 2)).keys
    r.check()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("host_cache_bytes", -1, "host_cache_bytes is -1"),
        ("page_bytes", 0, "page_bytes is 0"),
        ("page_tokens", 0, "page_tokens is 0"),
        ("max_job_pages", 0, "max_job_pages is 0"),
        ("store_pace_s", -0.5, "store_pace_s is -0.5"),
        ("copy_budget_s", float("nan"), "copy_budget_s is nan"),
        ("quarantine_limit", 0.0, "quarantine_limit is 0.0"),
        ("eviction", "fifo", "choose one of scan-resistant, lru"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_with_its_value(name: str, value: object, message: str) -> None:
    good: dict[str, Any] = {"host_cache_bytes": 1, "page_bytes": 1, "page_tokens": 1}
    with pytest.raises(ConfigError, match=message):
        TierConfig(**{**good, name: value})


def test_a_quota_holds_whole_pages_only() -> None:
    config = TierConfig(host_cache_bytes=199, page_bytes=100, page_tokens=4)
    assert (config.frames, replace(config, mode=Mode.OFF).frames) == (1, 0)


# ---- forgetting


def test_forgetting_an_identity_drops_its_pages_and_no_others() -> None:
    history = History(10_000)
    cache = HostCache(TierConfig(host_cache_bytes=40, page_bytes=1, page_tokens=PAGE), history=history)
    mine = Identity(model="m", revision="1", dtype="x", layout="l", page_tokens=PAGE)
    theirs = replace(mine, revision="2")
    for number, identity in enumerate((mine, theirs)):
        chain = key_chain(prompt(1, 3), identity)
        cache.device_added(chain, 0, 3)
        cache.retain(number, chain, pages=3)
        for job in cache.plan_writeback(Pressure(now_s=0.0, victims=(number,))):
            cache.settle(done(job.job_id))
        cache.evicted(number)
        cache.device_removed(chain.keys)
    cache.forget(mine)
    cache.check()
    found = [cache.lookup(key_chain(prompt(1, 3), identity), 0, 3).pages for identity in (mine, theirs)]
    assert found == [0, 3]
    assert cache.stats().free_frames == 37
    cache.forget(replace(mine, revision="never seen"))
    assert cache.stats().free_frames == 37
    cache.forget()
    assert cache.stats().free_frames == 40
    cache.check()


@pytest.mark.parametrize("everything", [True, False])
def test_what_a_copy_holds_in_place_is_unmatchable_at_once_and_goes_when_it_ends(everything: bool) -> None:
    r = rig(job=4)
    store(r, prompt(1, 4))
    store(r, prompt(2, 4))
    r.visit(prompt(3, 4))
    (job,) = plan(r, last(r))
    open_one = reserve(r, prompt(1, 4))
    draining = reserve(r, prompt(2, 4))
    r.cache.abandon(draining, Reason.LATE, copying=True)
    r.drop(last(r))
    r.cache.forget(None if everything else r.identity)
    r.check()
    assert [on_host(r, prompt(name, 4)) for name in (1, 2, 3)] == [0, 0, 0]
    assert r.cache.stats().free_frames == 28
    r.cache.commit(open_one)
    r.check()
    r.cache.settle(done(draining.job_id))
    r.check()
    r.complete(job.job_id)
    r.check()
    stats = r.cache.stats()
    assert (stats.free_frames, stats.pinned_pages, stats.resident_pages) == (40, 0, 0)
    assert [on_host(r, prompt(name, 4)) for name in (1, 2, 3)] == [0, 0, 0]


def test_after_forgetting_the_same_tokens_are_stored_anew() -> None:
    r = rig()
    store(r, prompt(1, 4))
    r.cache.forget()
    assert r.visit(prompt(1, 4)).report.recomputed[Reason.NEW] == 16
    r.evict(last(r))
    store(r, prompt(1, 4))
    assert on_host(r, prompt(1, 4)) == 4
    r.check()


def test_a_request_that_was_under_way_when_everything_was_forgotten_can_still_be_retained() -> None:
    r = rig()
    chain = r.chain(prompt(1, 4))
    r.cache.device_added(chain, 0, 2)
    r.cache.forget()
    r.cache.device_added(chain, 2, 4)
    r.cache.retain(1, chain, pages=4)
    r.check()
    assert plan(r, 1) == [], "what was computed with what is forgotten is not stored"


# ---- room


def test_tails_go_before_heads() -> None:
    r = rig(device=80, host=20)
    store(r, prompt(1, 20))
    store(r, prompt(2, 2))
    r.check()
    assert on_host(r, prompt(1, 20)) == 18
    assert r.cache.stats().counters.orphaned_pages == 0


def test_duplicates_of_device_pages_are_given_up_first() -> None:
    r = rig(device=80, host=8, mode=Mode.ON_RETAIN)
    r.visit(prompt(1, 4))
    r.pump()
    r.evict(last(r))
    r.visit(prompt(2, 4))
    r.pump()
    assert r.cache.stats().duplicate_pages == 4
    r.visit(prompt(3, 4))
    r.pump()
    assert [on_host(r, prompt(name, 4)) for name in (1, 2, 3)] == [4, 0, 4]
    r.check()


def test_a_duplicate_about_to_leave_the_device_is_not_a_duplicate_any_more() -> None:
    r = rig(device=80, host=8)
    store(r, prompt(1, 4))
    r.visit(prompt(2, 4))
    leaving = last(r)
    plan(r, leaving)
    r.pump()
    r.visit(prompt(3, 4))
    plan(r, last(r))
    r.pump()
    assert [on_host(r, prompt(name, 4)) for name in (1, 2, 3)] == [0, 4, 4]
    assert r.evict(leaving) == Clean()
    r.check()


def test_a_conversation_never_reused_cannot_displace_one_that_was() -> None:
    r = rig(device=80, host=8)
    store(r, prompt(1, 8))
    assert r.visit(prompt(1, 8)).host == 8
    r.evict(last(r))
    for name in range(2, 7):
        store(r, prompt(name, 4))
        assert on_host(r, prompt(1, 8)) == 8
    assert r.cache.stats().counters.stores_skipped == 5
    r.check()


def test_a_returned_conversation_that_is_stale_gives_way_in_the_end() -> None:
    r = rig(device=80, host=8)
    store(r, prompt(1, 8))
    assert r.visit(prompt(1, 8)).host == 8
    r.evict(last(r))
    for name in range(2, 30):
        store(r, prompt(name, 4))
    assert on_host(r, prompt(1, 8)) == 0
    assert on_host(r, prompt(29, 4)) == 4
    r.check()


@pytest.mark.parametrize("pinned", [False, True])
def test_when_a_head_leaves_every_tier_what_lies_behind_it_goes_too(pinned: bool) -> None:
    r = rig(job=4)
    r.visit(prompt(1, 12))
    head, middle, tail = plan(r, last(r))
    r.complete(tail.job_id)
    r.complete(middle.job_id)
    chain = r.chain(prompt(1, 12))
    reservation = r.cache.reserve(r.cache.lookup(chain, 4, 8))
    assert isinstance(reservation, Reservation)
    if not pinned:
        r.cache.commit(reservation)
    r.complete(head.job_id, "broken")
    r.check()
    r.drop(last(r))
    r.check()
    assert [r.cache.lookup(chain, start, 12).pages for start in (0, 4, 8)] == [0, 0, 0]
    assert r.cache.stats().free_frames == (36 if pinned else 40)
    if pinned:
        r.cache.commit(reservation)
        r.check()
    assert r.cache.stats().free_frames == 40
    assert r.cache.stats().counters.orphaned_pages == 8, "each page that was wasted is counted"


def test_recency_alone_can_be_chosen_and_then_the_oldest_goes_whoever_returned() -> None:
    config = TierConfig(host_cache_bytes=8, page_bytes=1, page_tokens=PAGE, eviction="lru")
    r = Rig(config, 80, eager=False)
    store(r, prompt(1, 4))
    assert r.visit(prompt(1, 4)).host == 4
    r.evict(last(r))
    store(r, prompt(2, 4))
    store(r, prompt(3, 4))
    assert [on_host(r, prompt(name, 4)) for name in (1, 2, 3)] == [0, 4, 4]


# ---- where pages lie


@pytest.mark.parametrize("eviction", ["scan-resistant", "lru"])
def test_what_is_about_to_leave_the_device_is_not_written_over_and_over_in_turns(eviction: str) -> None:
    config = TierConfig(host_cache_bytes=4, page_bytes=1, page_tokens=PAGE, eviction=eviction)
    r = Rig(config, 40)
    for name in (1, 2):
        r.visit(prompt(name, 4))
    for _ in range(9):
        plan(r, *r.bank)
        r.pump()
    assert plan(r, *r.bank) == []
    assert (r.cache.stats().counters.store_pages, r.cache.stats().counters.stores_skipped) == (4, 1)


def test_a_conversation_that_grows_turn_by_turn_lies_in_few_runs() -> None:
    r = rig(device=400, host=400)
    for turn in range(1, 21):
        for name in (1, 2):
            store(r, prompt(name, 4 * turn))
    for name in (1, 2):
        reservation = reserve(r, prompt(name, 80))
        assert reservation.pages == 80
        assert len(extents(range(80), reservation.frames)) <= 2
        r.cache.abandon(reservation, Reason.ABORTED, copying=False)
    r.check()


def test_extents_join_only_where_both_sides_are_neighbours() -> None:
    assert extents([], []) == ()
    assert extents([5, 6, 7, 9], [0, 1, 3, 4]) == (
        Extent(device_page=5, frame=0, pages=2),
        Extent(device_page=7, frame=3, pages=1),
        Extent(device_page=9, frame=4, pages=1),
    )
    with pytest.raises(ValueError, match="2 device pages but 1 frames"):
        extents([1, 2], [1])


# ---- the quota


def test_the_peak_never_exceeds_the_quota_and_quarantine_counts() -> None:
    r = rig(device=80, host=10, job=3)
    for name in range(12):
        r.visit(prompt(name, 5))
        jobs = plan(r, last(r))
        if name % 4 == 0 and jobs:
            r.cache.expire(jobs[0].job_id, running=True)
        r.pump(1)
        r.check()
        if name % 3 == 0:
            r.pump()
        r.evict(last(r))
        r.check()
    r.pump()
    stats = r.cache.stats()
    assert 0 < stats.counters.peak_frames <= stats.frames == 10
    assert stats.quarantined_frames == 0


def test_a_chain_of_thousands_of_pages_goes_with_its_last_pin() -> None:
    """Also when only its tail is pinned: seeing off a long chain must not depend on the depth of a stack."""
    pages = 5000
    r = rig(device=pages, host=pages, job=pages)
    r.visit(prompt(1, pages))
    plan(r, last(r))
    r.pump()
    r.evict(last(r))
    chain = r.chain(prompt(1, pages))
    reservation = r.cache.reserve(r.cache.lookup(chain, pages - 1, pages))
    assert isinstance(reservation, Reservation)
    r.cache.forget(r.identity)
    r.check()
    assert r.cache.stats().free_frames == pages - 1
    r.cache.abandon(reservation, Reason.FORGOTTEN, copying=False)
    r.check()
    assert r.cache.stats().free_frames == pages
