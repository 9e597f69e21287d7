"""The retracted probe from the public trace, and what is said of impossible rates."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from hostcache.errors import ConfigError
from hostcache.lab.lru import Touch
from hostcache.lab.reconcile import collapsed_rate, reconcile, warm_rate
from hostcache.lab.story import ENGINE_HITS, ENGINE_QUERIES, story, story_text
from hostcache.lab.stream import Stream, stream_of
from hostcache.workload.traces import open_trace

CONVERSATION = Path(__file__).resolve().parents[3] / "shared/data/mooncake_conversation_trace.jsonl.gz"
needs_trace = pytest.mark.skipif(not CONVERSATION.exists(), reason="the public traces are not beside the checkout")


@pytest.fixture(scope="module")
def slice_600() -> Stream:
    return stream_of(open_trace(CONVERSATION), limit=600)


@needs_trace
def test_the_story_ends_in_a_collapsed_bridge() -> None:
    told = story(CONVERSATION)
    assert (told["references"], told["distinct"], told["collapsed_texts"]) == (16495, 13712, 33)
    assert round(told["max_hit_rate"], 6) == 0.168718
    assert round(told["cold_miss_floor"], 6) == 0.831282
    assert round(told["lru_hit_rate"], 6) == 0.038678
    assert round(told["lru_hit_rate_collapsed"], 5) == 0.41049
    assert (told["verdict"], told["cause"]) == ("impossible", "bridge_collision")
    assert "0.410488" in story_text(told)


def test_without_its_trace_the_story_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs Mooncake's conversation trace"):
        story(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match=r"no --trace is given; the story needs Mooncake's conversation trace \(http"):
        story(None)


@needs_trace
def test_the_story_is_told_of_its_own_requests_alone(tmp_path: Path) -> None:
    with gzip.open(CONVERSATION, "rb") as file:
        rows = file.readlines()[:700]
    for part, wrong in ((rows, False), (rows[:600], False), (rows[:599], True), (rows[1:], True)):
        path = tmp_path / "part.jsonl"
        path.write_bytes(b"".join(part))
        if wrong:
            with pytest.raises(ConfigError, match="does not begin with the 600 requests of the story; it needs Moonca"):
                story(path)
        else:
            assert story(path)["references"] == 16495
    with pytest.raises(ConfigError, match="does not begin with the 600 requests"):
        story(CONVERSATION.with_name("mooncake_synthetic_trace.jsonl.gz"))


@needs_trace
def test_a_rate_at_the_models_is_explained_and_one_beside_it_is_named(slice_600: Stream) -> None:
    hits = round(0.038678 * 16495)
    for counted, verdict in ((hits, "explained"), (hits + 200, "above_model"), (hits - 200, "below_model")):
        outcome = reconcile(slice_600, capacity_blocks=1024, hits=counted, queries=16495)
        assert (outcome.verdict, outcome.cause) == (verdict, None)


@needs_trace
def test_each_impossible_rate_has_its_own_cause(slice_600: Stream) -> None:
    warm = warm_rate(slice_600, 14_000, "sequential")
    for hits, queries, capacity, cause in (
        (ENGINE_HITS, ENGINE_QUERIES, 1024, "bridge_collision"),
        (1_790_000_000, 1_790_000_000, 1024, "counter_not_a_count"),
        (2 * ENGINE_QUERIES, ENGINE_QUERIES, 1024, "counter_not_a_count"),
        (warm * 10**6, 10**6, 14_000, "warm_start"),
        (collapsed_rate(slice_600, 60, 1024) * 10**6, 10**6, 1024, "bridge_collision"),
    ):
        outcome = reconcile(slice_600, capacity_blocks=capacity, hits=hits, queries=queries)
        assert (outcome.verdict, outcome.cause) == ("impossible", cause), outcome.causes


@needs_trace
@pytest.mark.parametrize("touch", ["sequential", "batched", "tail-first"])
def test_the_collapsed_bridge_is_found_whatever_order_of_touch_is_assumed(slice_600: Stream, touch: Touch) -> None:
    outcome = reconcile(slice_600, capacity_blocks=1024, hits=ENGINE_HITS, queries=ENGINE_QUERIES, touch=touch)
    assert (outcome.verdict, outcome.cause) == ("impossible", "bridge_collision")
    assert "of 33 texts" in outcome.causes[0].says


@needs_trace
def test_counts_that_make_no_rate_are_refused(slice_600: Stream) -> None:
    with pytest.raises(ConfigError, match="no rate"):
        reconcile(slice_600, capacity_blocks=8, hits=0, queries=0)


@needs_trace
def test_through_a_good_bridge_an_engine_sees_the_trace_itself(slice_600: Stream) -> None:
    seen = slice_600.through(np.arange(slice_600.distinct), why="one text each")
    assert (seen.ids == slice_600.ids).all()
