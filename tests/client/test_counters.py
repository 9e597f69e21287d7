"""Differences of scrapes: absent stays absent, and a counter that went down is never a number."""

from __future__ import annotations

import pytest

from hostcache.client.counters import delta, delta_by_name, read
from hostcache.errors import ServerError

OPENING = {"accounting": {"requests": 3, "recomputed": {"new": 10, "evicted": 4}}, "host_cache": None}
CLOSING = {"accounting": {"requests": 5, "recomputed": {"new": 10, "evicted": 9, "late": 2}}, "host_cache": None}


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
