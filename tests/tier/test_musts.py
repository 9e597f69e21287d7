"""Musts of users of other systems that no single module can show: A3, D4, E2, E4 to E7, F1 to F3, H1."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from hostcache.testing.rig import Rig, done
from hostcache.tier import (
    Clean,
    Drop,
    Match,
    Mode,
    Pressure,
    Reason,
    Reservation,
    TierConfig,
    Wait,
    key_chain,
)

PAGE = 8


def rig(device: int = 40, host: int = 40, **options: Any) -> Rig:
    config = TierConfig(host_cache_bytes=host, page_bytes=1, page_tokens=PAGE, quarantine_limit=1.0,
                        mode=options.pop("mode", Mode.ON_PRESSURE))
    return Rig(config, device, **options)


def prompt(name: int, pages: int, rest: int = 1) -> list[int]:
    return [name * 10_000 + i for i in range(pages * PAGE + rest)]


def leave(r: Rig) -> None:
    for snapshot_id in list(r.bank):
        r.evict(snapshot_id)


def on_host(r: Rig, tokens: list[int]) -> int:
    chain = r.chain(tokens)
    return r.cache.lookup(chain, 0, len(chain)).pages


@pytest.mark.parametrize("tokens", [PAGE - 1, PAGE, PAGE + 1, 4 * PAGE - 1, 4 * PAGE, 4 * PAGE + 1])
def test_a3_the_page_that_ends_in_a_fresh_sample_is_never_stored(tokens: int) -> None:
    r = rig()
    answer = list(range(tokens))
    r.visit(answer, written=tokens - 1)
    leave(r)
    assert on_host(r, [*answer, *range(100, 200)]) == (tokens - 1) // PAGE
    assert r.visit([*answer, *range(100, 200)]).host == (tokens - 1) // PAGE


def test_e2_a_prompt_published_in_any_number_of_chunks_returns_to_its_last_whole_page() -> None:
    for chunk in (1, 2, 3, 5, 12):
        r = rig()
        tokens = prompt(1, 12)
        chain = r.chain(tokens)
        prints = [bytes([i]) for i in range(12)]
        for start in range(0, 12, chunk):
            r._publish(prints, chain, start, min(12, start + chunk))
        r.cache.retain(1, chain, pages=12)
        answer = r.cache.before_evict(1, stays=0, now_s=0.0)
        assert isinstance(answer, Wait)
        for job in answer.jobs:
            r.cache.settle(done(job.job_id))
        r.cache.evicted(1)
        r.cache.device_removed(chain.keys)
        assert on_host(r, tokens) == 12, chunk
        r.check()


def test_d4_pins_taken_minus_pins_given_back_are_those_of_live_requests() -> None:
    r = rig()
    r.visit(prompt(1, 4))
    leave(r)
    chain = r.chain(prompt(1, 4))
    live: list[Reservation] = []
    for turn in range(30):
        answer = r.cache.reserve(r.cache.lookup(chain, 0, 4))
        assert isinstance(answer, Reservation)
        live.append(answer)
        if turn % 3 == 1:
            r.cache.commit(live.pop(0))
        elif turn % 3 == 2:
            one = live.pop(0)
            r.cache.abandon(one, Reason.LATE, copying=True)
            assert r.cache.stats().live_reservations == len(live) + 1
            r.cache.settle(done(one.job_id))
        assert r.cache.stats().live_reservations == len(live)
        r.check()
    for one in live:
        r.cache.abandon(one, Reason.ABORTED, copying=False)
    assert (r.cache.stats().live_reservations, r.cache.stats().pinned_pages) == (0, 0)
    r.check()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), min_size=4, max_size=40), st.integers(2, 30))
def test_e4_what_is_on_the_host_always_begins_at_the_head_and_nothing_is_wasted(
    visits: list[tuple[int, int]], host: int
) -> None:
    r = rig(device=14, host=host)
    for name, pages in visits:
        r.visit(prompt(name, pages))
        leave(r)
        r.check()
        for other in range(6):
            chain = r.chain(prompt(other, 12))
            held = [r.cache.lookup(chain, i, i + 1).pages for i in range(12)]
            assert held == sorted(held, reverse=True)
    assert r.cache.stats().counters.orphaned_pages == 0


def test_e5_a_partial_match_does_not_consume_the_longer_conversation() -> None:
    r = rig()
    long = prompt(1, 10)
    r.visit(long)
    leave(r)
    for side in range(2, 6):
        assert r.visit([*long[: 4 * PAGE], *prompt(side, 1)]).host == 4
        leave(r)
    assert on_host(r, long) == 10
    assert r.visit(long).host == 10


def test_e5_one_shot_requests_that_share_the_system_prompt_cannot_displace_a_reused_conversation() -> None:
    r = rig(device=60, host=20)
    system = prompt(0, 2)[: 2 * PAGE]
    talk = [*system, *prompt(1, 12)]
    r.visit(talk)
    leave(r)
    assert r.visit(talk).host == 14
    leave(r)
    for name in range(2, 12):
        r.visit([*system, *prompt(name, 6)])
        leave(r)
        r.check()
    assert on_host(r, talk) == 14


def test_e6_prompt_only_prompt_and_answer_and_a_cap_are_selectable() -> None:
    prompt_tokens, answer = prompt(1, 3, rest=0), prompt(2, 2, rest=1)
    for cap, kept in ((3, 3), (None, 5), (2, 2), (0, 0)):
        r = rig()
        r.visit([*prompt_tokens, *answer], store_pages=cap, written=len(prompt_tokens) + len(answer) - 1)
        leave(r)
        assert r.visit([*prompt_tokens, *answer, *prompt(3, 1)]).host == kept


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.booleans(), st.booleans(), st.integers(-3, 99)),
             min_size=1, max_size=25),
    st.integers(1, 16),
)
def test_e7_a_hostile_hint_cannot_block_a_store_exceed_the_quota_or_fail_a_request(
    visits: list[tuple[int, int, bool, bool, int]], host: int
) -> None:
    r = rig(host=host)
    for number, (name, pages, closed, expected, cap) in enumerate(visits):
        chain = r.chain(prompt(name, pages))
        start = next((i for i in range(pages) if chain.keys[i] not in r.pages), pages)
        r._publish([b""] * pages, chain, start, pages)
        r.cache.retain(number, chain, pages=pages, store_pages=cap, session_closed=closed, expected_return=expected)
        answer = r.cache.before_evict(number, stays=0, now_s=0.0)
        if isinstance(answer, Wait):
            for job_id in answer.job_ids:
                r.cache.settle(done(job_id))
            answer = r.cache.before_evict(number, stays=0, now_s=0.0, expired=True)
        assert isinstance(answer, Clean | Drop)
        r.cache.evicted(number)
        r.cache.device_removed(chain.keys)
        for key in chain.keys:
            r.pages.pop(key, None)
        r.cache.check()
    assert r.cache.stats().counters.peak_frames <= host
    # Whatever was hinted before: what is worth keeping still finds its place.
    fresh = rig(host=host)
    fresh.visit(prompt(9, 1))
    leave(fresh)
    assert on_host(fresh, prompt(9, 1)) == 1


def test_e7_a_session_said_to_be_closed_gives_way_first_and_an_expected_one_stays() -> None:
    for closed, expected, kept in ((True, False, 0), (False, True, 4)):
        r = rig(device=60, host=8)
        for number, name in enumerate((1, 2)):
            chain = r.chain(prompt(name, 4))
            r.cache.device_added(chain, 0, 4)
            r.cache.retain(number, chain, pages=4, session_closed=closed and name == 2,
                           expected_return=expected and name == 2)
            for job in r.cache.plan_writeback(Pressure(now_s=0.0, victims=(number,))):
                r.cache.settle(done(job.job_id))
            r.cache.evicted(number)
            r.cache.device_removed(chain.keys)
        r.cache.touch(r.chain(prompt(1, 4)), 4)
        r.visit(prompt(3, 4))
        leave(r)
        assert on_host(r, prompt(1, 4)) == 4
        assert on_host(r, prompt(2, 4)) == kept
        r.check()


def test_f1_each_request_is_counted_once_and_no_counter_of_the_books_goes_down() -> None:
    r = rig(device=12, host=6)
    last: dict[str, Any] = {}
    for turn in range(40):
        r.visit(prompt(turn * 5 % 7, 1 + turn % 4))
        now = r.accounting.stats().as_json()
        assert now["requests"] == turn + 1
        assert now["device_tokens"] + now["host_tokens"] + now["recomputed_tokens"] == now["prompt_tokens"]
        for name in ("prompt_tokens", "device_tokens", "host_tokens", "recomputed_tokens", "bound_tokens"):
            assert now[name] >= last.get(name, 0)
        last = now


def test_f2_resident_pinned_dirty_and_duplicate_are_told_apart() -> None:
    r = rig(eager=False)
    r.visit(prompt(1, 4))
    leave_id = next(iter(r.bank))
    for job in r.cache.plan_writeback(Pressure(now_s=0.0, victims=(leave_id,))):
        r.submit([job])
    filling = r.cache.stats().as_json()
    assert [filling[f"{name}_bytes"] for name in ("filling", "pinned", "resident", "duplicate")] == [4, 4, 0, 0]
    assert filling["bytes_used"] == 4, "what is in transfer is in use"
    r.pump()
    r.visit(prompt(2, 3))
    told = r.cache.stats().as_json()
    names = ("filling", "pinned", "resident", "duplicate", "dirty")
    assert [told[f"{name}_bytes"] for name in names] == [0, 0, 4, 4, 3]


def test_f3_every_request_has_one_reason_and_the_position_of_its_first_missing_page() -> None:
    r = rig(device=40, host=3)
    r.visit(prompt(1, 3))
    leave(r)
    short = r.visit([7] * 5).report
    assert short.first_miss == (Reason.PARTIAL_PAGE, 0)
    longer = r.visit(prompt(1, 5)).report
    assert longer.first_miss == (Reason.NEW, 3 * PAGE)
    assert r.visit(prompt(1, 5)).report.first_miss == (Reason.PARTIAL_PAGE, 5 * PAGE)


def test_h1_different_salts_never_share_and_equal_ones_do() -> None:
    tokens = prompt(1, 4)
    salts = ["", "a", "b", "ab", "a\0b", "é"]
    for owner in salts:
        r = rig(salt=owner)
        r.visit(tokens)
        leave(r)
        for salt in salts:
            chain = key_chain(tokens, replace(r.identity, salt=salt))
            assert r.cache.lookup(chain, 0, 4).pages == (4 if salt == owner else 0)
    chains = [key_chain(tokens, replace(rig().identity, salt=salt)) for salt in salts]
    assert not any(set(one.keys) & set(other.keys) for one, other in combinations(chains, 2))


def test_a_lookup_of_pages_that_are_also_on_the_device_never_waits_for_the_tier() -> None:
    r = rig(mode=Mode.ON_RETAIN)
    r.visit(prompt(1, 4))
    visit = r.visit(prompt(1, 4))
    assert (visit.device, visit.host) == (4, 0)
    chain = r.chain(prompt(1, 4))
    assert r.cache.lookup(chain, 4, 4) == Match(chain=chain, start=4, pages=0)
