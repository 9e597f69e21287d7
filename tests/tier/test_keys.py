"""What makes two pages the same page: equal tokens and equal identity, nothing less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hostcache.tier import Identity, chain_ids, key_chain

BASE = Identity(model="m", revision="r", dtype="f32", layout="l", page_tokens=4)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(TOKENS, st.integers(0, 40))
def test_extending_a_chain_gives_the_chain_of_the_whole(tokens: list[int], cut: int) -> None:
    first = key_chain(tokens[:cut], BASE)
    whole = key_chain(tokens, BASE)
    assert first.extend(tokens[len(first) * 4 :]) == whole
    assert whole.prefix(len(first)) == first


@given(TOKENS)
def test_lists_and_arrays_of_any_integer_kind_have_the_same_keys(tokens: list[int]) -> None:
    chain = key_chain(tokens, BASE)
    for kind in ("i4", "i8", "u4", ">i4"):
        assert key_chain(np.array(tokens, dtype=kind), BASE) == chain
    doubled = np.repeat(np.array(tokens, dtype=np.int32), 2)
    assert key_chain(doubled[::2], BASE) == chain


@given(TOKENS, TOKENS)
def test_a_key_commits_to_every_token_before_the_end_of_its_page(a: list[int], b: list[int]) -> None:
    one, other = key_chain(a, BASE), key_chain(b, BASE)
    for page, (left, right) in enumerate(zip(one.keys, other.keys, strict=False)):
        assert (left == right) == (a[: (page + 1) * 4] == b[: (page + 1) * 4])


@given(TOKENS)
def test_a_chain_has_a_key_for_each_whole_page_and_all_differ(tokens: list[int]) -> None:
    chain = key_chain(tokens, BASE)
    assert len(chain) == len(chain.keys) == len(chain.plain) == len(tokens) // 4
    assert len({*chain.keys, *chain.plain}) == 2 * len(chain)
    assert all(len(key) == 16 for key in chain.keys)


def test_each_field_of_the_identity_changes_every_key() -> None:
    variants = [
        BASE,
        replace(BASE, model="X"),
        replace(BASE, revision="X"),
        replace(BASE, dtype="X"),
        replace(BASE, layout="X"),
        replace(BASE, parallel="X"),
        replace(BASE, adapter="X"),
        replace(BASE, media="X"),
        replace(BASE, salt="X"),
        replace(BASE, page_tokens=2),
    ]
    chains = [key_chain(range(8), identity) for identity in variants]
    for one, other in combinations(chains, 2):
        assert not set(one.keys) & set(other.keys)
    assert len({identity.digest for identity in variants}) == len(variants)


@given(st.text(max_size=4), st.text(max_size=4), st.text(max_size=4), st.text(max_size=4))
def test_text_cannot_move_from_one_field_into_the_next(
    adapter: str, salt: str, other_adapter: str, other_salt: str
) -> None:
    one = replace(BASE, adapter=adapter, salt=salt)
    other = replace(BASE, adapter=other_adapter, salt=other_salt)
    assert (one.digest == other.digest) == ((adapter, salt) == (other_adapter, other_salt))


def test_the_plain_digests_ignore_the_identity_but_not_the_page_size() -> None:
    plain = key_chain(range(8), BASE).plain
    assert key_chain(range(8), replace(BASE, salt="X")).plain == plain
    assert key_chain(range(8), replace(BASE, page_tokens=8)).plain[0] not in plain


@pytest.mark.parametrize(
    "tokens", [[-1, 0, 0, 0], [0, 0, 0, 2**31], [0.0, 1.0, 2.0, 3.0], np.zeros(4, dtype=np.float32)]
)
def test_what_is_no_token_id_is_refused(tokens: Sequence[int]) -> None:
    with pytest.raises(ValueError, match="token ids must be integers"):
        key_chain(tokens, BASE)


def test_a_page_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="page_tokens is 0"):
        key_chain([1], replace(BASE, page_tokens=0))


def test_history_ids_are_the_first_half_of_each_digest() -> None:
    digests = [bytes(range(16)), bytes(range(16, 32))]
    assert chain_ids(digests) == [int.from_bytes(digest[:8], "little") for digest in digests]
    assert chain_ids([]) == []
