"""The one-pass curves against the plain definitions, and the figures of the public traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hostcache.errors import ConfigError
from hostcache.lab import opt
from hostcache.lab.lru import Touch, lru_hits, stack_distances
from hostcache.lab.opt import optimal_depths, optimal_hits
from hostcache.lab.oracle import (
    cold_miss_floor,
    in_engine_blocks,
    lru_curve,
    maximum,
    opt_curve,
    oracle,
    rates,
    seen_by_engine,
    two_tiers,
)
from hostcache.lab.stream import stream_of
from hostcache.workload.traces import open_trace

CONVERSATION = Path(__file__).resolve().parents[3] / "shared/data/mooncake_conversation_trace.jsonl.gz"
SYNTHETIC = CONVERSATION.with_name("mooncake_synthetic_trace.jsonl.gz")
needs_trace = pytest.mark.skipif(not CONVERSATION.exists(), reason="the public traces are not beside the checkout")


@st.composite
def streams(draw: st.DrawFn) -> tuple[NDArray[np.int32], int]:
    """Ids and how many different ones there may be; some favour few of them, as real ones do."""
    distinct = draw(st.integers(1, 40))
    seed, size, skewed = draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 400)), draw(st.booleans())
    rng = np.random.Generator(np.random.PCG64(seed))
    ids = rng.zipf(1.3, size) % distinct if skewed else rng.integers(0, distinct, size)
    return ids.astype(np.int32), distinct


def by_hand(ids: NDArray[np.int32], starts: NDArray[np.int64], touch: Touch) -> list[int]:
    stack: list[int] = []
    found = []
    for first, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        asked = ids[first:end].tolist()
        found += [len(stack) - stack.index(each) if each in stack else 0 for each in asked]
        for each in reversed(asked) if touch == "tail-first" else asked:
            if each in stack:
                stack.remove(each)
            stack.append(each)
    return found


@settings(max_examples=200)
@given(streams())
def test_the_lru_curve_is_the_walked_cache_at_every_capacity(drawn: tuple[NDArray[np.int32], int]) -> None:
    ids, distinct = drawn
    for loops in (True, False):
        distances = stack_distances(ids, distinct, loops=loops)
        for capacity in range(distinct + 2):
            assert ((distances > 0) & (distances <= capacity)).sum() == lru_hits(ids, capacity)


@settings(max_examples=200)
@given(streams(), st.booleans())
def test_the_optimal_curve_is_the_heap_at_every_capacity(drawn: tuple[NDArray[np.int32], int], bypass: bool) -> None:
    ids, distinct = drawn
    depths = optimal_depths(ids, distinct, bypass=bypass)
    for capacity in range(distinct + 2):
        assert ((depths > 0) & (depths <= capacity)).sum() == optimal_hits(ids, capacity, bypass=bypass)
    assert (opt._depths(ids, distinct, opt.next_uses(ids), bypass, 2) == depths).all()


@settings(max_examples=200)
@given(streams())
def test_lru_never_beats_the_optimum_nor_that_the_bound(drawn: tuple[NDArray[np.int32], int]) -> None:
    ids, distinct = drawn
    bound = len(ids) - len(np.unique(ids))
    lru, best, demand = (np.bincount(each[each > 0], minlength=distinct + 2).cumsum() for each in (
        stack_distances(ids, distinct), optimal_depths(ids, distinct, bypass=True),
        optimal_depths(ids, distinct, bypass=False)))
    assert (lru <= demand).all()
    assert (demand <= best).all()
    assert lru[-1] == demand[-1] == best[-1] == bound


@settings(max_examples=100)
@given(streams(), st.sets(st.integers(0, 400), max_size=20), st.sampled_from(["batched", "tail-first"]))
def test_looked_up_together_they_are_found_as_the_stack_stood(drawn: tuple[NDArray[np.int32], int], cuts: set[int],
                                                              touch: Touch) -> None:
    ids, distinct = drawn
    starts = np.array(sorted({0, len(ids)} | {cut for cut in cuts if cut < len(ids)}), dtype=np.int64)
    for loops in (True, False):
        found = stack_distances(ids, distinct, starts=starts, touch=touch, loops=loops)
        assert found.tolist() == by_hand(ids, starts, touch)


@pytest.mark.parametrize("touch", ["sequential", "batched", "tail-first"])
@pytest.mark.parametrize("seed", range(4))
def test_long_prompts_that_come_back_are_found_alike_by_slots_and_otherwise(touch: Touch, seed: int) -> None:
    """Runs of neighbours over many words of the line of slots, which is packed several times."""
    rng = np.random.default_rng(seed)
    prompts: list[NDArray[np.int32]] = []
    while sum(map(len, prompts)) < 20_000:
        first, length = rng.integers(0, 1_000), rng.integers(1, 300)
        prompts.append((np.arange(first, first + length) % 1_000).astype(np.int32))
        if rng.random() < 0.5:
            prompts.append(prompts[rng.integers(len(prompts))][: rng.integers(1, 300)])
    ids = np.concatenate(prompts)
    starts = np.cumsum([0, *map(len, prompts)])
    by_slots, otherwise = (stack_distances(ids, 1_000, starts=starts, touch=touch, loops=loops)
                           for loops in (True, False))
    assert by_slots.max() > 128
    assert (by_slots == otherwise).all()


def test_optimal_replacement_with_bypass_beats_demand_fetching_where_a_newcomer_is_worth_less() -> None:
    ids = np.array([0, 1, 0, 2, 0, 1], dtype=np.int32)
    assert optimal_hits(ids, 1, bypass=True) == 2
    assert optimal_hits(ids, 1, bypass=False) == 0
    assert (optimal_depths(ids, 3, bypass=True) == 1).sum() == 2
    assert (optimal_depths(ids, 3, bypass=False) == 1).sum() == 0


@needs_trace
def test_the_conversation_trace_has_its_published_figures() -> None:
    stream = stream_of(open_trace(CONVERSATION))
    assert (stream.requests, stream.references, stream.distinct) == (12031, 288500, 182790)
    most = maximum(stream)
    assert (round(most.blocks, 6), round(most.tokens, 3), round(most.requests, 3)) == (0.366412, 0.374, 0.384)
    lru, best, demand = lru_curve(stream), opt_curve(stream), opt_curve(stream, bypass=False)
    assert round(best.hits(1000) / 288500, 6) == 0.190707
    assert round(demand.hits(1000) / 288500, 6) == 0.190620
    assert (lru.hits(10**9), best.hits(10**9), best.least(1.0)) == (105710, 105710, 8138)
    inclusive, exclusive = two_tiers(lru, 1000, 4000)
    assert inclusive.hits == lru.hits(4000) < exclusive.hits == lru.hits(5000)
    tail_first = lru_curve(stream, "tail-first")
    assert round(lru.hits(5000) / 288500, 5) == 0.11036
    assert round(tail_first.hits(5000) / 288500, 5) == 0.11182
    assert [round(lru.hits(each) / 288500, 4) for each in (1000, 10_000)] == [0.0445, 0.2112]
    shares = (0.9, 0.99, 1.0)
    assert [tail_first.least(share) for share in shares] == [31_435, 85_219, 158_281]
    assert [best.least(share) for share in shares] == [4_358, 7_081, 8_138]


@needs_trace
def test_looked_up_by_position_or_by_prefix_is_one_thing_only_when_touched_tail_first() -> None:
    stream = stream_of(open_trace(CONVERSATION))
    expected: dict[Touch, tuple[float, float]] = {"batched": (0.04475, 0.04447), "tail-first": (0.04477, 0.04477)}
    for touch, (anywhere, prefix) in expected.items():
        depths = lru_curve(stream, touch).depths
        hit = (depths > 0) & (depths <= 1024)
        gaps = np.concatenate(([0], np.cumsum(~hit)))
        closed = hit & (gaps[:-1] == np.repeat(gaps[stream.starts[:-1]], np.diff(stream.starts)))
        assert (round(hit.mean(), 5), round(closed.mean(), 5)) == (anywhere, prefix)


@needs_trace
def test_the_first_600_requests_have_the_figures_of_the_retracted_probe() -> None:
    stream = stream_of(open_trace(CONVERSATION), limit=600)
    assert (stream.references, stream.distinct) == (16495, 13712)
    assert (round(maximum(stream).blocks, 6), round(cold_miss_floor(stream), 6)) == (0.168718, 0.831282)
    assert round(lru_curve(stream).hits(1024) / 16495, 6) == 0.038678


@needs_trace
def test_three_definitions_of_one_rate_lie_far_apart() -> None:
    most = maximum(stream_of(open_trace(SYNTHETIC)))
    assert (round(most.requests, 3), round(most.blocks, 3), round(most.tokens, 3)) == (0.423, 0.640, 0.651)


@needs_trace
def test_smaller_engine_blocks_see_the_same_prefixes_and_the_last_token_is_never_held() -> None:
    stream = stream_of(open_trace(CONVERSATION), limit=300)
    for size in (16, 64, 512):
        view, may_hit = seen_by_engine(stream, size)
        curve = lru_curve(view)
        hit = (curve.depths > 0) & may_hit
        held = np.add.reduceat(np.where(hit, size, 0), view.starts[:-1][np.diff(view.starts) > 0])
        assert (held < view.input_tokens[np.diff(view.starts) > 0]).all()
        assert rates(view, hit).tokens <= maximum(stream).tokens + 1e-12


@needs_trace
def test_the_oracle_counts_as_an_engine_does_with_the_first_600_and_the_first_300_requests() -> None:
    stream = stream_of(open_trace(CONVERSATION), limit=600)
    found = in_engine_blocks(stream, 16, {}, "sequential")
    assert (found["references"], found["references"] - found["distinct"]) == (518_066, 88_946)
    assert found["max_hit_tokens"] == 88_946 * 16
    stream = stream_of(open_trace(CONVERSATION), limit=300, block_tokens=16)
    found = in_engine_blocks(stream, 16, {"device pool": 8192}, "sequential")
    assert (found["max_hit_tokens"], found["lru"][0]["hit_tokens"]) == (10_800, 4_784)
    assert (round(found["max_hit_rate"], 6), round(found["lru"][0]["hit_rate"], 6)) == (0.079505, 0.035218)
    with pytest.raises(ConfigError, match="no prompt of the trace has a whole block of 1048576 tokens"):
        in_engine_blocks(stream, 2**20, {}, "sequential")


@needs_trace
def test_the_oracle_names_its_three_rates_and_its_digest_knows_no_file() -> None:
    whole = oracle(stream_of(open_trace(CONVERSATION), limit=300, block_tokens=16), pool_tokens=8192, host_tokens=8192)
    assert whole["prompt_tokens"] == 135_840
    assert round(whole["max_hit_rate"]["blocks"], 4) == 0.0796
    assert whole["at"][0]["hit_rate"]["lru"].keys() == {"blocks", "tokens", "requests"}
    assert round(whole["at"][0]["hit_rate"]["lru"]["blocks"], 4) == 0.0352
    assert [each["policy"] for each in whole["two_tiers"]] == ["inclusive lru", "exclusive lru"]
    assert whole["engine_blocks"] is None
    assert whole["digest"].split()[0] == stream_of(open_trace(CONVERSATION), limit=300).digest
