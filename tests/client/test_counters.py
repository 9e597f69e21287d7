"""Differences of scrapes (case O9): absent stays absent, a reset is never a number, sums that should be equal are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.client.test_exposition import CLASSIC, OPENMETRICS

from hostcache.client.adapters import scrape_of
from hostcache.client.counters import PROCESS, Scrape, balance, change, delta, delta_by_name, read, resets
from hostcache.client.exposition import parse, read_exposition
from hostcache.errors import ServerError

OPENING = {"accounting": {"requests": 3, "recomputed": {"new": 10, "evicted": 4}}, "host_cache": None}
CLOSING = {"accounting": {"requests": 5, "recomputed": {"new": 10, "evicted": 9, "late": 2}}, "host_cache": None}
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
CREATED_S = 1790000000


def o9(hits: tuple[int, int], queries: tuple[int, int] | None, form: str, created: tuple[int, int] = (CREATED_S,) * 2,
       ) -> str:
    """The case's scrape: two engines, each with its time of creation."""
    families = {"vllm:prefix_cache_hits": hits} | ({} if queries is None else {"vllm:prefix_cache_queries": queries})
    lines = []
    for name, values in families.items():
        totals = [f'{name}_total{{engine="{engine}"}} {value}' for engine, value in enumerate(values)]
        births = [f'{name}_created{{engine="{engine}"}} {value}' for engine, value in enumerate(created)]
        if form == CLASSIC:
            lines += [f"# TYPE {name}_total counter", *totals, f"# TYPE {name}_created gauge", *births]
        else:
            lines += [f"# TYPE {name} counter", totals[0], births[0], totals[1], births[1]]
    return "\n".join(lines) + ("\n" if form == CLASSIC else "\n# EOF\n")


def o9_scrape(*args: Any, at_s: float = 0.0, **more: Any) -> Scrape:
    return scrape_of("vllm", read_exposition(o9(*args, **more), args[2]), at_s)


@pytest.mark.parametrize("form", [CLASSIC, OPENMETRICS])
def test_o9_both_forms_say_800_hits_of_2000(form: str) -> None:
    opening, closing = o9_scrape((100, 50), (1000, 500), form), o9_scrape((700, 250), (2000, 1500), form)
    hits, queries = change(opening, closing, HITS), change(opening, closing, QUERIES)
    assert (hits, queries) == (800, 2000)
    assert hits is not None
    assert queries is not None
    assert hits / queries == 0.40
    assert change(opening, closing, "device_tokens") == 800
    assert resets(opening, closing) == ()
    assert f'{HITS}{{engine="0"}} 100' in opening.raw


def test_o9_the_classic_text_is_refused_where_openmetrics_were_announced() -> None:
    with pytest.raises(ServerError, match="classic text"):
        parse(o9((100, 50), (1000, 500), CLASSIC), OPENMETRICS)


@pytest.mark.parametrize("form", [CLASSIC, OPENMETRICS])
@pytest.mark.parametrize(("hits", "created"), [
    ((700, 20), (CREATED_S, CREATED_S + 60)),  # the case: engine 1 fell from 50 to 20, the sum rose from 150 to 720
    ((700, 20), (CREATED_S, CREATED_S)),  # a server that does not renew the time
    ((700, 90), (CREATED_S, CREATED_S + 60)),  # engine 1 began anew and is past its old count already
])
def test_o9_an_engine_that_started_again_is_flagged_and_no_number(form: str, hits: tuple[int, int],
                                                                  created: tuple[int, int]) -> None:
    opening = o9_scrape((100, 50), (1000, 500), form)
    closing = o9_scrape(hits, (2000, 1500), form, created=created)
    assert HITS in resets(opening, closing)
    assert "device_tokens" in resets(opening, closing)
    assert change(opening, closing, HITS) is None
    assert change(opening, closing, "device_tokens") is None
    if created[1] == CREATED_S:
        assert change(opening, closing, QUERIES) == 2000


@pytest.mark.parametrize("form", [CLASSIC, OPENMETRICS])
def test_o9_a_family_that_is_missing_is_unavailable_and_not_0(form: str) -> None:
    without, whole = o9_scrape((100, 50), None, form), o9_scrape((700, 250), (2000, 1500), form)
    assert QUERIES not in without.counters
    assert change(without, whole, QUERIES) is None
    assert change(whole, without, QUERIES) is None
    assert change(without, whole, "no such counter") is None
    assert change(without, whole, HITS) == 800


