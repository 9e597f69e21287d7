"""What a single request may ask of the tier, and what it is told."""

from __future__ import annotations

from typing import Any

import pytest
from tests.vllm_plugin.mini import BLOCK, MiniVllm, cold

from hostcache.tier import Mode, Reason
from hostcache.vllm_plugin.wishes import NONE, Wishes, wishes_of

MODES = [Mode.ON_PRESSURE, Mode.ON_EVICT, Mode.ON_RETAIN]


def talk(name: int, pages: int = 8) -> list[int]:
    return [*[name] * (pages * BLOCK), name]


def others(mini: MiniVllm) -> None:
    for name in range(10, 16):
        mini.ask(talk(name))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("wish", "pages"), [({"store": False}, 0), ({"max_store_tokens": 3 * BLOCK + 1}, 3), ({}, 8)])
def test_no_more_is_saved_than_the_request_allows(mode: Mode, wish: dict[str, Any], pages: int) -> None:
    mini = MiniVllm(mode=mode)
    mini.ask(talk(0), wishes=wish)
    others(mini)
    again = mini.ask(talk(0))
    assert (again.answer, again.cached) == (cold(talk(0)), pages * BLOCK)
    mini.at_rest()


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_may_be_kept_out_and_its_prompt_not(mode: Mode) -> None:
    for wish, pages in (({"store_answer": False}, 8), ({}, 10)):
        mini = MiniVllm(mode=mode)
        first = mini.ask(talk(0), 2 * BLOCK, wishes=wish)
        others(mini)
        assert mini.ask([*first.tokens, 1]).cached == pages * BLOCK


@pytest.mark.parametrize("first", [{"store": False}, None])
def test_what_one_request_keeps_out_another_may_let_in(first: dict[str, Any] | None) -> None:
    mini = MiniVllm()
    mini.ask(talk(0), wishes=first)
    mini.ask([*talk(0), 1], wishes=None if first else {"store": False})
    others(mini)
    assert mini.ask(talk(0)).cached == 8 * BLOCK


@pytest.mark.parametrize(("wish", "pages"), [({"load": False}, 0), ({"max_load_tokens": 5 * BLOCK}, 5), ({}, 8)])
def test_no_more_is_restored_than_the_request_allows(wish: dict[str, Any], pages: int) -> None:
    mini = MiniVllm()
    mini.ask(talk(0))
    others(mini)
    again = mini.ask(talk(0), wishes=wish)
    assert (again.answer, again.cached) == (cold(talk(0)), pages * BLOCK)
    assert again.told is not None
    assert again.told["host"] == pages * BLOCK
    assert again.told["recomputed"].get("opted_out", 0) == (8 - pages) * BLOCK
    assert mini.side.accounting.stats().recomputed.get(Reason.OPTED_OUT, 0) == (8 - pages) * BLOCK
    mini.at_rest()


def test_a_request_that_asks_is_told_where_its_tokens_came_from() -> None:
    mini = MiniVllm()
    assert mini.ask(talk(0)).told is None
    others(mini)
    told = mini.ask([*talk(0), *[5] * BLOCK], wishes={}).told
    assert told == {"device": 0, "host": 8 * BLOCK, "recomputed": {"new": BLOCK, "partial_page": 1},
                    "first_miss": {"reason": "new", "position": 8 * BLOCK}}


def test_a_restore_that_is_dearer_is_told_as_such() -> None:
    mini = MiniVllm()
    mini.ask(talk(0))
    others(mini)
    mini.side.rates.saw_prefill(1000, 0.001)
    mini.side.rates.saw_restore(1, 1.0)
    told = mini.ask(talk(0), wishes={}).told
    assert told is not None
    assert told["recomputed"]["dearer"] == 8 * BLOCK


def test_wishes_that_are_not_understood_are_told_and_the_others_hold() -> None:
    assert wishes_of(None, 5) is wishes_of({"do_remote_prefill": True}, 5) is NONE
    assert wishes_of({"hostcache": 1}, 5).refused == {"hostcache": "is 1; give an object"}
    mine = wishes_of({"hostcache": {"load": False, "store": 0, "max_store_tokens": -1, "colour": "red"}}, 5)
    assert mine == Wishes(load_tokens=0, asked=True, refused={
        "store": "is 0; give true or false", "max_store_tokens": "is -1; give a whole number of at least 0",
        "colour": "is not known; known are store, load, store_answer, max_store_tokens, max_load_tokens"})
    told = MiniVllm().ask(talk(0), wishes={"colour": "red"}).told
    assert told is not None
    assert list(told["refused"]) == ["colour"]
