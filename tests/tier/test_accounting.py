"""The books: where every prompt token came from, and why the rest was computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from hostcache.errors import InvariantBroken
from hostcache.testing.rig import Rig, done
from hostcache.tier import (
    Accounting,
    History,
    Identity,
    Mode,
    PageKey,
    Pressure,
    Reason,
    RequestReport,
    TierConfig,
    Wait,
    check_balance,
    key_chain,
)
from hostcache.tier.notes import Departure, write_note
from hostcache.tier.reasons import OUTSIDE_BOUND

PAGE = 16
ID = Identity(model="m", revision="r", dtype="f32", layout="l", page_tokens=PAGE)


def rig(device: int = 40, host: int = 40, *, mode: Mode = Mode.ON_PRESSURE, eager: bool = True, salt: str = "") -> Rig:
    config = TierConfig(host_cache_bytes=host, page_bytes=1, page_tokens=PAGE, mode=mode)
    return Rig(config, device, eager=eager, salt=salt)


def prompt(name: int, pages: int, rest: int = 1) -> list[int]:
    return [name * 10_000 + i for i in range(pages * PAGE + rest)]


def leave(r: Rig) -> None:
    for snapshot_id in list(r.bank):
        r.evict(snapshot_id)


class Held:
    """A tier that holds the pages it is told to, and knows nothing of the others."""

    def __init__(self, reasons: Mapping[PageKey, Reason | None]) -> None:
        self.reasons = dict(reasons)

    def held(self, keys: tuple[PageKey, ...]) -> list[Reason | None]:
        return [self.reasons.get(key, Reason.FORGOTTEN) for key in keys]


def test_the_example_of_the_design_to_the_number() -> None:
    tokens = list(range(100))
    history, chain = History(100), key_chain(tokens, ID)
    history.seen(chain, 0, 5)
    history.left(history.ids(ID.digest, chain.keys[4:5]), write_note(Departure.DISPLACED, 0))
    accounting = Accounting(PAGE, history, Held(dict.fromkeys(chain.keys[:4])))
    report = accounting.settle(accounting.open("r", chain, 100), device_pages=3, host_pages=1)
    assert (report.device_tokens, report.host_tokens, report.bound_tokens) == (48, 16, 80)
    assert report.recomputed == {Reason.NEW: 16, Reason.PARTIAL_PAGE: 4, Reason.EVICTED: 16}
    assert report.first_miss == (Reason.EVICTED, 64)
    served = report.device_tokens + report.host_tokens
    assert (report.bound_tokens - served, served / 100, served / report.bound_tokens) == (16, 0.64, 0.80)
    assert report.as_json() == {
        "device": 48,
        "host": 16,
        "recomputed": {"new": 16, "partial_page": 4, "evicted": 16},
        "first_miss": {"reason": "evicted", "position": 64},
    }


def test_the_last_token_is_always_computed_so_a_whole_last_page_is_partial() -> None:
    r = rig()
    r.visit(prompt(1, 3, rest=0))
    report = r.visit(prompt(1, 3, rest=0)).report
    assert (report.device_tokens, report.recomputed) == (32, {Reason.PARTIAL_PAGE: 16})


@pytest.mark.parametrize("tokens", [0, 1, 15, 16])
def test_a_prompt_without_a_usable_page_is_partial(tokens: int) -> None:
    report = rig().visit(list(range(tokens))).report
    assert dict(report.recomputed) == ({Reason.PARTIAL_PAGE: tokens} if tokens else {})
    assert report.first_miss == ((Reason.PARTIAL_PAGE, 0) if tokens else None)


@pytest.mark.parametrize(
    "reason", [Reason.LATE, Reason.FAILED, Reason.NO_ROOM, Reason.DEARER, Reason.OPTED_OUT, Reason.TOO_SMALL]
)
def test_the_drivers_own_reason_is_booked_for_pages_the_tier_holds(reason: Reason) -> None:
    r = rig()
    r.visit(prompt(1, 4))
    leave(r)
    report = r.visit(prompt(1, 6), restore=lambda reservation: reason).report
    assert report.recomputed == {reason: 64, Reason.NEW: 32, Reason.PARTIAL_PAGE: 1}
    assert report.first_miss == (reason, 0)


def test_of_several_causes_the_first_counts() -> None:
    r = rig()
    r.visit(prompt(1, 2))
    account = r.accounting.open("r", r.chain(prompt(1, 2)), 33)
    account.miss(Reason.DEARER)
    account.miss(Reason.LATE)
    assert r.accounting.settle(account, device_pages=0, host_pages=0).recomputed[Reason.DEARER] == 32


def test_pages_dropped_for_want_of_quota_are_evicted_and_the_unwritten_are_not_written() -> None:
    r = rig(device=40, host=4)
    r.visit(prompt(1, 4))
    leave(r)
    r.visit(prompt(2, 4))
    leave(r)
    assert r.visit(prompt(1, 4)).report.recomputed == {Reason.EVICTED: 64, Reason.PARTIAL_PAGE: 1}
    leave(r)
    r = rig(device=40, host=2)
    r.visit(prompt(1, 4))
    leave(r)
    assert r.visit(prompt(1, 4)).report.recomputed == {Reason.NOT_WRITTEN: 64, Reason.PARTIAL_PAGE: 1}


def test_what_the_client_kept_out_of_the_store_is_opted_out() -> None:
    r = rig()
    r.visit(prompt(1, 4), store_pages=1)
    leave(r)
    visit = r.visit(prompt(1, 4))
    assert (visit.host, visit.report.recomputed) == (1, {Reason.OPTED_OUT: 48, Reason.PARTIAL_PAGE: 1})


def test_a_failed_store_is_failed() -> None:
    r = rig(eager=False)
    r.visit(prompt(1, 4))
    (job,) = r.cache.plan_writeback(Pressure(now_s=0.0, victims=tuple(r.bank)))
    r.cache.settle(done(job.job_id, "the disk is on fire"))
    r.drop(next(iter(r.bank)))
    assert r.visit(prompt(1, 4)).report.recomputed == {Reason.FAILED: 64, Reason.PARTIAL_PAGE: 1}


def test_a_store_over_its_budget_leaves_its_pages_not_written() -> None:
    for early in (False, True):
        r = rig(eager=False)
        r.visit(prompt(1, 4))
        (job,) = r.cache.plan_writeback(Pressure(now_s=0.0, victims=tuple(r.bank)))
        if early:
            r.drop(next(iter(r.bank)))
        r.cache.expire(job.job_id, running=True)
        if not early:
            r.drop(next(iter(r.bank)))
        assert r.visit(prompt(1, 4)).report.recomputed == {Reason.NOT_WRITTEN: 64, Reason.PARTIAL_PAGE: 1}, early


def test_what_was_forgotten_on_purpose_is_new_again() -> None:
    for everything in (True, False):
        r = rig()
        r.visit(prompt(1, 4))
        leave(r)
        r.cache.forget(None if everything else r.identity)
        report = r.visit(prompt(1, 4)).report
        assert (report.recomputed, report.bound_tokens) == ({Reason.NEW: 64, Reason.PARTIAL_PAGE: 1}, 0), everything


def test_with_the_tier_off_the_bound_is_known_and_the_gap_says_tier_off() -> None:
    for r in (rig(host=0), rig(mode=Mode.OFF)):
        r.visit(prompt(1, 4))
        leave(r)
        report = r.visit(prompt(1, 5)).report
        assert report.recomputed == {Reason.TIER_OFF: 64, Reason.NEW: 16, Reason.PARTIAL_PAGE: 1}
        assert report.bound_tokens == 64
        leave(r)


def test_an_unseen_page_is_new_even_when_aborted_or_opted_out() -> None:
    r = rig()
    r.visit(prompt(1, 2))
    account = r.accounting.open("r", r.chain(prompt(1, 4)), 65)
    account.miss(Reason.OPTED_OUT)
    report = r.accounting.abort(account, device_pages=1, host_pages=0)
    assert report.recomputed == {Reason.ABORTED: 16, Reason.NEW: 32, Reason.PARTIAL_PAGE: 1}
    assert report.first_miss == (Reason.ABORTED, 16)


def test_that_the_tokens_exist_under_another_salt_is_in_the_books_and_never_in_the_answer() -> None:
    history = History(100)
    theirs = key_chain(range(65), replace(ID, salt="them"))
    history.seen(theirs, 0, 4)
    accounting = Accounting(PAGE, history, Held({}))
    mine = key_chain(range(65), replace(ID, salt="me"))
    report = accounting.settle(accounting.open("r", mine, 65), device_pages=0, host_pages=0)
    assert report.recomputed == {Reason.IDENTITY: 64, Reason.PARTIAL_PAGE: 1}
    assert report.bound_tokens == 0
    assert report.as_json()["recomputed"] == {"new": 64, "partial_page": 1}
    assert report.as_json()["first_miss"] == {"reason": "new", "position": 0}
    assert accounting.stats().as_json()["recomputed"]["identity"] == 64


def test_new_and_hidden_identity_tokens_add_up_in_the_answer() -> None:
    report = RequestReport(
        prompt_tokens=32, device_tokens=0, host_tokens=0, bound_tokens=0,
        recomputed={Reason.NEW: 16, Reason.IDENTITY: 16},
    )
    assert report.as_json()["recomputed"] == {"new": 32}


def test_after_an_overflow_what_cannot_be_told_is_forgotten_and_the_bound_inexact() -> None:
    history = History(4)
    chain = key_chain(range(33), ID)
    history.seen(chain, 0, 2)
    history.left(range(9), 1)
    history.left(range(9, 19), 1)
    accounting = Accounting(PAGE, history, Held({}))
    report = accounting.settle(accounting.open("r", chain, 33), device_pages=0, host_pages=0)
    assert not accounting.stats().bound_exact
    assert report.bound_tokens == 32
    assert report.recomputed == {Reason.FORGOTTEN: 32, Reason.PARTIAL_PAGE: 1}


def test_a_hole_makes_the_held_pages_behind_it_useless_for_the_holes_own_reason() -> None:
    history, chain = History(100), key_chain(range(81), ID)
    history.seen(chain, 0, 5)
    history.left(history.ids(ID.digest, chain.keys[1:2]), write_note(Departure.DISPLACED, 0))
    held = Held(dict.fromkeys([chain.keys[0], *chain.keys[2:5]]))
    accounting = Accounting(PAGE, history, held)
    report = accounting.settle(accounting.open("r", chain, 81), device_pages=1, host_pages=0)
    assert report.recomputed == {Reason.EVICTED: 64, Reason.PARTIAL_PAGE: 1}


def test_a_copy_still_on_its_way_is_not_ready() -> None:
    r = rig(eager=False)
    r.visit(prompt(1, 4))
    snapshot_id = next(iter(r.bank))
    assert isinstance(r.cache.before_evict(snapshot_id, stays=0, now_s=0.0), Wait)
    account = r.accounting.open("r", r.chain(prompt(1, 4)), 65)
    r.cache.evicted(snapshot_id)
    r.cache.device_removed(r.chain(prompt(1, 4)).keys)
    late = r.accounting.open("late", r.chain(prompt(1, 4)), 65)
    for one in (account, late):
        report = r.accounting.settle(one, device_pages=0, host_pages=0)
        assert report.recomputed == {Reason.NOT_READY: 64, Reason.PARTIAL_PAGE: 1}


def test_an_account_is_settled_once_and_serves_no_more_than_it_can() -> None:
    r = rig()
    account = r.accounting.open("r", r.chain(prompt(1, 2)), 33)
    with pytest.raises(InvariantBroken, match="at most 2 can be"):
        r.accounting.settle(account, device_pages=3, host_pages=0)
    assert r.accounting.open_accounts == 1
    r.accounting.settle(account, device_pages=0, host_pages=0)
    for end in (r.accounting.settle, r.accounting.abort):
        with pytest.raises(ValueError, match="request r is settled already"):
            end(account, device_pages=0, host_pages=0)
    assert (r.accounting.stats().requests, r.accounting.open_accounts) == (1, 0)


def test_recovery_and_early_departures_have_counters_of_their_own() -> None:
    r = rig()
    r.accounting.recovered(device_tokens=1, host_tokens=2, recomputed_tokens=3)
    r.accounting.recovered(device_tokens=10, host_tokens=20, recomputed_tokens=30)
    r.accounting.aborted_before_admission()
    stats = r.accounting.stats().as_json()
    assert stats["recovery"] == {"device_tokens": 11, "host_tokens": 22, "recomputed_tokens": 33}
    assert (stats["requests"], stats["prompt_tokens"], stats["aborted_before_admission"]) == (0, 0, 1)


@given(
    st.integers(0, 200), st.integers(0, 13), st.integers(0, 13), st.integers(0, 13), st.integers(0, 13),
    st.lists(st.sampled_from([None, Reason.NOT_READY, Reason.FORGOTTEN]), min_size=13, max_size=13),
    st.sampled_from([None, Reason.LATE, Reason.DEARER]), st.booleans(), st.integers(1, 60),
)
def test_every_report_and_the_totals_balance_whatever_was_served(
    tokens: int, seen: int, elsewhere: int, device: int, host: int, states: list[Reason | None],
    cause: Reason | None, abort: bool, entries: int,
) -> None:
    history, chain = History(entries), key_chain(range(tokens), ID)
    history.seen(key_chain(range(tokens), replace(ID, salt="x")), 0, min(elsewhere, len(chain)))
    history.seen(chain, 0, min(seen, len(chain)))
    accounting = Accounting(PAGE, history, Held(dict(zip(chain.keys[:seen], states, strict=False))))
    account = accounting.open("r", chain, tokens)
    if cause:
        account.miss(cause)
    device = min(device, account.limit)
    host = min(host, account.limit - device)
    close = accounting.abort if abort else accounting.settle
    report = close(account, device_pages=device, host_pages=host)
    check_balance(report)
    check_balance(accounting.stats())
    assert all(tokens > 0 for tokens in report.recomputed.values())
    assert sum(report.as_json()["recomputed"].values()) == sum(report.recomputed.values())
    avoidable = sum(n for reason, n in report.recomputed.items() if reason not in OUTSIDE_BOUND)
    assert report.bound_tokens == report.device_tokens + report.host_tokens + avoidable
    if history.exact:
        assert report.bound_tokens == max(min(seen, account.limit), device + host) * PAGE


def test_books_that_do_not_balance_are_refused_with_the_numbers() -> None:
    good = RequestReport(prompt_tokens=48, device_tokens=16, host_tokens=0, bound_tokens=32,
                         recomputed={Reason.EVICTED: 16, Reason.NEW: 16})
    check_balance(good)
    with pytest.raises(InvariantBroken, match="16 served \\+ 32 recomputed tokens are not 49"):
        check_balance(replace(good, prompt_tokens=49))
    with pytest.raises(InvariantBroken, match="bound 48 − served 16 is not the 16 tokens missed"):
        check_balance(replace(good, bound_tokens=48))
