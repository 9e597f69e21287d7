"""How near eviction is, by whichever limit binds first."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
from hypothesis import given

from hostcache.tier import BankView, within_reach


def nothing_may_be_read() -> Iterator[tuple[int, int]]:
    raise AssertionError("frees was read although pages are plenty")
    yield (0, 0)


def test_no_limit_near_means_no_victims_and_frees_are_not_even_read() -> None:
    banks = [BankView(order=(1, 2, 3), capacity=24)]
    assert within_reach(banks, frees=nothing_may_be_read(), free_pages=100, reach_pages=100) == ()


def test_by_entries_the_next_victims_of_a_nearly_full_bank_are_within_reach() -> None:
    def reached(held: int, reach: int = 2) -> tuple[int, ...]:
        banks = [BankView(order=tuple(range(held)), capacity=24)]
        return within_reach(banks, frees=nothing_may_be_read(), free_pages=9, reach_pages=9, reach_entries=reach)

    assert [reached(held) for held in (22, 23, 24)] == [(), (0,), (0, 1)]
    assert reached(24, reach=0) == ()


def test_each_bank_is_judged_by_its_own_places() -> None:
    banks = [BankView(order=(1, 2), capacity=2), BankView(order=(3, 4), capacity=9), BankView(order=(5,), capacity=1)]
    assert within_reach(banks, frees=(), free_pages=9, reach_pages=0, reach_entries=1) == (1, 5)


def test_by_pages_victims_are_taken_until_enough_would_be_free_and_no_further() -> None:
    read: list[int] = []

    def frees() -> Iterator[tuple[int, int]]:
        for snapshot_id, pages in ((7, 3), (8, 0), (9, 4), (10, 50)):
            read.append(snapshot_id)
            yield snapshot_id, pages

    assert within_reach([], frees=frees(), free_pages=2, reach_pages=8) == (7, 8, 9)
    assert read == [7, 8, 9]


def test_a_snapshot_within_reach_by_both_limits_is_named_once_and_first() -> None:
    banks = [BankView(order=(2, 1), capacity=2)]
    frees = [(1, 1), (2, 1), (3, 1)]
    assert within_reach(banks, frees=frees, free_pages=0, reach_pages=3, reach_entries=1) == (2, 1, 3)


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 30), st.integers(0, 30))
def test_with_all_victims_gone_enough_is_free_or_nobody_is_left(pages: list[int], free: int, reach: int) -> None:
    frees = list(enumerate(pages))
    victims = within_reach([], frees=frees, free_pages=free, reach_pages=reach)
    assert victims == tuple(range(len(victims)))
    freed = free + sum(pages[: len(victims)])
    assert freed >= reach or len(victims) == len(pages)
    if victims:
        assert free + sum(pages[: len(victims) - 1]) < reach
