"""The mock server's words: the same ids in every process, and replies that can be sent back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hostcache.testing.mock_text import (
    WORD_IDS,
    WORDS,
    drifted,
    reply_words,
    token_id,
    tokenize,
    tokenize_chat,
)


def said(words: list[int]) -> str:
    return "".join(f" {WORDS[word]}" for word in words)


def test_ids_are_the_same_in_every_process() -> None:
    assert tokenize("the cache\n\twarms") == [1011183078, 1095199719, 1080087286]
    assert token_id("🧊") == token_id("🧊")
    assert token_id("\ud800") == token_id("?")  # half a surrogate pair is no text


def test_no_two_words_of_a_reply_share_an_id() -> None:
    assert len(set(WORD_IDS)) == len(set(WORDS)) == 4096


@given(st.lists(st.integers(0, 2**31), max_size=30), st.integers(0, 100), st.integers(0, 3))
def test_a_longer_reply_begins_with_the_shorter_one(prompt: list[int], count: int, seed: int) -> None:
    assert len(reply_words(prompt, count, seed=seed)) == count
    assert reply_words(prompt, count + 7, seed=seed)[:count] == reply_words(prompt, count, seed=seed)


def test_prompt_and_seed_decide_the_reply() -> None:
    replies = [reply_words(prompt, 8, seed=seed) for prompt in ([1], [2]) for seed in (0, 1)]
    assert len({tuple(reply) for reply in replies}) == 4


@given(st.text(), st.lists(st.integers(0, 4095), min_size=1, max_size=20), st.text())
def test_a_reply_sent_back_as_text_has_the_reply_s_own_ids(prompt: str, reply: list[int], more: str) -> None:
    ids = [WORD_IDS[word] for word in reply]
    assert tokenize(prompt + said(reply) + "\n" + more) == tokenize(prompt) + ids + tokenize(more)


@given(st.lists(st.integers(0, 4095), min_size=1, max_size=20), st.booleans())
def test_a_chat_that_goes_on_begins_with_the_earlier_prompt_and_its_reply(reply: list[int], stripped: bool) -> None:
    first = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]
    answer = said(reply).strip() if stripped else said(reply)
    second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "how?"}]
    earlier = tokenize_chat(first) + [WORD_IDS[word] for word in reply]
    assert tokenize_chat(second)[: len(earlier)] == earlier


def test_a_drifted_reply_differs_in_one_word() -> None:
    reply = reply_words([1], 9, seed=0)
    assert sum(a != b for a, b in zip(reply, drifted(reply), strict=True)) == 1
    assert drifted([]) == []
