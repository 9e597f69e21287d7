"""The page table: holds, the index, runs of neighbours, quarantine."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostcache.engine.pages import DevicePages, Hold
from hostcache.errors import InvariantBroken
from hostcache.tier import PageKey


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(16, "little"))


def test_pages_come_in_one_run_and_growth_takes_the_neighbour() -> None:
    table = DevicePages(64)
    first = table.allocate(10)
    assert first == list(range(first[0], first[0] + 10))
    assert table.allocate(1, after=first[-1]) == [first[-1] + 1]


def test_asking_for_more_than_is_free_takes_nothing() -> None:
    table = DevicePages(4)
    table.allocate(3)
    with pytest.raises(ValueError):
        table.allocate(2)
    assert table.free == 1
    table.check()


def test_a_published_page_leaves_the_index_with_its_last_hold_and_is_reported_once() -> None:
    table = DevicePages(4)
    [page] = table.allocate(1)
    assert table.publish(key(1), page) == page
    table.hold(Hold.BANK, [page])
    table.hold(Hold.STORE, [page])
    assert table.drop(Hold.USE, [page]) == []
    assert table.drop(Hold.BANK, [page]) == []
    assert table.match([key(1)]) == [page]
    assert table.drop(Hold.STORE, [page]) == [key(1)]
    assert table.match([key(1)]) == []
    assert table.free == 4


def test_a_second_page_of_the_same_content_is_told_which_page_serves_the_key() -> None:
    table = DevicePages(4)
    first, second = table.allocate(2)
    table.publish(key(1), first)
    assert table.publish(key(1), second) == first
    table.drop(Hold.USE, [second])
    assert table.find(key(1)) == first


def test_a_match_ends_at_the_first_page_that_is_missing() -> None:
    table = DevicePages(4)
    pages = table.allocate(3)
    for number, page in zip((0, 1, 3), pages, strict=True):
        table.publish(key(number), page)
    assert table.match([key(0), key(1), key(2), key(3)]) == pages[:2]


def test_a_quarantined_page_is_neither_free_nor_evictable() -> None:
    table = DevicePages(4)
    pages = table.allocate(2)
    table.hold(Hold.LATE, pages)
    table.drop(Hold.USE, pages)
    assert (table.free, table.evictable, table.quarantined) == (2, 0, 2)
    table.drop(Hold.LATE, pages)
    assert table.free == 4


def test_dropping_a_hold_twice_is_a_broken_invariant() -> None:
    table = DevicePages(4)
    pages = table.allocate(1)
    table.drop(Hold.USE, pages)
    with pytest.raises(InvariantBroken):
        table.drop(Hold.USE, pages)


def test_what_comes_free_is_counted_in_the_order_in_which_snapshots_go() -> None:
    table = DevicePages(8)
    pages = table.allocate(4)
    prompt, turn = pages[:3], pages
    table.hold(Hold.BANK, prompt)
    table.hold(Hold.BANK, turn)
    assert list(table.frees([prompt, turn])) == [0, 0], "a request still uses them"
    table.drop(Hold.USE, pages)
    assert list(table.frees([prompt, turn])) == [0, 4]
    assert list(table.frees([turn, prompt])) == [1, 3]
    assert table.stays(turn) == 3
    assert table.stays(prompt) == 3
    assert table.evictable == 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 11)), max_size=60))
def test_holds_of_any_kind_in_any_order_agree_with_plain_counting(moves: list[tuple[int, int]]) -> None:
    table = DevicePages(12)
    holds: Counter[tuple[Hold, int]] = Counter()
    published: dict[PageKey, int] = {}
    for what, number in moves:
        held = sorted({page for (_, page), count in holds.items() if count})
        if what == 0 and table.free > number % 4:
            for page in table.allocate(number % 4):
                assert page not in held
                holds[Hold.USE, page] += 1
        elif what in (1, 2) and held:
            page, kind = held[number % len(held)], list(Hold)[what]
            table.hold(kind, [page])
            holds[kind, page] += 1
        elif what == 3 and held:
            page = held[number % len(held)]
            holder = table.publish(key(number), page) if page not in published.values() else page
            if holder == page and page not in published.values():
                published[key(number)] = page
        elif what >= 4 and held:
            page = held[number % len(held)]
            kind = next(kind for kind in Hold if holds[kind, page])
            gone = table.drop(kind, [page])
            holds[kind, page] -= 1
            last = not any(holds[kind, page] for kind in Hold)
            keys = [key for key, holder in published.items() if holder == page]
            assert gone == (keys if last else [])
            for k in gone:
                del published[k]
        table.check()
        assert table.published == len(published)
        assert table.free == 12 - len({page for (_, page), count in holds.items() if count})
