"""The history: bounded, exact until it first loses something, and honest about it."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from hostcache.tier import History, Identity, KeyChain, chain_ids, key_chain


def chain(tokens: list[int], salt: str = "") -> KeyChain:
    return key_chain(tokens, Identity(model="m", revision="r", dtype="f32", layout="l", page_tokens=1, salt=salt))


def ids(tokens: list[int]) -> list[int]:
    return chain_ids(chain(tokens).keys)


def known(history: History, ids: list[int]) -> int:
    """How many leading ids were seen before."""
    return [*history.notes(ids), None].index(None)


def test_a_page_is_unknown_then_seen_then_left_then_seen_again() -> None:
    history, pages = History(100), chain([1, 2, 3])
    assert history.notes(ids([1, 2, 3])) == [None] * 3
    history.seen(pages, 0, 2)
    assert history.notes(ids([1, 2, 3])) == [0, 0, None]
    assert known(history, ids([1, 2, 3])) == 2
    history.left(ids([1, 2, 3])[:1], 9)
    assert history.notes(ids([1, 2, 3])) == [9, 0, None]
    history.seen(pages, 0, 1)
    assert history.notes(ids([1, 2, 3])) == [0, 0, None]


def test_tokens_seen_under_another_salt_are_known_elsewhere_only() -> None:
    history, mine, theirs = History(100), chain([1, 2, 3], "a"), chain([1, 2], "b")
    history.seen(theirs, 0, 2)
    assert known(history, chain_ids(mine.keys)) == 0
    assert history.known_elsewhere(mine, 0, 3) == [True, True, False]
    assert history.known_elsewhere(mine, 1, 2) == [True]
    assert history.known_elsewhere(theirs, 0, 2) == [False, False]


def test_an_overflow_drops_the_old_generation_and_says_so() -> None:
    history = History(8)
    history.left(range(5), 1)
    history.left(range(5, 9), 1)
    assert history.exact
    assert known(history, list(range(9))) == 9
    history.left(range(9, 15), 1)
    assert not history.exact
    assert history.notes([0, 4, 14]) == [None, None, 1]


def test_a_generation_is_full_in_the_middle_of_a_batch_too() -> None:
    history = History(8)
    history.left(range(40), 1)
    assert (len(history), history.exact) == (5, False)
    assert history.notes([29, 35, 39]) == [None, 1, 1]


def test_pages_that_keep_being_used_survive_the_change_of_generations() -> None:
    history = History(8)
    for start in range(0, 80, 4):
        history.left([1000, *range(start, start + 4)], 1)
    assert history.notes([1000]) == [1]
    assert not history.exact


def test_a_drop_that_loses_nothing_keeps_the_history_exact() -> None:
    history = History(8)
    for _ in range(9):
        history.left(range(5), 1)
    assert history.exact
    assert known(history, list(range(5))) == 5


def test_a_forgotten_identity_is_as_never_seen_and_others_stay_known() -> None:
    history, mine, theirs = History(100), chain([1, 2]), chain([1, 2], "b")
    for pages in (mine, theirs):
        history.seen(pages, 0, 2)

    def seen(pages: KeyChain) -> int:
        return known(history, history.ids(pages.identity.digest, pages.keys))

    history.forget(mine.identity.digest)
    assert (seen(mine), seen(theirs)) == (0, 2)
    history.seen(mine, 0, 1)
    assert seen(mine) == 1
    history.forget(mine.identity.digest)
    assert seen(mine) == 0


def test_clearing_starts_anew_and_exact() -> None:
    history = History(4)
    history.seen(chain([1, 2]), 0, 2)
    history.left(range(9), 1)
    history.left(range(9, 19), 1)
    assert not history.exact
    history.clear()
    assert (len(history), history.exact) == (0, True)
    assert history.known_elsewhere(chain([1, 2], "b"), 0, 2) == [False, False]


@given(st.lists(st.lists(st.integers(0, 60), max_size=6), max_size=40), st.integers(2, 40))
def test_it_never_holds_much_more_than_its_cap_and_an_exact_one_knows_everything(
    batches: list[list[int]], entries: int
) -> None:
    history = History(entries)
    seen: dict[int, int] = {}
    for note, batch in enumerate(batches, start=1):
        history.left(batch, note)
        seen.update(dict.fromkeys(batch, note))
        assert len(history) <= entries + 6
        found = history.notes(list(seen))
        if history.exact:
            assert found == list(seen.values())
        else:
            assert all(note in (None, seen[i]) for i, note in zip(seen, found, strict=True))
