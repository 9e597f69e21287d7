"""An oracle's document as text and as a page: ticks in tokens and GiB, working points marked, all of it readable."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from tests.report.pages_read import read

from hostcache.report.oracle_page import oracle_html, oracle_text

BLOCK = 512
RATES = {"blocks": 0.2, "tokens": 0.21, "requests": 0.22}


def curve(policy: str, hit_rate: list[float]) -> dict[str, Any]:
    return {"policy": policy, "capacity_blocks": [0, 2, 20, 200, 2000, 20000], "hit_rate": hit_rate,
            "reaches": {"0.5": 300, "1": 2000}}


def document(*, pool: int | None = 300, host: int | None = 1200, own: bool = True,
             token_bytes: int | None = 131_072) -> dict[str, Any]:
    policies = ("lru, tail-first", "optimum", "optimum without bypass")
    at = {"device pool": pool, "device pool and host": None if pool is None or host is None else pool + host}
    return {
        "trace": "small.jsonl.gz", "command": ["hostcache", "lab", "oracle", "--trace", "small.jsonl.gz"],
        "requests": 40, "references": 1000, "distinct": 600, "block_tokens": BLOCK, "prompt_tokens": 500_000,
        "max_hit_rate": {"blocks": 0.4, "tokens": 0.41, "requests": 0.42}, "cold_miss_floor": 0.6,
        "kv_bytes_per_token": token_bytes,
        "curves": [curve(policy, [0, 0.01, 0.05, 0.1, 0.3, 0.4]) for policy in policies],
        "at": [{"name": name, "capacity_blocks": blocks, "capacity_tokens": blocks * BLOCK,
                "hit_rate": dict.fromkeys(policies, RATES)} for name, blocks in at.items() if blocks is not None],
        "two_tiers": [] if pool is None or host is None else [
            {"policy": policy, "device_blocks": pool, "host_blocks": host, "device_hits": 100, "host_hits": 90,
             "hit_rate": rate} for policy, rate in (("inclusive lru", 0.19), ("exclusive lru", 0.25))],
        "own_tier": None if not own else {
            "policy": "hostcache", "touch": "tail-first", "requests": 40, "references": 1000, "page_tokens": BLOCK,
            "device_pages": pool, "host_pages": host, "device_hits": 110, "host_hits": 160, "bound_hits": 400,
            "hit_rate": {"blocks": 0.27, "tokens": 0.28, "requests": 0.29}, "missed": {"new": 600, "evicted": 130},
            "written": 700, "longer_than_device": 0},
    }


def drawing(page: str) -> ET.Element:
    found = re.search(r'<svg viewBox[^>]*class="chart lines">.*?</svg>', page, re.DOTALL)
    assert found
    return ET.fromstring(found[0])


def texts(svg: ET.Element, kind: str) -> list[str]:
    return [text.text or "" for text in svg.iter("text") if text.get("class") == kind]


def test_capacity_is_told_in_tokens_and_in_gib_under_the_same_ticks() -> None:
    svg = drawing(oracle_html(document()))
    where = {text.text: text.get("x") for text in svg.iter("text")}
    for tokens, gib in (("1k", "0.122"), ("10k", "1.22"), ("100k", "12.2"), ("1M", "122"), ("10M", "1,221")):
        assert where[tokens] == where[gib]
    assert texts(svg, "axis-name") == ["hit rate in blocks", "tokens", "GiB"]
    page = oracle_html(document(token_bytes=None))
    assert texts(drawing(page), "axis-name")[1:] == ["capacity in tokens, logarithmic"]
    assert "--kv-bytes-per-token adds GiB" in page


def test_working_points_are_marked_at_their_capacities_and_labelled() -> None:
    svg = drawing(oracle_html(document()))
    dots = {(float(dot.get("data-x", "nan")), float(dot.get("data-value", "nan")), dot.get("class"))
            for dot in svg.iter("circle") if dot.get("class") != "unmarked"}
    assert dots == {(300.0 * BLOCK, 0.2, "dot off dashed"), (300.0 * BLOCK, 0.2, "dot on dashed"),
                    (1500.0 * BLOCK, 0.19, "dot off dashed"), (1500.0 * BLOCK, 0.25, "dot off dashed"),
                    (1500.0 * BLOCK, 0.27, "dot host")}
    assert {"the bound 0.4000", "LRU 0.2000", "optimum 0.2000", "inclusive LRU 0.1900",
            "exclusive LRU 0.2500", "hostcache 0.2700"} <= set(texts(svg, "value"))
    assert texts(svg, "rule-text") == ["device pool, 154k", "pool and host, 768k"]


def test_text_and_page_say_what_our_own_tier_was_driven_over_and_what_it_missed() -> None:
    for written in (oracle_text(document()), oracle_html(document()).replace("&#x27;", "'")):
        assert "driven over 40 requests with 1,000 pages of 512 tokens" in written
        assert "At most 400 of these can be hits. Missed: 600 new, 130 evicted." in written
    assert re.search(r"hostcache's own tier +110 +160 +0\.270000", oracle_text(document()))
    longer = document()
    longer["own_tier"]["longer_than_device"] = 3
    assert "3 prompts were longer than the device pool" in oracle_text(longer)


@pytest.mark.parametrize(("pool", "host", "points"), [(None, None, 0), (300, None, 2), (300, 1200, 4), (0, 1200, 2)])
def test_a_page_without_pool_or_host_or_own_tier_shows_what_there_is(pool: int | None, host: int | None,
                                                                     points: int) -> None:
    page = oracle_html(document(pool=pool, host=host, own=False))
    read(page)
    svg = drawing(page)
    assert sum(dot.get("class") != "unmarked" for dot in svg.iter("circle")) == points
    assert "own tier" not in page + oracle_text(document(pool=pool, host=host, own=False))


def test_a_number_and_its_unit_are_not_torn_apart_in_a_cell() -> None:
    page = oracle_html(document())
    assert "768,000 tokens, 93.8&nbsp;GiB" in page
    assert "93.8 GiB" in oracle_text(document())
