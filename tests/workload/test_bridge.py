"""The bridge in both directions, and the gates that close before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.workload.bridge import Alphabet, Bridge, BridgeRefused, alphabet_of, candidate_words, gate
from hostcache.workload.legacy_bridge import legacy_texts, legacy_words

WORDS = tuple(f"w{chr(97 + i // 26 // 26)}{chr(97 + i // 26 % 26)}{chr(97 + i % 26)}" for i in range(1000))
IDS = {word: 7 * place + 3 for place, word in enumerate(WORDS)}
ALPHABET = Alphabet(words=WORDS, ids=tuple(IDS.values()))
names = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=40, unique=True)


def tokenize(text: str) -> Sequence[int]:
    """Known words are one token, others as many as they have letters."""
    found: list[int] = []
    for word in re.findall(r" ?\w+", text):
        found += [IDS[word[1:]]] if word[1:] in IDS else [100_000 + ord(letter) for letter in word]
    return found


def bridge(block_tokens: int = 16, seed: bytes = b"seal") -> Bridge:
    return Bridge(alphabet=ALPHABET, block_tokens=block_tokens, seed=seed)


@given(names)
def test_every_64_bit_id_comes_back_from_its_tokens_and_the_text_from_the_tokenizer(drawn: list[int]) -> None:
    ids = np.array(drawn, dtype=np.uint64)
    made = bridge()
    assert made.names_of(made.blocks(ids)).tolist() == drawn
    prompt = made.prompt(ids, 16 * len(drawn) - 5)
    assert list(tokenize(made.text(prompt))) == prompt.tolist()
    report = gate(made, ids, engine_block_tokens=16, prompts=[prompt], tokenize=tokenize)
    assert (report.blocks, report.first_blocks, report.prompts) == (len(drawn), len(drawn), 1)


def test_the_seed_changes_the_filler_and_not_the_id() -> None:
    ids = np.arange(5, dtype=np.uint64)
    one, other = bridge(seed=b"one"), bridge(seed=b"other")
    assert (one.blocks(ids)[:, : one.digits] == other.blocks(ids)[:, : one.digits]).all()
    assert (one.blocks(ids)[:, one.digits :] != other.blocks(ids)[:, one.digits :]).any(axis=1).all()


def test_a_block_too_short_for_an_id_is_refused() -> None:
    with pytest.raises(BridgeRefused, match="a block of 6 tokens cannot hold a 64-bit id in base 1000, which takes 7"):
        bridge(block_tokens=6)


def test_siblings_that_begin_alike_in_the_engines_blocks_are_refused() -> None:
    alike = np.arange(3000, dtype=np.uint64)
    with pytest.raises(BridgeRefused, match=r"begin with the same 1 tokens, and 3000 blocks have \d+ beginnings"):
        gate(bridge(), alike, engine_block_tokens=1)


def test_a_tokenizer_that_adds_a_token_of_its_own_is_refused_at_the_gate() -> None:
    made, ids = bridge(), np.array([5], dtype=np.uint64)
    with pytest.raises(BridgeRefused, match="prompt 0 of 16 tokens comes back as 17 tokens, different from token 0 on"):
        gate(made, ids, engine_block_tokens=16, prompts=[made.prompt(ids)], tokenize=lambda text: [1, *tokenize(text)])


def test_the_alphabet_is_the_words_that_are_one_token_each() -> None:
    candidates = ["strange", *WORDS[:200], "other", *WORDS[200:300]]
    found = alphabet_of(tokenize, candidates, size=250)
    assert found.words == WORDS[:250]
    assert found.ids == tuple(IDS[word] for word in WORDS[:250])
    with pytest.raises(BridgeRefused, match="gives 0 words as one token each"):
        alphabet_of(tokenize, ["strange", "words"])
    assert list(candidate_words(["An egg, an Egg; eggs x"])) == ["egg", "an", "eggs"]


def test_tokens_that_are_no_block_are_refused() -> None:
    with pytest.raises(BridgeRefused, match="token 4 cannot be the id of a block"):
        bridge().names_of(np.full((1, 16), 4, dtype=np.int32))
    with pytest.raises(BridgeRefused, match="3 tokens cannot be the id of a block"):
        bridge().names_of(np.full((1, 3), 3, dtype=np.int32))


def test_the_defective_bridge_has_33_texts_whatever_the_ids() -> None:
    ids = np.arange(13_712, dtype=np.uint64)
    assert len(np.unique(legacy_texts(ids))) == 33
    texts = [{tuple(legacy_words(each, 64)) for each in some} for some in (ids.tolist(), range(33))]
    assert texts[0] == texts[1]
