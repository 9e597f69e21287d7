"""The tier as a policy: beside LRU, the optimum and the bound on small streams, and on the public trace."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostcache.errors import ConfigError, InvariantBroken
from hostcache.lab import commands
from hostcache.lab.oracle import lru_curve, maximum, opt_curve, seen_by_engine, two_tiers
from hostcache.lab.own_tier import own_tier
from hostcache.lab.stream import Stream, stream_of
from hostcache.report.oracle_page import oracle_html, oracle_text
from hostcache.workload.traces import open_trace

CONVERSATION = Path(__file__).resolve().parents[3] / "shared/data/mooncake_conversation_trace.jsonl.gz"
needs_trace = pytest.mark.skipif(not CONVERSATION.exists(), reason="the public traces are not beside the checkout")

BLOCK = 4


def stream(requests: Sequence[Sequence[int]], inputs: Sequence[int] | None = None) -> Stream:
    """Requests as block ids. `inputs`: their tokens (default: all blocks are full)."""
    ranks: dict[int, int] = {}
    ids = [ranks.setdefault(each, len(ranks)) for blocks in requests for each in blocks]
    lengths = np.array([len(blocks) for blocks in requests])
    tokens = lengths * BLOCK if inputs is None else np.array(inputs)
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    place = np.arange(len(ids)) - np.repeat(starts[:-1], lengths)
    return Stream(ids=np.array(ids, dtype=np.int32), starts=starts, names=np.array(list(ranks), dtype=np.uint64),
                  tokens=np.minimum(BLOCK, np.repeat(tokens, lengths) - place * BLOCK).astype(np.int32),
                  input_tokens=tokens.astype(np.int64), block_tokens=BLOCK, rounding="ceil", digest="drawn")


@st.composite
def conversations(draw: st.DrawFn) -> Stream:
    """Each request goes on from a part of an earlier one; its last block may not be full."""
    requests: list[list[int]] = []
    inputs = []
    fresh = 0
    for _ in range(draw(st.integers(1, 30))):
        before = draw(st.sampled_from([[], *requests[-8:]]))
        kept = before[: draw(st.integers(0, len(before)))]
        more = draw(st.integers(0 if kept else 1, 6))
        requests.append([*kept, *range(fresh, fresh + more)])
        inputs.append(len(requests[-1]) * BLOCK - draw(st.integers(0, BLOCK - 1)))
        fresh += more
    return stream(requests, inputs)


def tokens(pages: int) -> int:
    return pages * BLOCK


@settings(max_examples=60, deadline=None)
@given(conversations(), st.integers(0, 20), st.integers(0, 30))
def test_its_device_is_the_lru_touched_tail_first_and_its_hits_stay_under_the_optimum_of_both(
        drawn: Stream, device: int, host: int) -> None:
    found = own_tier(drawn, device_tokens=tokens(device), host_tokens=tokens(host))
    assert found.device_hits == lru_curve(drawn, "tail-first").hits(device)
    assert found.hits <= opt_curve(drawn).hits(device + host) <= found.bound_hits
    assert found.bound_hits == drawn.references - drawn.distinct
    assert found.hits + sum(found.missed.values()) == found.references == drawn.references
    assert found.hit_rate.blocks == pytest.approx(found.hits / drawn.references)
    assert found.missed.get("new", 0) == drawn.distinct
    assert "forgotten" not in found.missed
    assert found.longer_than_device == np.count_nonzero(np.diff(drawn.starts) > device)


@settings(max_examples=20, deadline=None)
@given(conversations(), st.integers(0, 20))
def test_without_a_host_it_is_the_device_alone(drawn: Stream, device: int) -> None:
    found = own_tier(drawn, device_tokens=tokens(device), host_tokens=BLOCK - 1)
    assert (found.host_pages, found.host_hits, found.written) == (0, 0, 0)
    assert found.device_hits == lru_curve(drawn, "tail-first").hits(device)


@settings(max_examples=40, deadline=None)
@given(conversations(), st.integers(0, 20))
def test_with_an_enormous_host_it_is_the_infinite_cache_however_small_the_device(drawn: Stream, device: int) -> None:
    found = own_tier(drawn, device_tokens=tokens(device), host_tokens=tokens(4 * drawn.references))
    assert found.hit_rate == maximum(drawn)
    assert found.hits == found.bound_hits


@settings(max_examples=40, deadline=None)
@given(conversations(), st.integers(0, 60), st.sampled_from([1, 2, 4, 8]))
def test_in_an_engine_s_pages_the_last_token_is_never_a_hit(drawn: Stream, device_tokens: int, page: int) -> None:
    if (drawn.input_tokens < page).all():
        return
    found = own_tier(drawn, device_tokens=device_tokens, host_tokens=tokens(4 * drawn.references), page_tokens=page)
    view, may_hit = seen_by_engine(drawn, page)
    depths = lru_curve(view, "tail-first").depths
    assert found.device_hits == np.count_nonzero((depths > 0) & (depths <= device_tokens // page) & may_hit)
    assert found.hits == found.bound_hits == np.count_nonzero((depths > 0) & may_hit)
    assert found.missed.get("partial_page", 0) == np.count_nonzero(~may_hit)
    assert found.page_tokens == page


def test_a_page_is_known_by_all_that_comes_before_it() -> None:
    found = own_tier(stream([[1, 2], [3, 2], [1, 2]]), device_tokens=tokens(8), host_tokens=tokens(8))
    assert (found.device_hits, found.bound_hits) == (2, 2)


def test_what_the_history_has_forgotten_is_told_from_what_was_never_seen() -> None:
    asked = stream([[1, 2], range(3, 99), [1, 2], [1, 2]])
    found = own_tier(asked, device_tokens=tokens(4), host_tokens=tokens(2), history_pages=16)
    assert (found.device_hits, found.host_hits, found.bound_hits) == (2, 0, 4)
    assert found.missed == {"new": 98, "forgotten": 2}
    assert own_tier(asked, device_tokens=tokens(4), host_tokens=tokens(2)).missed == {"new": 98, "evicted": 2}


def test_pages_larger_than_every_prompt_are_refused() -> None:
    with pytest.raises(ConfigError, match="no prompt of the trace has a whole page of 64 tokens"):
        own_tier(stream([[1, 2]]), device_tokens=64, host_tokens=64, page_tokens=64)


def test_no_figure_above_the_bound_and_none_that_does_not_add_up_can_be_made() -> None:
    found = own_tier(stream([[1, 2], [1, 2]]), device_tokens=tokens(2), host_tokens=tokens(2))
    assert (found.hits, found.missed) == (2, {"new": 2})
    with pytest.raises(InvariantBroken, match="impossible: 3 hits of 4 references, no cache can have more than 2"):
        replace(found, host_hits=1, missed={"new": 1})
    with pytest.raises(InvariantBroken, match="2 hits and 1 misses are not the 4 references"):
        replace(found, missed={"new": 1})


def test_progress_tells_how_many_requests_were_driven() -> None:
    heard: list[int] = []
    own_tier(stream([[1]] * 200), device_tokens=4, host_tokens=4, progress=heard.append)
    assert heard == [64, 128, 192]


@needs_trace
@pytest.mark.parametrize("host_blocks", [500, 2000])
def test_on_the_public_trace_it_is_worth_as_much_as_an_exclusive_lru_of_both_sizes(host_blocks: int) -> None:
    asked = stream_of(open_trace(CONVERSATION), limit=1200)
    found = own_tier(asked, device_tokens=1000 * 512, host_tokens=host_blocks * 512)
    inclusive, exclusive = two_tiers(lru_curve(asked, "tail-first"), 1000, host_blocks)
    assert (found.requests, found.references) == (1200, asked.references)
    assert found.device_hits == exclusive.device_hits
    assert found.hits > inclusive.hits
    assert found.hits >= exclusive.hits - 0.005 * asked.references


# The command --------------------------------------------------------------------------------------------------------


def small_trace(folder: Path) -> Path:
    path = folder / "small.jsonl.gz"
    rows = [{"timestamp": 1000 * i, "input_length": 512 * 3, "output_length": 1, "hash_ids": [3 * (i % 4) + j
            for j in range(3)]} for i in range(12)]
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


def oracle(folder: Path, *flags: str) -> tuple[dict[str, Any], str]:
    """The document, and what went to stderr."""
    parser = argparse.ArgumentParser()
    commands.add_arguments(parser)
    args = parser.parse_args(["oracle", "--trace", str(small_trace(folder)), "--out", str(folder / "out"), "--json",
                              *flags])
    out, err = io.StringIO(), io.StringIO()
    pages = commands.Pages(oracle_text=oracle_text, oracle_html=oracle_html)
    assert commands.run(args, out=out, err=err, pages=pages, argv=["lab", "oracle"]) == 0
    document: dict[str, Any] = json.loads(out.getvalue())
    assert "hit rate" in (folder / "out/oracle.html").read_text(encoding="utf-8")
    return document, err.getvalue()


def test_the_command_drives_the_tier_where_a_pool_and_a_host_are_given(tmp_path: Path) -> None:
    document, err = oracle(tmp_path, "--pool-tokens", str(6 * 512), "--host-tokens", str(9 * 512))
    own = document["own_tier"]
    assert {key: own[key] for key in ("requests", "references", "device_hits", "host_hits", "bound_hits", "touch")} == {
        "requests": 12, "references": 36, "device_hits": 0, "host_hits": 24, "bound_hits": 24, "touch": "tail-first"}
    assert "hostcache's own tier, request by request" in err


@pytest.mark.parametrize("flags", [(), ("--pool-tokens", "4096"),
                                   ("--pool-tokens", "4096", "--host-tokens", "4096", "--no-own-tier")])
def test_without_a_host_or_with_the_flag_no_tier_is_driven(tmp_path: Path, flags: tuple[str, ...]) -> None:
    document, err = oracle(tmp_path, *flags)
    assert document["own_tier"] is None
    assert "own tier" not in err


def test_an_engine_s_blocks_are_counted_with_and_without_a_tier(tmp_path: Path) -> None:
    document, _ = oracle(tmp_path, "--pool-tokens", str(13 * 512), "--page-tokens", "256")
    # Twelve prompts of six such blocks, four of them different; the last block of each is never a hit.
    assert document["own_tier"] is None
    assert document["engine_blocks"] == {
        "block_tokens": 256, "references": 72, "distinct": 24, "max_hit_tokens": 40 * 256,
        "max_hit_rate": 40 * 256 / (12 * 1536), "lru": [
            {"name": "device pool", "capacity_blocks": 26, "hit_tokens": 40 * 256, "hit_rate": 40 * 256 / 18432}]}
    assert re.search(r"LRU, device pool +26 +10,240 +0\.555556", oracle_text(document))


@pytest.mark.parametrize(("flags", "says"), [
    (("--block-tokens", "9" * 23), "--block-tokens is 9{23}; give 1 or more, at most 1048576"),
    (("--pool-tokens", "512", "--host-tokens", "9" * 23), "--host-tokens is 9{23}; give 1 or more"),
    (("--pool-tokens", "0"), "--pool-tokens is 0; give 1 or more"),
    (("--requests", "-1"), "--requests is -1; give 1 or more"),
    (("--host-tokens", "512"), "--host-tokens is given without --pool-tokens"),
    (("--page-tokens", "7"), "engine blocks of 7 tokens and trace blocks of 512: neither is a multiple"),
    (("--kv-bytes-per-token", "0"), "--kv-bytes-per-token is 0; a token of no bytes"),
])
def test_sizes_that_make_no_sense_are_refused_and_leave_no_folder(tmp_path: Path, flags: tuple[str, ...],
                                                                  says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        oracle(tmp_path, *flags)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_taken_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    oracle(tmp_path)
    with pytest.raises(ConfigError, match="runs never overwrite"):
        oracle(tmp_path, "--page-tokens", "7")


def test_a_host_that_no_memory_could_hold_is_the_infinite_cache(tmp_path: Path) -> None:
    document, _ = oracle(tmp_path, "--pool-tokens", "512", "--host-tokens", str(10**15))
    own = document["own_tier"]
    assert own["device_hits"] + own["host_hits"] == own["bound_hits"] == 24
    assert own["host_pages"] == 10**15 // 512


@pytest.mark.parametrize(("pool", "host"), [(512, 512), (1024, 10**15), (10**15, 10**15), (12 * 512, 12 * 512)])
def test_the_chart_is_readable_with_working_points_at_its_edges(tmp_path: Path, pool: int, host: int) -> None:
    oracle(tmp_path, "--pool-tokens", str(pool), "--host-tokens", str(host), "--kv-bytes-per-token", "64")
    page = (tmp_path / "out/oracle.html").read_text(encoding="utf-8")
    found = re.search(r'<svg viewBox[^>]*class="chart lines">.*?</svg>', page, re.DOTALL)
    assert found
    svg = ET.fromstring(found[0])
    left, top, wide, high = map(float, svg.attrib["viewBox"].split())
    boxes = []
    for text in svg.iter("text"):
        width, x, y = 6.5 * len(text.text or ""), float(text.attrib["x"]), float(text.attrib["y"])
        start = {"middle": x - width / 2, "end": x - width}.get(text.get("text-anchor", ""), x)
        assert left - 1 <= start < start + width <= left + wide + 12, text.text
        assert top < y - 10 < y <= top + high, text.text
        if text.get("class") in {"value", "rule-text", "axis-name"} and y < 290:
            boxes.append((start, y - 10, start + width, y, text.text))
    for one, other in combinations(boxes, 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1], (one, other)
    # The lines are drawn where they rise, however far off a pool is.
    assert all(len(line.attrib["points"].split()) > 2 for line in svg.iter("polyline")
               if "dot" not in line.attrib["class"] and " " in line.attrib["points"])
