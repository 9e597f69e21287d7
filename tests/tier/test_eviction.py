"""Which rule decides a contested place: the one that has hurt less."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from hostcache.tier.eviction import Duel, Rule

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("lost"), st.sampled_from(Rule), st.integers(1, 300), st.just(0)),
        st.tuples(st.just("returned"), st.sampled_from(Rule), st.integers(1, 3), st.integers(0, 500)),
    ),
    max_size=60,
)


def play(events: list[tuple[str, Rule, int, int]], turnover: int = 100) -> Duel:
    duel = Duel(turnover)
    for kind, rule, pages, age in events:
        if kind == "lost":
            duel.lost(rule, pages)
        else:
            duel.returned(rule, pages, age)
    return duel


def test_who_knows_nothing_displaces() -> None:
    assert Duel(100).choose() is Rule.DISPLACE
    assert Duel(0).choose() is Rule.DISPLACE


def test_pages_that_come_back_right_after_they_were_displaced_turn_the_choice() -> None:
    duel = Duel(100)
    duel.lost(Rule.DISPLACE, 50)
    duel.returned(Rule.DISPLACE, 50, age=10)
    assert duel.choose() is Rule.KEEP


def test_keeping_can_be_regretted_too() -> None:
    duel = Duel(100)
    for rule, back in ((Rule.DISPLACE, 10), (Rule.KEEP, 90)):
        duel.lost(rule, 100)
        duel.returned(rule, back, age=0)
    assert duel.choose() is Rule.DISPLACE


def test_what_returns_late_hurts_less() -> None:
    early, late = Duel(100), Duel(100)
    for duel, age in ((early, 1), (late, 400)):
        duel.lost(Rule.DISPLACE, 50)
        duel.returned(Rule.DISPLACE, 50, age)
    assert early.rate(Rule.DISPLACE) > 10 * late.rate(Rule.DISPLACE)


def test_old_experience_fades() -> None:
    duel = Duel(10)
    duel.lost(Rule.DISPLACE, 10)
    duel.returned(Rule.DISPLACE, 10, age=0)
    before = duel.rate(Rule.DISPLACE)
    duel.lost(Rule.DISPLACE, 800)
    assert duel.rate(Rule.DISPLACE) < before / 100


@given(EVENTS)
def test_rates_are_never_negative_and_the_same_events_decide_the_same(events: list[tuple[str, Rule, int, int]]) -> None:
    one, other = play(events), play(events)
    assert one.choose() is other.choose()
    assert all(one.rate(rule) >= 0 for rule in Rule)
