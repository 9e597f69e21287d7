"""The mock server's two tiers against what must be true of any cache, and against caches simple enough to be seen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.testing.mock_cache import BlockChain, MockCache
from hostcache.tier import Reason, check_balance

BLOCK = 4
# Few distinct tokens and short prompts, so that prompts share beginnings often.
PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=30)


def chain(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    made = BlockChain(BLOCK, salt)
    made.extend(tokens)
    return made.digests


def cache(device: int, host: int = 0) -> MockCache:
    return MockCache(block_tokens=BLOCK, device_blocks=device, host_blocks=host)


@given(PROMPTS, st.integers(0, 12), st.integers(0, 12), st.lists(st.sampled_from(["reset", "keep", ""]), max_size=30))
def test_every_prompt_token_comes_from_the_device_the_host_or_is_computed(
        prompts: list[list[int]], device: int, host: int, resets: list[str]) -> None:
    tiers = cache(device, host)
    for index, prompt in enumerate(prompts):
        report = tiers.admit(chain(prompt), len(prompt))
        check_balance(report)
        served = report.device_tokens + report.host_tokens
        assert served + sum(report.recomputed.values()) == len(prompt) == report.prompt_tokens
        assert served <= len(prompt) - 1
        tiers.check()
        if index < len(resets) and resets[index]:
            tiers.reset(keep_host=resets[index] == "keep")
            tiers.check()


@given(PROMPTS, st.integers(0, 4))
def test_an_ample_host_serves_what_an_infinite_cache_would(prompts: list[list[int]], device: int) -> None:
    tiers = cache(device, 10_000)
    for prompt in prompts:
        report = tiers.admit(chain(prompt), len(prompt))
        assert report.device_tokens + report.host_tokens == report.bound_tokens


@given(PROMPTS, st.integers(1, 12))
def test_the_device_alone_is_an_lru_touched_from_the_end(prompts: list[list[int]], device: int) -> None:
    tiers, held = cache(device), OrderedDict[bytes, None]()
    for prompt in prompts:
        blocks = chain(prompt)
        hits = 0
        while hits < (len(prompt) - 1) // BLOCK and blocks[hits] in held:
            hits += 1
        assert tiers.admit(blocks, len(prompt)).device_tokens == hits * BLOCK
        for block in reversed(blocks):
            held.pop(block, None)
            held[block] = None
        while len(held) > device:
            held.popitem(last=False)


@given(PROMPTS, st.integers(1, 12), st.integers(1, 12))
def test_blocks_are_hit_at_most_as_often_as_they_were_asked_for_again(prompts: list[list[int]], device: int,
                                                                       host: int) -> None:
    tiers = cache(device, host)
    served = sum(report.device_tokens + report.host_tokens
                 for report in (tiers.admit(chain(prompt), len(prompt)) for prompt in prompts))
    blocks = [block for prompt in prompts for block in chain(prompt)]
    assert served <= (len(blocks) - len(set(blocks))) * BLOCK


def test_what_leaves_the_device_is_restored_from_the_host_and_counted() -> None:
    tiers = cache(device=2, host=8)
    first, second = list(range(9)), list(range(100, 109))
    assert tiers.admit(chain(first), 9).recomputed == {Reason.NEW: 8, Reason.PARTIAL_PAGE: 1}
    tiers.admit(chain(second), 9)
    report = tiers.admit(chain(first), 9)
    assert (report.device_tokens, report.host_tokens) == (0, 8)
    assert (tiers.counters.restores, tiers.counters.restored_blocks) == (1, 2)
    assert (tiers.counters.stores, tiers.counters.stored_blocks) == (2, 4)
    assert (tiers.on_device, tiers.on_host, tiers.on_both) == (2, 4, 2)


def test_a_block_evicted_again_is_not_written_again() -> None:
    tiers = cache(device=1, host=8)
    for prompt in ([1] * 5, [2] * 5, [1] * 5, [2] * 5):
        tiers.admit(chain(prompt), 5)
    assert tiers.counters.stored_blocks == 2


def test_without_a_host_the_reason_is_that_the_tier_is_off() -> None:
    tiers = cache(device=1)
    for prompt in ([1] * 5, [2] * 5):
        tiers.admit(chain(prompt), 5)
    assert tiers.admit(chain([1] * 5), 5).recomputed == {Reason.TIER_OFF: 4, Reason.PARTIAL_PAGE: 1}


def test_a_full_host_forgets_the_end_of_the_oldest_prompt_first() -> None:
    tiers = cache(device=0, host=3)
    tiers.admit(chain(range(20)), 20)
    assert tiers.counters.host_evicted == 2
    report = tiers.admit(chain(range(20)), 20)
    assert (report.host_tokens, report.recomputed) == (12, {Reason.EVICTED: 4, Reason.PARTIAL_PAGE: 4})


def test_a_prompt_that_was_served_whole_still_computes_its_last_token() -> None:
    tiers = cache(device=10)
    tiers.admit(chain([1] * 8), 8)
    assert tiers.admit(chain([1] * 8), 8).device_tokens == 4


def test_a_reset_can_leave_the_host_serving() -> None:
    kept, cleared = cache(device=1, host=8), cache(device=1, host=8)
    for tiers, keep in ((kept, True), (cleared, False)):
        for prompt in ([1] * 5, [2] * 5):
            tiers.admit(chain(prompt), 5)
        tiers.reset(keep_host=keep)
    assert kept.admit(chain([1] * 5), 5).host_tokens == 4
    assert cleared.admit(chain([1] * 5), 5).recomputed == {Reason.NEW: 4, Reason.PARTIAL_PAGE: 1}


@given(st.lists(st.integers(0, 2**63 - 1), max_size=40), st.integers(0, 40))
def test_a_chain_grown_in_two_steps_is_the_chain_grown_in_one(tokens: list[int], cut: int) -> None:
    grown = BlockChain(BLOCK)
    grown.extend(tokens[:cut])
    grown.extend(tokens[cut:])
    assert grown.digests == chain(tokens)
    assert len(grown.digests) == len(tokens) // BLOCK


def test_a_salt_and_every_earlier_token_make_another_block() -> None:
    tokens = list(range(8))
    assert not set(chain(tokens)) & set(chain(tokens, "salt"))
    assert chain(tokens)[1] != chain([9, *tokens[1:]])[1]


def test_an_id_beyond_63_bits_is_no_token() -> None:
    with pytest.raises(OverflowError):
        BlockChain(BLOCK).extend([1 << 63])
