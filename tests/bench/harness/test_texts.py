"""What a cell says: the same everywhere for the same names, nothing shared where nothing may be."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.bench.harness.load import aborted
from hostcache.bench.harness.texts import Mode, Piece, Texts, joined
from hostcache.client.openai import Heard, ReplyUsage
from hostcache.errors import ConfigError

IDS = tuple((i * 7919) % 997 for i in range(5000))
WORDS = " ".join(f"word{i % 571}" for i in range(4000))


def texts(mode: Mode = "ids", salt: str = "salt", seed: int = 0) -> Texts:
    return Texts(mode, IDS if mode == "ids" else WORDS, seed=seed, salt=salt)


def answer(*ids: int, text: str = "", prompt: int = 0) -> Heard:
    usage = ReplyUsage(prompt_tokens=prompt, completion_tokens=len(ids) or 5, hit_tokens=0, device_tokens=None,
                       host_tokens=None, recomputed=None, first_miss=None)
    return Heard(outcome="ok", reason=None, text=text, reasoning="", token_ids=ids, finish_reason="length", usage=usage,
                 sent_s=0.0, answered_attempt_s=0.0, first_token_s=1.0, ended_s=2.0, chunk_s=(0.0,), retries=())


@given(st.sets(st.tuples(st.text(max_size=5), st.integers(0, 50)), min_size=2, max_size=20), st.integers(1, 300))
def test_heads_of_different_names_differ_within_their_first_tokens(names: set[tuple[str, int]], tokens: int) -> None:
    said = texts()
    heads = [said.head(tokens + 16, *name) for name in names]
    assert len({head[:8] for head in heads}) == len(names)
    assert all(len(head) == tokens + 16 for head in heads)


def test_another_salt_says_the_same_words_behind_another_tag() -> None:
    one, other = texts(), texts().with_salt("other")
    assert one.head(100, "a")[:8] != other.head(100, "a")[:8]
    assert one.head(100, "a")[8:] == other.head(100, "a")[8:]
    assert one.piece(100, "a") == other.piece(100, "a")


def test_another_seed_says_other_words() -> None:
    assert texts().piece(50, "a") != texts(seed=1).piece(50, "a")


@given(st.sets(st.integers(0, 2**64 - 1), min_size=2, max_size=50))
def test_blocks_of_different_ids_never_say_the_same(numbers: set[int]) -> None:
    said = texts()
    blocks = {number: said.block(number, 64) for number in numbers}
    assert len(set(blocks.values())) == len(numbers)
    assert all(said.block(number, 64) == block for number, block in blocks.items())


@pytest.mark.parametrize("mode", ["ids", "text"])
def test_a_piece_longer_than_the_corpus_begins_it_again(mode: Mode) -> None:
    said = texts(mode)
    piece = said.piece(3 * len(said.source), "long")
    assert said.tokens_of(piece) == 3 * len(said.source)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 5)), max_size=8))
def test_a_prompt_of_ids_is_an_exact_descendant_of_the_last(turns: list[tuple[int, int]]) -> None:
    said = texts()
    talk = said.talk(said.head(40, "a"))
    for number, (growth, replied) in enumerate(turns):
        before, reply = talk.prompt, tuple(range(replied))
        talk.heard(answer(*reply))
        talk.append(said.piece(growth, "growth", number))
        assert talk.shared_tokens == len(before) + replied
        assert isinstance(talk.prompt, tuple)
        assert talk.prompt[: len(before) + replied] == (*before, *reply)
        assert talk.tokens == len(before) + replied + growth


def test_of_a_failed_turn_nothing_joins_and_the_prompt_counts_as_sent() -> None:
    said = texts()
    talk = said.talk(said.head(40, "a"))
    before = talk.prompt
    talk.heard(aborted(0.0, 1.0))
    assert (talk.prompt, talk.shared_tokens) == (before, 40)


def test_a_compacted_conversation_shares_no_more_than_what_is_left() -> None:
    said = texts()
    talk = said.talk(said.head(100, "a"))
    talk.heard(answer(1, 2))
    talk.append(said.piece(30, "tool"))
    talk.cut(0.5)
    assert (talk.tokens, talk.shared_tokens) == (66, 66)


def test_text_goes_on_from_the_reply_as_it_is_and_counts_by_usage() -> None:
    said = texts("text")
    talk = said.talk(said.head(40, "a"))
    before = talk.prompt
    talk.heard(answer(text=" so it is", prompt=41))
    assert isinstance(before, str)
    assert talk.prompt == before + " so it is"
    assert talk.tokens == 46
    assert talk.shared_tokens is None


def test_a_chat_takes_turns_and_ends_with_its_user_after_a_compaction() -> None:
    said = texts("chat")
    talk = said.talk(said.head(40, "a"))
    for turn in range(3):
        talk.heard(answer(text=" so it is"))
        talk.append(said.piece(10, "tool", turn))
    roles = [message["role"] for message in talk.prompt if not isinstance(message, int | str)]
    assert roles == ["user", "assistant"] * 3 + ["user"]
    talk.cut(0.72)
    assert [message["role"] for message in talk.prompt if not isinstance(message, int | str)][-1] == "user"


def test_pieces_of_two_kinds_do_not_join() -> None:
    pieces: tuple[Piece, ...] = ("text", (1, 2))
    with pytest.raises(TypeError, match="text where token ids"):
        joined(*pieces)


def test_a_corpus_that_is_too_short_is_refused() -> None:
    with pytest.raises(ConfigError, match="corpus of 3 tokens is too short"):
        Texts("ids", (1, 2, 3), seed=0, salt="")


def test_every_process_says_the_same() -> None:
    script = ("from hostcache.bench.harness.texts import Texts; t = Texts('ids', tuple((i * 7919) % 997 for i in "
              "range(5000)), seed=3, salt='x'); print(t.head(20, 'a', 1), t.block(2**63 + 5, 12))")
    said = {subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60,
                           env={"PYTHONHASHSEED": seed}).stdout for seed in ("0", "77")}
    assert len(said) == 1
