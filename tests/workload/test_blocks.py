"""Block ids become page keys and fingerprints: whole pages, the same everywhere, different where they must be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostcache.errors import ConfigError
from hostcache.tier.keys import Identity, chain_ids
from hostcache.workload.blocks import ChainBuilder, block_chain, block_keys, block_prints, common_blocks
from hostcache.workload.sample_traces import synthetic_requests

RATIOS = [(64, 64), (64, 512), (512, 64), (512, 512), (64, 16), (1, 3), (6, 1)]
IDS = st.lists(st.integers(0, 2**64 - 1), max_size=40, unique=True)


def identity(page_tokens: int, salt: str = "") -> Identity:
    return Identity(model="m", revision="r", dtype="d", layout="l", page_tokens=page_tokens, salt=salt)


def blocks_of(ids: Sequence[int]) -> npt.NDArray[np.uint64]:
    return np.array(ids, dtype=np.uint64)


def splitmix(x: int) -> int:
    """The finalizer in plain integers."""
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 % 2**64
    x ^= x >> 27
    x = x * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


@given(ids=IDS, ratio=st.sampled_from(RATIOS), salt=st.binary(max_size=20), cut=st.integers(0, 5))
@settings(deadline=None)
def test_keys_are_what_the_docstring_says_in_plain_integers(
    ids: list[int], ratio: tuple[int, int], salt: bytes, cut: int
) -> None:
    block_tokens, page_tokens = ratio
    sizes = block_tokens.to_bytes(8, "little") + page_tokens.to_bytes(8, "little")
    digest = blake2b(sizes + salt, digest_size=16, person=b"hostcache-blk-1").digest()
    words = [int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")]
    golden = 0x9E3779B97F4A7C15
    tokens = max(0, len(ids) * block_tokens - cut)
    expected = []
    for page in range(tokens // page_tokens):
        last = ids[((page + 1) * page_tokens - 1) // block_tokens]
        key = [splitmix((last * golden + word) % 2**64) for word in words]
        if page_tokens < block_tokens:
            part = page % (block_tokens // page_tokens)
            key = [splitmix((word + part * golden) % 2**64) for word in key]
        expected.append(b"".join(word.to_bytes(8, "little") for word in key))
    keys = block_keys(blocks_of(ids), block_tokens=block_tokens, page_tokens=page_tokens, salt=salt,
                      input_tokens=tokens)
    assert list(keys) == expected


def test_keys_and_prints_are_the_same_in_every_process() -> None:
    script = ("import numpy as np, sys\nfrom hostcache.workload.blocks import block_keys, block_prints\n"
              "ids = np.array([0, 1, 2**64 - 1], dtype=np.uint64)\n"
              "keys = block_keys(ids, block_tokens=64, page_tokens=32, salt=b'x')\n"
              "prints = block_prints(ids, block_tokens=64, page_tokens=32)\n"
              "sys.stdout.write(b''.join(keys).hex() + ' ' + ' '.join(map(str, prints)))\n")
    said = {subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONHASHSEED": seed}, check=True,
                           capture_output=True, text=True).stdout for seed in ("0", "1")}
    ids = blocks_of([0, 1, 2**64 - 1])
    keys = block_keys(ids, block_tokens=64, page_tokens=32, salt=b"x")
    prints = block_prints(ids, block_tokens=64, page_tokens=32)
    assert said == {b"".join(keys).hex() + " " + " ".join(map(str, prints))}


@pytest.mark.parametrize(("block_tokens", "page_tokens"), RATIOS)
def test_only_whole_pages_within_the_prompt_exist(block_tokens: int, page_tokens: int) -> None:
    for count in (0, 1, 7, 8, 9):
        for tokens in range(max(0, count - 1) * block_tokens, count * block_tokens + 1):
            blocks = blocks_of(range(count))
            chain = block_chain(blocks, tokens, block_tokens=block_tokens, identity=identity(page_tokens))
            prints = block_prints(blocks, block_tokens=block_tokens, page_tokens=page_tokens, input_tokens=tokens)
            assert len(chain) == len(prints) == tokens // page_tokens
    over = block_chain(blocks, 10**6, block_tokens=block_tokens, identity=identity(page_tokens))
    assert len(over) == 9 * block_tokens // page_tokens, "tokens behind the last block have no key (floor formats)"


@given(head=IDS, tails=st.tuples(IDS, IDS), ratio=st.sampled_from(RATIOS))
@settings(deadline=None)
def test_chains_share_exactly_the_pages_their_blocks_share(
    head: list[int], tails: tuple[list[int], list[int]], ratio: tuple[int, int]
) -> None:
    block_tokens, page_tokens = ratio
    requests = []
    for number, tail in enumerate(tails):  # ids that are chained by prefix: one behind the head is of its own branch
        own = [block // 2 * 2 + number for block in tail if block not in head]
        requests.append(blocks_of([block // 2 for block in dict.fromkeys(head)] + list(dict.fromkeys(own))))
    one, other = (block_chain(blocks, len(blocks) * block_tokens, block_tokens=block_tokens,
                              identity=identity(page_tokens)) for blocks in requests)
    shared = common_blocks(*requests) * block_tokens // page_tokens
    assert one.keys[:shared] == other.keys[:shared]
    assert all(a != b for a, b in zip(one.keys[shared:], other.keys[shared:], strict=False))


def test_different_blocks_parts_salts_and_sizes_have_different_keys_and_prints() -> None:
    ids = blocks_of([*range(20_000), *range(2**63, 2**63 + 20_000), *(2**k for k in range(16, 63))])
    keys: list[bytes] = []
    prints: list[int] = []
    for block_tokens, page_tokens in ((64, 64), (64, 32), (512, 512)):
        for salt in (b"", b"a"):
            keys += block_keys(ids, block_tokens=block_tokens, page_tokens=page_tokens, salt=salt)
        prints += block_prints(ids, block_tokens=block_tokens, page_tokens=page_tokens).tolist()
    assert len(set(keys)) == len(keys) == 2 * len(prints)
    assert len(set(chain_ids(keys))) == len(keys), "the history's 64-bit ids"
    assert len(set(prints)) == len(prints)
    assert not set(prints) & set(chain_ids(keys)), "a print is no part of a key"


@pytest.mark.parametrize("page_tokens", [64, 16])
def test_every_bit_of_a_key_and_a_print_is_as_good_as_a_coin(page_tokens: int) -> None:
    ids = blocks_of(range(8192))
    keys = block_keys(ids, block_tokens=64, page_tokens=page_tokens)
    words = np.frombuffer(b"".join(keys), dtype="<u8").reshape(-1, 2)
    prints = block_prints(ids, block_tokens=64, page_tokens=page_tokens)
    columns = np.column_stack([words, prints.reshape(-1, 1)]).astype("<u8")
    bits = np.unpackbits(np.ascontiguousarray(columns).view(np.uint8).reshape(len(columns), -1), axis=1)
    deviation = 0.5 / len(bits) ** 0.5
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * deviation
    flips = (bits[1:] ^ bits[:-1]).mean(axis=0)
    assert np.abs(flips - 0.5).max() < 5 * deviation, "neighbouring ids differ in half of the bits"
    together = np.corrcoef(bits.astype(np.float64), rowvar=False) - np.eye(bits.shape[1])
    assert np.abs(together).max() < 6 / len(bits) ** 0.5, "no two bits know of each other"


def test_a_print_depends_on_every_block_of_its_page() -> None:
    blocks = blocks_of(range(16))
    prints = block_prints(blocks, block_tokens=64, page_tokens=512)
    for at in range(16):
        other = blocks.copy()
        other[at] += np.uint64(100)
        changed = block_prints(other, block_tokens=64, page_tokens=512) != prints
        assert changed.tolist() == [at < 8, at >= 8]
    swapped = blocks_of([1, 0, *range(2, 16)])
    assert block_prints(swapped, block_tokens=64, page_tokens=512)[0] != prints[0]


@given(seed=st.integers(0, 10_000), ratio=st.sampled_from([(64, 64), (64, 512), (64, 16), (64, 32)]))
@settings(max_examples=30, deadline=None)
def test_a_builder_gives_what_each_request_alone_would_have_and_reuses_the_objects(
    seed: int, ratio: tuple[int, int]
) -> None:
    block_tokens, page_tokens = ratio
    builder = ChainBuilder(identity(page_tokens), block_tokens=block_tokens)
    requests = [r for r in synthetic_requests(seed, sessions=2, turns=8) if r.session == "session_000"]
    chains = []
    for request in [*requests, requests[0], requests[-1]]:
        chain = builder.chain(request.blocks, request.input_tokens)
        assert chain == block_chain(request.blocks, request.input_tokens, block_tokens=block_tokens,
                                    identity=identity(page_tokens))
        assert chain.plain == chain.keys
        chains.append(chain)
    for before, after in pairwise(chains):
        shared = sum(a == b for a, b in zip(before.keys, after.keys, strict=False))
        reused = sum(a is b for a, b in zip(before.keys, after.keys, strict=False))
        assert reused == shared


@given(steps=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12 * 64)), min_size=2, max_size=6),
       ratio=st.sampled_from([(64, 64), (64, 128), (64, 16)]))
@settings(deadline=None)
def test_a_builder_may_be_given_any_prompt_after_any_other(
    steps: list[tuple[int, int]], ratio: tuple[int, int]
) -> None:
    block_tokens, page_tokens = ratio
    builder = ChainBuilder(identity(page_tokens), block_tokens=block_tokens)
    for number, (shared, tokens) in enumerate(steps):
        blocks = blocks_of([*range(shared), *range(100 + 20 * number, 112 + 20 * number - shared)])
        for length in (tokens, tokens // 2, tokens):
            assert builder.chain(blocks, length) == block_chain(blocks, length, block_tokens=block_tokens,
                                                                identity=identity(page_tokens))


def test_keys_differ_by_identity_and_not_by_what_an_identity_is_made_of_elsewhere() -> None:
    blocks = blocks_of(range(8))
    one = block_chain(blocks, 512, block_tokens=64, identity=identity(64))
    other = block_chain(blocks, 512, block_tokens=64, identity=identity(64, salt="x"))
    assert not set(one.keys) & set(other.keys)
    assert one.keys == block_keys(blocks, block_tokens=64, page_tokens=64, salt=identity(64).digest)


@pytest.mark.parametrize(("block_tokens", "page_tokens"), [(64, 48), (48, 64), (512, 100), (0, 64), (64, 0), (64, -64)])
def test_sizes_that_do_not_fit_are_refused_in_one_line(block_tokens: int, page_tokens: int) -> None:
    blocks = blocks_of(range(8))
    with pytest.raises(ConfigError, match=f"{page_tokens} tokens") as caught:
        block_keys(blocks, block_tokens=block_tokens, page_tokens=page_tokens)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError):
        block_prints(blocks, block_tokens=block_tokens, page_tokens=page_tokens)
    with pytest.raises(ConfigError):
        ChainBuilder(identity(page_tokens), block_tokens=block_tokens)
