"""Waits after refusals: their size, their spread, and when they end."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.client.backpressure import Backpressure, parse_retry_after

RULE = Backpressure()


@given(refusals=st.integers(0, 19), seed=st.integers())
def test_each_wait_lies_within_a_quarter_of_half_a_second_doubled(refusals: int, seed: int) -> None:
    wait = RULE.wait_s(refusals, None, Random(seed))
    middle = min(8.0, 0.5 * 2**refusals)
    assert wait is not None
    assert 0.75 * middle <= wait <= 1.25 * middle


@given(refusals=st.integers(0, 19), seed=st.integers(), asked=st.floats(0, 120))
def test_no_wait_is_shorter_than_the_server_asked_for(refusals: int, seed: int, asked: float) -> None:
    wait = RULE.wait_s(refusals, asked, Random(seed))
    assert wait is not None
    assert wait >= asked


def test_the_same_seed_waits_the_same_and_another_seed_otherwise() -> None:
    def waits(seed: int) -> list[float | None]:
        rng = Random(seed)
        return [RULE.wait_s(n, None, rng) for n in range(6)]

    assert waits(0) == waits(0)
    assert waits(0) != waits(1)


def test_the_budget_ends_it() -> None:
    assert RULE.wait_s(19, None, Random(0)) is not None
    assert RULE.wait_s(20, None, Random(0)) is None


def test_nobody_waits_for_an_absurd_retry_after() -> None:
    assert RULE.wait_s(0, 121.0, Random(0)) is None


@pytest.mark.parametrize(("header", "seconds"), [
    (None, None), ("3", 3.0), ("0.5", 0.5), ("0", 0.0), ("-1", None), ("nan", None), ("inf", None), ("soon", None),
    ("Wed, 21 Oct 2026 07:28:00 GMT", None)])
def test_retry_after_is_read_as_seconds_or_not_at_all(header: str | None, seconds: float | None) -> None:
    assert parse_retry_after(header) == seconds
