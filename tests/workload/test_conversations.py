"""Conversations drawn from a counter: same seed, same bytes; keys by the tier's rule; independent prints."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.errors import ConfigError
from hostcache.tier import Identity, key_chain
from hostcache.workload.conversations import Conversation, token_prints

PAGE = 8


def identity(page: int = PAGE) -> Identity:
    return Identity(model="m", revision="1", dtype="none", layout="l", page_tokens=page)


def tokens_of(conversation: Conversation) -> list[int]:
    return [int(token) for token in conversation._tokens.values]


@given(start=st.integers(1, 60), moves=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), max_size=6))
def test_chain_and_prints_grown_turn_by_turn_are_those_of_the_whole(start: int, moves: list[tuple[int, int]]) -> None:
    talk = Conversation(identity(), 7, start_tokens=start)
    for reply, heard in moves:
        turn = talk.turn(reply)
        assert turn.chain.keys == key_chain(tokens_of(talk), identity()).keys
        assert (turn.prints == token_prints(tokens_of(talk), PAGE)).all()
        assert len(turn.chain) == len(turn.prints) == turn.tokens // PAGE
        talk.answered()
        talk.hear(heard)
        assert talk.tokens == turn.tokens + heard


def test_the_next_prompt_continues_the_last_reply_and_names_both_its_frontiers() -> None:
    talk = Conversation(identity(), 1, start_tokens=30)
    first = talk.turn(10)
    talk.answered()
    talk.hear(5)
    second = talk.turn(10)
    assert second.prompt_tokens == 45
    assert second.chain.keys[:5] == first.chain.keys
    assert second.ancestors == (first.prompt_end, first.turn_end)
    assert first.prompt_end.tokens == 30
    assert first.turn_end.tokens == 40


def test_after_compaction_only_the_kept_part_is_shared_and_frontiers_beyond_it_are_gone() -> None:
    talk = Conversation(identity(), 1, start_tokens=80)
    before = talk.turn(20)
    talk.answered()
    talk.compact(0.72)
    talk.hear(40)
    after = talk.turn(8)
    assert talk.tokens == 72 + 40
    shared = next(i for i, (a, b) in enumerate(zip(before.chain.keys, after.chain.keys, strict=False)) if a != b)
    assert shared == 9
    assert after.ancestors == ()


def test_a_turn_that_was_not_answered_leaves_no_trace() -> None:
    talk = Conversation(identity(), 1, start_tokens=30)
    refused = talk.turn(10)
    again = talk.turn(10)
    assert again.prompt_end == refused.prompt_end
    assert again.chain.keys[:3] == refused.chain.keys[:3]
    assert talk.tokens == 30


def test_a_shared_head_is_shared_and_the_rest_is_not() -> None:
    head = Conversation(identity(), 5, start_tokens=32)
    one, two = (Conversation(identity(), seed, start_tokens=64, head=head, head_tokens=32).turn(0) for seed in (1, 2))
    assert one.chain.keys[:4] == two.chain.keys[:4] == head.turn(0).chain.keys
    assert one.chain.keys[4] != two.chain.keys[4]
    assert one.prints[4] != two.prints[4]


def test_prints_tell_swapped_changed_and_moved_tokens_apart() -> None:
    tokens = list(range(100, 132))
    base = token_prints(tokens, PAGE)
    swapped = [tokens[1], tokens[0], *tokens[2:]]
    moved = [*tokens[8:16], *tokens[:8], *tokens[16:]]
    assert (token_prints(swapped, PAGE) != base).all()
    assert (token_prints(moved, PAGE)[:2] != base[:2]).all()
    assert len(set(base.tolist())) == 4
    assert (token_prints([*tokens[:31], 7], PAGE)[:3] == base[:3]).all()


def test_another_seed_says_other_things_and_every_process_says_the_same() -> None:
    code = ("from hostcache.workload.conversations import Conversation; from hostcache.tier import Identity; "
            "t = Conversation(Identity(model='m', revision='1', dtype='none', layout='l', page_tokens=8), SEED, "
            "start_tokens=50).turn(20); print(t.chain.keys[-1].hex(), t.prints.tolist(), t.turn_end)")
    said = [
        subprocess.run([sys.executable, "-c", code.replace("SEED", seed)], env={"PYTHONHASHSEED": hash_seed},
                       capture_output=True, text=True, check=True).stdout
        for seed, hash_seed in (("3", "0"), ("3", "1234"), ("4", "0"))
    ]  # fmt: skip
    assert said[0] == said[1] != said[2]


def test_a_conversation_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="starts with 0 tokens"):
        Conversation(identity(), 1, start_tokens=0)


def test_tokens_are_31_bit_ids() -> None:
    talk = Conversation(identity(), 9, start_tokens=10_000)
    drawn = talk._tokens.values
    assert drawn.dtype == np.int32
    assert int(drawn.min()) >= 0
    assert len(np.unique(drawn)) > 9_990
