"""The bridge in both directions, and the gates that close before anything is sent."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hostcache
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


def test_a_token_for_two_words_does_not_make_up_for_a_word_of_two() -> None:
    merged = ["an", "egg", "strange", *WORDS[:100]]  # " an egg" is one token, " strange" is two

    def odd(text: str) -> Sequence[int]:
        text = text.replace(" an egg", " E").replace(" strange", " S T")
        known = {"E": 1, "S": 2, "T": 4, "an": 5, "egg": 6}
        return [known[word] if word in known else IDS[word] for word in text.split()]

    found = alphabet_of(odd, merged, size=80, group=4)
    assert "strange" not in found.words
    assert {word: list(odd(f" {word}")) for word in found.words} == {
        word: [token] for word, token in zip(found.words, found.ids, strict=True)}


def test_an_alphabet_that_could_give_two_ids_one_text_cannot_be_made() -> None:
    words, ids = ALPHABET.words, ALPHABET.ids
    for wrong, says in (
            ((words[:1], ids[:1]), "1 words and 1 tokens are no alphabet"), (((), ()), "0 words"),
            ((words, ids[:-1]), "1000 words and 999 tokens"), ((words, (*ids[:-1], 2**31)), "no alphabet"),
            ((words, (*ids[:-1], ids[0])), "token 3 is twice"),
            (((*words[:-1], words[5]), ids), "word 'waaf' is twice")):
        with pytest.raises(BridgeRefused, match=says):
            Alphabet(words=wrong[0], ids=wrong[1])
    with pytest.raises(BridgeRefused, match="an alphabet of 63 words is too small; 64 or more"):
        alphabet_of(tokenize, WORDS, size=63)


def test_a_prompt_longer_than_its_blocks_is_refused_and_never_shortened() -> None:
    ids = np.array([5, 6], dtype=np.uint64)
    assert len(bridge().prompt(ids, 32)) == 32
    with pytest.raises(BridgeRefused, match="a prompt of 33 tokens is not made of 2 blocks of 16"):
        bridge().prompt(ids, 33)


def test_engine_blocks_of_no_tokens_are_refused() -> None:
    with pytest.raises(BridgeRefused, match="no blocks of 0 tokens"):
        gate(bridge(), np.array([5], dtype=np.uint64), engine_block_tokens=0)


@given(names, st.sampled_from([5, 7, 8, 16, 24, 32, 512]), st.sampled_from([7, 16, 48]))
def test_in_engine_blocks_of_any_size_that_holds_an_id_prompts_part_where_their_ids_do(
        drawn: list[int], engine_block: int, block: int) -> None:
    ids = np.array(drawn, dtype=np.uint64)
    made = bridge(block)
    one, other = ids.copy(), np.array([*drawn[:-1], drawn[-1] ^ 1], dtype=np.uint64)
    try:
        gate(made, np.unique([*one, *other]), engine_block_tokens=engine_block)
    except BridgeRefused:
        assert math.gcd(engine_block, block) < made.digits
        return
    shared = (len(ids) - 1) * block
    prompts = [made.prompt(each) for each in (one, other)]
    assert [len(each) for each in prompts] == [len(ids) * block] * 2
    assert (prompts[0][:shared] == prompts[1][:shared]).all()
    end = (shared // engine_block + 1) * engine_block  # of the first engine block with a token of the last ids
    assert (prompts[0][shared:end] != prompts[1][shared:end]).any()


def test_siblings_that_part_too_late_in_an_engine_block_are_refused() -> None:
    """Blocks of 20 under engine blocks of 21: one token of a block is all that an engine block may have of it."""
    with pytest.raises(BridgeRefused, match=r"the same 1 tokens.*an engine with blocks of 21 would see hits"):
        gate(bridge(20), np.arange(3000, dtype=np.uint64), engine_block_tokens=21)


def test_the_defective_bridge_is_out_of_reach_of_whatever_sends() -> None:
    source = Path(hostcache.__file__).parent
    users = {path.relative_to(source).as_posix() for path in source.rglob("*.py")
             if "legacy_bridge" in path.read_text(encoding="utf-8")}
    assert users <= {"lab/reconcile.py", "lab/story.py", "lab/gap.py"}  # they judge


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