def plain(counters: dict[str, float], created: dict[str, float] | None = None) -> Scrape:
    return Scrape(engine="hostcache", counters=counters, created=created or {}, raw=(), at_s=0.0)


def test_a_gauge_may_go_down() -> None:
    opening, closing = plain({"resident_bytes": 10.0, "restores": 1.0}), plain({"resident_bytes": 4.0, "restores": 1.0})
    assert resets(opening, closing) == ()
    assert change(opening, closing, "resident_bytes") == -6


def test_a_server_that_began_anew_takes_every_counter_with_it() -> None:
    opening, closing = plain({"a": 1.0, "quota_bytes": 5.0}, {PROCESS: 10.0}), plain({"a": 9.0}, {PROCESS: 12.0})
    assert resets(opening, closing) == ("a",)
    assert change(opening, closing, "a") is None
    assert resets(opening, plain({"a": 9.0}, {PROCESS: 10.4})) == ()  # told as an age: an answer's time more or less


COUNTS = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 50).map(float))


@given(COUNTS, COUNTS)
def test_no_change_is_ever_negative(before: dict[str, float], after: dict[str, float]) -> None:
    for name in "abcd":
        moved = change(plain(before), plain(after), name)
        assert moved is None or moved >= 0


def test_what_adds_up_is_checked_and_what_does_not_is_named() -> None:
    opening = {"prompt_tokens": 100.0, "cached_tokens": 40.0, "device_tokens": 30.0, "host_tokens": 10.0,
               "recomputed_tokens": 60.0}
    whole = {"prompt_tokens": 200.0, "cached_tokens": 90.0, "device_tokens": 70.0, "host_tokens": 20.0,
             "recomputed_tokens": 110.0}
    assert balance(opening, whole).checked == ("cached + recomputed = prompt", "device + host = cached")
    assert balance(opening, whole).broken == ()
    assert balance(opening, {**whole, "recomputed_tokens": 111.0}).broken == (
        "cached + recomputed = prompt: 101 and 100",)
    assert balance({}, whole) == balance(opening, {}) == balance({}, {})
    assert balance({}, {}).checked == ()


def test_vllms_sources_add_up_to_its_hits_unless_somebody_was_preempted() -> None:
    def vllm(device: float, host: float, hits: float, preemptions: float = 0.0) -> dict[str, float]:
        sources = {"device": device, "host": host, "disk": 0.0, "p2p": 0.0, "external_unspecified": 0.0}
        return {HITS: hits, "vllm:external_prefix_cache_hits_total": host, "preemptions": preemptions,
                **{f'vllm:prompt_tokens_cached_by_source_total{{source="{name}"}}': value
                   for name, value in sources.items()}}

    assert balance(vllm(0, 0, 0), vllm(64, 32, 64)).broken == ()
    assert len(balance(vllm(0, 0, 0), vllm(64, 32, 60)).broken) == 1
    skipped = balance(vllm(0, 0, 0), vllm(64, 32, 60, preemptions=1))
    assert (skipped.broken, skipped.skipped) == (
        (), ("vLLM: cached by source = hits + external hits: 1 preemptions",))


# -- answers of /v1/stats as they are ----------------------------------------------------------------------------------


def test_a_counter_is_the_difference_of_two_scrapes() -> None:
    assert delta(OPENING, CLOSING, "accounting", "requests") == 2


def test_what_a_server_does_not_say_is_none_and_not_zero() -> None:
    assert delta(OPENING, CLOSING, "accounting", "bound_tokens") is None
    assert delta(OPENING, CLOSING, "host_cache", "restores") is None
    assert read({"a": {"b": "3"}}, "a", "b") is None
    assert read({"a": True}, "a") is None


def test_a_counter_that_went_down_voids_the_cell() -> None:
    with pytest.raises(ServerError, match=r"accounting\.requests went down from 5 to 3"):
        delta(CLOSING, OPENING, "accounting", "requests")
    with pytest.raises(ServerError, match="went down"):
        delta_by_name({"c": {"x": 2}}, {"c": {"x": 1}}, "c")


def test_named_counters_move_by_name_and_new_ones_start_at_zero() -> None:
    assert delta_by_name(OPENING, CLOSING, "accounting", "recomputed") == {"evicted": 5, "late": 2}
    assert delta_by_name(OPENING, CLOSING, "host_cache", "anything") == {}
